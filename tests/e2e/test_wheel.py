"""The wheel in an environment of its own, without the checkout: what a person has after `pip install`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, fenced

QUICK = next(block for block in fenced("README.md") if block.language == "sh" and "pip install leaktight" in block.text)
SCRIPTS = [block.text for block in fenced("README.md") if "import leaktight" in block.text]
SOURCES = ("src", "docs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


class Installed:
    """A virtual environment with the wheel, and with the packages of this one that the wheel needs."""

    def __init__(self, folder: Path) -> None:
        self.wheel = build_wheel(folder)
        self.folder = folder / "venv"
        venv.create(self.folder, symlinks=True)
        pip("--python", str(self.python), "install", "--no-deps", "--no-index", str(self.wheel))
        # Files .pth of the named folder are not obeyed, so an editable install there stays unseen.
        packages = sysconfig.get_path("purelib", vars={"base": str(self.folder)})
        Path(packages, "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *arguments: str, folder: Path) -> str:
        """What the program prints in an empty environment; fails the test unless it ends well."""
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "LEAKTIGHT_DATA")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        program = [str(self.folder / "bin" / arguments[0]), *arguments[1:]]
        done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout + done.stderr


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, built from a copy, so that nothing is left behind in it."""
    copy = folder / "sources"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(copy))
    [wheel] = folder.glob("*.whl")
    return wheel


def pip(*arguments: str) -> None:
    program = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


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
