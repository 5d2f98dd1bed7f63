"""Hostile files are refused in one line, in little time and memory. All of them, in processes: `bench faults files`."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from bench.faults.files import CELLS, harmless
from bench.faults.hostile import CASES, Case
from bench.faults.hostile.archives import CASES as ARCHIVES
from bench.faults.hostile.results import honest_run
from bench.faults.hostile.tensors import TRAPS
from PIL import EpsImagePlugin

from leaktight.cli.app import main
from leaktight.core.errors import DataError
from leaktight.core.pickles import check_pickles
from leaktight.data.images import decode_image
from leaktight.data.sources import extract

HEAVY = (
    "GB",
    "TB",
    "million",
    "000 members",
    "00 000 tensors",
    "400 000 names",
    "a byte order",
    "9 000",
    "5 000 frames",
)
QUICK = [case for case in (*CASES, *TRAPS) if case not in ARCHIVES and not any(word in case.name for word in HEAVY)]
LIMIT = 6 * 2**30
LIMITED = (
    "tensor file: npz, 5.7 GB packed into a few MB",
    "data set: arrays, 5.7 GB of bytes",
    "data set: IDX, gzip of 6 GB",
    "tensor file: safetensors, a hole of 1 TB",
)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_it_is_refused_in_one_line(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["leaktight", *case.make(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err.rstrip("\n")
    assert left.value.code in case.codes
    last = said.split("\n")[-1]
    assert last.startswith("leaktight: ")
    assert case.names in last
    assert last.isprintable()
    assert len(last) < 3000
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("case", [case for case in ARCHIVES if "GB" not in case.name], ids=lambda case: case.id)
def test_an_archive_writes_nothing_outside(case: Case, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    words = case.make(given)
    with pytest.raises(DataError, match="bad"):
        extract(Path(words[2]), Path(words[3]))
    assert [path.name for path in tmp_path.iterdir()] == ["given"]
    assert not (given / "set").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITED)
def test_little_memory_is_enough_to_refuse_it(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.id == name)
    words = [sys.executable, "-m", "leaktight", *case.make(tmp_path)]
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))  # noqa: E731
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, preexec_fn=limit, env=env, check=False)
    assert done.returncode == 2, done.stderr[-500:]
    assert "at most" in done.stderr or "cannot read" in done.stderr


@pytest.mark.parametrize("cell", CELLS, ids=repr)
def test_no_cell_is_a_formula(
    cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = honest_run(tmp_path / "run", {"outpost": cell})
    monkeypatch.setattr(sys, "argv", ["leaktight", "report", str(folder), "--format", "csv"])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    assert harmless(capsysbinary.readouterr().out.decode())


def test_a_picture_starts_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: pytest.fail("started Ghostscript"))
    with pytest.raises(DataError, match="no such kind of picture"):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n", "a.png")


def test_honest_pickles_pass_the_look(tmp_path: Path) -> None:
    import pickle

    for protocol in range(2, 6):
        path = tmp_path / f"{protocol}.pkl"
        path.write_bytes(pickle.dumps({"a": [(1, (2, "x")), {3: b"y"}], "b": list(range(5000))}, protocol))
        with path.open("rb") as file:
            check_pickles(file, 2)
