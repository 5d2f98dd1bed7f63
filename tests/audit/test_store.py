from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from leaktight.audit.store import open_store
from leaktight.core.errors import CheckpointError, LeaktightError


def filled(path: Path, number: int) -> None:
    store = open_store(path)
    for place in range(number):
        store.add({"id": f"trial-{place}", "loss": float("nan"), "images": {"count": 1}}, {"truth": b"png"})


def test_what_was_added_is_there_again(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    assert list(open_store(tmp_path).trials) == ["trial-0", "trial-1"]
    line = json.loads((tmp_path / "trials.jsonl").read_text().splitlines()[0])
    assert line == {"id": "trial-0", "loss": None, "images": {"truth": "images/trial-0-truth.png", "count": 1}}
    assert (tmp_path / line["images"]["truth"]).read_bytes() == b"png"


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_dropped_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    filled(tmp_path, 2)
    file = tmp_path / "trials.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    assert list(open_store(tmp_path).trials) == ["trial-0"]
    filled_again = open_store(tmp_path)
    filled_again.add({"id": "trial-1", "loss": float("nan"), "images": {"count": 1}}, {"truth": b"png"})
    assert file.read_bytes() == whole


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    file = tmp_path / "trials.jsonl"
    file.write_text(file.read_text().replace("trial-0", 'trial"0', 1))
    with pytest.raises(CheckpointError, match="line 1"):
        open_store(tmp_path)


def test_a_full_disk_is_a_clear_error_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 1)
    before = (tmp_path / "trials.jsonl").read_bytes()
    store = open_store(tmp_path)
    with monkeypatch.context() as patched:
        write = os.write
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
        with pytest.raises(LeaktightError, match="disk is full; free space, then go on with --resume"):
            store.add({"id": "trial-1"}, {})

        def refuse(descriptor: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patched.setattr(os, "write", refuse)
        with pytest.raises(LeaktightError, match="No space left on device"):
            store.add({"id": "trial-1"}, {})
    assert (tmp_path / "trials.jsonl").read_bytes() == before
