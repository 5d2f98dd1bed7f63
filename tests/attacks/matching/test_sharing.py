"""Victims of the same network share one traced iteration, and their results are those of a trace of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import Tensor, fx

from leaktight.attacks.labels.rules import Given, Joint
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import Cosine, SquaredError
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.sought import Pixels
from leaktight.attacks.optimizers import compile as compiling
from leaktight.attacks.optimizers.compile import Function
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.core.types import Observation
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.models.initialise import build_model
from leaktight.models.small import LeNetZhu

ATTACK = Matching(iterations=3, labels=Given(), priors=((1e-3, TotalVariation()),), onednn=False, backend="fx")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits(size=16).load(Path())


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    compiling._tracing.cache_clear()
    found: list[int] = []
    trace = compiling._traced

    def counted(function: Function, inputs: Sequence[Tensor]) -> fx.GraphModule:
        found.append(1)
        return trace(function, inputs)

    monkeypatch.setattr(compiling, "_traced", counted)
    return found


def victim(digits: Dataset, seed: int) -> Observation:
    """Another example of another network of the same kind, with other weights."""
    batch = draw(digits, 1, seed)
    model = build_model(LeNetZhu(), digits.inputs, digits.num_classes, init="wide", rng=replayed(seed))
    return replace(observe(model, batch, digits.num_classes), labels=batch.targets)


@pytest.mark.parametrize(
    "attack",
    [
        ATTACK,
        replace(ATTACK, restarts=2, parallel="vmap"),
        replace(ATTACK, optimizer=Lbfgs(), precision="float64"),
        replace(ATTACK, labels=Joint(), objective=SquaredError(), optimizer=Lbfgs(line_search="none")),
    ],
    ids=["adam", "vmap", "lbfgs", "joint"],
)
def test_victims_share_a_trace_and_each_has_its_own_answer(
    digits: Dataset, attack: Matching, traces: list[int]
) -> None:
    victims = [victim(digits, seed) for seed in range(3)]
    shared = [attack.reconstruct([each], rng=replayed(0)).guess.inputs for each in victims]
    assert len(traces) == 1
    for each, found in zip(victims, shared, strict=True):
        compiling._tracing.cache_clear()
        assert torch.equal(attack.reconstruct([each], rng=replayed(0)).guess.inputs, found)


def test_weights_of_priors_are_inputs(digits: Dataset, traces: list[int]) -> None:
    seen = victim(digits, 0)
    found = {}
    for weight in (1e-3, 1.0):
        attack = replace(ATTACK, priors=((weight, TotalVariation()),))
        found[weight] = attack.reconstruct([seen], rng=replayed(0)).loss
        eager = replace(attack, backend="eager").reconstruct([seen], rng=replayed(0)).loss
        assert found[weight] == pytest.approx(eager, rel=1e-5)
    assert len(traces) == 1
    assert found[1e-3] < found[1.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda attack: replace(attack, objective=SquaredError()),
        lambda attack: replace(attack, priors=((1e-3, TotalVariation(form="squared")),)),
        lambda attack: replace(attack, priors=()),
        lambda attack: replace(attack, sought=Pixels(box=False)),
        lambda attack: replace(attack, optimizer=Adam(slope="plain")),
        lambda attack: replace(attack, keep="last"),
        lambda attack: replace(attack, precision="float64"),
        lambda attack: replace(attack, restarts=2, parallel="vmap"),
    ],
    ids=["objective", "form", "priors", "box", "slope", "keep", "precision", "lanes"],
)
def test_another_attack_has_a_trace_of_its_own(
    digits: Dataset, change: Callable[[Matching], Matching], traces: list[int]
) -> None:
    seen, attack = victim(digits, 0), replace(ATTACK, objective=Cosine(), optimizer=Adam(slope="sign"))
    for each in (attack, change(attack)):
        each.reconstruct([seen], rng=replayed(0))
    assert len(traces) == 2
