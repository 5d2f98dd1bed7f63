"""An audit from beginning to end in its folder: what is there already is not done again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leaktight.audit import tradeoff
from leaktight.audit.cells import gather
from leaktight.audit.experiment import Site
from leaktight.audit.plan import Experiment
from leaktight.audit.states import States, prepare_states
from leaktight.audit.store import TrialStore, open_store
from leaktight.audit.summary import summarise
from leaktight.audit.verdict import verdicts
from leaktight.core.errors import LeaktightError
from leaktight.engines.training import Row
from leaktight.fl.run_folder import RunFolder
from leaktight.runtime.executor import Executor


class Watcher:
    """What is told of a run while it goes on; every method may be left as it is."""

    def round_done(self, defense: str, row: Row) -> None:
        """A round of the training before the attacks."""

    def trials_begin(self, done: int, total: int) -> None:
        """So many trials of `total` were there already."""

    def trial_done(self, line: Mapping[str, Any]) -> None:
        """A trial is on the disk."""


def run_audit(
    experiment: Experiment,
    folder: RunFolder,
    *,
    executor: Executor,
    scenario: Mapping[str, Any],
    command: str,
    weigh: bool = False,
    workers: int | None = None,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Train what has to be trained, run the trials that are missing, write `summary.json`, and give it.

    scenario: facts about the scenario in plain words. weigh: train every defense through all rounds and add the
    trade-off. workers: processes for training; the trials are the executor's.
    """
    watcher = watcher or Watcher()
    store = open_store(folder.path)
    states = prepare_states(experiment, folder.path, whole=weigh, workers=workers, told=watcher.round_done)
    _run_trials(experiment, store, states, executor, watcher)
    lines = [store.trials[spec.id] for spec in experiment.trials]
    facts = {"easier": easier} if (easier := easier_than_training(experiment)) else {}
    cells = gather(lines, experiment.seed)
    summary = {
        **summarise(lines, seed=experiment.seed, facts=facts),
        "run": str(folder.path),
        "command": command,
        "scenario": dict(scenario),
        "training_failed": dict(states.failed),
        "tradeoff": None,
    }
    if weigh:
        rows = [
            tradeoff.make_row(each.name, each.settings, cells, states.training.get(each.name))
            for each in experiment.defenses
        ]
        summary["tradeoff"] = tradeoff.weigh(rows, verdicts(cells))
    folder.write_summary(summary)
    return summary


def _run_trials(
    experiment: Experiment, store: TrialStore, states: States, executor: Executor, watcher: Watcher
) -> None:
    missing = [spec for spec in experiment.trials if spec.id not in store.trials]
    watcher.trials_begin(len(experiment.trials) - len(missing), len(experiment.trials))
    site = Site(experiment, states.packed, states.accuracy, states.failed)
    with executor.start(site) as workers:
        for _, done in workers.run([spec.id for spec in missing]):
            watcher.trial_done(store.add(done.line, done.pictures))


def check_something_ran(summary: Mapping[str, Any]) -> None:
    """Raise an error if every attack failed: a summary without a score is no result."""
    attacks = [cell for cell in summary["cells"] if cell["role"] == "attack"]
    if all(cell["failed"] == cell["trials"] for cell in attacks):
        flag = next(flag for flag in summary["flags"] if flag["code"] == "trials-failed")
        raise LeaktightError(f"every trial failed, the first with: {flag['detail']}; see {summary['run']}")


def easier_than_training(experiment: Experiment) -> str | None:
    """How the attacked updates differ from those of training, if they come from fewer examples or steps."""
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
