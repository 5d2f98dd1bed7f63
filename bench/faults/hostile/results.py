"""Hostile result files and cards, for `leaktight report`, `verify` and `leaderboard`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.faults.hostile.case import Case

GROUP = "result"
COMMANDS = ("report", "verify")


def _damaged(file: str, change: Callable[[Path], None], command: str, folder: Path) -> list[str]:
    """An honest run in which one file was changed."""
    run = honest_run(folder / "run")
    change(run / file)
    return [command, str(run)]


def honest_run(folder: Path, rename: Mapping[str, str] | None = None) -> Path:
    """A small finished run. rename: other names for its methods."""
    from tests.report.made_run import MadeRun

    made = MadeRun(folder, rename=rename)
    for trial in range(3):
        made.add("none", "csdlg", trial, 0.3)
        made.add("outpost", "csdlg", trial, 0.9)
    return made.finish()


def _content(content: Callable[[], bytes], path: Path) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content())


def _special(make: Callable[[Path], None], path: Path) -> None:
    path.unlink(missing_ok=True)
    make(path)


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


CONTENTS: Mapping[str, Callable[[], bytes]] = {
    "noise": lambda: bytes(range(256)) * 4 + b"\n",
    "nested 100 000 deep": lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n",
    "a list nested 100 000 deep": lambda: b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "an integer of 100 000 digits": lambda: b'{"schema_version": ' + b"9" * 100_000 + b"}\n",
    "a key of 20 MB": lambda: b'{"' + b"a" * 20_000_000 + b'": 1}\n',
    "an escape": lambda: json.dumps({"schema_version": 4, "\x1b[2J": "\x1b[2J"}, ensure_ascii=False).encode() + b"\n",
    "a bare number": lambda: b"1e999\n",
    "UTF-16": lambda: "{}".encode("utf-16") + b"\n",
}
SPECIAL: Mapping[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
    "a hole of 1 TB": _hole,
    "a folder": lambda path: path.mkdir(),
}


def _card(change: Callable[[Path], None], folder: Path) -> list[str]:
    place = folder / "board" / "diagnostic" / "digits"
    place.mkdir(parents=True)
    change(place / "bad.json")
    return ["leaderboard", str(folder / "board"), "--out", str(folder / "page.html")]


CASES = (
    *(
        Case(
            GROUP,
            f"{command}, summary.json: {name}",
            partial(_damaged, "summary.json", change, command),
            "summary.json",
        )
        for command in COMMANDS
        for name, change in (
            *((name, partial(_content, content)) for name, content in CONTENTS.items()),
            *((name, partial(_special, make)) for name, make in SPECIAL.items()),
        )
    ),
    *(
        Case(GROUP, f"report, {file}: {name}", partial(_damaged, file, partial(_special, make), "report"), file)
        for file in ("environment.json", "config.toml")
        for name, make in SPECIAL.items()
    ),
    *(
        Case(GROUP, f"card: {name}", partial(_card, partial(_content, content)), "bad.json")
        for name, content in CONTENTS.items()
    ),
    *(
        Case(GROUP, f"card: {name}", partial(_card, partial(_special, make)), "bad.json")
        for name, make in SPECIAL.items()
    ),
)
