"""Values between processes: they arrive as they were, and large ones are copied as little as possible."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from leaktight.runtime.sharing import dumped, in_shared_memory, loaded

SIZE = 1 << 25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
def test_tensors_arrive_as_they_were_and_can_be_changed(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    for copy in (loaded(dumped({"a": tensor}))["a"], in_shared_memory({"a": tensor}).value()["a"]):
        assert copy.dtype == dtype
        assert torch.equal(copy, tensor)
        copy += copy.new_ones(())
        assert not copy.numel() or not torch.equal(copy, tensor)


def test_views_and_shared_objects_keep_their_meaning() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    value = {"part": base[1], "column": base[:, 1], "common": base}
    copy = loaded(dumped(value, [base]), [base])
    assert copy["common"] is base
    assert torch.equal(copy["part"], base[1])
    assert torch.equal(copy["column"], base[:, 1])
    assert copy["part"].untyped_storage().nbytes() == 16


def test_a_ciphertext_is_in_shared_memory_once() -> None:
    body = torch.randint(256, (SIZE,), dtype=torch.uint8)
    shared = in_shared_memory({"sealed": {"body": body, "count": 3}, "model": torch.ones(5)})
    assert isinstance(shared.data, torch.Tensor)
    assert len(shared.data) < 10_000
    copy = shared.value()
    assert copy["sealed"]["body"].data_ptr() == body.data_ptr()
    assert copy["sealed"]["count"] == 3
    assert torch.equal(copy["model"], torch.ones(5))


def test_reading_makes_one_copy() -> None:
    data = dumped({"w": torch.ones(SIZE // 4)})
    tracemalloc.start()
    try:
        copy = loaded(data)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1.2 * SIZE
    assert copy["w"].sum() == SIZE // 4
