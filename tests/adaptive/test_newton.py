"""Levenberg-Marquardt against SciPy, and the number of equations that a FedKL update has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.optimize import least_squares
from tests.adaptive.scenes import play, score
from tests.seeds import replayed
from torch import Tensor

from leaktight.adaptive.newton import Equations, can_refine, solve
from leaktight.adaptive.table import adapt
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.core.types import Batch, UpdateKind
from leaktight.defenses.fedkl import FedKl


def curved(point: Tensor) -> Tensor:
    """Seven equations of three unknowns."""
    first, second, third = point
    return torch.stack(
        [first.exp(), first * second, second**2 + third, third.sin(), first - third, second.tanh(), first * third]
    )


def test_a_solution_is_the_one_of_scipy() -> None:
    start, truth = torch.zeros(3, dtype=torch.float64), torch.tensor([0.5, -0.8, 0.3], dtype=torch.float64)
    goal = curved(truth) + 0.01 * torch.tensor([1.0, -1, 2, 0, 1, -2, 1])
    errors = torch.tensor([0.01, 0.02, 0.01, 0.03, 0.01, 0.02, 0.01], dtype=torch.float64)
    centre, precision = torch.full_like(start, 0.2), torch.full_like(start, 4.0)
    found = solve(Equations(curved, goal, errors, centre, precision), start, steps=50)

    def residuals(point: object) -> object:
        here = torch.as_tensor(point, dtype=torch.float64)
        return torch.cat([(curved(here) - goal) / errors, 2 * (here - centre)]).numpy()

    other = least_squares(residuals, start.numpy(), xtol=1e-14, ftol=1e-14, gtol=1e-14)
    torch.testing.assert_close(found.point, torch.from_numpy(other.x), rtol=0, atol=1e-4)
    left = (curved(found.point) - goal) / errors
    assert found.misfit == pytest.approx(float(left.square().mean()))


def solved(kind: UpdateKind) -> tuple[Tensor, Batch]:
    scene = play(FedKl(), kind=kind)
    attack = adapt(CsDlg(iterations=5, backend="eager", onednn=False), FedKl())
    assert attack is not None
    return attack.reconstruct([scene.seen], rng=replayed(0)).guess.inputs, scene.truth


def test_a_fedkl_gradient_is_solved_to_rounding() -> None:
    assert score(*solved("gradient")) > 60


def test_a_fedkl_model_change_is_solved_but_for_its_brightness() -> None:
    """Batch norm on one image hides how bright it is; rounded parameters hide the little that is left of it."""
    guess, truth = solved("delta")
    brightness = float((guess * truth.inputs).sum() / guess.square().sum())
    assert score(guess, truth) > 30
    assert score(brightness * guess, truth) > 60


def test_a_search_that_is_not_smooth_or_too_large_is_left_as_it_is() -> None:
    scene = play(FedKl(key_length=16), count=1)
    smooth = CsDlg().matching()
    assert can_refine(smooth, smooth.evidence([scene.seen], rng=replayed(0)))
    signed = InvertingGradients().matching()
    assert not can_refine(signed, signed.evidence([scene.seen], rng=replayed(0)))
    several = replace(scene.seen, batch_size=100, labels=torch.zeros(100, dtype=torch.long))
    assert not can_refine(smooth, smooth.evidence([several], rng=replayed(0)))
