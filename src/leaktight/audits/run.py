"""A whole audit in its folder: training, trials, summary. Trials that the folder already holds are not repeated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from leaktight.audits.experiment import TrialRunner
from leaktight.audits.growth import adopt
from leaktight.audits.judge import tradeoff
from leaktight.audits.judge.answer import answer
from leaktight.audits.judge.cells import LEAKED_IF, CellTrials, gather
from leaktight.audits.judge.checks import Evidence, raise_flags
from leaktight.audits.judge.statistics import looks_factor
from leaktight.audits.judge.summary import cell_of, over_time
from leaktight.audits.judge.verdict import Panel
from leaktight.audits.plan import Experiment
from leaktight.audits.schedule import Wanted, num_looks, wanted
from leaktight.audits.states import States, prepare_states, scored_on
from leaktight.audits.trial import Finished
from leaktight.core.errors import LeaktightError
from leaktight.results.folder import RunFolder
from leaktight.results.schema import (
    SCHEMA_VERSION,
    Plain,
    Round,
    Spending,
    Summary,
    Tradeoff,
    Trial,
    Verdict,
    common_ledger,
    metrics_of,
    training_name,
)
from leaktight.results.store import TrialStore, open_store
from leaktight.runtime.executor import Executor, Tell, Work, Workers


class Watcher:
    """Callbacks for the progress of a run; override those you need."""

    def grows(self, words: Sequence[str]) -> None:
        """A resumed run grows by these settings."""

    def training_begins(self, name: str, rounds: int) -> None:
        """The training of a defense before the attacks starts; it has this number of rounds.

        name: the defense with its settings, and its track.
        """

    def round_done(self, name: str, row: Round) -> None:
        """A round of the training before the attacks is done."""

    def trials_begin(self, done: int, total: int) -> None:
        """The trials start; `done` of the `total` are in the folder already."""

    def trial_done(self, trial: Trial) -> None:
        """A trial is done and stored."""

    def looked(self, needed: Wanted, done: int) -> None:
        """The first victims are done, and some defenses need more; `done` of the needed trials are finished."""


@dataclass(frozen=True)
class Clock:
    """The time of a run. budget: minutes after which no trial starts; None for no end."""

    budget: float | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    @property
    def spent(self) -> bool:
        return self.budget is not None and self.minutes >= self.budget


@dataclass(frozen=True)
class Tracks:
    """The work of a worker process: trial ids of all tracks in, trials out."""

    runners: Sequence[TrialRunner]

    def __call__(self, job: str, tell: Tell[object]) -> Finished:
        runner = next(each for each in self.runners if job in each.experiment.by_id)
        return runner(job, tell)


def run_audit(
    experiment: Experiment,
    folder: RunFolder,
    *,
    executor: Executor,
    scenario: Mapping[str, Plain],
    command: str,
    production: Experiment | None = None,
    weigh: bool = False,
    workers: int | None = None,
    budget: float | None = None,
    retry_failed: bool = False,
    watcher: Watcher | None = None,
) -> Summary:
    """Train the defenses as far as needed, run the missing trials, write `summary.json` and return it.

    scenario: facts about the scenario for readers. production: the experiment of the production track. weigh: train
    every defense through all rounds and add the trade-off. executor: runs the trials. workers: processes for training.
    budget: minutes after which no trial starts. retry_failed: repeat trials that ended in an error.
    """
    watcher, clock = watcher or Watcher(), Clock(budget)
    store = opened(folder, retry_failed=retry_failed)
    experiments = [experiment, *([production] if production else [])]
    adopt(experiments, store, folder.path)
    earlier = sum(trial.seconds for trial in store.trials.values()) / 60
    states = [
        prepare_states(
            each,
            folder.path,
            whole=weigh and each is experiment,
            workers=workers,
            begin=watcher.training_begins,
            after_round=watcher.round_done,
        )
        for each in experiments
    ]
    runners = [
        TrialRunner(each, own.packed, own.accuracy, own.failed) for each, own in zip(experiments, states, strict=True)
    ]
    if any(name not in store.trials for name in wanted(experiments, store.trials).ids):
        folder.outgrow_summary()
    needed = run_wanted(Tracks(runners), experiments, store, executor, watcher, clock)
    trials = _counted(experiments, needed, store)
    if not any(trial.role == "attack" for trial in trials):
        raise LeaktightError(
            f"no attack was finished within {budget or 0:g} minutes; raise --budget, and continue with --resume"
        )
    spending = Spending(
        trials=len(trials),
        planned=sum(len(each.trials) for each in experiments),
        minutes=clock.minutes + earlier,
        budget=budget,
        ended=_ended(needed, store, trials, experiments),
    )
    summary = summarise(
        experiments,
        trials,
        states,
        weigh=weigh,
        spending=spending,
        run=folder.path,
        command=command,
        scenario=scenario,
        earlier_looks=folder.looks(len(trials)),
    )
    return folder.write_summary(summary)


def summarise(
    experiments: Sequence[Experiment],
    trials: Sequence[Trial],
    states: Sequence[States],
    *,
    weigh: bool,
    spending: Spending,
    run: Path,
    command: str,
    scenario: Mapping[str, Plain],
    earlier_looks: int = 0,
) -> Summary:
    """The summary of these trials. states: of each experiment; the first one is the diagnostic one.

    earlier_looks: how often results of fewer trials were written; tests are corrected for it.
    """
    experiment, cells = experiments[0], gather(trials)
    confidence = experiment.settings.confidence
    looks = num_looks(experiments) * looks_factor(earlier_looks)
    panel = Panel(cells, confidence, looks, earlier_looks, cut=spending.ended == "budget")
    helpless = {(each.track, name): reason for each in experiments for name, reason in each.helpless.items()}
    concluded = panel.verdicts()
    weighed = _weighed(experiment, cells, states[0], concluded) if weigh else None
    raised = raise_flags(Evidence(panel, easier_than_training(*experiments), helpless, weighed))
    summary = Summary(
        schema_version=SCHEMA_VERSION,
        run=str(run),
        command=command,
        scenario=dict(scenario),
        answer=answer(concluded, cells, weighed, earlier_looks=earlier_looks),
        cells=tuple(cell_of(cell, panel, raised) for cell in cells),
        metrics=metrics_of(trials),
        leaked_if=LEAKED_IF,
        confidence=confidence,
        spending=spending,
        verdicts=tuple(concluded),
        flags=tuple(each.flag for each in raised),
        ledger=common_ledger([trial for trial in trials if trial.track == experiment.track]),
        training_failed={
            training_name(each.track, name): reason
            for each, own in zip(experiments, states, strict=True)
            for name, reason in own.failed.items()
        },
        tradeoff=weighed,
        over_time=over_time([trial for trial in trials if trial.track == experiment.track]),
        defenses={
            training_name(each.track, defense.name): dict(defense.settings)
            for each in experiments
            for defense in each.defenses
        },
    )
    return summary.model_copy(update={"earlier_looks": earlier_looks}) if earlier_looks else summary


def _weighed(
    experiment: Experiment, cells: Sequence[CellTrials], states: States, verdicts: Sequence[Verdict]
) -> Tradeoff:
    scored = scored_on(experiment.federation)
    rows = [
        tradeoff.make_row(each.name, each.settings, cells, states.training.get(each.name), scored)
        for each in experiment.defenses
    ]
    return tradeoff.weigh(rows, verdicts, scored)


def opened(folder: RunFolder, *, retry_failed: bool) -> TrialStore:
    """The trials of a run's folder, without failed ones if these are to be repeated."""
    store = open_store(folder.path)
    if retry_failed and store.failed:
        folder.withdraw_summary()  # first: it says more than the trials that are left
        store.forget_failed()
    return store


def run_wanted(
    work: Work[str, object, Finished],
    experiments: Sequence[Experiment],
    store: TrialStore,
    executor: Executor,
    watcher: Watcher,
    clock: Clock,
) -> Wanted:
    """Run the trials that the rule asks for and that are not in the store, until there are none or time is up."""
    needed = wanted(experiments, store.trials)
    watcher.trials_begin(_done(needed, store), len(needed.ids))
    with executor.start(work) as workers:
        while not clock.spent and _done(needed, store) < len(needed.ids):
            _run_missing(workers, needed.ids, store, watcher, clock)
            before, needed = needed, wanted(experiments, store.trials)
            if needed != before:
                watcher.looked(needed, _done(needed, store))
    return needed


def run_missing(
    work: Work[str, object, Finished], ids: Sequence[str], store: TrialStore, executor: Executor, watcher: Watcher
) -> None:
    """Run the trials of these ids that are not in the store. work: runs the trial of an id."""
    watcher.trials_begin(sum(name in store.trials for name in ids), len(ids))
    with executor.start(work) as workers:
        _run_missing(workers, ids, store, watcher, Clock())


def _run_missing(
    workers: Workers[str, object, Finished], ids: Sequence[str], store: TrialStore, watcher: Watcher, clock: Clock
) -> None:
    def in_time() -> Iterator[str]:
        for name in ids:
            if name not in store.trials:
                if clock.spent:
                    return
                yield name

    for _, (trial, pictures) in workers.run(in_time()):
        store.add(trial, pictures)
        watcher.trial_done(trial)


def _done(needed: Wanted, store: TrialStore) -> int:
    return sum(name in store.trials for name in needed.ids)


def _counted(experiments: Sequence[Experiment], needed: Wanted, store: TrialStore) -> list[Trial]:
    """The finished trials, in the order of the plan; also those that the rule asked for before the run grew."""
    ids = (*needed.ids, *(spec.id for each in experiments for spec in each.trials))
    return [store.trials[name] for name in dict.fromkeys(ids) if name in store.trials]


def _ended(
    needed: Wanted, store: TrialStore, trials: Sequence[Trial], experiments: Sequence[Experiment]
) -> Literal["decided", "all trials", "budget"]:
    if _done(needed, store) < len(needed.ids):
        return "budget"
    return "all trials" if len(trials) == sum(len(each.trials) for each in experiments) else "decided"


def check_something_ran(summary: Summary) -> None:
    """Raise an error if every trial of every attack failed."""
    if all(cell.failed == cell.trials for cell in summary.cells if cell.role == "attack"):
        flag = next(flag for flag in summary.flags if flag.code == "trials-failed")
        raise LeaktightError(f"every trial failed, the first with: {flag.detail}; see {summary.run}")


def easier_than_training(experiment: Experiment, production: Experiment | None = None) -> str | None:
    """How the attacked updates differ from those of training, in words; None if their sizes are the same.

    production: the experiment that attacks those of training.
    """
    local, attacked = experiment.federation.trainer.local, experiment.attacked
    size = min(experiment.federation.sizes.values())
    steps, fewer = local.num_steps(size), attacked.num_steps(size)
    used, less = (min(each.samples or size, size) for each in (local, attacked))
    if (fewer, less, attacked.batch_size) == (steps, used, local.batch_size):
        return None
    beside = "the production track attacks those" if production else "a table [production] adds a track of those"
    return (
        f"attacked: {less} examples in {fewer} steps of {attacked.batch_size}; "
        f"training: {used} examples in {steps} steps of {local.batch_size}; {beside}"
    )
