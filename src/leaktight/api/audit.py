"""`leaktight.audit` and `leaktight.tradeoff`: attacks on defenses in a federated scenario."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Unpack

from leaktight.adaptive.auto import ENSEMBLES, Budget
from leaktight.api.runs import (
    continued,
    continues,
    growing,
    held_tables,
    parse_workers,
    recorded_call,
    require_resumed,
    run_path,
)
from leaktight.api.scenario import Scenario, Source, configure
from leaktight.audits.growth import require_room
from leaktight.audits.plan import Experiment
from leaktight.audits.run import Watcher, run_audit
from leaktight.config.audit import build_tracks, complete, production_fact, scenario_facts
from leaktight.config.growth import check_audit
from leaktight.config.settings import Config
from leaktight.config.tables import AUDIT_SCENARIO
from leaktight.core.errors import UsageError
from leaktight.results.folder import RunFolder, open_run
from leaktight.results.forecast import Forecast, Problem
from leaktight.results.schema import Plain, Summary
from leaktight.results.verify import require_unchanged

Command = Literal["audit", "tradeoff"]
Trials = int | Literal["auto"]


@dataclass(frozen=True)
class PlannedAudit:
    """An audit that is ready to run. production: of the production track. facts: about the scenario, for readers.

    budget: minutes after which no trial starts; None for no end. onto: the run that it goes on with, if there is one.
    """

    command: Command
    config: Config
    experiment: Experiment
    production: Experiment | None
    facts: Mapping[str, Plain]
    budget: float | None = None
    onto: Path | None = None

    @property
    def experiments(self) -> list[Experiment]:
        """The experiments of all tracks, the diagnostic one first."""
        return [self.experiment, *([self.production] if self.production else [])]

    def folder(self, out: Path | str | None = None, *, resume: bool = False) -> Path:
        """The folder of its results; see `run_path`."""
        if resume and out is None and self.onto is not None:
            return self.onto
        return run_path(self.command, self.config.to_toml(), out, resume=resume)

    def forecast(
        self, workers: int | str | None = 0, *, out: Path | str | None = None, resume: bool = False
    ) -> Forecast:
        """What the run does, how long it takes and how much memory, by a short rehearsal; and what to change.

        out, resume: as in a run, which is refused for the same reasons; what is finished there is not counted.
        """
        from leaktight.api.forecast import forecast_audit  # not needed for a run

        path, fits = self.folder(out, resume=resume), partial(require_room, self.experiments)
        words = continues(path, self.config.to_toml(), check_audit, resume=resume, fits=fits)
        return forecast_audit(
            self.command, self.experiments, self.facts, workers=workers, budget=self.budget, held=path, grows_by=words
        )

    def doubts(self, workers: int | str | None = 0) -> Sequence[Problem]:
        """Why the run may not end; empty for a plan that seems short."""
        from leaktight.api.forecast import doubts_of_audit

        return doubts_of_audit(self.command, self.experiments, workers=workers, budget=self.budget)

    def run(
        self,
        path: Path,
        *,
        resume: bool = False,
        workers: int | str | None = 0,
        retry_failed: bool = False,
        watcher: Watcher | None = None,
        call: str = "",
    ) -> Summary:
        """Run the missing trials in the folder `path`, write the report, and return the summary.

        workers, retry_failed: as in `leaktight.audit`. call: the command line, to be recorded.
        """
        executor, processes = parse_workers(workers, self.experiment.federation.most_processes)
        require_resumed(resume=resume, retry_failed=retry_failed)
        call = call or f"leaktight.{self.command}() in Python"
        fits = partial(require_room, self.experiments)
        grow = growing(check_audit, call, fits=fits, tell=(watcher or Watcher()).grows)
        with open_run(path, self.config.to_toml(), resume=resume, key=self.config.key, grow=grow) as folder:
            require_unchanged(folder.path)
            fits(folder.path)
            summary = run_audit(
                self.experiment.keyed(folder.key),
                folder,
                executor=executor,
                scenario=self.facts,
                command=recorded_call(folder, call),
                production=self.production and self.production.keyed(folder.key),
                weigh=self.command == "tradeoff",
                workers=processes,
                budget=self.budget,
                retry_failed=retry_failed,
                watcher=watcher,
            )
            from leaktight.report.html import write_report  # slow to import, and only needed now
            from leaktight.report.machines.decision import write_decision

            write_decision(folder.path)
            write_report(folder.path)
        return summary


def plan(
    command: Command,
    config: Source = None,
    *,
    adaptive: bool = True,
    trials: Trials | None = None,
    confidence: float | None = None,
    budget: float | str | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    defenses_named: bool = False,
    **scenario: Unpack[Scenario],
) -> PlannedAudit:
    """Read and check everything; nothing is trained or attacked. A trade-off has no production track.

    defenses_named: the config has all defenses to try, even if it has none; add no defaults.
    resume: go on with the run in `out`, or with the newest one; without `config` its settings are the defaults.
    """
    minutes, effort = _parse_budget(budget)

    def resolve(onto: Path | None) -> Config:
        base = config if config is not None or onto is None else RunFolder(onto).config
        resolved = complete(
            configure(base, scenario, scenario=AUDIT_SCENARIO),
            trials=trials,
            confidence=confidence,
            effort=effort,
            defenses_named=defenses_named or bool(scenario.get("defenses")),
            onto=None if onto is None else held_tables(onto),
        )
        return replace(resolved, production=None) if command == "tradeoff" else resolved

    resolved, onto = continued(command, out, resolve) if resume else (resolve(None), None)
    experiment, production = build_tracks(resolved, adaptive=adaptive)
    facts = scenario_facts(resolved, experiment)
    if resolved.production and production:
        facts["production"] = production_fact(resolved.production, production)
    if resolved.device != "cpu":
        facts["device"] = resolved.device
    return PlannedAudit(command, resolved, experiment, production, facts, minutes, onto)


def _parse_budget(budget: float | str | None) -> tuple[float | None, Budget | None]:
    """The minutes of a budget, and the effort of the attack `auto`; one of them, or none, is given."""
    for effort in ENSEMBLES:
        if budget == effort:
            return None, effort
    if budget is None or (not isinstance(budget, str) and budget > 0):
        return budget, None
    words = ", ".join(ENSEMBLES)
    raise UsageError(f"expected as budget {words}, or minutes > 0, got {budget!r}; leave it out for no end")


def _warn(planned: PlannedAudit, workers: int | str | None) -> None:
    """Warn of a plan that does not end."""
    from leaktight.api.forecast import sentence

    for each in planned.doubts(workers):
        warnings.warn(sentence(each), stacklevel=3)


def audit(
    config: Source = None,
    *,
    adaptive: bool = True,
    trials: Trials | None = None,
    confidence: float | None = None,
    budget: float | str | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    workers: int | str | None = 0,
    retry_failed: bool = False,
    watcher: Watcher | None = None,
    **scenario: Unpack[Scenario],
) -> Summary:
    """Attack every defense in a federated scenario, compare the guesses with controls, and return the summary.

    config: a TOML file, "recipe:NAME", a `Config`, or None for the built-in scenario. scenario: keywords instead of a
    file, or on top of it: model, data, partition, local, federation, threat, attacks, defenses, seed, settings,
    data_root, device; see `leaktight.api.scenario.Scenario`. Methods are objects, kinds of the catalogue, or
    "package.module:Class".
    adaptive: also attack each defense with knowledge of it. trials: victims for each attack on each defense, or "auto":
    5, and 20 or more where 5 do not decide. confidence: the share of victims that "nothing found" has to stay below
    (default: 0.15). budget: the effort of the attack `auto`, "quick", "standard" or "thorough"; or minutes after which
    no trial starts, which may differ when a run is resumed.
    out: the folder of the results and of report.html (default: runs/audit-NNN).
    resume: continue the run there, or the newest one, with its settings where none are given. More trials, attacks,
    defenses or minutes let it grow to the run that it would have been; what would change finished trials is an error.
    workers: the number of worker processes; 0 for this process, None for one per core; or "ray", "ray://host:port". A
    script that starts processes needs `if __name__ == "__main__":`. Results do not depend on it.
    retry_failed: with resume, repeat trials that ended in an error. A fault of the machine (`MachineError`) is no such
    error: it is raised, and resume does what is missing. watcher: callbacks for progress.
    """
    planned = plan(
        "audit",
        config,
        adaptive=adaptive,
        trials=trials,
        confidence=confidence,
        budget=budget,
        out=out,
        resume=resume,
        **scenario,
    )
    _warn(planned, workers)
    return planned.run(
        planned.folder(out, resume=resume), resume=resume, workers=workers, retry_failed=retry_failed, watcher=watcher
    )


def tradeoff(
    config: Source = None,
    *,
    adaptive: bool = True,
    trials: Trials | None = None,
    confidence: float | None = None,
    budget: float | str | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    workers: int | str | None = 0,
    retry_failed: bool = False,
    watcher: Watcher | None = None,
    **scenario: Unpack[Scenario],
) -> Summary:
    """As `audit`, and train every defense through all rounds, to compare leakage, accuracy and time."""
    planned = plan(
        "tradeoff",
        config,
        adaptive=adaptive,
        trials=trials,
        confidence=confidence,
        budget=budget,
        out=out,
        resume=resume,
        **scenario,
    )
    _warn(planned, workers)
    return planned.run(
        planned.folder(out, resume=resume), resume=resume, workers=workers, retry_failed=retry_failed, watcher=watcher
    )
