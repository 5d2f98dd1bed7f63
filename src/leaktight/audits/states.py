"""Training before the attacks: the state of every defense's federation before each attacked round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from leaktight.audits.experiment import state_key
from leaktight.audits.judge.tradeoff import Scored
from leaktight.audits.plan import Entry, Experiment
from leaktight.audits.trial import reason_of
from leaktight.core.faults import raise_fault
from leaktight.core.files import slug
from leaktight.core.protocols import Defense
from leaktight.core.tensors import pack
from leaktight.engines.training import train
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.local import evaluate
from leaktight.fl.state import load_checkpoint, save_checkpoint
from leaktight.report.words import defense_words
from leaktight.results.folder import RunFolder
from leaktight.results.schema import UNDEFENDED, Round, TrainingSummary, training_name


@dataclass(frozen=True)
class States:
    """packed, accuracy: the serialised state before a round and the accuracy of its model, by `state_key`.

    training: the summary of each defense's training; empty if none was needed. failed: by defense, why training failed.
    """

    packed: Mapping[str, bytes] = field(default_factory=dict)
    accuracy: Mapping[str, float | None] = field(default_factory=dict)
    training: Mapping[str, TrainingSummary] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


def prepare_states(
    experiment: Experiment,
    folder: Path,
    *,
    whole: bool = False,
    workers: int | None = None,
    begin: Callable[[str, int], None],
    after_round: Callable[[str, Round], None],
) -> States:
    """Train every defense's federation up to the last attacked round, or through all rounds if `whole`.

    begin: called with the name of a training and the number of its rounds. after_round: called with the name and each
    finished round, those of a resumed run included.
    """
    packed: dict[str, bytes] = {}
    accuracy: dict[str, float | None] = {}
    training: dict[str, TrainingSummary] = {}
    failed: dict[str, str] = {}
    stopped: list[Exception] = []  # by a caller, for which no defense is to blame

    def tell(name: str, row: Round) -> None:
        try:
            after_round(name, row)
        except Exception as error:
            stopped.append(error)
            raise

    for defense in experiment.defenses if experiment.trains or whole else ():
        federation = experiment.trained(defense)
        rounds = federation.plan.rounds if whole else experiment.rounds[-1]
        begin(_name(experiment, defense), rounds)
        try:
            training[defense.name] = _train(experiment, defense, federation, folder, whole, workers, tell)
        except Exception as error:  # a defect in one defense must not end the others' trials
            raise_fault(error)
            if error in stopped or (defense.name == UNDEFENDED and experiment.track == "diagnostic"):
                raise
            failed[defense.name] = reason_of(error)
            continue
        rows = training[defense.name].rounds
        for round_index in experiment.rounds if experiment.trains else ():
            key = state_key(defense.name, round_index)
            accuracy[key] = rows[round_index - 1].accuracy if round_index else _first_accuracy(federation)
            if round_index:
                path = _state_file(experiment, folder, defense, round_index)
                packed[key] = pack(load_checkpoint(path, remedy=_retry(path.parent)))
            else:
                packed[key] = pack(federation.first_state().stored())
    return States(packed, accuracy, training, failed)


def _train(
    experiment: Experiment,
    defense: Entry[Defense],
    federation: Federation,
    folder: Path,
    whole: bool,
    workers: int | None,
    after_round: Callable[[str, Round], None],
) -> TrainingSummary:
    def keep(state: FederationState) -> None:
        if state.server.round in experiment.rounds:
            save_checkpoint(_state_file(experiment, folder, defense, state.server.round), state.stored())

    own = training_folder(experiment, folder, defense.name)
    return train(
        federation,
        RunFolder(own),
        defense_kind=defense.name,
        defense_settings=defense.settings,
        workers=workers,
        after_round=lambda row: after_round(_name(experiment, defense), row),
        after_state=keep,
        until=None if whole else experiment.rounds[-1],
        retry=_retry(own),
    )


def _retry(folder: Path) -> str:
    """What to do about a damaged state of a training."""
    return f"remove {folder} to train it again, and add --resume"


def _name(experiment: Experiment, defense: Entry[Defense]) -> str:
    """The name of a training for readers."""
    return training_name(experiment.track, defense_words(defense.name, defense.settings))


def training_folder(experiment: Experiment, folder: Path, defense: str) -> Path:
    """Where a run keeps the training of a defense."""
    own = folder / "training" / "production" if experiment.track == "production" else folder / "training"
    return own / slug(defense)


def _state_file(experiment: Experiment, folder: Path, defense: Entry[Defense], round_index: int) -> Path:
    return training_folder(experiment, folder, defense.name) / f"round-{round_index:04d}.state"


def scored_on(federation: Federation) -> Scored:
    """The examples that accuracy is measured on; clients who score on test examples all have the same ones."""
    targets = federation.dataset.test.targets
    if federation.server.scores_on == "validation":
        kept = [federation.client(name).validation.targets for name in federation.shares]
        targets = federation.dataset.task.join(kept)
    largest = int(torch.unique(targets, dim=0, return_counts=True)[1].max())
    return Scored(len(targets), largest / len(targets))


def _first_accuracy(federation: Federation) -> float | None:
    """The accuracy before training; None if only clients can score the model."""
    if federation.server.scores_on is not None:
        return None
    state = federation.first_state().server
    setup, test = federation.setup, federation.dataset.test
    return evaluate(setup.trainer, state.params, state.buffers, test, device=setup.device).accuracy
