from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leaktight.core.errors import LeaktightError
from leaktight.core.tensors import add, digest, first_non_finite, pack, squared_norm, unpack

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text(), st.binary()
)
STATES = st.dictionaries(
    st.text(max_size=5),
    st.recursive(LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner))),
    max_size=4,
)


@given(STATES)
def test_pack_and_unpack_are_inverse(state: dict[str, Any]) -> None:
    assert unpack(pack(state)) == state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_tensors_survive_packing_to_the_bit(dtype: torch.dtype) -> None:
    tensor = (torch.arange(6).reshape(2, 3) % 2).to(dtype)
    back = unpack(pack({"a": {"b": tensor, "c": tensor, "transposed": tensor.T, "part": tensor[1]}}))["a"]
    assert torch.equal(back["b"], tensor)
    assert back["b"].dtype == dtype
    assert torch.equal(back["transposed"], tensor.T)
    assert torch.equal(back["part"], tensor[1])


def test_state_of_a_foreign_type_is_refused_by_path() -> None:
    with pytest.raises(LeaktightError, match=r"a/b is a set"):
        pack({"a": {"b": {1, 2}}})


def test_squared_norm_of_many_small_values_is_exact() -> None:
    tensor = torch.full((4_000_000,), 1e-3)
    assert float(squared_norm([tensor])) == pytest.approx(4.0, rel=1e-6)


def test_digest_sees_one_bit_and_the_name() -> None:
    tensor = torch.zeros(4)
    other = tensor.clone()
    other[2] = torch.finfo(torch.float32).tiny
    assert digest({"w": tensor}) == digest({"w": tensor.clone()})
    assert digest({"w": tensor}) != digest({"w": other})
    assert digest({"w": tensor}) != digest({"v": tensor})


def test_add_keeps_names_that_the_change_lacks() -> None:
    result = add({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2)}, scale=2.0)
    assert result["a"].tolist() == [3.0, 3.0]
    assert result["b"].tolist() == [1.0, 1.0]


def test_first_non_finite_names_the_tensor() -> None:
    assert first_non_finite({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}) == "b"
    assert first_non_finite({"a": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}) is None
