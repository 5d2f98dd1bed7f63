"""The command line in a test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from leaktight.cli.app import main


def forget_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide modules that earlier tests wrote and imported, so that another one of the same name is found."""
    for name, module in list(sys.modules.items()):
        if "/pytest-of-" in str(getattr(module, "__file__", "")):
            monkeypatch.delitem(sys.modules, name)


class Here:
    """The command line inside the test's own process: quick, with its exit code and what it printed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("LEAKTIGHT_DATA", str(folder / "data"))
        monkeypatch.setattr(sys, "path", list(sys.path))
        forget_modules(monkeypatch)
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["leaktight", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = self.capsys.readouterr()
        return int(stopped.value.code or 0), printed.out, printed.err
