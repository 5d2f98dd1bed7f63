"""Errors are sentences: no Python in them, nothing said twice, and exit code 2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.bad_inputs import CALLS, write_files
from tests.here import Here

REPR = re.compile(
    r"\(\d+,\)|\(\d+(?:, \d+)+\)|\(\)"  # tuples
    r"|\bNone\b|\bTrue\b|\bFalse\b|\bnan\b"
    r"|(?:frozen)?set\(|\{'|\{\}|\['|\[\]|dict_\w+"
    r"|<\w+[ .]|\w+\(\w+=|Path\(|tensor\(|torch\.\w+|\bclass '|\\n|PosixPath|Traceback"
)
DOUBLED = re.compile(
    r"leaktight: leaktight|did you mean.*did you mean|choose from.*choose from|(\b\w{4,} \w{4,}\b).{0,4}\1"
)


def test_the_calls_are_many_and_different() -> None:
    assert len(set(CALLS)) == len(CALLS) >= 75


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_is_answered_in_plain_words(here: Here, tmp_path: Path, call: str) -> None:
    write_files(tmp_path)
    code, _, error = here(*call.split())
    assert code == 2, error
    last = error.rstrip().splitlines()[-1]
    assert last.startswith("leaktight: ")
    assert not REPR.search(last), last
    assert not DOUBLED.search(last), last
