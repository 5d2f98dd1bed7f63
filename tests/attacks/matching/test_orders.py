"""The order of examples over local steps, when labels are known as a set."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed

from leaktight.attacks.labels.rules import Geng
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.orders import Arrangement, Order, arrangements, candidates, epochs_of, in_order
from leaktight.attacks.matching.view import Evidence, Simulation
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.fedavg_epochs import apart, merged
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.fl.local import plan_batches
from leaktight.models.initialise import build_model
from leaktight.models.small import LeNetZhu


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits().load(Path())


def scene(digits: Dataset, count: int, local: LocalTraining, seed: int) -> tuple[Observation, Batch, list[list[int]]]:
    """An observation, its examples, and the labels of each step."""
    batch = draw(digits, count, seed, unique=True)
    model = build_model(LeNetZhu(), digits.inputs, 10, rng=replayed(seed))
    seen = replace(observe(model, batch, 10, local=local, seed=seed), labels=batch.targets.sort().values)
    _, steps = plan_batches(count, local, rng=replayed(seed).child("steps"))
    return seen, batch, [sorted(batch.targets[step].tolist()) for step in steps]


def labels_of(evidence: Evidence) -> list[list[int]]:
    assert evidence.labels is not None
    return [sorted(evidence.labels[list(places)].tolist()) for places, _ in evidence.views[0][1].steps]


def quick(**settings: Any) -> Matching:
    return replace(CsDlg(iterations=3, parallel="none", backend="eager").matching(), **settings)


@pytest.mark.parametrize("kinds", [[0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 1, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2], [3, 1], [2, 1]])
def test_arrangements_are_all_and_distinct(kinds: list[int], sizes: list[int]) -> None:
    """Against all permutations, told apart by the kinds in each batch."""
    groups = [[place for place, kind in enumerate(kinds) if kind == each] for each in sorted(set(kinds))]

    def form(arrangement: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        parts = torch.tensor(arrangement)[: sum(sizes)].split(sizes)
        return tuple(tuple(sorted(kinds[place] for place in part.tolist())) for part in parts)

    found = [form(each) for each in arrangements(groups, sizes)]
    assert len(found) == len(set(found))
    assert set(found) == {form(each) for each in permutations(range(4))}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("count", "size"), [(2, 1), (4, 1), (4, 2)])
def test_the_loss_finds_the_order_of_the_labels(digits: Dataset, seed: int, count: int, size: int) -> None:
    seen, _, truth = scene(digits, count, LocalTraining(batch_size=size, learning_rate=0.05), seed)
    attack = quick()
    settled = attack.settled(attack.evidence([seen], rng=replayed(1)), rng=replayed(1))
    assert labels_of(settled) == truth


def test_the_loss_finds_the_order_of_inferred_labels(digits: Dataset) -> None:
    seen, _, truth = scene(digits, 3, LocalTraining(batch_size=1, learning_rate=0.005), 0)
    attack = quick(labels=Geng())
    settled = attack.settled(attack.evidence([replace(seen, labels=None)], rng=replayed(1)), rng=replayed(1))
    assert labels_of(settled) == truth


def test_every_epoch_has_an_order_of_its_own(digits: Dataset) -> None:
    seen, _, truth = scene(digits, 3, LocalTraining(batch_size=1, epochs=2, learning_rate=0.05), 1)
    assert truth[:3] != truth[3:]
    attack = quick()
    settled = attack.settled(attack.evidence([seen], rng=replayed(1)), rng=replayed(1))
    assert labels_of(settled) == truth


def test_with_one_order_or_one_step_nothing_changes(digits: Dataset) -> None:
    seen, _, _ = scene(digits, 2, LocalTraining(batch_size=1, learning_rate=0.05), 0)
    attack = quick(matched=Simulation(orders=1))
    evidence = attack.evidence([seen], rng=replayed(1))
    assert attack.settled(evidence, rng=replayed(1)) is evidence
    whole, _, _ = scene(digits, 2, LocalTraining(batch_size=2, learning_rate=0.05), 0)
    evidence = quick().evidence([whole], rng=replayed(1))
    assert labels_of(quick().settled(evidence, rng=replayed(1))) == labels_of(evidence)


def misplaced(order: Order, goal: Arrangement) -> int:
    return sum(a != b for a, b in zip(order[0], goal, strict=True))


def test_a_descent_that_ends_at_a_worse_order_begins_anew(digits: Dataset) -> None:
    """Half of the orders are nearer to another one, from which no exchange of two examples leads down."""
    seen, _, _ = scene(digits, 8, LocalTraining(batch_size=1, learning_rate=0.05), 0)
    evidence = quick().evidence([seen], rng=replayed(1))
    goal, trap = (3, 1, 4, 0, 5, 7, 2, 6), (6, 2, 7, 5, 0, 4, 1, 3)
    asked = set()

    def score(order: Order, starts: int) -> float:
        asked.add(starts)
        return min(misplaced(order, goal), misplaced(order, trap) + 0.5)

    found = [candidates(evidence, 1500, score, ordered=False, rng=replayed(seed))[0] for seed in range(6)]
    assert found == [(goal,)] * 6
    assert asked == {1}, "many orders are looked at from one start"


def test_among_too_many_orders_a_descent_finds_the_best(digits: Dataset) -> None:
    """8! orders; the score is the number of examples out of place."""
    seen, _, _ = scene(digits, 8, LocalTraining(batch_size=1, learning_rate=0.05), 0)
    evidence = quick().evidence([seen], rng=replayed(1))
    goal = (3, 1, 4, 0, 5, 7, 2, 6)
    found = candidates(
        evidence,
        400,
        lambda order, starts: misplaced(order, goal),
        ordered=False,
        rng=replayed(0),
    )
    assert found[0] == (goal,)
    assert len(found) == len(set(found)) <= 400


def test_images_of_epochs_are_apart_and_merged(digits: Dataset) -> None:
    seen, batch, _ = scene(digits, 3, LocalTraining(batch_size=2, epochs=2, learning_rate=0.05), 1)
    shared = quick().evidence([seen], rng=replayed(1))
    assert [len(epoch) for epoch in epochs_of(shared.views[0][1].steps)] == [2, 2]
    moved = in_order(shared, ((0, 1, 2), (2, 0, 1)))
    spread = apart(moved, [2, 2])
    assert [places for places, _ in spread.views[0][1].steps] == [(0, 1), (2,), (3, 4), (5,)]
    assert labels_of(spread) == labels_of(moved)
    assert spread.labels is not None
    order = batch.targets.argsort()
    images = batch.inputs[order][[0, 1, 2, 2, 0, 1]]
    joined = merged(Batch(images, spread.labels), 3)
    torch.testing.assert_close(joined.inputs, batch.inputs[order])
    assert joined.targets.tolist() == batch.targets[order].tolist()
