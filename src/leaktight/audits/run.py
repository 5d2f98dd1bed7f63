"""A whole audit in its folder: training, trials, summary. Trials that the folder already holds are not repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leaktight.audits import tradeoff
from leaktight.audits.answer import answer
from leaktight.audits.cells import LEAKED_IF, gather
from leaktight.audits.checks import Evidence, raise_flags
from leaktight.audits.experiment import TrialRunner
from leaktight.audits.plan import Experiment
from leaktight.audits.states import prepare_states
from leaktight.audits.summary import cell_of, over_time
from leaktight.audits.trial import Finished
from leaktight.audits.verdict import Panel
from leaktight.core.errors import LeaktightError
from leaktight.results.folder import RunFolder
from leaktight.results.schema import (
    SCHEMA_VERSION,
    Plain,
    Round,
    Summary,
    Trial,
    common_ledger,
    metrics_of,
)
from leaktight.results.store import TrialStore, open_store
from leaktight.runtime.executor import Executor, Work

CONFIDENCE = 0.15


class Watcher:
    """Callbacks for the progress of a run; override those you need."""

    def round_done(self, defense: str, row: Round) -> None:
        """A round of the training before the attacks is done."""

    def trials_begin(self, done: int, total: int) -> None:
        """The trials start; `done` of the `total` are in the folder already."""

    def trial_done(self, trial: Trial) -> None:
        """A trial is done and stored."""


def run_audit(
    experiment: Experiment,
    folder: RunFolder,
    *,
    executor: Executor,
    scenario: Mapping[str, Plain],
    command: str,
    weigh: bool = False,
    workers: int | None = None,
    watcher: Watcher | None = None,
) -> Summary:
    """Train the defenses as far as needed, run the missing trials, write `summary.json` and return it.

    scenario: facts about the scenario for readers. weigh: train every defense through all rounds and add the
    trade-off. executor: runs the trials. workers: processes for training.
    """
    watcher = watcher or Watcher()
    store = open_store(folder.path)
    states = prepare_states(experiment, folder.path, whole=weigh, workers=workers, after_round=watcher.round_done)
    runner = TrialRunner(experiment, states.packed, states.accuracy, states.failed)
    run_missing(runner, [spec.id for spec in experiment.trials], store, executor, watcher)
    trials = [store.trials[spec.id] for spec in experiment.trials]
    cells = gather(trials)
    panel = Panel(cells, CONFIDENCE)
    raised = raise_flags(Evidence(panel, easier_than_training(experiment)))
    concluded = panel.verdicts()
    rows = [
        tradeoff.make_row(each.name, each.settings, cells, states.training.get(each.name))
        for each in (experiment.defenses if weigh else ())
    ]
    weighed = tradeoff.weigh(rows, concluded) if weigh else None
    summary = Summary(
        schema_version=SCHEMA_VERSION,
        run=str(folder.path),
        command=command,
        scenario=dict(scenario),
        answer=answer(concluded, cells, weighed),
        cells=tuple(cell_of(cell, panel, raised) for cell in cells),
        metrics=metrics_of(trials),
        leaked_if=LEAKED_IF,
        confidence=CONFIDENCE,
        verdicts=tuple(concluded),
        flags=tuple(each.flag for each in raised),
        ledger=common_ledger(trials),
        training_failed=dict(states.failed),
        tradeoff=weighed,
        over_time=over_time(trials),
    )
    return folder.write_summary(summary)


def run_missing(
    work: Work[str, object, Finished], ids: Sequence[str], store: TrialStore, executor: Executor, watcher: Watcher
) -> None:
    """Run the trials of these ids that are not in the store. work: runs the trial of an id."""
    missing = [each for each in ids if each not in store.trials]
    watcher.trials_begin(len(ids) - len(missing), len(ids))
    with executor.start(work) as workers:
        for _, (trial, pictures) in workers.run(missing):
            store.add(trial, pictures)
            watcher.trial_done(trial)


def check_something_ran(summary: Summary) -> None:
    """Raise an error if every trial of every attack failed."""
    if all(cell.failed == cell.trials for cell in summary.cells if cell.role == "attack"):
        flag = next(flag for flag in summary.flags if flag.code == "trials-failed")
        raise LeaktightError(f"every trial failed, the first with: {flag.detail}; see {summary.run}")


def easier_than_training(experiment: Experiment) -> str | None:
    """How the attacked updates differ from those of training, in words; None if their sizes are the same."""
    local, attacked = experiment.federation.trainer.local, experiment.attacked
    size = min(experiment.federation.sizes.values())
    steps, fewer = local.num_steps(size), attacked.num_steps(size)
    used, less = (min(each.samples or size, size) for each in (local, attacked))
    if (fewer, less, attacked.batch_size) == (steps, used, local.batch_size):
        return None
    return (
        f"attacked: {less} examples in {fewer} steps of {attacked.batch_size}; "
        f"training: {used} examples in {steps} steps of {local.batch_size}"
    )
