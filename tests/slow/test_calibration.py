"""Whole audits of attacks whose strength is known: the judge says too much or too little in at most 5 % of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from bench.audits import Scene, verdicts
from bench.calibration import EDGE, KNOWN, SAYS_MORE, UNKNOWN, defended, worst_blind
from scipy import stats

from leaktight.results.schema import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

AUDITS = 60


@pytest.mark.parametrize(
    ("scenes", "word", "wrong"),
    [(KNOWN, worst_blind, SAYS_MORE), (UNKNOWN, worst_blind, SAYS_MORE), (EDGE, defended, ("nothing-found",))],
    ids=["labels known", "labels unknown", "a defense that does nothing"],
)
def test_at_most_one_audit_in_twenty_is_wrong(
    scenes: Sequence[Scene], word: Callable[[Sequence[Verdict]], str], wrong: Sequence[str]
) -> None:
    words = [word(verdicts(scenes[number % len(scenes)], 100_000 + number)) for number in range(AUDITS)]
    errors = sum(each in wrong for each in words)
    assert errors <= stats.binom.ppf(0.999, AUDITS, 0.05), words
