"""Whether PyTorch's kernels for LSTM and CTC may be used: they are faster, but have no second derivative."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_FIRST_ONLY: ContextVar[bool] = ContextVar("first_derivatives_only", default=False)


@contextmanager
def first_derivatives_only() -> Iterator[None]:
    """Promise that code inside is differentiated at most once, by autograd and not by `torch.func`."""
    token = _FIRST_ONLY.set(True)
    try:
        yield
    finally:
        _FIRST_ONLY.reset(token)


def quick_kernels() -> bool:
    """Whether kernels without second derivatives and without `vmap` may be used.

    >>> with first_derivatives_only():
    ...     quick_kernels()
    True
    >>> quick_kernels()
    False
    """
    return _FIRST_ONLY.get()
