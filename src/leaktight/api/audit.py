"""`leaktight.audit` and `leaktight.tradeoff`: attacks on defenses in a federated scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Unpack

from leaktight.api.runs import called, parse_workers, run_path
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
    """An audit that is ready to run. facts: the scenario in plain words."""

    command: Command
    config: Config
    experiment: Experiment
    facts: Mapping[str, Plain]

    @property
    def rounds(self) -> int:
        """How many rounds are trained for each defense before it is attacked; a trade-off trains all of them."""
        every = self.experiment.federation.plan.rounds
        return every if self.command == "tradeoff" else self.experiment.rounds[-1]

    def folder(self, out: Path | str | None = None, *, resume: bool = False) -> Path:
        """Where its results go; see `run_path`."""
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
        """Run what is missing of it in the folder `path`, write its report, and give its summary.

        workers: as `leaktight.audit` has it. call: the command line that it came from, for the record.
        """
        executor, processes = parse_workers(workers)
        with open_run(path, self.config.to_toml(), resume=resume, key=self.config.key) as folder:
            summary = run_audit(
                self.experiment.keyed(folder.key),
                folder,
                executor=executor,
                scenario=self.facts,
                command=called(folder, call or f"leaktight.{self.command}() in Python"),
                weigh=self.command == "tradeoff",
                workers=processes,
                watcher=watcher,
            )
            from leaktight.report.html import write_report  # slow to import, and only needed now

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
    """Read and check everything; nothing is trained or attacked yet."""
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
    """Attack every defense in a federated scenario, judge the guesses against controls, and give the summary.

    config: a TOML file, a `Config`, or None for the built-in scenario. scenario: keywords in place of a file, or laid
    over it: model, data, partition, local, federation, threat, attacks, defenses, seed, settings, data_root; see
    `leaktight.api.scenario.Scenario`. Methods are objects, kinds of the catalogue, or "package.module:Class".
    adaptive: also attack each defense with attackers who know it. trials: victims for each attack on each defense.
    out: the folder of the results and of report.html (default: runs/audit-NNN); resume: go on with it.
    workers: the number of worker processes; 0: this process does the work; None: one per core; or "ray", or
    "ray://host:port". A script that starts processes needs `if __name__ == "__main__":`. No number depends on it.
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
    """As `audit`, and train every defense through all rounds: leakage, accuracy and time, and a recommendation."""
    planned = plan("tradeoff", config, adaptive=adaptive, trials=trials, **scenario)
    return planned.run(planned.folder(out, resume=resume), resume=resume, workers=workers, watcher=watcher)
