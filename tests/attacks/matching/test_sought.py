"""A search may move anything that stands for examples: here a code of a few numbers, in every way the loop can run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests.attacks.scenes import observe
from tests.seeds import replayed
from torch import Tensor

from leaktight.attacks.labels.rules import Given, Joint
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import SquaredError
from leaktight.attacks.matching.sought import Grey, Pixels, SearchSpace, Sought
from leaktight.attacks.matching.view import Evidence
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.attacks.optimizers.optimizer import Tree
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.config.catalogue import MODELS
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Observation
from leaktight.data.embedded import Digits
from leaktight.metrics import psnr
from leaktight.models.initialise import build_model
from leaktight.models.small import LeNetZhu

NUMBERS = 5


def basis(pixels: int) -> Tensor:
    return torch.randn(NUMBERS, pixels, generator=replayed(8).public())


class CodeSpace(SearchSpace):
    def draw(self, rng: Rng) -> Tree:
        return {
            "code": 0.1 * torch.randn(self.shape[0], NUMBERS, generator=rng.child("code").public()).to(self.precision)
        }

    def images(self, variables: Tree, constants: Tree) -> Tensor:
        flat: Tensor = torch.sigmoid(variables["code"] @ constants["basis"])
        return flat.reshape(self.shape)

    def confined(self, variables: Tree) -> Tree:
        return {**variables, "code": variables["code"].clamp(-1, 1)}

    def penalty(self, variables: Tree, constants: Tree) -> Tensor | None:
        small: Tensor = 1e-6 * variables["code"].square().sum()
        return small


@dataclass(frozen=True, kw_only=True)
class Code(Sought):
    """Images as a sigmoid of a few directions; the code is searched."""

    def space(self, evidence: Evidence, rng: Rng, precision: torch.dtype) -> SearchSpace:
        pixels = math.prod(evidence.shape)
        return CodeSpace(evidence, precision, {"basis": basis(pixels).to(precision)})


ATTACK = Matching(
    objective=SquaredError(),
    labels=Given(),
    sought=Code(),
    optimizer=Adam(learning_rate=0.1, decay="cosine"),
    iterations=80,
    precision="float64",
    onednn=True,
    restarts=2,
)


@pytest.fixture(scope="module")
def victims() -> tuple[list[Batch], list[list[Observation]]]:
    """Two clients whose images lie in the range of the code."""
    data = Digits().load(Path())
    model = build_model(MODELS["lenet_zhu"](), data.inputs, data.num_classes, init="wide", rng=replayed(0))
    batches, seen = [], []
    for client in range(2):
        code = 0.8 * (2 * torch.rand(1, NUMBERS, generator=replayed(20 + client).public()) - 1)
        image = torch.sigmoid(code @ basis(data.inputs.size)).reshape(1, *data.inputs.shape)
        batches.append(Batch(image, torch.tensor([3 + client])))
        seen.append([replace(observe(model, batches[-1], data.num_classes), labels=batches[-1].targets)])
    return batches, seen


def error(guess: Batch, truth: Batch) -> float:
    return float((guess.inputs - truth.inputs).abs().max())


@pytest.mark.parametrize("parallel", ["vmap", "processes"])
def test_the_code_is_found_in_every_way_of_running(
    victims: tuple[list[Batch], list[list[Observation]]], parallel: str
) -> None:
    truths, seen = victims
    attack = replace(ATTACK, parallel=parallel)  # type: ignore[arg-type]
    found = attack.reconstruct(seen[1], rng=replayed(2))
    assert error(found.guess, truths[1]) < 0.01
    again = replace(ATTACK, parallel="none").reconstruct(seen[1], rng=replayed(2))
    torch.testing.assert_close(found.guess.inputs, again.guess.inputs, rtol=0, atol=1e-6)


def test_lbfgs_moves_it_too_and_the_box_is_for_pixels_alone(
    victims: tuple[list[Batch], list[list[Observation]]],
) -> None:
    truths, seen = victims
    found = replace(ATTACK, optimizer=Lbfgs(), iterations=5, restarts=1).reconstruct(seen[0], rng=replayed(3))
    assert error(found.guess, truths[0]) < 1e-4


def test_the_variables_stay_where_they_are_allowed(victims: tuple[list[Batch], list[list[Observation]]]) -> None:
    _, seen = victims
    shown: list[Tensor] = []
    wild = replace(ATTACK, optimizer=Adam(learning_rate=50.0), iterations=3, progress_every=1, keep="last")
    wild.reconstruct(seen[0], rng=replayed(1), progress=lambda _, loss, guess: shown.append(guess))  # type: ignore[arg-type]
    code = torch.logit(shown[-1].double().reshape(1, -1)) @ torch.linalg.pinv(basis(shown[-1].numel()).double())
    assert float(code.abs().max()) <= 1 + 1e-3


def test_labels_are_searched_beside_it(victims: tuple[list[Batch], list[list[Observation]]]) -> None:
    truths, seen = victims
    found = replace(ATTACK, labels=Joint(), iterations=200, restarts=1).reconstruct(seen[0], rng=replayed(1))
    assert found.guess.targets.tolist() == truths[0].targets.tolist()


def test_the_penalty_is_part_of_the_loss(victims: tuple[list[Batch], list[list[Observation]]]) -> None:
    _, seen = victims
    here = {"code": torch.full((1, NUMBERS), 0.5, dtype=torch.float64)}
    evidence = ATTACK.evidence(seen[0], rng=replayed(0))
    whole, plain = (
        each.problem(evidence, replayed(0), [0], together=False) for each in (ATTACK, replace(ATTACK, objective=None))
    )
    assert float(plain.loss(here, {}, plain.constants)) == pytest.approx(1e-6 * NUMBERS * 0.25)
    assert float(whole.loss(here, {}, whole.constants)) > 1e-6 * NUMBERS * 0.25


def test_again_begins_pixels_at_given_images_and_anything_else_anew() -> None:
    images = torch.rand(1, 1, 4, 4, generator=replayed(1).public())
    begun = Pixels(start=Grey(), box=False).again(images)
    assert isinstance(begun, Pixels)
    assert not begun.box
    assert torch.equal(begun.start.draw((1, 1, 4, 4), replayed(2).public()), images)
    assert Code().again(images) == Code()


@pytest.mark.parametrize("side", [7, 8])
def test_coarse_images_are_interpolated_to_the_whole_size(side: int) -> None:
    rough = Pixels(coarse=2).rough
    assert rough is not None
    iterations, sought = rough
    assert iterations == 2
    space = sought.space(Evidence([], None, 3, (1, side, side), 10), replayed(1), torch.float64)
    variables = space.draw(replayed(2))
    assert variables["images"].shape == (3, 1, 4, 4)
    assert space.boxed == 3 * 4 * 4
    level = {"images": torch.full_like(variables["images"], 0.3)}
    torch.testing.assert_close(space.images(level, {}), torch.full((3, 1, side, side), 0.3, dtype=torch.float64))
    assert space.images(variables, {}).shape == (3, 1, side, side)


def test_a_search_goes_on_from_coarse_images() -> None:
    data = Digits(size=32).load(Path())
    model = build_model(LeNetZhu(activation="sigmoid"), data.inputs, 10, init="wide", rng=replayed(3))
    batch = data.test.batch(slice(0, 1))
    seen = replace(observe(model, batch, 10), labels=batch.targets)
    told: list[int] = []
    found = {}
    for coarse in (0, 2):
        attack = CsDlg(iterations=5 - coarse, coarse=coarse, onednn=False, progress_every=1)
        found[coarse] = attack.reconstruct([seen], rng=replayed(0), progress=lambda step, *_: told.append(step))
    alone, after = found[0], found[2]
    assert float(psnr(after.guess.inputs, batch.inputs)) > 3 + float(psnr(alone.guess.inputs, batch.inputs))
    steps = [step for step, _ in after.history]
    assert steps == sorted(set(steps)), "one history of both searches"
    assert after.history[0][1] == after.first_loss
    assert after.first_loss > 1e3 * after.loss
    assert max(told) <= after.notes["evaluations"]


def test_restarts_are_those_of_the_coarse_search() -> None:
    data = Digits(size=8).load(Path())
    model = build_model(LeNetZhu(activation="sigmoid"), data.inputs, 10, init="wide", rng=replayed(3))
    batch = data.test.batch(slice(0, 1))
    seen = replace(observe(model, batch, 10), labels=batch.targets)
    one, three = (
        CsDlg(iterations=2, coarse=1, restarts=number, onednn=False).reconstruct([seen], rng=replayed(0))
        for number in (1, 3)
    )
    assert len(three.notes["losses"]) == 1
    assert one.notes["evaluations"] < three.notes["evaluations"] < 2 * one.notes["evaluations"]
    with pytest.raises(ValueError, match="coarse"):
        CsDlg(coarse=-1)


def test_iterations_of_restarts_side_by_side_count_once() -> None:
    data = Digits(size=8).load(Path())
    model = build_model(LeNetZhu(activation="sigmoid"), data.inputs, 10, init="wide", rng=replayed(3))
    batch = data.test.batch(slice(0, 1))
    seen = replace(observe(model, batch, 10), labels=batch.targets)
    attack = InvertingGradients(iterations=6, coarse=4, restarts=3, parallel="vmap", onednn=False, progress_every=1)
    told: list[int] = []
    found = attack.reconstruct([seen], rng=replayed(0), progress=lambda step, *_: told.append(step))
    assert found.notes["iterations"] == 10
    assert told == sorted(told)
    assert max(told) == 10
    rough = replace(attack, iterations=4, coarse=0).matching()
    coarse = replace(rough, sought=Pixels(coarse=4).rough[1])  # type: ignore[index]
    assert found.first_loss == coarse.reconstruct([seen], rng=replayed(0)).first_loss


def test_labels_that_are_searched_for_are_not_lost_in_between() -> None:
    data = Digits(size=8).load(Path())
    model = build_model(LeNetZhu(activation="sigmoid"), data.inputs, 10, init="wide", rng=replayed(3))
    seen = observe(model, data.test.batch(slice(0, 1)), 10)
    attacks = [replace(CsDlg(iterations=1, coarse=each, onednn=False).matching(), labels=Joint()) for each in (0, 3)]
    first, second = (each.reconstruct([seen], rng=replayed(0)) for each in attacks)
    assert torch.equal(first.guess.inputs, second.guess.inputs), "no coarse search"
