"""`leaktight.audit` and `leaktight.tradeoff`: attacks on defenses in a federated scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Unpack

from leaktight.api.runs import parse_workers, recorded_call, run_path
from leaktight.api.scenario import Scenario, Source, configure
from leaktight.audits.plan import Experiment
from leaktight.audits.run import Watcher, run_audit
from leaktight.config.audit import build_experiment, complete, scenario_facts
from leaktight.config.scenario import load_data
from leaktight.config.settings import Config
from leaktight.config.tables import AUDIT_SCENARIO, OWN_SCENARIO
from leaktight.results.folder import open_run
from leaktight.results.schema import Plain, Summary

Command = Literal["audit", "tradeoff"]


@dataclass(frozen=True)
class PlannedAudit:
    """An audit that is ready to run. facts: about the scenario, for readers."""

    command: Command
    config: Config
    experiment: Experiment
    facts: Mapping[str, Plain]

    @property
    def rounds(self) -> int:
        """The rounds of training per defense: all for a trade-off, else up to the last attacked round."""
        every = self.experiment.federation.plan.rounds
        return every if self.command == "tradeoff" else self.experiment.rounds[-1]

    def folder(self, out: Path | str | None = None, *, resume: bool = False) -> Path:
        """The folder of its results; see `run_path`."""
        return run_path(self.command, self.config.to_toml(), out, resume=resume)

    def run(
        self,
        path: Path,
        *,
        resume: bool = False,
        workers: int | str | None = 0,
        watcher: Watcher | None = None,
        call: str = "",
    ) -> Summary:
        """Run the missing trials in the folder `path`, write the report, and return the summary.

        workers: as in `leaktight.audit`. call: the command line, to be recorded.
        """
        executor, processes = parse_workers(workers)
        with open_run(path, self.config.to_toml(), resume=resume, key=self.config.key) as folder:
            summary = run_audit(
                self.experiment.keyed(folder.key),
                folder,
                executor=executor,
                scenario=self.facts,
                command=recorded_call(folder, call or f"leaktight.{self.command}() in Python"),
                weigh=self.command == "tradeoff",
                workers=processes,
                watcher=watcher,
            )
            from leaktight.report.decision import write_decision
            from leaktight.report.html import write_report  # slow to import, and only needed now

            write_decision(folder.path)
            write_report(folder.path)
        return summary


def plan(
    command: Command,
    config: Source = None,
    *,
    adaptive: bool = True,
    trials: int | None = None,
    **scenario: Unpack[Scenario],
) -> PlannedAudit:
    """Read and check everything; nothing is trained or attacked."""
    own = "model" in scenario or "data" in scenario
    resolved = complete(
        configure(config, scenario, scenario=OWN_SCENARIO if own else AUDIT_SCENARIO),
        trials=trials,
        defenses_named=bool(scenario.get("defenses")),
    )
    experiment = build_experiment(resolved, *load_data(resolved), adaptive=adaptive)
    return PlannedAudit(command, resolved, experiment, scenario_facts(resolved, experiment))


def audit(
    config: Source = None,
    *,
    adaptive: bool = True,
    trials: int | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    workers: int | str | None = 0,
    watcher: Watcher | None = None,
    **scenario: Unpack[Scenario],
) -> Summary:
    """Attack every defense in a federated scenario, compare the guesses with controls, and return the summary.

    config: a TOML file, a `Config`, or None for the built-in scenario. scenario: keywords instead of a file, or on top
    of it: model, data, partition, local, federation, threat, attacks, defenses, seed, settings, data_root; see
    `leaktight.api.scenario.Scenario`. Methods are objects, kinds of the catalogue, or "package.module:Class".
    adaptive: also attack each defense with knowledge of it. trials: victims for each attack on each defense.
    out: the folder of the results and of report.html (default: runs/audit-NNN). resume: continue the run there.
    workers: the number of worker processes; 0 for this process, None for one per core; or "ray", "ray://host:port". A
    script that starts processes needs `if __name__ == "__main__":`. Results do not depend on it.
    watcher: callbacks for progress.
    """
    planned = plan("audit", config, adaptive=adaptive, trials=trials, **scenario)
    return planned.run(planned.folder(out, resume=resume), resume=resume, workers=workers, watcher=watcher)


def tradeoff(
    config: Source = None,
    *,
    adaptive: bool = True,
    trials: int | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    workers: int | str | None = 0,
    watcher: Watcher | None = None,
    **scenario: Unpack[Scenario],
) -> Summary:
    """As `audit`, and train every defense through all rounds, to compare leakage, accuracy and time."""
    planned = plan("tradeoff", config, adaptive=adaptive, trials=trials, **scenario)
    return planned.run(planned.folder(out, resume=resume), resume=resume, workers=workers, watcher=watcher)
