"""`leaktight reproduce` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.here import Here

from leaktight.reproductions.docs import pages
from leaktight.reproductions.recipe import reproducible

DOCS = Path(__file__).parents[2] / "docs" / "results"
QUICK = "fedboosting-figure-4-3"


def test_without_a_name_all_recipes_are_listed(here: Here) -> None:
    _, text, _ = here("reproduce")
    assert all(name in "".join(text.split()) for name in reproducible())


def test_a_result_stands_beside_the_published_numbers_and_is_not_made_twice(here: Here, tmp_path: Path) -> None:
    code, text, _ = here("reproduce", QUICK)
    assert code == 0
    assert "published / measured" in text
    assert "not testable here: " in text
    page = tmp_path / "runs" / "reproduce" / f"{QUICK}-smoke" / "page.md"
    assert "| the two clients |" in page.read_text()
    _, text, _ = here("reproduce", QUICK, "--dry-run")
    assert "0 runs are left" in text
    _, text, _ = here("reproduce", QUICK, "--json")
    assert [each["recipe"] for each in json.loads(text)] == [QUICK]


def test_a_dry_run_says_what_is_left(here: Here) -> None:
    _, text, _ = here("reproduce", "agic-table-3", QUICK, "--dry-run", "--workers", "0")
    assert "epoch 1" in text
    assert "not rehearsed" in text
    assert "3 runs are left" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["outpost-tabel-3"], "did you mean 'outpost-table-3'"),
        ([QUICK, "--shard", "3/2"], "expected a shard such as 2/3"),
        (["--write-docs", "docs"], "got smoke, which decides nothing"),
        ([QUICK, "--workers", "many"], "expected workers to be a number of processes"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(here: Here, call: list[str], message: str) -> None:
    code, _, errors = here("reproduce", *call)
    assert code == 2
    assert message in " ".join(errors.split())


def test_the_pages_of_the_documentation_are_made_from_their_results() -> None:
    for path, text in pages(DOCS).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: leaktight reproduce --write-docs docs/results"
