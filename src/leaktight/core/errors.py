"""Errors that a user can act on: "expected X, got Y; do Z".

The command line prints the message of a `LeaktightError` on one line. `UsageError` and its children mean that the
input was wrong (exit code 2); every other one means that the work failed (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LeaktightError(Exception):
    """The work failed for a reason that we can name."""


class UsageError(LeaktightError):
    """The request itself cannot be carried out: bad option, config or input file."""


class ConfigError(UsageError):
    """A configuration that is not valid."""


class OutsideBudgetError(UsageError):
    """Something about the data would leave the client that its privacy budget does not count."""


class DataError(UsageError):
    """A data set that is missing, truncated or not what it claims to be."""


class DownloadError(LeaktightError):
    """A file could not be fetched."""


class ChecksumError(DataError):
    """A file is not the one that was published."""


class InputsError(UsageError):
    """Examples of a kind or size that a method does not take."""


class ModelError(UsageError):
    """A model that cannot be built or does not fit the data."""


class NotDisclosedError(LeaktightError):
    """An attack asked for a fact that its threat model does not give to the attacker."""


class RoundFailedError(LeaktightError):
    """Too few clients answered for the round to count."""


class RefusedError(LeaktightError):
    """A client does not train on the model that it was sent."""


class ResultsError(UsageError):
    """A result file that is damaged, not Leaktight's, or of a later version."""


class CheckpointError(LeaktightError):
    """A checkpoint that cannot be read, or that belongs to another run."""


def suggestion(name: str, valid: Iterable[str]) -> str:
    """A hint naming the closest valid name, one of the same letters before others, or all when none is close.

    >>> suggestion("digit", ["digits", "photos"])
    "did you mean 'digits'?"
    >>> suggestion("dgl", ["ggl", "dlg"])
    "did you mean 'dlg'?"
    >>> suggestion("zzz", ["b", "a"])
    'choose from: a, b'
    """
    names = sorted(valid)
    swapped = [each for each in names if sorted(each) == sorted(name)]
    close = swapped or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from: {', '.join(names)}"
