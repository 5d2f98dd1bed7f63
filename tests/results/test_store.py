from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from tests.results.made import changed, made_trial

from leaktight.core.errors import MachineError, ResultsError
from leaktight.results.schema import Pictures, Trial
from leaktight.results.store import open_store, read_summary, read_trials


def with_picture(number: int) -> tuple[Trial, dict[str, bytes]]:
    path = f"images/{number}.png"
    trial = made_trial(trial=number, loss=float("nan"), images=Pictures(guess=path, size=(8, 8), count=1))
    return trial, {path: b"png"}


def filled(path: Path, number: int) -> list[Trial]:
    store = open_store(path)
    for place in range(number):
        store.add(*with_picture(place))
    return list(store.trials.values())


def test_what_was_added_is_there_again(tmp_path: Path) -> None:
    added = filled(tmp_path, 2)
    assert list(open_store(tmp_path).trials.values()) == added
    line = json.loads((tmp_path / "trials.jsonl").read_text().splitlines()[0])
    assert line["loss"] is None, "JSON has no NaN"
    assert line["images"] == {"guess": "images/0.png", "size": [8, 8], "count": 1}
    assert (tmp_path / line["images"]["guess"]).read_bytes() == b"png"


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_dropped_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    first, second = filled(tmp_path, 2)
    file = tmp_path / "trials.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    assert list(read_trials(tmp_path)) == [first.id]
    assert file.read_bytes() == whole[:-cut], "a reader changes nothing"
    store = open_store(tmp_path)
    assert list(store.trials) == [first.id]
    store.add(second, {})
    assert file.read_bytes() == whole


def test_a_trial_written_twice_counts_once(tmp_path: Path) -> None:
    (first,) = filled(tmp_path, 1)
    open_store(tmp_path).add(changed(first, loss=7.0), {})
    assert read_trials(tmp_path) == {first.id: first}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"id"', "rubbish", "Invalid JSON"),
        ('"adaptive": false', '"adaptive": "perhaps"', "adaptive: Input should be a valid boolean, got 'perhaps'"),
        ('"client": "client-000", ', "", "client: Field required"),
        ('"psnr": [5.0]', '"psnr": [5.0, "much"]', "scores.psnr.1: Input should be a valid number, got 'much'"),
        ('"seed": 0', '"seed": "0"', "seed: Input should be a valid integer, got '0'"),
        ('"count": 1', '"count": 0', "images.count: Input should be greater than or equal to 1, got 0"),
        (
            '"schema_version": 2',
            '"schema_version": 3',
            "schema_version: expected at most 2: .*later Leaktight; .*, got 3",
        ),
        ('"schema_version": 2, ', "", "schema_version: Field required"),
    ],
)
def test_a_damaged_line_is_named_with_its_field(tmp_path: Path, old: str, new: str, told: str) -> None:
    filled(tmp_path, 2)
    file = tmp_path / "trials.jsonl"
    first, second = (re.sub(r', "sha256": "\w+"', "", line) for line in file.read_text().splitlines())
    file.write_text(f"{second}\n{first.replace(old, new)}\n")
    with pytest.raises(ResultsError, match=rf"trials\.jsonl, line 2: {told}"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"schema_version": 3, "cells": "new"}', "written by a later Leaktight"),
        ('{"cells": []}', "schema_version: Field required"),
        ("[]", "Input should be an object"),
        ("{", "Invalid JSON"),
        ("\x00\xff", "Invalid JSON"),
        ('{"schema_version": 1, "rounds": []}', "training run"),
        ('{"schema_version": 1, "run": ""}', "cells: Field required"),
        ('{"schema_version": 1, "run": "", "cells": [{"attack": 3}]}', "cells.0.attack: .*string, got 3"),
    ],
)
def test_a_summary_that_cannot_be_read_is_explained(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ResultsError, match=told) as caught:
        read_summary(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_a_clear_error_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 1)
    before = (tmp_path / "trials.jsonl").read_bytes()
    store = open_store(tmp_path)
    second, _ = with_picture(1)
    write = os.write
    for number, told in ((errno.ENOSPC, "No space left on device; free space"), (errno.EFBIG, "too large; .*ulimit")):
        room = [7]

        def fill(descriptor: int, data: bytes, number: int = number, room: list[int] = room) -> int:
            if not room:
                raise OSError(number, os.strerror(number))
            return write(descriptor, data[: room.pop()])

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", fill)
            with pytest.raises(MachineError, match=f"{told}.*; --resume goes on"):
                store.add(second, {})
        assert (tmp_path / "trials.jsonl").read_bytes() == before
    store.add(second, {})
    assert len(read_trials(tmp_path)) == 2
