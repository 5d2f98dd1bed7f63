"""Running one trial so that its failure is a result: what went wrong is on record, and the others go on."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from leaktight.core.errors import LeaktightError
from leaktight.results.schema import Trial, TrialHead, TrialOutcome

Attempted: TypeAlias = tuple[TrialOutcome, Mapping[str, bytes]]
"""What a trial gave, and its pictures by their paths in the run's folder."""

_NOTHING = {name: value for name, value in TrialOutcome() if name not in ("labels", "metrics")}
"""What is written of every trial, failed ones included."""


class Finished(NamedTuple):
    """A trial, and its pictures by their paths in the run's folder."""

    trial: Trial
    pictures: Mapping[str, bytes]


def attempt(head: TrialHead, run: Callable[[], Attempted]) -> Finished:
    """Run a trial: itself as a run's file will give it back, and its pictures."""
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        outcome, pictures = _outcome(run)
    said = sorted({str(each.message).splitlines()[0] for each in warned if each.category is UserWarning})
    done = {**_NOTHING, **head.facts(), **outcome.facts(), "seconds": time.perf_counter() - began, "warnings": said}
    written = Trial.model_validate(done).model_dump_json(exclude_unset=True)
    return Finished(Trial.model_validate_json(written), pictures)


def picture_paths(trial_id: str) -> tuple[str, str]:
    """Where the strips of the originals and of the guesses go in a run's folder."""
    return f"images/{trial_id}-truth.png", f"images/{trial_id}-guess.png"


def _outcome(run: Callable[[], Attempted]) -> Attempted:
    try:
        return run()
    except LeaktightError as error:
        return TrialOutcome(status="failed", error=" ".join(str(error).split())), {}
    except Exception as error:  # one trial must not take the others with it
        first = (str(error) or "no message").splitlines()[0]
        return TrialOutcome(status="failed", error=f"{type(error).__name__}: {first}"), {}
