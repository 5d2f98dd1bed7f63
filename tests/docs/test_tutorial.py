"""docs/tutorial.md, from its first command to its last, and what it says comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.pages import run_page

from leaktight.results.schema import Summary
from leaktight.results.store import read_summary


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tutorial")
    run_page("docs/tutorial.md", folder)
    return folder / "runs"


def summary_of(run: Path) -> Summary:
    summary = read_summary(run)
    assert isinstance(summary, Summary)
    assert all(cell.failed == 0 for cell in summary.cells)
    assert (run / "report.html").exists()
    return summary


@pytest.mark.parametrize(
    ("run", "defenses"),
    [
        ("first", ["none", "outpost"]),
        ("mine", ["none", "noise"]),
        ("defended", ["none", "compression", "noise"]),
        ("python", ["none", "noise"]),
    ],
)
def test_every_audit_has_a_verdict_on_what_it_names(runs: Path, run: str, defenses: list[str]) -> None:
    summary = summary_of(runs / run)
    verdicts = {verdict.defense: verdict.verdict for verdict in summary.verdicts}
    assert list(verdicts) == defenses
    assert verdicts["none"] == "leaks"


def test_the_first_audit_raises_the_flag_that_the_page_explains(runs: Path) -> None:
    assert "too-few-trials" in {flag.code for flag in summary_of(runs / "first").flags}


def test_own_images_come_back_exactly_without_a_defense(runs: Path) -> None:
    for run in ("mine", "python"):
        [undefended] = [
            cell for cell in summary_of(runs / run).cells if (cell.attack, cell.defense) == ("csdlg", "none")
        ]
        assert undefended.mean_of("psnr") == 100


def test_the_captured_update_leaks(runs: Path) -> None:
    assert [verdict.verdict for verdict in summary_of(runs / "captured").verdicts] == ["leaks"]
