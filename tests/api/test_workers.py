"""Who runs the trials of a Python caller."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import leaktight as lt
from leaktight.core.protocols import Progress
from leaktight.results.store import read_trials
from leaktight.runtime.processes import in_worker


@dataclass(frozen=True)
class Witness(lt.Attack):
    """Its loss is the number of the process that it ran in; 0 where it did not compute as workers do."""

    def reconstruct(
        self, seen: Sequence[lt.Observation], *, rng: lt.Rng, progress: Progress | None = None
    ) -> lt.Reconstruction:
        guess = lt.Batch(torch.zeros(1, *seen[0].inputs.shape), torch.zeros(1, dtype=torch.long))
        return lt.Reconstruction(guess, os.getpid() if torch.get_num_threads() == 1 and in_worker() else 0.0)


def test_a_call_from_python_is_computed_here_as_a_worker_would(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        attacks = [Witness(), lt.attacks.MeanImage()]
        lt.audit(model="mlp", attacks=attacks, defenses=["none"], trials=1, out=tmp_path / "run")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert not in_worker()
    trials = read_trials(tmp_path / "run").values()
    assert [trial.loss for trial in trials if trial.role == "attack"] == [os.getpid()]
