"""docs/tutorial.md, from its first command to its last, and what it says comes out."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import run_page

from leaktight.results.schema import Summary
from leaktight.results.store import read_summary

DEFENSES = {
    "first": ["none", "outpost"],
    "mine": ["none", "noise"],
    "defended": ["none", "compression", "noise"],
    "python": ["none", "noise"],
    "captured": ["captured update"],
}
"""What each run of the page has a verdict on."""


def test_the_page_runs_and_every_run_ends_as_it_says(tmp_path: Path) -> None:
    # One test, so that the page is run once, however tests are spread over processes.
    run_page("docs/tutorial.md", tmp_path)
    summaries = {run: summary_of(tmp_path / "runs" / run) for run in DEFENSES}
    for run, summary in summaries.items():
        verdicts = {each.defense: each.verdict for each in summary.verdicts if each.track == "diagnostic"}
        assert list(verdicts) == DEFENSES[run]
        assert verdicts[DEFENSES[run][0]] == "reconstructed", "the undefended update does not leak"
    assert "too-few-trials" in {flag.code for flag in summaries["first"].flags}
    for run in ("mine", "defended", "python"):
        assert undefended_psnr(summaries[run]) == 100


def summary_of(run: Path) -> Summary:
    summary = read_summary(run)
    assert isinstance(summary, Summary)
    assert all(cell.failed == 0 for cell in summary.cells)
    assert (run / "report.html").exists()
    return summary


def undefended_psnr(summary: Summary) -> float | None:
    [cell] = [cell for cell in summary.cells if (cell.attack, cell.defense) == ("csdlg", "none")]
    return cell.mean_of("psnr")
