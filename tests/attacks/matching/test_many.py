from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.attacks.scenes import observe
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.attacks.labels.rules import Given, Joint
from leaktight.attacks.matching import spread
from leaktight.attacks.matching.alike import groups
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.many import reconstruct_all
from leaktight.attacks.matching.objectives import LayerCosine, SquaredError
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.view import OneBatch
from leaktight.attacks.optimizers import first_order
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.attacks.presets.agic import Agic
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.gradinversion import GradInversion
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng, global_seed
from leaktight.core.threat import Knowledge
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, ImageShape, Mode, Observation, Reconstruction
from leaktight.models import build_model
from leaktight.models.small import LeNetZhu
from leaktight.runtime.processes import in_worker

SMOOTH = Matching(
    iterations=5,
    restarts=2,
    labels=Given(),
    priors=((1e-3, TotalVariation()),),
    optimizer=Adam(learning_rate=0.01),
    precision="float64",
    onednn=True,
)


def network(seed: int, width: int = 4) -> nn.Module:
    with global_seed(replayed(seed).child("network")):
        return nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(16 * width, 3)
        )


def victim(seed: int, model: nn.Module | None = None, count: int = 2, **options: Any) -> Observation:
    """An update of random images and labels, by default of a network of its own."""
    generator = replayed(seed).child("images").public()
    labels = (torch.arange(count) + seed) % 3
    batch = Batch(torch.rand(count, 1, 8, 8, generator=generator), labels)
    observation = observe(model or network(seed), batch, 3, **options)
    return replace(observation, labels=labels.sort().values)


def one_by_one(attack: Matching, victims: Sequence[Observation], traced: bool = False) -> list[Reconstruction]:
    alone = replace(attack, parallel="none", backend="fx" if traced else "eager")
    return [alone.reconstruct([each], rng=replayed(place)) for place, each in enumerate(victims)]


def all_at_once(attack: Any, victims: Sequence[Observation], workers: int = 1, **options: Any) -> list[Reconstruction]:
    rngs = [replayed(place) for place in range(len(victims))]
    return reconstruct_all(attack, [[each] for each in victims], rngs=rngs, workers=workers, **options)


def assert_same(left: Sequence[Reconstruction], right: Sequence[Reconstruction], tolerance: float) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one.guess.inputs, other.guess.inputs, rtol=0, atol=tolerance)
        assert one.guess.targets.tolist() == other.guess.targets.tolist()
        assert one.notes["losses"] == pytest.approx(other.notes["losses"], abs=tolerance)


LOCAL = LocalTraining(epochs=2, batch_size=1, learning_rate=0.1, momentum=0.9)
COMPOSITIONS: dict[str, tuple[Matching, dict[str, Any]]] = {
    "cosine": (SMOOTH, {}),
    "one restart": (replace(SMOOTH, restarts=1), {}),
    "eager": (replace(SMOOTH, backend="eager"), {}),
    "labels searched": (replace(SMOOTH, objective=SquaredError(), labels=Joint()), {}),
    "simulated": (SMOOTH, {"local": LOCAL}),
    "one batch": (replace(SMOOTH, matched=OneBatch(), objective=LayerCosine()), {"local": LOCAL}),
    "the last": (replace(SMOOTH, keep="last"), {}),
    "noise": (replace(SMOOTH, optimizer=Adam(learning_rate=0.01, langevin=0.1)), {}),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_victims_side_by_side_are_those_one_by_one(name: str) -> None:
    attack, options = COMPOSITIONS[name]
    victims = [victim(seed, **options) for seed in range(2)]
    assert len({tuple(each.labels.tolist()) for each in victims if each.labels is not None}) > 1
    together = all_at_once(replace(attack, parallel="vmap"), victims)
    assert_same(together, one_by_one(attack, victims), 1e-9)


def test_restarts_side_by_side_on_several_convolutions_over_maps_smaller_than_their_kernels() -> None:
    """Weights in channels-last order have wrong gradients under vmap there (PyTorch 2.13)."""
    model = build_model(LeNetZhu(), ImageShape(1, 8, 8), 3, init="wide", rng=replayed(0))
    victims = [victim(0, model, local=LOCAL)]
    together = all_at_once(replace(SMOOTH, parallel="vmap"), victims)
    assert_same(together, one_by_one(SMOOTH, victims), 1e-9)


def test_victims_of_one_network_share_its_weights() -> None:
    model = network(0)
    victims = [victim(seed, model) for seed in range(2)]
    together = all_at_once(replace(SMOOTH, parallel="vmap"), victims)
    assert_same(together, one_by_one(SMOOTH, victims), 1e-9)


def test_the_consensus_is_of_each_victims_own_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_order, "_CONSENSUS_FROM", 1)
    monkeypatch.setattr(first_order, "_CONSENSUS_EVERY", 2)
    attack = GradInversion(iterations=8, batch_norm=0.0, consensus=10.0, labels=Given(), precision="float64")
    victims = [victim(seed) for seed in range(2)]
    together = all_at_once(replace(attack, parallel="vmap"), victims)
    assert_same(together, one_by_one(attack.matching(), victims), 1e-9)
    free = one_by_one(replace(attack, consensus=0.0).matching(), victims[:1])
    assert not torch.allclose(free[0].guess.inputs, together[0].guess.inputs, atol=1e-6)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_batch_norm_statistics_of_restarts_side_by_side(mode: Mode) -> None:
    with global_seed(replayed(1)):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 3))
    attack = GradInversion(iterations=4, labels=Given(), precision="float64", progress_every=2)
    victims = [victim(0, model, mode=mode)]
    together = all_at_once(replace(attack, parallel="vmap"), victims)
    assert_same(together, one_by_one(attack.matching(), victims), 1e-9)


def test_each_restart_stops_by_itself() -> None:
    """One that is good enough is kept as it was then, however long the others go on."""
    attack = replace(SMOOTH, restarts=1, iterations=40, check_every=5, keep="last")
    victims = [victim(seed) for seed in range(2)]
    losses = [each.loss for each in one_by_one(attack, victims)]
    attack = replace(attack, stop_below=sum(losses) / 2)
    alone = one_by_one(attack, victims)
    assert len({each.notes["iterations"] for each in alone}) == 2
    together = all_at_once(replace(attack, parallel="vmap"), victims)
    assert [each.notes["iterations"] for each in together] == [each.notes["iterations"] for each in alone]
    assert_same(together, alone, 1e-9)


class Scaled(nn.Module):
    """A network with a number that no tensor and no description shows."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = network(0), scale

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.inner(self.scale * images)
        return out


def frozen(value: float) -> nn.Module:
    """A network whose first layer is not trained, so that no update and no broadcast tells of it."""
    first = nn.Conv2d(1, 1, 1)
    with torch.no_grad():
        first.weight.fill_(value)
        first.bias.zero_()  # type: ignore[union-attr]
    first.requires_grad_(False)
    return nn.Sequential(first, *network(0).children())


def test_only_victims_that_differ_in_inputs_alone_are_alike() -> None:
    victims = [
        victim(0),
        victim(1, network(1, width=5)),
        victim(2),
        victim(3, count=3),
        victim(4, Scaled(1.0)),
        victim(5, Scaled(2.0)),
        victim(6, Scaled(1.0)),
        victim(7, frozen(1.0)),
        victim(8, frozen(2.0)),
        victim(9, local=LOCAL),
        victim(10),
        victim(11),
    ]
    problems = [SMOOTH.problem([each], rng=replayed(0)) for each in victims]
    assert groups(problems, 3) == [[0, 2, 10], [1], [3], [4, 6], [5], [7, 8], [9], [11]]
    attack = replace(SMOOTH, restarts=1, iterations=2, parallel="vmap")
    assert_same(all_at_once(attack, victims[4:9]), one_by_one(attack, victims[4:9]), 1e-9)


def test_processes_and_turns_agree_to_the_last_bit() -> None:
    """Victims and restarts over processes: first-order steps, and L-BFGS with the reports on its way."""
    victims = [victim(seed) for seed in range(2)]
    reports: dict[int, list[int]] = {1: [], 2: []}
    finished: list[int] = []
    for attack in (replace(SMOOTH, precision="float32"), replace(SMOOTH, optimizer=Lbfgs(), iterations=1)):
        attack = replace(attack, progress_every=5)
        spread_out, inline = (
            all_at_once(
                replace(attack, parallel="processes"),
                victims,
                workers,
                progress=lambda place, *rest, workers=workers: reports[workers].append(place),
                done=lambda place, answer: finished.append(place),
            )
            for workers in (2, 1)
        )
        assert_same(spread_out, inline, 0.0)
        assert_same(spread_out, one_by_one(attack, victims, traced=True), 0.0)
    assert sorted(reports[2]) == sorted(reports[1])
    assert set(reports[2]) == {0, 1}
    assert sorted(finished) == [0, 0, 0, 0, 1, 1, 1, 1]


@dataclass(frozen=True, kw_only=True)
class Stubborn:
    """Guesses noise, says where it ran, and refuses one victim."""

    requires: frozenset[Knowledge] = frozenset()

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        if seen[0].batch_size == 3:
            raise UsageError("not this one")
        if progress is not None:
            progress(1, 0.5, None)
        images = torch.rand(2, 1, 8, 8, generator=rng.public())
        return Reconstruction(
            Batch(images, torch.zeros(2, dtype=torch.long)), 0.5, {"losses": [0.5], "in": in_worker()}
        )


def test_any_attack_takes_processes_or_turns_and_its_errors_come_through() -> None:
    victims = [victim(seed) for seed in range(3)]
    told: list[tuple[int, int, float]] = []
    spread_out = all_at_once(
        Stubborn(), victims, 2, progress=lambda place, i, loss, guess: told.append((place, i, loss))
    )
    assert_same(spread_out, all_at_once(Stubborn(), victims), 0.0)
    assert [answer.notes["in"] for answer in spread_out] == [True] * 3
    assert sorted(told) == [(0, 1, 0.5), (1, 1, 0.5), (2, 1, 0.5)]
    for workers in (1, 2):
        with pytest.raises(UsageError, match="not this one"):
            all_at_once(Stubborn(), [*victims, victim(3, count=3)], workers)


def test_bad_calls_are_named() -> None:
    with pytest.raises(UsageError, match="one rng for each victim"):
        reconstruct_all(SMOOTH, [[victim(0)]], rngs=[])
    with pytest.raises(UsageError, match="workers >= 1"):
        reconstruct_all(SMOOTH, [[victim(0)]], rngs=[replayed(0)], workers=0)
    assert reconstruct_all(SMOOTH, [], rngs=[]) == []
    with pytest.raises(ValueError, match="L-BFGS"):
        Dlg(parallel="vmap")


def test_only_what_is_a_mere_composition_is_taken_apart() -> None:
    assert InvertingGradients().composition() == InvertingGradients().matching()
    assert Agic().composition() == Agic().matching()
    assert Agic(epochs=2).composition() is None


def test_the_way_follows_the_size_of_the_work() -> None:
    """Small networks go side by side, wide ones to processes once it is worth it, L-BFGS never under vmap."""
    small = SMOOTH.problem([victim(0)], rng=replayed(0))
    wide = SMOOTH.problem([victim(0, network(0, width=60_000))], rng=replayed(0))
    assert spread.flops_of(small) == 2 * 2 * (16 * 4 * 9 + 64 * 3)
    simulated = SMOOTH.problem([victim(0, local=LOCAL)], rng=replayed(0))
    assert spread.flops_of(simulated) == 2 * spread.flops_of(small)
    long = replace(SMOOTH, iterations=10_000)
    bent = replace(long, optimizer=Lbfgs(), labels=Given())
    assert spread.choose(SMOOTH, small, 1, 2) == ("vmap", 1)
    assert spread.choose(long, small, 1, 2) == ("vmap", 2)
    assert spread.choose(replace(SMOOTH, iterations=1), wide, 1, 2) == ("none", 1)
    assert spread.choose(long, wide, 1, 2) == ("processes", 2)
    assert spread.choose(long, wide, 1, 1) == ("none", 1)
    assert spread.choose(replace(long, consensus=1.0), wide, 1, 2) == ("none", 1)
    assert spread.choose(replace(long, consensus=1.0), wide, 3, 2) == ("processes", 2)
    assert spread.choose(bent, small, 2, 2) == ("processes", 2)
    assert spread.choose(replace(bent, stop_below=1e-6), small, 1, 2) == ("none", 1)
    assert spread.choose(replace(long, restarts=1), wide, 1, 2) == ("none", 1)
    for way in ("processes", "none"):
        assert spread.choose(replace(SMOOTH, parallel=way), small, 1, 2)[0] == way
