from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.defenses.steps import defended, drawn_step, flat

from leaktight.defenses.compression import GradientCompression


@settings(deadline=None)
@given(st.integers(1, 99))
def test_of_each_tensor_exactly_the_smallest_share_is_zeroed(percent: int) -> None:
    step = drawn_step((20, 30), (10,), (1,))
    outcome = defended(GradientCompression(prune_share=percent / 100), step)
    zeroed = 0
    for name, before in step.gradient.items():
        after = outcome.tensors[name]
        gone = math.ceil(percent * (before.numel() - 1) / 100)
        assert int((after == 0).sum()) == gone
        assert torch.equal(after[after != 0], before[after != 0]), "what is kept is exact"
        if gone:
            assert before[after == 0].abs().max() < before[after != 0].abs().min()
        zeroed += gone
    assert outcome.figures["fraction_zeroed"] == pytest.approx(zeroed / 611)


def test_all_tensors_together_keep_the_largest_of_all() -> None:
    step = drawn_step((20, 30), (10,), (391,))
    outcome = defended(GradientCompression(prune_share=0.9, scope="global"), step)
    order = flat(step.gradient).abs().argsort()
    assert set(torch.nonzero(flat(outcome.tensors) == 0).flatten().tolist()) == set(order[:900].tolist())
    assert outcome.figures["fraction_zeroed"] == pytest.approx(900 / 1001)
    torch.testing.assert_close(flat(outcome.tensors)[order[900:]], flat(step.gradient)[order[900:]], rtol=0, atol=0)


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_loses_the_entries_that_the_same_numbers_in_float32_lose(scope: Any, dtype: torch.dtype) -> None:
    step = drawn_step((20, 30), (), (10,))
    half = {name: tensor.to(dtype) for name, tensor in step.gradient.items()}
    wide = {name: tensor.float() for name, tensor in half.items()}
    defense = GradientCompression(scope=scope)
    found, expected = (defended(defense, replace(step, gradient=each)).tensors for each in (half, wide))
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in expected.items())


def test_a_zero_does_not_tell_the_sign_that_was_there() -> None:
    outcome = defended(GradientCompression(), drawn_step((40, 50)))
    assert not bool(torch.signbit(outcome.tensors["0"][outcome.tensors["0"] == 0]).any())


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_no_pruning_is_the_identity_and_full_pruning_leaves_the_largest(scope: str) -> None:
    step = drawn_step((4, 5), (7,))
    none = defended(GradientCompression(prune_share=0, scope=scope), step)  # type: ignore[arg-type]
    assert none.tensors["0"] is step.gradient["0"]
    assert none.figures["fraction_zeroed"] == 0
    full = defended(GradientCompression(prune_share=1, scope=scope), step)  # type: ignore[arg-type]
    assert int(flat(full.tensors).count_nonzero()) == (2 if scope == "tensor" else 1)


@pytest.mark.parametrize("prune_share", [-0.1, 1.1, math.nan])
def test_impossible_shares_are_refused(prune_share: float) -> None:
    with pytest.raises(ValueError, match=r"expected prune_share in \[0, 1\]"):
        GradientCompression(prune_share=prune_share)
