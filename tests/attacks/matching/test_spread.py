"""Restarts side by side, over processes and in turn find the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.attacks.scenes import observe
from tests.seeds import replayed
from torch import nn

from leaktight.attacks.labels.rules import Given, Joint
from leaktight.attacks.matching import attack as attack_module
from leaktight.attacks.matching import spread
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import LayerCosine, SquaredError
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.spread import Parallel
from leaktight.attacks.matching.view import Evidence, OneBatch
from leaktight.attacks.optimizers import first_order
from leaktight.attacks.optimizers.compile import Backend
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.gradinversion import GradInversion
from leaktight.core.inputs import Images
from leaktight.core.rng import global_seed
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Mode, Observation, Reconstruction
from leaktight.models.initialise import build_model
from leaktight.models.small import LeNetZhu

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


def in_turn(attack: Matching, seen: Observation, backend: Backend = "eager") -> Reconstruction:
    return replace(attack, parallel="none", backend=backend).reconstruct([seen], rng=replayed(0))


def spread_out(attack: Matching, seen: Observation, way: Parallel = "vmap") -> Reconstruction:
    return replace(attack, parallel=way).reconstruct([seen], rng=replayed(0))


def assert_same(one: Reconstruction, other: Reconstruction, tolerance: float) -> None:
    torch.testing.assert_close(one.guess.inputs, other.guess.inputs, rtol=0, atol=tolerance)
    assert one.guess.targets.tolist() == other.guess.targets.tolist()
    assert one.notes["losses"] == pytest.approx(other.notes["losses"], abs=tolerance)
    assert one.first_loss == pytest.approx(other.first_loss, abs=tolerance)


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
def test_restarts_side_by_side_are_those_in_turn(name: str) -> None:
    attack, options = COMPOSITIONS[name]
    seen = victim(0, **options)
    assert_same(spread_out(attack, seen), in_turn(attack, seen), 1e-9)


def test_restarts_side_by_side_on_several_convolutions_over_maps_smaller_than_their_kernels() -> None:
    """Weights in channels-last order have wrong gradients under vmap there (PyTorch 2.13)."""
    model = build_model(LeNetZhu(), Images(1, 8, 8), 3, init="wide", rng=replayed(0))
    seen = victim(0, model, local=LOCAL)
    assert_same(spread_out(SMOOTH, seen), in_turn(SMOOTH, seen), 1e-9)


def test_restarts_are_drawn_to_their_consensus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_order, "_CONSENSUS_FROM", 1)
    monkeypatch.setattr(first_order, "_CONSENSUS_EVERY", 2)
    preset = GradInversion(iterations=8, batch_norm=0.0, consensus=10.0, labels=Given(), precision="float64")
    drawn, free = preset.matching(), replace(preset, consensus=0.0).matching()
    seen = victim(0)
    together = spread_out(drawn, seen)
    assert_same(together, in_turn(drawn, seen), 1e-9)
    assert not torch.allclose(in_turn(free, seen).guess.inputs, together.guess.inputs, atol=1e-6)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_batch_norm_statistics_of_restarts_side_by_side(mode: Mode) -> None:
    with global_seed(replayed(1)):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 3))
    attack = GradInversion(iterations=4, labels=Given(), precision="float64", progress_every=2)
    seen = victim(0, model, mode=mode)
    assert_same(spread_out(attack.matching(), seen), in_turn(attack.matching(), seen), 1e-9)


def test_each_restart_ends_by_itself() -> None:
    """One that is good enough is kept as it was then, however long the others go on."""
    seen = victim(0)
    attack = replace(SMOOTH, iterations=40, check_every=5, keep="last", stop_below=2e-3)
    evidence = attack.evidence([seen], rng=replayed(0))
    ways: tuple[Parallel, ...] = ("none", "vmap")
    for way in ways:
        found = replace(attack, parallel=way).search(evidence, rng=replayed(0)).search
        assert [each.steps for each in found.candidates] == [30, 25]
        assert [each.history[-1][0] for each in found.candidates] == [30, 25]
        assert all(each.history[0][0] == 1 for each in found.candidates)
    assert_same(spread_out(attack, seen), in_turn(attack, seen), 1e-9)


@pytest.mark.parametrize(
    "attack", [replace(SMOOTH, precision="float32"), replace(SMOOTH, optimizer=Lbfgs(), iterations=1)], ids=type
)
def test_processes_and_turns_agree_to_the_last_bit(attack: Matching) -> None:
    """Restarts over processes, with the reports on their way: always the best of all so far."""
    attack, seen = replace(attack, progress_every=5), victim(0)
    reports: list[float] = []
    apart = replace(attack, parallel="processes").reconstruct(
        [seen], rng=replayed(0), progress=lambda iteration, loss, guess: reports.append(loss)
    )
    assert_same(apart, in_turn(attack, seen, "fx"), 0.0)
    assert len(reports) >= attack.restarts
    assert reports == sorted(reports, reverse=True)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="with Lbfgs"):
        Dlg(parallel="vmap")


def test_a_search_is_compiled_where_all_victims_together_save_more_than_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attack = replace(SMOOTH, iterations=10_000, restarts=1)
    evidence, longer = attack.evidence([victim(0)], rng=replayed(0)), replace(attack, iterations=100_000)
    steps = attack.evidence([victim(0, local=LOCAL)], rng=replayed(0))
    assert spread.layers_of(evidence) == 2
    assert spread.layers_of(steps) == 8, "four local steps"

    def chosen(attack: Matching, evidence: Evidence = evidence) -> Backend:
        return spread.choose_backend(attack.workload, evidence, attack.backend)

    monkeypatch.setattr(spread, "has_compiler", lambda: True)
    assert chosen(attack) == "fx", "2 layers and 10 000 steps save 5 seconds; compiling takes 13"
    assert chosen(longer) == "inductor"
    assert chosen(replace(attack, restarts=10)) == "inductor"
    with spread.among(5):
        assert chosen(attack) == "fx"
        with spread.among(10):
            assert chosen(attack) == "inductor"
        with spread.among(0):
            assert chosen(longer) == "fx"
        assert chosen(attack) == "fx"
        assert chosen(replace(longer, backend="eager")) == "eager"
    assert chosen(replace(attack, backend="inductor")) == "inductor"
    monkeypatch.setattr(spread, "_MOST_LAYERS", 7)
    assert (chosen(longer, steps), chosen(longer)) == ("fx", "inductor"), "a long graph"
    monkeypatch.setattr(spread, "has_compiler", lambda: False)
    assert chosen(longer) == "fx"


def test_restarts_in_processes_run_as_the_search_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the audit said of its victims is not known in a new process, so the choice is made before."""
    asked: list[Any] = []

    def run_all(function: Any, jobs: Any, **options: Any) -> Any:
        asked.extend(job.attack.backend for job in jobs)
        raise InterruptedError

    monkeypatch.setattr(spread, "has_compiler", lambda: True)
    monkeypatch.setattr(attack_module, "run_all", run_all)
    attack = replace(SMOOTH, iterations=10_000, parallel="processes")
    with spread.among(10), pytest.raises(InterruptedError):
        attack.reconstruct([victim(0)], rng=replayed(0))
    assert asked == ["inductor", "inductor"]


def test_the_way_follows_the_size_of_the_work() -> None:
    """Small networks go side by side, wide ones to processes once it is worth it, L-BFGS never under vmap."""
    small = SMOOTH.evidence([victim(0)], rng=replayed(0))
    wide = SMOOTH.evidence([victim(0, network(0, width=60_000))], rng=replayed(0))
    assert spread.flops_of(small) == 2 * 2 * (16 * 4 * 9 + 64 * 3)
    simulated = SMOOTH.evidence([victim(0, local=LOCAL)], rng=replayed(0))
    assert spread.flops_of(simulated) == 2 * spread.flops_of(small)
    long = replace(SMOOTH, iterations=10_000)
    bent = replace(long, optimizer=Lbfgs(), labels=Given())

    def way(attack: Matching, evidence: Evidence, workers: int = 2) -> tuple[Parallel, int]:
        return spread.choose(attack.workload, evidence, attack.parallel, workers)

    assert way(SMOOTH, small) == ("vmap", 1)
    assert way(long, small) == ("vmap", 2)
    assert way(replace(SMOOTH, iterations=1), wide) == ("none", 1)
    assert way(long, wide) == ("processes", 2)
    assert way(long, wide, workers=1) == ("none", 1)
    assert way(replace(long, consensus=1.0), wide) == ("none", 1)
    assert way(bent, small) == ("processes", 2)
    assert way(replace(bent, stop_below=1e-6), small) == ("none", 1)
    assert way(replace(long, restarts=1), wide) == ("none", 1)
    assert way(replace(SMOOTH, parallel="processes"), small) == ("processes", 2)
    assert way(replace(SMOOTH, parallel="none"), small) == ("none", 1)
