"""Hostile configs, for `leaktight audit` and `leaktight train`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.faults.hostile.case import Case

GROUP = "config"
ESCAPE = "\x1b[2J\x1b]0;owned\x07"


def audited(content: bytes, folder: Path, command: str = "audit") -> list[str]:
    (folder / "bad.toml").write_bytes(content)
    return (
        [command, str(folder / "bad.toml"), "--dry-run"]
        if command == "audit"
        else [command, str(folder / "bad.toml"), "--out", str(folder / "run")]
    )


def _text(content: Callable[[], str], command: str, folder: Path) -> list[str]:
    return audited(content().encode(), folder, command)


def _special(make: Callable[[Path], None], folder: Path) -> list[str]:
    make(folder / "bad.toml")
    return ["audit", str(folder / "bad.toml"), "--dry-run"]


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def _overridden(word: Callable[[], str], folder: Path) -> list[str]:
    return ["audit", "--dry-run", "--set", word()]


def _secret(make: Callable[[Path], None], folder: Path) -> list[str]:
    make(folder / "bad.key")
    return audited(f'secret_seed = "@{folder / "bad.key"}"\n'.encode(), folder)


TEXTS: Mapping[str, Callable[[], str]] = {
    "arrays nested 100 000 deep": lambda: "seed = " + "[" * 100_000,
    "arrays nested 400 deep": lambda: "seed = " + "[" * 400 + "]" * 400,
    "tables nested 100 000 deep": lambda: "seed = " + "{a=" * 100_000,
    "tables nested 90 deep": lambda: "[audit]\nlocal = " + "{a=" * 90 + "1" + "}" * 90,
    "a key of 100 000 parts": lambda: ".".join("a" * 100_000) + " = 1",
    "a header of 30 000 parts": lambda: f"[{'.'.join('a' * 30_000)}]\nb = 1",
    "a quoted key of 100 000 parts": lambda: '"a" . ' * 100_000 + '"a" = 1',
    "an unknown table with a name of 1 MB": lambda: f"[{'a' * 1_000_000}]\n",
    "an unknown key of 200 000 letters": lambda: f"[audit]\n{'a' * 200_000} = 1\n",
    "an unknown kind of 200 000 letters": lambda: f'[data]\nkind = "{"a" * 200_000}"\n',
    "an integer of 5000 digits": lambda: "seed = " + "9" * 5000,
    "an integer of 100 000 hexadecimal digits": lambda: "seed = 0x" + "f" * 100_000,
    "a seed past 64 bits": lambda: f"seed = {2**70}",
    "trials past 64 bits": lambda: f"[audit]\ntrials = {2**70}",
    "a float of 2 MB": lambda: "[local]\nlearning_rate = 0." + "1" * 2_000_000,
    "infinity": lambda: "[local]\nlearning_rate = inf",
    "not a number": lambda: "[local]\nlearning_rate = nan",
    "a date for a number": lambda: "[local]\nlearning_rate = 1979-05-27T07:32:00Z",
    "a time for a seed": lambda: "seed = 07:32:00",
    "an impossible date": lambda: "seed = 2026-13-45",
    "a date for a table": lambda: "data = 1979-05-27",
    "true for a table": lambda: "data = true",
    "a list for a table": lambda: "data = [1, 2]",
    "a table for a seed": lambda: "[seed]\na = 1",
    "a list of lists of tables": lambda: "attack = [[{kind = 'dlg'}]]",
    "an array of 2 million numbers": lambda: f"[data]\nkind = 'arrays'\npath = [{'1,' * 2_000_000}]",
    "100 000 attacks": lambda: "[[attack]]\nkind = 'nothing'\n" * 100_000,
    "50 MB": lambda: "# comment\n" * 5_000_000,
    "a string of 3 MB": lambda: f"[data]\nkind = 'arrays'\npath = '{'a' * 3_000_000}'",
    "a path of 10 000 letters": lambda: f"[data]\nkind = 'arrays'\npath = '{'a' * 10_000}'",
    "a path with a NUL": lambda: '[data]\nkind = "arrays"\npath = "a\\u0000b"',
    "a path with an escape": lambda: '[data]\nkind = "arrays"\npath = "a\\u001b[2Jb"',
    "an escape in a key": lambda: '[data]\n"\\u001b[2J" = 1',
    "an escape in a table": lambda: '["\\u001b]0;owned\\u0007"]\na = 1',
    "a raw escape": lambda: f"seed = '{ESCAPE}'",
    "control characters": lambda: "seed = 1\x00\x01\n",
    "bare carriage returns": lambda: "seed = 1\r[data]\rkind = 'digits'\r",
    "the same key twice": lambda: "seed = 1\nseed = 2",
    "a module that does not exist": lambda: "[data]\nkind = 'no.such.module:Class'",
    "a module name of 200 000 parts": lambda: f"[data]\nkind = '{'a.' * 200_000}b:C'",
    "a model of a billion units": lambda: "[model]\nkind = 'mlp'\nhidden = [1000000000, 1000000000]",
    "a billion clients": lambda: "[partition]\nkind = 'iid'\nclients = 1000000000",
    "a size of a billion pixels": lambda: "[data]\nkind = 'digits'\nsize = 1000000000",
    "a trillion trials": lambda: "[audit]\ntrials = 1000000000000",
}
BYTES: Mapping[str, bytes] = {
    "UTF-16": "seed = 1".encode("utf-16"),
    "Latin-1": "seed = 'é'".encode("latin-1"),
    "noise": bytes(range(256)) * 4,
}
SPECIAL: Mapping[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": lambda path: path.mkdir(),
    "a hole of 1 TB": _hole,
}
WORDS: Mapping[str, Callable[[], str]] = {
    "arrays nested 50 000 deep": lambda: "seed=" + "[" * 50_000,
    "a key of 50 000 parts": lambda: ".".join("a" * 50_000) + "=1",
    "an integer of 5000 digits": lambda: "seed=" + "9" * 5000,
    "a forged line": lambda: 'seed=1\nx="\x1b[2J"',
}
VALUES = (
    *("a path of 10 000 letters", "a path with a NUL", "a path with an escape", "a module that does not exist"),
    *("a model of a billion units", "a billion clients", "a size of a billion pixels"),
)
"""TOML that is well formed; what is refused is a value, which the refusal names."""
TRAINED = ("arrays nested 100 000 deep", "a key of 100 000 parts", "an escape in a key", "an integer of 5000 digits")
CASES = (
    *(
        Case(GROUP, name, partial(_text, text, "audit"), "" if name in VALUES else "bad.toml")
        for name, text in TEXTS.items()
    ),
    *(Case(GROUP, f"train: {name}", partial(_text, TEXTS[name], "train"), "bad.toml") for name in TRAINED),
    *(Case(GROUP, name, partial(audited, content), "bad.toml") for name, content in BYTES.items()),
    Case(GROUP, "a byte order mark", partial(audited, b"\xef\xbb\xbfseed = 1\n"), "", (0,)),
    *(Case(GROUP, name, partial(_special, make), "bad.toml") for name, make in SPECIAL.items()),
    *(
        Case(GROUP, f"--set {name}", partial(_overridden, word), "seed" if "seed" in word()[:9] else "a.a")
        for name, word in WORDS.items()
    ),
    *(Case(GROUP, f"secret_seed @{name}", partial(_secret, make), "secret_seed") for name, make in SPECIAL.items()),
)
