"""In which order a client took its examples: orders to compare, when only the set of labels is known.

With several local steps the order of the examples is part of what explains an update. An order is one arrangement of
the examples for each epoch of each update; an arrangement has the example of every slot, batch after batch. The
examples are named by their slots in the first epoch, so there only their labels can be in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from leaktight.attacks.matching.view import Evidence
from leaktight.core.rng import Rng

Arrangement: TypeAlias = tuple[int, ...]
Order: TypeAlias = tuple[Arrangement, ...]
Steps: TypeAlias = Sequence[tuple[tuple[int, ...], float]]


def in_order(evidence: Evidence, order: Order) -> Evidence:
    """The evidence with its labels and its steps in this order."""
    labels = evidence.labels if evidence.labels is None else evidence.labels[list(order[0])]
    named: list[Arrangement] = [tuple(range(evidence.num_examples)), *order[1:]]
    views, number = [], 0
    for weight, view, places in evidence.views:
        steps: list[tuple[tuple[int, ...], float]] = []
        for epoch in epochs_of(view.steps):
            steps += [(tuple(named[number][slot] for slot in slots), rate) for slots, rate in epoch]
            number += 1
        views.append((weight, replace(view, steps=steps), places))
    return replace(evidence, views=views, labels=labels)


def epochs_of(steps: Steps) -> list[Steps]:
    """The steps of each epoch. An epoch begins with the first slot."""
    starts = [number for number, (slots, _) in enumerate(steps) if slots[0] == 0]
    return [steps[start:end] for start, end in pairwise([*starts, len(steps)])]


def candidates(
    evidence: Evidence, most: int, score: Callable[[Order, int], float], *, ordered: bool, rng: Rng
) -> list[Order]:
    """Distinct orders, those with the lowest score first; `most` of them if there are more.

    ordered: whether labels are in the order of the first epoch. Where there are too many orders, one is drawn at
    random, and exchanges two examples again and again, where that lowers its score; where it finds nothing lower for
    long, it begins anew. score: of an order, at so many starts; fewer of them where there are many orders.
    """
    shape = _Shape(evidence, ordered=ordered)
    orders = list(islice(shape.all(), most + 1))
    if len(orders) == 1:
        return orders
    many = len(orders) > most
    scores = _descended(shape, most, score, rng) if many else {order: score(order, STARTS) for order in orders}
    return sorted(scores, key=lambda order: scores[order])


STARTS = 2  # at which an order is scored
_PROPOSALS = 20  # for each order that is scored; most repeat an earlier one near the end of a descent
_PATIENCE = 60  # orders without a lower score, after which a descent begins anew


def _descended(shape: _Shape, most: int, score: Callable[[Order, int], float], rng: Rng) -> dict[Order, float]:
    """The scores of up to `most` orders, met on descents from random ones."""
    generator = rng.public()
    scores: dict[Order, float] = {}
    here, waited = shape.draw(generator), 0
    scores[here] = score(here, 1)
    for _ in range(_PROPOSALS * most):
        if len(scores) == most:
            break
        anew = waited == _PATIENCE
        there = shape.draw(generator) if anew else shape.neighbour(here, generator)
        waited = 0 if anew else waited + (there not in scores)
        if there not in scores:
            scores[there] = score(there, 1)
        if anew or scores[there] < scores[here]:
            here, waited = there, 0
    return scores


_ENOUGH = 0.5


class _Shape:
    """The epochs of an evidence: the sizes of their batches, and which examples count as equal in each."""

    def __init__(self, evidence: Evidence, *, ordered: bool) -> None:
        number = evidence.num_examples
        own = list(range(number))
        labels = own if evidence.labels is None or ordered else _kinds(evidence.labels)
        epochs = [epoch for _, view, _ in evidence.views for epoch in epochs_of(view.steps)]
        self.sizes = [[len(slots) for slots, _ in epoch] for epoch in epochs]
        self.kinds = [labels, *[own] * (len(epochs) - 1)]
        self.fixed = ordered or evidence.labels is None

    def all(self) -> Iterator[Order]:
        """All distinct orders, one at a time."""
        return self._from(0)

    def _from(self, epoch: int) -> Iterator[Order]:
        if epoch == len(self.sizes):
            yield ()
            return
        for arrangement in self._arrangements(epoch):
            for rest in self._from(epoch + 1):
                yield (arrangement, *rest)

    def _arrangements(self, epoch: int) -> Iterator[Arrangement]:
        kinds = self.kinds[epoch]
        if epoch == 0 and self.fixed:
            return iter([tuple(range(len(kinds)))])
        groups = [[place for place, kind in enumerate(kinds) if kind == each] for each in sorted(set(kinds))]
        return arrangements(groups, self.sizes[epoch])

    def first(self) -> Order:
        return tuple(tuple(range(len(kinds))) for kinds in self.kinds)

    def draw(self, generator: torch.Generator) -> Order:
        """A random order."""
        return tuple(
            arrangement
            if epoch == 0 and self.fixed
            else self._tidy(epoch, torch.randperm(len(arrangement), generator=generator).tolist())
            for epoch, arrangement in enumerate(self.first())
        )

    def neighbour(self, order: Order, generator: torch.Generator) -> Order:
        """The order with a few examples exchanged: one pair, or with half the probability one more, and so on."""
        changed = [list(arrangement) for arrangement in order]
        first = 1 if self.fixed else 0
        while True:
            epoch = int(torch.randint(first, len(order), (), generator=generator))
            one, other = torch.randperm(len(order[epoch]), generator=generator)[:2].tolist()
            changed[epoch][one], changed[epoch][other] = changed[epoch][other], changed[epoch][one]
            if torch.rand((), generator=generator) < _ENOUGH:
                return tuple(self._tidy(epoch, arrangement) for epoch, arrangement in enumerate(changed))

    def _tidy(self, epoch: int, arrangement: Sequence[int]) -> Arrangement:
        """The arrangement in the form in which `all` has it: equal examples and those of a batch ascend."""
        kinds = self.kinds[epoch]
        queues = {kind: iter([place for place, each in enumerate(kinds) if each == kind]) for kind in kinds}
        bounds = list(accumulate(self.sizes[epoch], initial=0))
        result: list[int] = []
        for start, end in pairwise([*bounds, len(arrangement)] if bounds[-1] < len(arrangement) else bounds):
            batch = sorted(arrangement[start:end], key=lambda place: kinds[place])
            result += [next(queues[kinds[place]]) for place in batch]
        return tuple(result)


def arrangements(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> Iterator[Arrangement]:
    """All distinct ways to fill batches of these sizes. groups: examples that count as equal.

    Examples within a batch have no order. What is left over comes last.

    >>> list(arrangements([[0, 1], [2]], [1, 2]))
    [(0, 1, 2), (2, 0, 1)]
    """
    if not sizes:
        yield tuple(place for group in groups for place in group)
        return
    for taken in _picks([len(group) for group in groups], sizes[0]):
        chosen = [place for group, count in zip(groups, taken, strict=True) for place in group[:count]]
        left = [group[count:] for group, count in zip(groups, taken, strict=True)]
        for rest in arrangements(left, sizes[1:]):
            yield (*chosen, *rest)


def _picks(counts: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """All ways to take `size` things of kinds that occur this often."""
    if not counts:
        yield ()
        return
    for number in range(min(size, counts[0]), max(0, size - sum(counts[1:])) - 1, -1):
        for rest in _picks(counts[1:], size - number):
            yield (number, *rest)


def _kinds(labels: Tensor) -> list[int]:
    """A number for each label, equal for equal ones."""
    rows = [tuple(row.flatten().tolist()) for row in labels]
    return [rows.index(row) for row in rows]
