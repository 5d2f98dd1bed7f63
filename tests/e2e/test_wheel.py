"""The wheel in an environment of its own, without the checkout: what a person has after `pip install`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.pages import ROOT, fenced
from tests.wheel import Installed

QUICK = next(block for block in fenced("README.md") if block.language == "sh" and "pip install leaktight" in block.text)
SCRIPTS = [block.text for block in fenced("README.md") if "import leaktight" in block.text]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_it_is_the_wheel_that_runs(installed: Installed, tmp_path: Path) -> None:
    found = installed.run("python", "-c", "import leaktight; print(leaktight.__file__)", folder=tmp_path)
    assert Path(found.strip()).is_relative_to(installed.folder)


def test_the_quick_start_of_the_readme(installed: Installed, tmp_path: Path) -> None:
    assert len(QUICK.commands) >= 5
    alone = {"audit": ("--workers", "0")}  # in one process, which is quicker for a few trials
    printed = [installed.run("leaktight", *each, *alone.get(each[0], ()), folder=tmp_path) for each in QUICK.commands]
    assert "trials" in printed[0]
    assert "reconstructed" in printed[1]
    assert (tmp_path / "runs" / "audit-001" / "report.html").is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda text: text.split("lt.")[1].split("(")[0])
def test_the_python_of_the_readme(installed: Installed, tmp_path: Path, script: str) -> None:
    (tmp_path / "script.py").write_text(script)
    assert installed.run("python", "script.py", folder=tmp_path).strip()


def test_the_pages_of_the_checkout_are_in_it(installed: Installed, tmp_path: Path) -> None:
    folder = Path(installed.run("leaktight", "docs", "--path", folder=tmp_path).strip())
    assert folder.is_relative_to(installed.folder)
    pages = {page.relative_to(ROOT / "docs"): page.read_bytes() for page in (ROOT / "docs").rglob("*.md")}
    assert {page.relative_to(folder): page.read_bytes() for page in folder.rglob("*.md")} == pages
    assert "`leaktight docs verdicts`" in installed.run("leaktight", "docs", "audit", folder=tmp_path)


def test_recipes_are_in_it(installed: Installed, tmp_path: Path) -> None:
    names = {file.stem for file in (ROOT / "src/leaktight/recipes").glob("*.toml")}
    listed = installed.run("leaktight", "list", "recipes", folder=tmp_path)
    assert all(name in listed for name in names)
    # On embedded data, so that no download is needed.
    small = ("--trials", "1", "--dry-run", "--set", "data.kind=digits", "--set", "partition.clients=20")
    planned = installed.run("leaktight", "audit", "recipe:outpost-table-3", *small, folder=tmp_path)
    assert "victims: 1" in planned
    trained = installed.run("leaktight", "train", "recipe:fedboosting-figure-4-2", "--dry-run", folder=tmp_path)
    assert "two_gaussians" in trained
