from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.defenses.steps import defended, defended_update, drawn_step

from leaktight.core.errors import LeaktightError
from leaktight.defenses.clipping import Clipping
from leaktight.defenses.compression import GradientCompression
from leaktight.defenses.minmax import MinMaxSampling
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.perturbation import At, Perturbation, below_percentile

AT_EITHER = [AdditiveNoise, GradientCompression, MinMaxSampling, Clipping]


@settings(deadline=None)
@example(values=[0.0, 10001.0], share=1e-10)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 1))
def test_below_the_percentile_is_what_numpy_puts_below_it(values: list[float], share: float) -> None:
    threshold = np.percentile(values, 100 * share)
    below = below_percentile(torch.tensor(values, dtype=torch.float64), share).numpy()
    # Where interpolation gives a number between two neighbours that differ by rounding, both answers are right. A share
    # so near to a value that rounding decides counts as that value.
    far = np.abs(np.array(values) - threshold) > 1e-6 * (1 + np.ptp(values))
    assert ((np.array(values) < threshold) == below)[far].all()


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 100))
def test_of_different_values_the_exact_share_lies_below(count: int, percent: int) -> None:
    below = below_percentile(torch.randperm(count, generator=torch.Generator().manual_seed(0)).double(), percent / 100)
    assert int(below.sum()) == -(-percent * (count - 1) // 100)


def test_nothing_lies_below_the_percentile_of_nothing() -> None:
    assert below_percentile(torch.zeros(0, 3), 0.5).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (30, 7)])
def test_the_percentile_is_that_of_the_same_numbers_in_any_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(below_percentile(values, 0.7), below_percentile(values.double(), 0.7))


@pytest.mark.parametrize("cls", AT_EITHER)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_keep_their_types(cls: type[Perturbation], dtype: torch.dtype) -> None:
    gradient = drawn_step((4, 5), (), (7,)).gradient
    mixed = {**gradient, "0": gradient["0"].to(dtype), "1": gradient["1"].to(dtype)}
    for tensors in ({"0": mixed["0"]}, mixed):
        found = defended_update(cls(at="update"), tensors).tensors
        assert {name: tensor.dtype for name, tensor in found.items()} == {name: t.dtype for name, t in tensors.items()}


@pytest.mark.parametrize("cls", AT_EITHER)
@pytest.mark.parametrize("at", ["step", "update"])
def test_it_acts_where_it_is_told_to_and_nowhere_else(cls: type[Perturbation], at: At) -> None:
    defense = Clipping(clip_norm=0.1, at=at) if cls is Clipping else cls(at=at)
    step = drawn_step((4, 5), (7,))
    at_step, at_update = defended(defense, step), defended_update(defense, step.gradient)
    acting, resting = (at_step, at_update) if at == "step" else (at_update, at_step)
    assert all(not torch.equal(acting.tensors[name], step.gradient[name]) for name in ("0", "1"))
    assert all(resting.tensors[name] is step.gradient[name] for name in ("0", "1"))
    assert acting.figures
    assert not resting.figures


@pytest.mark.parametrize("cls", AT_EITHER)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_named(cls: type[Perturbation], bad: float) -> None:
    step = drawn_step((4, 5), (7,))
    step.gradient["1"][3] = bad
    with pytest.raises(LeaktightError, match="'1' is not finite"):
        defended(cls(at="step"), step)
    with pytest.raises(LeaktightError, match="'1' is not finite"):
        defended_update(cls(at="update"), step.gradient)


@pytest.mark.parametrize("cls", AT_EITHER)
def test_another_place_is_refused(cls: type[Perturbation]) -> None:
    with pytest.raises(ValueError, match="expected at to be one of step, update"):
        cls(at="round")  # type: ignore[arg-type]
