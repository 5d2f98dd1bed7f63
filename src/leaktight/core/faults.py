"""Faults of the machine, told apart from errors of a method: these say something of the method, those nothing."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from leaktight.core.errors import CheckpointError, DownloadError, LeaktightError, MachineError

_SPACE = "free space or choose another folder"
_MEMORY = "free memory or use fewer --workers"
_DISK = "check the disk or choose another folder"
_REMEDIES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n) or use fewer --workers",
    errno.ENFILE: "raise the limit of open files (ulimit -n) or use fewer --workers",
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: "use fewer --workers",
    errno.EIO: _DISK,
    errno.EROFS: _DISK,
    errno.ESTALE: _DISK,
}
_TOLD = {
    **{os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENOMEM)},
    "can't allocate memory": errno.ENOMEM,
    "out of memory": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
    "process pool was terminated abruptly": errno.ENOMEM,
}
"""Words by which libraries tell a fault of the system in an error of another type."""
_OF_CODE = (LeaktightError, ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
"""Types of errors that no library uses to tell a fault of the system, whatever their words are."""
_ASKED = re.compile(r"(?:tried to|Unable to) allocate ([\d.]+) (bytes|[KMGTPE]iB)")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def remedy(error: OSError) -> str:
    """What a user can do about an error of the system.

    >>> remedy(OSError(errno.EFBIG, "File too large"))
    'raise the limit of file sizes (ulimit -f)'
    """
    return _REMEDIES.get(error.errno or 0, "choose another folder")


def fault_of(error: BaseException) -> LeaktightError | None:
    """The fault of the machine behind an error; None for any other error. Causes (`raise ... from`) count.

    Whoever asks for more memory than the machine has would do so again, so that is an error of the method.

    >>> fault_of(OSError(errno.ENOSPC, "No space left on device"))
    MachineError('No space left on device; free space or choose another folder')
    >>> fault_of(ValueError("a loss that is not finite")), fault_of(FileNotFoundError(errno.ENOENT, "no such file"))
    (None, None)
    """
    for each in _causes(error):
        if isinstance(each, MachineError | CheckpointError | DownloadError):
            return each
        if _beyond_machine(str(each)):
            return None
        if isinstance(each, MemoryError):
            return MachineError(f"out of memory; {_MEMORY}")
        number = each.errno if isinstance(each, OSError) else _told(each)
        if number in _REMEDIES:
            where = f" ({each.filename})" if isinstance(each, OSError) and each.filename else ""
            return MachineError(f"{os.strerror(number)}{where}; {_REMEDIES[number]}")
    return None


def raise_fault(error: BaseException) -> None:
    """Raise the fault of the machine behind an error, if there is one. For handlers that make errors into results."""
    fault = fault_of(error)
    if fault is not None:
        raise fault from (None if fault is error else error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _told(error: BaseException) -> int | None:
    if isinstance(error, _OF_CODE):
        return None
    text = str(error)
    return next((number for words, number in _TOLD.items() if words in text), None)


def _beyond_machine(text: str) -> bool:
    """Whether a library says that it was asked for more memory at once than the machine has."""
    asked = _ASKED.search(text)
    if asked is None or not hasattr(os, "sysconf"):
        return False
    count, unit = asked.groups()
    size: float = float(count) * 2.0 ** (10 * _UNITS.index(unit))
    return size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
