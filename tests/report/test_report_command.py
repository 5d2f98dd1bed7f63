from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.report.made_run import MadeRun

from leaktight.cli import app as cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["leaktight", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_page_of_a_run_is_made_again(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(finished_run, tmp_path / "copy"))
    (copy / "report.html").unlink(missing_ok=True)
    assert run(monkeypatch, copy) == 0
    assert f"report: {copy / 'report.html'}" in capsys.readouterr().out
    assert "<h1>" in (copy / "report.html").read_text()
    assert run(monkeypatch, copy, "--out", "elsewhere.html") == 0
    assert (tmp_path / "elsewhere.html").read_text() == (copy / "report.html").read_text()


def test_several_runs_make_a_comparison(
    finished_run: Path, other_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, finished_run, other_run) == 0
    assert "2 runs side by side" in (tmp_path / "comparison.html").read_text()


@pytest.mark.parametrize(("form", "start"), [("md", "# Leakage"), ("csv", "table,track,defense"), ("latex", "% needs")])
def test_tables_are_printed_or_written(
    form: str,
    start: str,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert run(monkeypatch, finished_run, "--format", form) == 0
    printed = capfdbinary.readouterr().out.decode()
    assert printed.startswith(start)
    assert run(monkeypatch, finished_run, "--format", form, "--out", tmp_path / "table") == 0
    assert (tmp_path / "table").read_text() == printed


def test_mistakes_are_one_line_and_exit_code_2(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        ((tmp_path / "missing",), "expected the folder of a run"),
        ((tmp_path,), "is not a run"),
        ((finished_run, "--format", "latx"), "did you mean 'latex'?"),
    ):
        assert run(monkeypatch, *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_an_unfinished_run_is_reported_with_a_word_of_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = MadeRun(tmp_path / "run")
    made.add("none", "csdlg", 0, 0.1)
    assert run(monkeypatch, made.path) == 0
    assert "is not finished" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_to_is_named(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(monkeypatch, finished_run, "--out", tmp_path / "file" / "report.html") == 1
    assert "cannot write" in capsys.readouterr().err
