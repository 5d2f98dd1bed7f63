from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.seeds import replayed

from leaktight.core.errors import DataError
from leaktight.data.settings import PartSettings, SplitSettings, stratified_split

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=8)


@given(SIZES, st.floats(0.05, 0.95), st.integers(0, 5))
def test_split_is_a_partition_in_proportion(sizes: list[int], share: float, seed: int) -> None:
    strata = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    if len(strata) < 2:
        return
    train, test = stratified_split(strata, share, replayed(seed))
    assert sorted(torch.cat([train, test]).tolist()) == list(range(len(strata)))
    wanted = min(max(round(share * len(strata)), 1), len(strata) - 1)
    assert len(test) == wanted
    for stratum, size in enumerate(sizes):
        assert abs(int((strata[test] == stratum).sum()) - size * wanted / len(strata)) < 1


def test_split_depends_on_the_seed_alone() -> None:
    strata = torch.arange(3).repeat(40)
    first, again, other = (stratified_split(strata, 0.2, replayed(seed))[1] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_split_keeps_the_callers_order() -> None:
    train, test = stratified_split(torch.tensor([1, 0, 1, 0, 1, 0]), 0.34, replayed(0))
    assert train.tolist() == sorted(train.tolist())
    assert test.tolist() == sorted(test.tolist())


def test_one_example_cannot_be_split() -> None:
    with pytest.raises(DataError, match="at least 2 examples"):
        stratified_split(torch.tensor([3]), 0.5, replayed(0))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_test_share_is_checked(share: float) -> None:
    with pytest.raises(ValueError, match="expected test_share between 0 and 1"):
        SplitSettings(test_share=share)


def test_part_is_checked() -> None:
    with pytest.raises(ValueError, match="expected part to be one of both, train, test, got 'all'"):
        PartSettings(part="all")  # type: ignore[arg-type]


def test_size_is_checked() -> None:
    with pytest.raises(ValueError, match="expected size >= 1, got 0"):
        PartSettings(size=0)
