"""The methods of docs/extend.md, in a package outside of the project, audited in all three ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.pages import blocks, run_page

from leaktight.results.schema import Summary
from leaktight.results.store import read_summary

ATTACK, DEFENSE = "my_package.attacks:FirstLayer", "my_package.defenses:RelativeNoise"
METRIC = "my_package.metrics:PixelsRight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page was run."""
    folder = tmp_path_factory.mktemp("outside")
    run_page("docs/extend.md", folder)
    return folder


@pytest.mark.parametrize(
    ("run", "defenses"),
    [
        ("config", [f"{DEFENSE}(strength=0.5)", f"{DEFENSE}(strength=8.0)"]),
        ("command", [DEFENSE]),
        ("python", [DEFENSE]),
    ],
)
def test_own_methods_are_audited(folder: Path, run: str, defenses: list[str]) -> None:
    summary = read_summary(folder / "runs" / run)
    assert isinstance(summary, Summary)
    cells = {cell.defense: cell for cell in summary.cells if cell.attack == ATTACK}
    assert list(cells) == ["none", *defenses]
    assert all(cell.failed == 0 and cell.trials == 3 for cell in cells.values())
    assert summary.metrics[METRIC].leaks_when == "high"
    verdicts = {verdict.defense: verdict.verdict for verdict in summary.verdicts}
    assert verdicts["none"] == "leaks"
    assert cells["none"].mean_of(METRIC) == 1.0
    assert (cells[defenses[-1]].mean_of(METRIC) or 0) < 0.8
    assert verdicts[defenses[-1]] == "not-found"


def test_an_attack_and_a_defense_need_thirty_lines() -> None:
    lengths = {block.file: len(block.text.splitlines()) - 1 for block in blocks("docs/extend.md") if block.file}
    assert lengths["my_package/attacks.py"] <= 30
    assert lengths["my_package/defenses.py"] <= 30
