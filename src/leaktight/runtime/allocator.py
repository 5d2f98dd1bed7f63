"""How the C library (glibc) treats memory that was freed: kept for what comes next, or returned to the system.

Elsewhere (musl, macOS, Windows) these functions do nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_LARGE = 1 << 25  # bytes; what is larger is returned at once, so that large models leave no holes
_KEPT = 10**9  # bytes at the end of the heap


def keep_freed() -> bool:
    """Keep freed memory in this process; whether the C library agreed.

    Tensors of one step have the sizes of those of the step before. By default glibc returns their memory in between,
    and every page is then cleared anew: a tenth of the time of training a small network.
    """
    set_option = _of_c("mallopt")
    if set_option is None:
        return False
    return bool(set_option(_MMAP_THRESHOLD, _LARGE)) and bool(set_option(_TRIM_THRESHOLD, _KEPT))


def give_back() -> None:
    """Return freed memory to the system, also what lies between memory that is still used."""
    trim = _of_c("malloc_trim")
    if trim is not None:
        trim(0)


def _of_c(name: str) -> Callable[..., int] | None:
    """A function of the C library; None if it has none of this name."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return None
    return found
