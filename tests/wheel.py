"""A wheel of this checkout in an environment of its own: what a person has after `pip install`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.docs.pages import ROOT

SOURCES = ("src", "docs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


class Installed:
    """A virtual environment with the wheel, and with the packages of this one that the wheel needs."""

    def __init__(self, folder: Path) -> None:
        self.wheel = build_wheel(folder)
        self.folder = folder / "venv"
        venv.create(self.folder, symlinks=True)
        pip("--python", str(self.python), "install", "--no-deps", "--no-index", str(self.wheel))
        # Files .pth of the named folder are not obeyed, so an editable install there stays unseen.
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(self.folder)}))
        (self.packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a shell in which it is activated, without those that lead to the checkout."""
        hidden = ("PYTHONPATH", "LEAKTIGHT_DATA")
        variables = {name: value for name, value in os.environ.items() if name not in hidden}
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        return variables | {"VIRTUAL_ENV": str(self.folder), "PATH": path}

    def run(self, *arguments: str, folder: Path) -> str:
        """What the program prints in an empty environment; fails the test unless it ends well."""
        program = [str(self.folder / "bin" / arguments[0]), *arguments[1:]]
        done = subprocess.run(program, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=500)
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
