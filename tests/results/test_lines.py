"""Every damage to `trials.jsonl` is seen, and what to do about it is said."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests.results.made import changed, made_trial
from tests.results.test_store import filled

from leaktight.core.errors import ResultsError
from leaktight.results.lines import CHECKSUM, canonical, hashed, line_of
from leaktight.results.schema import Trial
from leaktight.results.store import open_store, read_trials


def without_checksum(line: bytes) -> bytes:
    document = json.loads(line)
    del document[CHECKSUM]
    return json.dumps(document).encode() + b"\n"


def read_or_refused(folder: Path) -> list[Trial] | str:
    try:
        return list(read_trials(folder).values())
    except ResultsError as error:
        return str(error)


def file_of(folder: Path) -> Path:
    return folder / "trials.jsonl"


def test_the_checksum_is_that_of_the_other_fields() -> None:
    document = json.loads(line_of(made_trial()))
    stated = document.pop(CHECKSUM)
    assert stated == hashed(canonical(document))


def test_no_changed_bit_of_any_byte_passes(tmp_path: Path) -> None:
    """A changed bit is refused with its line, or changes no value, or makes the last line an incomplete one."""
    added = filled(tmp_path, 3)
    whole = file_of(tmp_path).read_bytes()
    moments, refused = random.Random(5), 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << moments.randrange(8)
        file_of(tmp_path).write_bytes(damaged)
        line = whole[:place].count(b"\n") + 1
        read = read_or_refused(tmp_path)
        if isinstance(read, str):
            refused += 1
            assert f"trials.jsonl, line {line}: " in read, place
            assert "delete" in read
            assert "--resume" in read
            assert read.isprintable()
        else:
            assert read == added or (place == len(whole) - 1 and read == added[:2]), place
    assert refused > 0.97 * len(whole)


@pytest.mark.parametrize(
    ("garbage", "lines"),
    [
        (b"\x00\xff\xfe rubbish\n", "line 2"),
        (b"\x00" * 100, "line 4"),
        (b"[1, 2]\n", "line 2"),
        (b'{"a":' + b"[" * 100_000 + b"\n", "line 2"),
        (b'{"sha256": "none"}\n', "line 2"),
        (b"x\ny\nz\n", r"line 2: .* \(damaged, too: 3, 4\); restore the file, or delete these lines"),
    ],
)
def test_garbage_is_refused_with_its_lines(tmp_path: Path, garbage: bytes, lines: str) -> None:
    filled(tmp_path, 3)
    first, *others = file_of(tmp_path).read_bytes().splitlines(keepends=True)
    at_end = not garbage.endswith(b"\n")
    parts = [first, *others, garbage] if at_end else [first, garbage, *others]
    file_of(tmp_path).write_bytes(b"".join(parts))
    with pytest.raises(ResultsError, match=lines):
        open_store(tmp_path)


def test_what_the_refusal_says_helps(tmp_path: Path) -> None:
    first, _, third = filled(tmp_path, 3)
    lines = file_of(tmp_path).read_bytes().splitlines(keepends=True)
    (tmp_path / "summary.json").write_text("{}")
    file_of(tmp_path).write_bytes(lines[0] + lines[1].replace(b'"trial": 1', b'"trial": 7') + lines[2])
    with pytest.raises(ResultsError, match=r"line 2: its checksum .* delete this line and .*summary\.json and"):
        read_trials(tmp_path)
    file_of(tmp_path).write_bytes(lines[0] + lines[2])
    assert list(read_trials(tmp_path).values()) == [first, third]


def test_files_of_earlier_versions_open_and_go_on_with_checksums(tmp_path: Path) -> None:
    first, second = filled(tmp_path, 2)
    old = b"".join(map(without_checksum, file_of(tmp_path).read_bytes().splitlines(keepends=True)))
    file_of(tmp_path).write_bytes(old)
    store = open_store(tmp_path)
    assert list(store.trials.values()) == [first, second]
    third = made_trial(trial=2)
    store.add(third, {})
    assert list(read_trials(tmp_path).values()) == [first, second, third]
    new = line_of(third)
    assert file_of(tmp_path).read_bytes() == old + new
    file_of(tmp_path).write_bytes(new + old)
    with pytest.raises(ResultsError, match=r"line 2: expected a checksum, got none \(damaged, too: 3\)"):
        read_trials(tmp_path)


def test_failed_trials_are_forgotten_on_request_only(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    good, bad = made_trial(trial=0), changed(made_trial(trial=1), status="failed", error="no guess")
    store.add(good, {})
    store.add(bad, {})
    assert open_store(tmp_path).failed == (bad.id,)
    store.forget_failed()
    assert store.trials == open_store(tmp_path).trials == {good.id: good}
    again = changed(bad, status="done", error=None)
    store.add(again, {})
    assert read_trials(tmp_path) == {good.id: good, bad.id: again}


def test_other_ends_of_lines_lose_nothing(tmp_path: Path) -> None:
    trials = filled(tmp_path, 3)
    file = tmp_path / "trials.jsonl"
    lines = file.read_bytes()
    file.write_bytes(lines.replace(b"\n", b"\r\n"))
    assert list(open_store(tmp_path).trials.values()) == trials
    file.write_bytes(lines.replace(b"\n", b"\r"))
    with pytest.raises(ResultsError, match=r"line 1: .*restore the file"):
        open_store(tmp_path)
    assert file.read_bytes() == lines.replace(b"\n", b"\r"), "one line without an end, but not one that was cut"
