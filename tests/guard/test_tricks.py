"""Models of the agreed architecture that were made to give examples away: the guard notices them in the first round."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from bench.tricks import TRICKS, Victim, disguised_imprint
from tests.attacks.tampered import scene
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.config.catalogue import MODELS
from leaktight.core.protocols import Defense, Sight
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.types import Broadcast
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.defenses.client_dp import ClientDp
from leaktight.engines.inprocess import Reports, run
from leaktight.guard import BroadcastGuard, Judgement
from leaktight.models.initialise import build_model
from leaktight.models.small import LeNetZhu

CODES = {
    "trap weights": {"quiet"},
    "QBI": {"quiet"},
    "split imprint": {"mirrored"},
    "mirrored pairs": {"mirrored"},
    "mirrored last layer": {"hushed"},
}


@cache
def digits() -> Dataset:
    return Digits(size=16).load(Path())


def network(kind: str, seed: int) -> nn.Module:
    return build_model(MODELS[kind](), digits().inputs, 10, rng=replayed(seed))


def judged(
    kind: str, trick: Callable[[Victim], dict[str, Tensor]], *, private: bool = False, seed: int = 21
) -> Judgement:
    model, data = network(kind, seed), digits()
    public = data.test.batch(slice(0, 128)).inputs
    params, buffers = cloned(parameters_of(model)), cloned(buffers_of(model))
    sent = trick(Victim(model, params, buffers, public, 32, replayed(seed).public()))
    examples = None if private else data.train.batch(slice(0, 32))
    own = Sight(inputs=data.inputs, rng=replayed(seed), examples=examples)
    return BroadcastGuard().judge(Broadcast(sent, buffers, 0), network(kind, seed + 1), own, {})


@pytest.mark.parametrize("private", [False, True], ids=["own examples", "made-up examples"])
@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("kind", ["mlp", "lenet_zhu", "resnet20"])
def test_a_trick_is_noticed_in_the_first_round(kind: str, trick: str, private: bool) -> None:
    found = {finding.code for finding in judged(kind, TRICKS[trick], private=private).findings}
    assert CODES[trick] <= found


@pytest.mark.parametrize("private", [False, True], ids=["own examples", "made-up examples"])
def test_an_imprint_whose_rows_do_not_look_alike_is_noticed_and_counted(private: bool) -> None:
    """It gives three quarters of the images away: its rows differ only where images do not."""
    found = judged("mlp", disguised_imprint, private=private)
    assert found.signs["mirrored"] == 0.0
    assert {finding.code for finding in found.findings} >= {"twins"}
    assert found.leak is not None
    assert private or found.leak > 0.6, "the estimate is of the own examples"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["mlp", "lenet_relu"])
def test_few_examples_of_one_kind_are_no_finding(kind: str, seed: int) -> None:
    """One of two examples that is alone by chance, examples of one class, and one example many times."""
    make = {"mlp": lambda s: network("mlp", s), "lenet_relu": relu_network}[kind]
    data = digits().train
    one_class = (data.targets == seed).nonzero().flatten()[:32]
    for places in (torch.arange(2) + 2 * seed, one_class, one_class[:1].repeat(32)):
        own = Sight(inputs=digits().inputs, rng=replayed(1), examples=data.batch(places))
        sent = Broadcast(cloned(parameters_of(make(seed))), {}, 0)
        assert not BroadcastGuard().judge(sent, make(seed + 50), own, {}).findings


def relu_network(seed: int) -> nn.Module:
    kind = LeNetZhu(activation="relu")
    return build_model(kind, digits().inputs, 10, rng=replayed(seed))


@pytest.mark.parametrize("private", [False, True], ids=["own examples", "made-up examples"])
@pytest.mark.parametrize("kind", ["mlp", "lenet_zhu", "resnet20"])
def test_the_honest_model_passes(kind: str, private: bool) -> None:
    assert not judged(kind, lambda victim: dict(victim.params), private=private).findings


def test_the_estimate_of_what_is_given_away_grows_with_the_trick() -> None:
    honest = judged("mlp", lambda victim: dict(victim.params)).leak
    tricked = judged("mlp", TRICKS["QBI"]).leak
    assert honest is not None
    assert tricked is not None
    assert tricked > honest + 0.2


@pytest.mark.parametrize("defense", [Defense(), ClientDp(noise_multiplier=1.0)], ids=["none", "client_dp"])
def test_honest_rounds_pass_beside_noise(defense: Defense) -> None:
    if defense.private:
        pytest.importorskip("opacus")
    played = scene(
        digits(), network("mlp", 5), batch=16, clients=4, steps="delta", guard=BroadcastGuard(), defense=defense
    )
    rounds: list[Reports] = []
    run(played.federation, workers=1, score=False, until=6, on_reports=rounds.append)
    reports = [report for each in rounds for report in each.values()]
    assert len(reports) == 24
    assert not any(report["guard_suspicious"] for report in reports)
    assert all(("guard_leak" in report) != defense.private for report in reports), "a figure of examples stays unsaid"


def test_one_example_gives_itself_away_and_is_no_finding() -> None:
    model = network("mlp", 3)
    own = Sight(inputs=digits().inputs, rng=replayed(1), examples=digits().train.batch(slice(0, 1)))
    sent = Broadcast(cloned(parameters_of(model)), {}, 0)
    assert not BroadcastGuard().judge(sent, network("mlp", 4), own, {}).suspicious
    assert torch.equal(sent.params["classifier.0.weight"], parameters_of(model)["classifier.0.weight"])
