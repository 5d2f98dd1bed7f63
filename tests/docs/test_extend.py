"""The methods of docs/extend.md, in a package outside of the project, audited in all three ways."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import blocks, run_page

from leaktight.results.schema import Summary
from leaktight.results.store import read_summary

ATTACK, DEFENSE = "my_package.attacks:FirstLayer", "my_package.defenses:RelativeNoise"
METRIC = "my_package.metrics:PixelsRight"
DEFENSES = {
    "config": [f"{DEFENSE}(strength=0.5)", f"{DEFENSE}(strength=8.0)"],
    "command": [DEFENSE],
    "python": [DEFENSE],
}
"""By run of the page."""


def test_own_methods_are_audited_from_a_config_the_command_line_and_python(tmp_path: Path) -> None:
    # One test, so that the page is run once, however tests are spread over processes.
    run_page("docs/extend.md", tmp_path)
    for run, defenses in DEFENSES.items():
        summary = read_summary(tmp_path / "runs" / run)
        assert isinstance(summary, Summary)
        cells = {cell.defense: cell for cell in summary.cells if cell.attack == ATTACK}
        assert list(cells) == ["none", *defenses]
        assert all(cell.failed == 0 and cell.trials == 20 for cell in cells.values())
        verdicts = {verdict.defense: verdict.verdict for verdict in summary.verdicts}
        assert verdicts["none"] == "reconstructed", "the attack does not work"
        # A few victims in a hundred are identified by chance; the noise is drawn anew in every run.
        assert verdicts[defenses[-1]] in ("nothing-found", "identified"), "the defense does not protect"
        assert summary.metrics[METRIC].leaks_when == "high"
        assert cells["none"].mean_of(METRIC) == 1.0
        assert (cells[defenses[-1]].mean_of(METRIC) or 0) < 0.8


def test_an_attack_and_a_defense_need_thirty_lines() -> None:
    lengths = {block.file: len(block.text.splitlines()) - 1 for block in blocks("docs/extend.md") if block.file}
    assert lengths["my_package/attacks.py"] <= 30
    assert lengths["my_package/defenses.py"] <= 30
