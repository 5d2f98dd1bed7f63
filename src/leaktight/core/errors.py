"""Errors with messages like "expected X, got Y; do Z".

The command line prints the message of a `LeaktightError` on one line. A `UsageError` or a subclass means wrong input
(exit code 2), a `LeakFoundError` a leak that the user does not accept (3); any other means that the work failed (1).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping


class LeaktightError(Exception):
    """The work failed for a known reason."""


class MachineError(LeaktightError):
    """A fault of the machine: a worker gone, a full disk, too little shared memory. It says nothing of the method.

    The run ends with exit code 1, keeps what is done, and `--resume` does the rest.
    """


class StoppedError(BaseException):
    """A signal asks the process to end. Like Ctrl-C, it is nothing that work may handle."""


class UsageError(LeaktightError):
    """The input is wrong: a bad option, config or file."""


class ConfigError(UsageError):
    """A configuration that is not valid."""


class OutsideBudgetError(UsageError):
    """The client would send information about its data that its privacy budget does not count."""


class DataError(UsageError):
    """A data set that is missing, damaged or of another format."""


class DownloadError(LeaktightError):
    """A file could not be fetched."""


class ChecksumError(DataError):
    """A file has another checksum than the published one."""


class InputsError(UsageError):
    """Examples of a kind or size that a method does not take."""


class ModelError(UsageError):
    """A model that cannot be built or does not fit the data."""


class OutOfScopeError(ModelError):
    """A model of a task or for inputs that are not supported yet."""


class NotDisclosedError(LeaktightError):
    """An attack needs a fact that the threat model does not disclose."""


class RoundFailedError(LeaktightError):
    """Too few clients replied for the round to be valid."""


class UnusableError(RoundFailedError):
    """Updates that cannot be combined. reasons: by client; without these clients the round may go on."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{client}: {reason}" for client, reason in reasons.items()))
        self.reasons = dict(reasons)


class RefusedError(LeaktightError):
    """A client refuses to train on the model that it received."""


class UntrustedError(LeaktightError):
    """A server does not use an answer: it is too large, not signed by its client, or for another request."""


class ResultsError(UsageError):
    """A result file that is damaged, not Leaktight's, or of a later version."""


class LeakFoundError(LeaktightError):
    """A verdict is as bad as the level that the user named, or worse."""


class CheckpointError(MachineError):
    """A checkpoint that is damaged or missing, or that belongs to another run."""


_LONGEST = 80
"""The most letters of a name that are compared; the time grows with their square."""


def suggestion(name: str, valid: Iterable[str]) -> str:
    """A hint with the closest valid name (first one of the same letters), or with all if none is close.

    >>> suggestion("digit", ["digits", "photos"])
    "did you mean 'digits'?"
    >>> suggestion("dgl", ["ggl", "dlg"])
    "did you mean 'dlg'?"
    >>> suggestion("zzz", ["b", "a"])
    'choose from: a, b'
    """
    names, name = sorted(valid), name[:_LONGEST]
    swapped = [each for each in names if sorted(each) == sorted(name)]
    close = swapped or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from: {', '.join(names)}"


def require_at_least(least: float, /, **settings: float | None) -> None:
    """Raise ValueError unless all these settings are finite and >= `least`, or None."""
    for name, value in settings.items():
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"expected {name} >= {least:g}, got {value}")


def require_above(bound: float, /, **settings: float | None) -> None:
    """Raise ValueError unless all these settings are finite and > `bound`, or None."""
    for name, value in settings.items():
        if value is not None and not bound < value < math.inf:
            raise ValueError(f"expected {name} > {bound:g}, got {value}")
