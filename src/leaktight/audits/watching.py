"""Several rounds of one victim: which rounds are played, what an attack is given of them, and its guess from all of it.

With the same examples in every watched round, an attack that joins rounds makes one guess from all updates, and any
other attack makes its guess from the last. With new examples in every round there is a guess for each, and all guesses
together are scored against all examples. An attack is then given a round with those before it (`Observation.earlier`),
which say nothing about its examples, but may say something about the client's memory, such as the moments of a defense.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from leaktight.attacks.matching.spread import among
from leaktight.audits.settings import AuditSettings
from leaktight.core.devices import CPU, placed, returned, working_on
from leaktight.core.errors import UsageError
from leaktight.core.protocols import ActiveAttack, Attack, Progress, follow
from leaktight.core.rng import Rng
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, Reconstruction

T = TypeVar("T")


def check_watched(settings: AuditSettings, attacks: Iterable[tuple[str, Attack]], *, last: int, played: int) -> None:
    """Raise UsageError if there are too few rounds to watch, or an attack needs another number of them.

    attacks: with their names. last: the last attacked round. played: the federation's number of rounds.
    """
    watched = settings.watched
    if watched > 1 and last + watched > played:
        raise UsageError(
            f"expected audit.watched <= {played - last}, the rounds left from round {last} on, got {watched}; raise "
            "federation.rounds or lower audit.watched"
        )
    for name, attack in attacks:
        needed = None if isinstance(attack, ActiveAttack) else attack.needs_rounds
        if needed is not None and (watched != needed or settings.watched_examples != "same"):
            raise UsageError(
                f"{name} needs {needed} updates of the same examples, got audit.watched = {watched} of "
                f'{settings.watched_examples} ones; set audit.watched = {needed} and audit.watched_examples = "same"'
            )


def watched_training(settings: AuditSettings, local: LocalTraining) -> LocalTraining:
    """The clients' local training in the watched rounds: with the same examples in all of them, if so set."""
    keeps = settings.watched > 1 and settings.watched_examples == "same"
    return replace(local, redraw=False) if keeps else local


def counted_rounds(settings: AuditSettings, rounds: Sequence[T]) -> list[T]:
    """The watched rounds whose examples are the truth: all of them if they have new ones, else the last."""
    return list(rounds) if settings.watched_examples == "new" else [rounds[-1]]


def handed(settings: AuditSettings, attack: Attack, seen: Sequence[Observation]) -> list[list[Observation]]:
    """What an attack is given of all that was seen of a victim, one list for each guess."""
    if settings.watched_examples == "new":
        return [[each] for each in seen]
    return [list(seen)] if attack.joins_rounds else [[seen[-1]]]


def reconstructed(
    attack: Attack,
    given: Sequence[Sequence[Observation]],
    *,
    rng: Rng,
    device: torch.device = CPU,
    victims: int = 1,
    progress: Progress | None = None,
) -> Reconstruction:
    """The guess of an attack; of several lists, all guesses as one, each with at most the disclosed number of examples.

    Losses of several guesses are averaged. device: where the attack runs; the guess is on the CPU. Attacks
    need float64, which mps has not, and run on the CPU there. victims: those that the attack has in all, which share
    what it compiles. progress: told of a single guess; see `Attack.reconstruct`.
    """
    device = CPU if device.type == "mps" else device
    with working_on(device), among(victims):
        return returned(_joined(attack, placed(given, device), rng, progress), device)


def _joined(
    attack: Attack, given: Sequence[Sequence[Observation]], rng: Rng, progress: Progress | None
) -> Reconstruction:
    if len(given) == 1:
        return attack.reconstruct(given[0], rng=rng, progress=progress)
    found = follow(attack, given, rng=rng)
    guesses = [each.guess.inputs[: seen[0].batch_size] for each, seen in zip(found, given, strict=True)]
    targets = [each.guess.targets[: seen[0].batch_size] for each, seen in zip(found, given, strict=True)]
    read = [each.labels for each in found if each.labels is not None]
    firsts = [each.first_loss for each in found if each.first_loss is not None]
    return Reconstruction(
        guess=Batch(torch.cat(guesses), torch.cat(targets)),
        loss=sum(each.loss for each in found) / len(found),
        notes={"assumed": sorted({str(note) for each in found for note in each.notes.get("assumed", ())})},
        first_loss=sum(firsts) / len(firsts) if len(firsts) == len(found) else None,
        labels=torch.cat(read) if len(read) == len(found) else None,
    )
