"""Running one trial so that its failure is a result: what went wrong is on record, and the others go on."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from leaktight.core.errors import LeaktightError

Outcome: TypeAlias = tuple[dict[str, Any], dict[str, bytes]]
"""What a trial adds to its line, and its pictures."""


class Attempt(NamedTuple):
    """A trial's line for the store, and its pictures."""

    line: dict[str, Any]
    pictures: dict[str, bytes]


def attempt(line: dict[str, Any], run: Callable[[], Outcome]) -> Attempt:
    """A trial's line for the store, completed, with its pictures. line: all that is known before it is run."""
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found, pictures = _outcome(run)
    said = sorted({str(each.message).splitlines()[0] for each in warned if each.category is UserWarning})
    done = {**line, **found, "seconds": time.perf_counter() - began, "warnings": said}
    return Attempt(done, pictures)


def _outcome(run: Callable[[], Outcome]) -> Outcome:
    try:
        return run()
    except LeaktightError as error:
        return {"status": "failed", "error": " ".join(str(error).split())}, {}
    except Exception as error:  # one trial must not take the others with it
        first = (str(error) or "no message").splitlines()[0]
        return {"status": "failed", "error": f"{type(error).__name__}: {first}"}, {}
