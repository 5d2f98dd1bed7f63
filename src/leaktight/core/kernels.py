"""Whether PyTorch's own kernels for LSTM and CTC may be used: they are quicker, but have first derivatives only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_FIRST_ONLY: ContextVar[bool] = ContextVar("first_derivatives_only", default=False)


@contextmanager
def first_derivatives_only() -> Iterator[None]:
    """What runs inside is differentiated once, by autograd, or not at all; not by `torch.func`, and not twice."""
    token = _FIRST_ONLY.set(True)
    try:
        yield
    finally:
        _FIRST_ONLY.reset(token)


def quick_kernels() -> bool:
    """Whether a kernel without second derivatives and without a rule for `vmap` will do.

    >>> with first_derivatives_only():
    ...     quick_kernels()
    True
    >>> quick_kernels()
    False
    """
    return _FIRST_ONLY.get()
