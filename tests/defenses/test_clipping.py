from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.defenses.steps import batch, defended, drawn_step, flat, network, step_of
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import LeaktightError, ModelError
from leaktight.core.types import Batch
from leaktight.defenses.clipping import Clipping


@settings(deadline=None)
@given(st.floats(1e-3, 20))
def test_the_whole_gradient_is_scaled_to_the_bound(clip_norm: float) -> None:
    step = drawn_step((4, 5), (7,))
    norm = float(flat(step.gradient).norm())
    outcome = defended(Clipping(clip_norm=clip_norm), step)
    expected = flat(step.gradient) * min(1, clip_norm / norm)
    torch.testing.assert_close(flat(outcome.tensors), expected)
    assert outcome.figures["clip_rate"] == (norm > clip_norm)


def test_each_tensor_is_scaled_to_the_bound() -> None:
    step = drawn_step((40, 50), (2,), (30, 30))
    outcome = defended(Clipping(scope="layer", clip_norm=10), step)
    assert outcome.figures["clip_rate"] == pytest.approx(2 / 3)
    assert outcome.tensors["1"] is step.gradient["1"]
    for name in ("0", "2"):
        expected = step.gradient[name] * 10 / step.gradient[name].norm()
        torch.testing.assert_close(outcome.tensors[name], expected)


def test_each_example_is_scaled_to_the_bound_before_the_mean() -> None:
    model, examples = network(), batch(5)
    alone = [step_of(model, Batch(examples.inputs[[place]], examples.targets[[place]])).gradient for place in range(5)]
    norms = torch.stack([flat(gradient).norm() for gradient in alone])
    clip_norm = float(norms.sort().values[2:4].mean())  # between the third and the fourth of five
    outcome = defended(Clipping(scope="example", clip_norm=clip_norm), step_of(model, examples))
    expected = sum(
        flat(gradient) * min(1.0, clip_norm / float(norm)) for gradient, norm in zip(alone, norms, strict=True)
    )
    torch.testing.assert_close(flat(outcome.tensors), expected / 5)
    assert outcome.figures["clip_rate"] == pytest.approx(2 / 5)


def test_a_parameter_without_dimensions_counts_as_one_number_of_each_example() -> None:
    each = {"scale": torch.tensor([3.0, 0.1]), "weight": torch.tensor([[4.0, 0.0], [0.1, 0.2]])}
    step = replace(drawn_step((), (2,)), gradient={name: rows.mean(0) for name, rows in each.items()})
    outcome = defended(Clipping(scope="example", clip_norm=1), replace(step, per_example=lambda: each))
    torch.testing.assert_close(outcome.tensors["scale"], torch.tensor((0.6 + 0.1) / 2))
    torch.testing.assert_close(outcome.tensors["weight"], torch.tensor([(0.8 + 0.1) / 2, 0.2 / 2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_the_mean_is_rounded_once(dtype: torch.dtype) -> None:
    rows = torch.randn(200, 50, generator=replayed(0).public()).to(dtype)
    step = replace(drawn_step((50,)), gradient={"0": rows.mean(0)}, per_example=lambda: {"0": rows})
    found = defended(Clipping(scope="example", clip_norm=1), step).tensors["0"]
    expected = (rows.double() / rows.double().norm(dim=1, keepdim=True).clamp(min=1)).mean(0)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)


def test_nothing_too_long_is_left_bit_for_bit() -> None:
    step = step_of(network(), batch(5))
    for scope in ("global", "layer", "example"):
        outcome = defended(Clipping(scope=scope, clip_norm=math.inf), step)
        assert all(outcome.tensors[name] is tensor for name, tensor in step.gradient.items())
        assert outcome.figures["clip_rate"] == 0


def test_examples_do_not_have_gradients_under_batch_norm_in_training() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3)).double()
    with pytest.raises(ModelError, match="batch normalisation"):
        defended(Clipping(scope="example"), step_of(model, batch(4)))


def test_a_broken_example_is_not_hidden_by_the_others() -> None:
    step = step_of(network(), batch(3))
    each = step.per_example()
    each["3.bias"][1, 0] = math.nan
    with pytest.raises(LeaktightError, match=r"'3\.bias' is not finite"):
        defended(Clipping(scope="example"), replace(step, per_example=lambda: each))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 0}, "expected clip_norm > 0, got 0"),
        ({"clip_norm": math.nan}, "expected clip_norm > 0"),
        ({"scope": "batch"}, "expected scope to be one of"),
        ({"scope": "example", "at": "update"}, 'expected at = "step"'),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Clipping(**settings)
