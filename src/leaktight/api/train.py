"""`leaktight.train`: federated training in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack

from leaktight.api.runs import continued, growing, run_path
from leaktight.api.scenario import Scenario, Source, configure
from leaktight.config.audit import federation_facts
from leaktight.config.growth import check_training
from leaktight.config.scenario import build_federation, centralised, load_data
from leaktight.config.settings import Config
from leaktight.config.toml import kind_of, settings_of
from leaktight.core.errors import UsageError, suggestion
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Partition
from leaktight.engines import inprocess, training
from leaktight.engines.training import Engine
from leaktight.fl.federation import Federation
from leaktight.results.folder import RunFolder, open_run
from leaktight.results.forecast import Forecast, Problem
from leaktight.results.schema import Plain, Round, TrainingSummary


@dataclass(frozen=True)
class PlannedTraining:
    """A training run that is ready to start. onto: the run that it goes on with, if there is one."""

    config: Config
    dataset: Dataset
    partition: Partition
    federation: Federation
    onto: Path | None = None

    @property
    def per_round(self) -> int:
        """The number of clients per round."""
        return self.config.plan.per_round or len(self.federation.shares)

    def folder(self, out: Path | str | None = None, *, resume: bool = False) -> Path:
        """The folder of its results; see `run_path`."""
        if resume and out is None and self.onto is not None:
            return self.onto
        return run_path("train", self.config.to_toml(), out, resume=resume)

    @property
    def facts(self) -> dict[str, Plain]:
        """Facts about the scenario, for readers."""
        return federation_facts(self.config, self.federation)

    def forecast(self, workers: int | None = 0) -> Forecast:
        """The rounds and examples of the run, how long it takes and how much memory, by a short rehearsal."""
        from leaktight.api.forecast import forecast_training  # not needed for a run

        return forecast_training(self.federation, self.defense_name, self.facts, workers)

    def doubts(self, workers: int | None = 0) -> Sequence[Problem]:
        """Why the run may not end; empty for a plan that seems short."""
        from leaktight.api.forecast import doubts_of_training

        return doubts_of_training(self.federation, self.defense_name, workers)

    @property
    def defense_name(self) -> str:
        return kind_of(self.config.defense) or "own defense"

    def run(
        self,
        path: Path,
        *,
        engine: str = "inprocess",
        resume: bool = False,
        workers: int | None = None,
        from_round: int | None = None,
        after_round: Callable[[Round], None] = lambda row: None,
        after_client: Callable[[], None] = lambda: None,
        grows: Callable[[list[str]], None] = lambda words: None,
    ) -> TrainingSummary:
        """Train the remaining rounds in the folder `path`, draw the curves, and return the summary.

        grows: told the settings by which a resumed run grows.
        from_round: go back to the state before this round, counted from 1; with `resume` only.
        """
        from leaktight.data.holdings import plot_summary  # matplotlib is slow to import
        from leaktight.report.figures import plot_learning_curve

        if engine not in _ENGINES:
            raise UsageError(f"no engine {engine!r}; {suggestion(engine, _ENGINES)}")
        if from_round is not None and not resume:
            raise UsageError("--from-round goes back in a run that exists; add --resume")
        grow = growing(check_training, tell=grows)
        with open_run(path, self.config.to_toml(), resume=resume, key=self.config.key, grow=grow) as folder:
            plot_summary(self.dataset, self.partition, folder.path / "holdings.png")
            summary = training.train(
                self.federation.keyed(folder.key),
                folder,
                engine=_ENGINES[engine](folder),
                defense_kind=kind_of(self.config.defense) or "",
                defense_settings=settings_of(self.config.defense),
                workers=self.federation.most_processes if workers is None else workers,
                after_round=after_round,
                after_client=after_client,
                keep=self.config.plan.keep_checkpoints,
                from_round=from_round,
            )
            plot_learning_curve(summary, folder.path / "curve.png")
        return summary


def plan(
    config: Source = None,
    *,
    pooled: bool = False,
    out: Path | str | None = None,
    resume: bool = False,
    **scenario: Unpack[Scenario],
) -> PlannedTraining:
    """Read and check everything; nothing is trained.

    resume: go on with the run in `out`, or with the newest one; without `config` its settings are the defaults.
    """

    def resolve(onto: Path | None) -> Config:
        resolved = configure(config if config is not None or onto is None else RunFolder(onto).config, scenario)
        return centralised(resolved) if pooled else resolved

    resolved, onto = continued("train", out, resolve) if resume else (resolve(None), None)
    dataset, partition = load_data(resolved)
    return PlannedTraining(resolved, dataset, partition, build_federation(resolved, dataset, partition), onto)


def train(
    config: Source = None,
    *,
    pooled: bool = False,
    engine: str = "inprocess",
    out: Path | str | None = None,
    resume: bool = False,
    from_round: int | None = None,
    workers: int | None = 0,
    **scenario: Unpack[Scenario],
) -> TrainingSummary:
    """Train a federation, and return accuracy, loss, time and bytes of every round.

    config, scenario: as in `leaktight.audit`; several defenses are stacked in order.
    pooled: train one client with all data, the reference without federation.
    engine: "inprocess", or "flower" (Flower's simulation), with the same results.
    out: the run's folder, with a checkpoint after each round (default: runs/train-NNN). resume: continue the run there,
    or the newest one, with its settings where none are given; more rounds (`federation.rounds`) let it grow.
    from_round: with `resume`, go back to the state before this round, counted from 1, and train it and all later ones
    again; the files of the earlier attempt are set aside. Possible for the last rounds (`federation.keep_checkpoints`).
    workers: as in `leaktight.audit`, but not Ray.
    """
    planned = plan(config, pooled=pooled, out=out, resume=resume, **scenario)
    path = planned.folder(out, resume=resume)
    return planned.run(path, engine=engine, resume=resume, from_round=from_round, workers=workers)


def _in_process(folder: RunFolder) -> Engine:
    if _flower_folder(folder).exists():
        raise UsageError(f"the run in {folder.path} was started on Flower; resume it with --engine flower")
    return inprocess.run


def _on_flower(folder: RunFolder) -> Engine:
    from leaktight.engines.flower.simulation import simulate  # an extra, and slow to import

    return partial(simulate, folder=_flower_folder(folder))


def _flower_folder(folder: RunFolder) -> Path:
    """The folder where a run on Flower keeps its name and its clients' private states."""
    return folder.path / "flower"


_ENGINES: Mapping[str, Callable[[RunFolder], Engine]] = {"inprocess": _in_process, "flower": _on_flower}
