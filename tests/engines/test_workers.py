from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.types import Examples, Params
from leaktight.engines.workers import open_workers


@dataclass(frozen=True)
class Adding:
    """Adds the job's number to a parameter and to the examples it holds; some numbers mean trouble."""

    examples: Examples

    def __call__(self, params: Params, buffers: Params, job: Any) -> Any:
        if job["number"] == 13:
            raise UsageError("thirteen is not a number")
        if job["number"] == 99:
            os._exit(1)
        return {
            "sum": params["w"] + job["number"] + int(self.examples.inputs.sum()),
            "threads": torch.get_num_threads(),
        }


def adding() -> Adding:
    return Adding(Examples(torch.ones(2, 1, 1, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)))


@pytest.mark.parametrize("number", [1, 2])
def test_results_come_in_the_order_of_the_jobs(number: int) -> None:
    finished: list[None] = []
    with open_workers(adding(), number) as workers:
        jobs = [{"number": value} for value in range(5)]
        results = workers.run({"w": torch.tensor([0.5])}, {}, jobs, lambda: finished.append(None))
    assert [float(result["sum"]) for result in results] == [2.5, 3.5, 4.5, 5.5, 6.5]
    assert {result["threads"] for result in results} == {1}
    assert len(finished) == 5


@pytest.mark.parametrize("number", [1, 2])
def test_a_named_error_stays_that_error(number: int) -> None:
    with pytest.raises(UsageError, match="thirteen"), open_workers(adding(), number) as workers:
        workers.run({"w": torch.zeros(1)}, {}, [{"number": 13}], lambda: None)


def test_a_worker_that_dies_is_a_clear_error() -> None:
    with pytest.raises(LeaktightError, match="a worker process died"), open_workers(adding(), 2) as workers:
        workers.run({"w": torch.zeros(1)}, {}, [{"number": 99}], lambda: None)
