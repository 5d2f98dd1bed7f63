"""What an audit prints: the answer, the verdicts, then a table for each track."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.report.made_run import ANSWER

from leaktight.cli.audit_display import print_audit
from leaktight.cli.inspect_display import print_inspection
from leaktight.report.judgements import ANSWERS
from leaktight.results.schema import Summary
from leaktight.results.store import read_summary


def printed(summary: Summary, width: int = 80) -> str:
    buffer = io.StringIO()
    print_audit(summary, Console(file=buffer, width=width))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


@pytest.fixture
def summary(both_tracks: Path) -> Summary:
    found = read_summary(both_tracks)
    assert isinstance(found, Summary)
    return found


@pytest.mark.parametrize("width", [80, 120])
def test_the_five_answers_come_first(summary: Summary, width: int) -> None:
    text = printed(summary, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    starts = [next(at for at, line in enumerate(lines) if line.startswith(f"{name}  ")) for name in ANSWERS.values()]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert " ".join(lines[0].split()).startswith(f"What leaks {ANSWER.leaks[:40]}")
    assert "`" not in text


def test_every_defense_has_a_line_with_its_word_its_strongest_attacker_and_its_victims(summary: Summary) -> None:
    lines = printed(summary).splitlines()
    for line in (
        "● reconstructed  no defense: csdlg, 3 of 3 reconstructed",
        "◐ identified     outpost: csdlg, knows the defense, 1 of 3 reconstructed",
        "○ nothing found  gaussian_noise: csdlg, 0 of 3 reconstructed",
        "◐ identified   no defense: agic, 0 of 3 reconstructed",
        "◔ labels read  outpost: agic, 0 of 3 reconstructed",
    ):
        assert lines.count(line) == 1
        reason = lines[lines.index(line) + 1]
        assert "reconstructed" in reason


def test_tracks_have_tables_of_their_own(summary: Summary, finished_run: Path) -> None:
    text = printed(summary)
    first, second = text.index("\nDiagnostic\nattack"), text.index("\nProduction\nattack")
    assert "agic" not in text[first:second]
    assert "csdlg" not in text[second : text.index("a victim counts")]
    assert text.count("Diagnostic. An upper bound") == text.count("Production. Updates as in training") == 1
    rows = [line for line in text[first:second].splitlines() if not line.startswith(" ")]
    assert [line for line in rows if line in ("no defense", "gaussian_noise", "outpost", "precode")] == [
        "no defense",
        "gaussian_noise",
        "outpost",
        "precode",
    ]
    alone = read_summary(finished_run)
    assert isinstance(alone, Summary)
    for word in ("iagnostic", "roduction"):
        assert word not in printed(alone)


def test_names_of_attacks_are_whole_at_80_columns(summary: Summary) -> None:
    lines = printed(summary).splitlines()
    for name in ("inverting_gradients", "csdlg +", "agic"):
        assert any(line.startswith(f"  {name} ") for line in lines)
    assert not any("…" in line for line in lines)


def test_what_does_not_count_and_what_was_spent_is_said(summary: Summary) -> None:
    text = printed(summary)
    assert "inverting_gradients on gaussian_noise: 1 invalid: its own loss did not fall" in text
    assert "trials: 52 of at most 120" in text
    assert "ended because: the rule asks for no more trials" in text


def test_advice_follows_the_reason(summary: Summary) -> None:
    lost = summary.verdicts[1].model_copy(update={"verdict": "cannot-conclude", "advice": "Set --trials 19."})
    text = printed(summary.model_copy(update={"verdicts": (lost,), "answer": None}))
    assert text.startswith("Diagnostic.")
    assert "? cannot conclude  gaussian_noise" in text
    assert "Set --trials 19." in text


def test_an_inspection_begins_with_its_verdict(summary: Summary) -> None:
    buffer = io.StringIO()
    kept = [cell for cell in summary.cells if cell.track == "diagnostic" and cell.defense == "none"]
    bare = summary.model_copy(update={"cells": tuple(kept), "verdicts": summary.verdicts[:1], "answer": None})
    print_inspection(bare, Console(file=buffer, width=80))
    assert buffer.getvalue().startswith("● reconstructed  no defense: csdlg, 3 of 3 reconstructed")
    assert "first loss" in buffer.getvalue()
