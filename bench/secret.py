"""What secrecy costs: a million draws from the secret stream, beside PyTorch's own, one thread.

Candidates take turns; the figures are the fastest of each in this process's own time, and ratios within one run. Noise
that differential privacy lets out is compared with what it takes the place of: a tensor, plus noise of float32.
A local step needs thousands of numbers rather than a million, so these are measured as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from bench.timing import fastest
from leaktight.core.rng import Rng
from leaktight.core.secret import SecretStream, released

SIZES = (1_000_000, 16_000)
STD = 0.3
BASES: Mapping[str, str] = {
    "secret normal, float32": "torch.randn, float32",
    "secret normal, float64": "torch.randn, float64",
    "secret Laplace, float32": "torch.randn, float32",
    "released": "torch.randn, float32",
    "released ": "x + std * torch.randn",
    "secret permutation": "torch.randperm",
}
"""What each draw is compared with; a second comparison of the same draw has a space at its end."""


def candidates(count: int) -> dict[str, Callable[[], object]]:
    generator, stream = Rng(0).public(), SecretStream(bytes(32))
    tensor = torch.ones(count)
    return {
        "torch.randn, float32": lambda: torch.randn(count, generator=generator),
        "torch.randn, float64": lambda: torch.randn(count, generator=generator, dtype=torch.float64),
        "x + std * torch.randn": lambda: tensor + STD * torch.randn(count, generator=generator),
        "torch.randperm": lambda: torch.randperm(count, generator=generator),
        "secret normal, float32": lambda: stream.normal(count, np.float32),
        "secret normal, float64": lambda: stream.normal(count),
        "secret Laplace, float32": lambda: stream.laplace(count, np.float32),
        "released": lambda: released({"": tensor}, STD, stream),
        "secret permutation": lambda: stream.permutation(count),
    }


def main() -> None:
    torch.set_num_threads(1)
    for count in SIZES:
        seconds = fastest(candidates(count), repeats=max(15, 4_000_000 // count))
        print(f"{count:,} draws at a time")
        print(f"{'draw':>24} {'a million':>12} {'times':>7}   beside")
        for draw, base in BASES.items():
            value, beside = seconds[draw.strip()], seconds[base]
            print(f"{draw.strip():>24} {1e9 * value / count:9.2f} ms {value / beside:7.2f}   {base}", flush=True)
