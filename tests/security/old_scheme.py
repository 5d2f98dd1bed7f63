"""How secrets were drawn before: from PyTorch's generator, under a seed of 63 bits of which it keeps 32.

A positive control: whatever finds nothing in today's draws has to find these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor

from leaktight.core.rng import Rng, global_seed
from leaktight.core.secret import Dtype, Numbers, SecretStream

TYPES: Mapping[Dtype, torch.dtype] = {np.float32: torch.float32, np.float64: torch.float64}


class OldStream(SecretStream):
    """The draws of `SecretStream`, from `torch.Generator`."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def bytes(self, count: int) -> bytes:
        """From a generator of their own: what else is drawn comes first of all."""
        own = self.generator.clone_state()
        return torch.randint(256, (count,), generator=own, dtype=torch.uint8).numpy().tobytes()

    def uniform(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        return torch.rand(count, generator=self.generator, dtype=TYPES[dtype]).numpy()

    def normal(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        return torch.randn(count, generator=self.generator, dtype=TYPES[dtype]).numpy()

    def exponential(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        values: Numbers = -np.log(1 - self.uniform(count, dtype))
        return values

    def laplace(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        both = self.exponential(2 * count, dtype)
        values: Numbers = (both[1::2] - both[0::2]) * math.sqrt(0.5)
        return values

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)


def restore_old_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw everything secret as it was drawn before."""
    monkeypatch.setattr(Rng, "secret", lambda self: OldStream(self.public()))
    monkeypatch.setattr("leaktight.models.keylock.secret_model", _seeded)


def _seeded(rng: Rng) -> AbstractContextManager[None]:
    rng.secret()  # so that whoever listens hears of this place
    return global_seed(rng)
