"""AdaDefense's stand-ins are solved for the gradient, and a client's moments are followed over its rounds."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal

import pytest
import torch
from tests.adaptive.scenes import LOCAL, Scene, play, score
from tests.seeds import replayed
from torch import Tensor

from leaktight.adaptive.adadefense import KnowsAdaDefense, server_scale
from leaktight.adaptive.knowing import Case, Knowing
from leaktight.adaptive.moments import Moments, first_step, nearest, settled, solved
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.core.protocols import follow
from leaktight.core.types import Update
from leaktight.defenses.adadefense import AdaDefense

CSDLG = CsDlg(iterations=10, onednn=False)


def drawn(seed: int) -> Tensor:
    values = torch.randn(400, generator=replayed(seed).public()).double() * 1e-3
    values[:3] = 0
    return values


@pytest.mark.parametrize("form", ["adam", "adagrad", "yogi"])
@pytest.mark.parametrize("other", ["paper", "inside", "code"])
def test_one_of_the_solutions_is_the_gradient_in_every_round(
    form: Literal["adam", "adagrad", "yogi"], other: str
) -> None:
    variant: Literal["paper", "code"] = "code" if other == "code" else "paper"
    defense = AdaDefense(form=form, variant=variant, epsilon_inside=other == "inside")
    moments = Moments()
    for number in range(4):
        gradient = {"w": drawn(number)}
        stand_in, _ = defense.stand_in(gradient, moments.state)
        found = solved(Update(stand_in, "gradient"), defense, moments)
        value, error = nearest(found, "w", gradient["w"])
        right = (value - gradient["w"]).abs() <= 1e-6 * gradient["w"].abs() + 1e-15
        assert int((~right).sum()) <= 1, "a rare third solution of yogi is not looked for"
        assert bool(found.other["w"].isnan().all()) == (number == 0 or (form == "adagrad" and variant == "paper"))
        moments = moments.after(gradient, {"w": torch.zeros_like(error)}, defense)


@pytest.mark.parametrize("inside", [False, True])
def test_the_first_solution_is_the_inverse_in_closed_form(inside: bool) -> None:
    defense = AdaDefense(epsilon_inside=inside)
    stand_in, _ = defense.stand_in({"w": drawn(0)}, Moments().state)
    share, epsilon = stand_in["w"], first_step(defense)[1]
    closed = share * (epsilon / (1 - share.square())).sqrt() if inside else epsilon * share / (1 - share.abs())
    found = solved(Update(stand_in, "gradient"), defense, Moments())
    torch.testing.assert_close(found.tensors["w"], closed, rtol=1e-6, atol=0)


def test_errors_are_those_of_rounding_and_of_the_moments() -> None:
    """Against the spread that many roundings, or many wrong moments, give."""
    defense, before, gradient = AdaDefense(), drawn(0)[3:], drawn(1)[3:]
    true = Moments().after({"w": before}, {"w": torch.zeros_like(before)}, defense)
    stand_in, _ = defense.stand_in({"w": gradient}, true.state)
    off = 1e-3 * before * torch.randn(len(before), generator=replayed(2).public()).double()
    doubtful = Moments().after({"w": before + off}, {"w": 1e-3 * before.abs()}, defense)
    found = solved(Update({"w": stand_in["w"].float()}, "gradient"), defense, doubtful)
    value, error = nearest(found, "w", gradient)
    known = error < 0.1 * gradient.abs()
    ratio = ((value - gradient).abs() / error)[known].median()
    assert int(known.sum()) > 200
    assert 0.2 < float(ratio) < 2


def test_precise_solutions_outweigh_the_guess_and_the_guess_fills_in() -> None:
    defense, gradient = AdaDefense(), drawn(0)[3:]
    gradient[:50] *= 1e3  # beyond what float32 stand-ins tell
    sent = {"w": defense.stand_in({"w": gradient.float()}, Moments().state)[0]["w"]}
    found = solved(Update(sent, "gradient"), defense, Moments())
    noise = torch.randn(len(gradient), generator=replayed(3).public()).double()
    value, _ = settled(found, {"w": 2 * gradient * (1 + 1e-3 * noise)})
    off = ((value["w"] - gradient) / gradient).abs()
    assert float(off[:50].median()) < 0.01
    assert float(off[50:].median()) < 1e-3
    assert float(((found.tensors["w"] - gradient) / gradient).abs()[:50].median()) > 0.05


def knowing(defense: AdaDefense) -> Knowing:
    return Knowing(attack=CSDLG, adaptation=KnowsAdaDefense(defense=defense))


def two_rounds(defense: AdaDefense) -> list[Scene]:
    first = play(defense)
    return [first, play(defense, seed=5, round_index=1, state=first.state, params=first.seen.broadcast.params)]


def test_later_rounds_are_solved_by_who_followed_the_moments_and_by_nobody_else() -> None:
    scenes = two_rounds(AdaDefense())
    scenes[1] = replace(scenes[1], seen=replace(scenes[1].seen, model=scenes[0].seen.model))
    alone = scenes[1].score(knowing(AdaDefense()))
    kept = copy.deepcopy(scenes[1].seen.update.tensors)
    found = follow(knowing(AdaDefense()), [[scene.seen] for scene in scenes], rng=replayed(0))
    scores = [score(each.guess.inputs, scene.truth) for each, scene in zip(found, scenes, strict=True)]
    assert min(scores) > 35, scores
    assert alone < 20, alone
    assert all(torch.equal(tensor, kept[name]) for name, tensor in scenes[1].seen.update.tensors.items())


@pytest.mark.parametrize("factor", [1e-3, -1e-4])
def test_the_aggregate_of_one_client_is_solved_with_the_servers_factor(factor: float) -> None:
    scene = play(AdaDefense())
    scaled = {name: factor * tensor for name, tensor in scene.seen.update.tensors.items()}
    kind: Literal["gradient", "delta"] = "gradient" if factor > 0 else "delta"
    seen = replace(scene.seen, update=replace(scene.seen.update, tensors=scaled, kind=kind))
    assert server_scale(seen, AdaDefense()) == pytest.approx(abs(factor), rel=1e-12)
    assert replace(scene, seen=seen).score(knowing(AdaDefense())) > 50


def test_the_mean_of_two_clients_and_a_later_round_are_told_from_a_first() -> None:
    one, two = play(AdaDefense()).seen, play(AdaDefense(), seed=5).seen
    mean = {name: (tensor + two.update.tensors[name]) / 2 for name, tensor in one.update.tensors.items()}
    assert server_scale(one, AdaDefense()) == 1.0
    assert server_scale(replace(one, update=replace(one.update, tensors=mean)), AdaDefense()) is None
    assert server_scale(two_rounds(AdaDefense())[1].seen, AdaDefense()) is None
    case = Case(model=one.model, num_examples=1, num_steps=1)
    adaptation = KnowsAdaDefense(defense=AdaDefense())
    assert adaptation.unable(case) is None
    assert adaptation.unable(replace(case, clients=2)) is not None


@pytest.mark.slow
def test_batches_and_several_steps_are_solved() -> None:
    attack = Knowing(attack=replace(CSDLG, iterations=60), adaptation=KnowsAdaDefense(defense=AdaDefense()))
    batch = play(AdaDefense(), count=4, local=replace(LOCAL, batch_size=4))
    steps = play(AdaDefense(), kind="delta", local=replace(LOCAL, steps=4))
    assert batch.score(attack) > 30
    assert steps.score(attack) > 50
