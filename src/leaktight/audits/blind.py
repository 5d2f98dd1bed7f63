"""Labels guessed without the update: how many would be right by chance, found by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SIMULATIONS = 999

Counts = NDArray[np.int64]
"""How often each label occurs, one row for each set of labels."""


class BlindLabels(NamedTuple):
    """chance: the probability that as many labels are right, or more, if the update is not looked at.

    accuracy: the mean share of labels that are then right.
    """

    chance: float
    accuracy: float


@dataclass(frozen=True)
class LabelDraws:
    """The labels of the training examples of every client, as numbers from 0, and the number of each label."""

    numbers: Mapping[tuple[int, ...], int]
    clients: Sequence[NDArray[np.int64]]

    @classmethod
    def of(cls, targets: Sequence[Tensor]) -> LabelDraws:
        """targets: those of each client, (n,) or words (n, L) padded with -1."""
        known: dict[tuple[int, ...], int] = {}
        clients = [np.array([known.setdefault(row, len(known)) for row in rows_of(each)]) for each in targets]
        return cls(known, clients)

    def counts_of(self, labels: Tensor) -> Counts:
        """The counts of these labels, (number of labels,); a label that no client has is left out."""
        found = [self.numbers[row] for row in rows_of(labels) if row in self.numbers]
        return np.bincount(np.array(found, dtype=np.int64), minlength=len(self.numbers))

    def drawn(self, sizes: Sequence[int], rng: np.random.Generator) -> Counts:
        """The counts of one simulated update. sizes: the number of examples of each of its clients.

        The clients are random, no one twice; each draws its examples as for local training, without replacement, or
        with it if it has fewer.
        """
        members = rng.choice(len(self.clients), len(sizes), replace=False, shuffle=True)
        total = np.zeros(len(self.numbers), dtype=np.int64)
        for member, size in zip(members, sizes, strict=True):
            own = self.clients[member]
            if size != len(own):
                own = own[rng.choice(len(own), size, replace=size > len(own), shuffle=False)]
            total += np.bincount(own, minlength=len(total))
        return total


def blind_labels(
    guess: Tensor, truth: Tensor, sizes: Sequence[int], draws: LabelDraws, rng: np.random.Generator
) -> BlindLabels:
    """Compare the labels of a guess with the true ones and with those of simulated updates.

    sizes: the number of true labels of each client behind the update.
    """
    guessed = draws.counts_of(guess)
    simulated = np.stack([draws.drawn(sizes, rng) for _ in range(SIMULATIONS)])
    right = np.minimum(simulated, guessed).sum(1)
    reached = int(np.minimum(draws.counts_of(truth), guessed).sum())
    accuracy = float(right.mean()) / max(len(guess), len(truth))
    return BlindLabels((1 + int((right >= reached).sum())) / (SIMULATIONS + 1), accuracy)


def rows_of(labels: Tensor) -> list[tuple[int, ...]]:
    """Each label as a tuple: a class, the class of the highest score (N, C), or a word without its padding.

    >>> import torch
    >>> rows_of(torch.tensor([2, 0])), rows_of(torch.tensor([[5, 7, -1]]))
    ([(2,), (0,)], [(5, 7)])
    """
    whole = labels.argmax(1) if labels.is_floating_point() else labels
    if whole.ndim == 1:
        return [(label,) for label in whole.tolist()]
    return [tuple(symbol for symbol in row if symbol >= 0) for row in whole.tolist()]
