"""A whole audit in its folder: training, trials, summary. Trials that the folder already holds are not repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leaktight.audits import tradeoff
from leaktight.audits.cells import LEAKED_IF, CellTrials, Interval, gather
from leaktight.audits.checks import Evidence, Raised, raise_flags
from leaktight.audits.experiment import TrialRunner
from leaktight.audits.plan import Experiment
from leaktight.audits.states import prepare_states
from leaktight.audits.trial import Finished
from leaktight.audits.verdict import verdicts
from leaktight.core.errors import LeaktightError
from leaktight.results.folder import RunFolder
from leaktight.results.schema import (
    SCHEMA_VERSION,
    Cell,
    Moment,
    Plain,
    Round,
    Score,
    Summary,
    Trial,
    common_ledger,
    metrics_of,
)
from leaktight.results.store import TrialStore, open_store
from leaktight.runtime.executor import Executor, Work

ALWAYS = ("psnr", "mse", "ssim", "lpips_alex")
"""Metrics that every cell has, null where they were not computed."""


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
    cells = gather(trials, experiment.seed)
    raised = raise_flags(Evidence(cells, easier_than_training(experiment)))
    concluded = verdicts(cells)
    rows = [
        tradeoff.make_row(each.name, each.settings, cells, states.training.get(each.name))
        for each in (experiment.defenses if weigh else ())
    ]
    summary = Summary(
        schema_version=SCHEMA_VERSION,
        run=str(folder.path),
        command=command,
        scenario=dict(scenario),
        cells=tuple(cell_of(cell, raised) for cell in cells),
        metrics=metrics_of(trials),
        leaked_if=LEAKED_IF,
        verdicts=tuple(concluded),
        flags=tuple(each.flag for each in raised),
        ledger=common_ledger(trials),
        training_failed=dict(states.failed),
        tradeoff=tradeoff.weigh(rows, concluded) if weigh else None,
        over_time=over_time(trials, experiment.seed),
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


def cell_of(cell: CellTrials, raised: Sequence[Raised]) -> Cell:
    """A cell of `summary.json`. raised: the checks of the whole run."""
    found = Cell(
        attack=cell.attack,
        role=cell.role,
        defense=cell.defense,
        adaptive=cell.adaptive,
        threat=cell.threat,
        trials=len(cell.trials),
        failed=len(cell.trials) - len(cell.done),
        success_rate=cell.success_rate if cell.role == "attack" else None,
        control={metric: cell.control(metric) for metric in ("psnr", "ssim")},
        seconds=sum(trial.seconds for trial in cell.trials) / len(cell.trials),
        flags=tuple(dict.fromkeys(each.check.code for each in raised if each.finding.concerns(cell))),
        trial_ids=tuple(trial.id for trial in cell.trials),
    )
    metrics = dict.fromkeys((*ALWAYS, *(name for trial in cell.done for name in trial.scores)))
    labels = cell.label_accuracy()
    read = None if labels is None else _score(labels, max(cell.labels_read))
    return found.with_scores({**{name: _figure(cell, name) for name in metrics}, "label_accuracy": read})


def over_time(trials: Sequence[Trial], seed: int) -> tuple[Moment, ...] | None:
    """Leakage and accuracy by round; None unless several rounds were attacked."""
    rounds = sorted({trial.round for trial in trials})
    if len(rounds) < 2:
        return None
    moments = [
        _moment(cell, number)
        for number in rounds
        for cell in gather([trial for trial in trials if trial.round == number], seed)
        if cell.role == "attack" and cell.done
    ]
    return tuple(sorted(moments, key=lambda moment: (moment.defense, moment.attack, moment.round)))


def _moment(cell: CellTrials, round_index: int) -> Moment:
    return Moment(
        defense=cell.defense,
        attack=cell.attack,
        adaptive=cell.adaptive,
        round=round_index,
        accuracy=cell.trials[0].model_accuracy,
        success_rate=cell.success_rate,
        trials=len(cell.done),
    ).with_scores({name: _figure(cell, name) for name in ("psnr", "ssim")})


def _figure(cell: CellTrials, metric: str) -> Score | None:
    interval, worst = cell.interval(metric), cell.most_leaking(metric)
    return None if interval is None or worst is None else _score(interval, cell.values(metric)[worst])


def _score(interval: Interval, worst: float) -> Score:
    return Score(mean=interval.mean, ci95=(interval.low, interval.high), worst=worst)
