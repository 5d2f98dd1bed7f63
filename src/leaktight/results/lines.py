"""The lines of `trials.jsonl`: each is a trial and a checksum of it, so that damage is seen when it is read.

The checksum is the SHA-256 hash of the canonical form of the other fields. Lines of earlier versions have none; after
the first line with a checksum every line needs one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from leaktight.core.errors import ResultsError
from leaktight.results.schema import SCHEMA_VERSION, Trial, parse

CHECKSUM = "sha256"
_LOOKS_LIKE_ONE = re.compile(r"[0-9a-f]{64}")
_START = b'{"'


class Line(NamedTuple):
    """A line with its number, counted from 1, and the trial in it."""

    number: int
    text: bytes
    trial: Trial


def canonical(content: object) -> bytes:
    """JSON in one form: sorted keys, no spaces, ASCII.

    >>> canonical({"b": 1.0, "a": ["é", None]})
    b'{"a":["\\\\u00e9",null],"b":1.0}'
    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def hashed(content: bytes) -> str:
    """Its SHA-256 hash."""
    return hashlib.sha256(content).hexdigest()


def line_of(trial: Trial) -> bytes:
    """The line of a trial, with its checksum."""
    document = trial.document()
    return json.dumps({**document, CHECKSUM: hashed(canonical(document))}, allow_nan=False).encode() + b"\n"


def whole_lines(content: bytes) -> int:
    """The number of bytes without an incomplete last line, which a killed process leaves.

    A last line with a CR is none of ours: another program changed the ends of the lines, and all are in it.
    """
    whole = content.rfind(b"\n") + 1
    cut = content[whole:].startswith(_START[: len(content) - whole]) and b"\r" not in content[whole:]
    return whole if cut else len(content)


def read_lines(file: Path, content: bytes) -> Iterator[Line]:
    """The lines of a file with this content, without an incomplete last one. ResultsError names all that are damaged.

    Those are told together, with what to do about them.
    """
    found: list[Line] = []
    damaged: dict[int, str] = {}
    needed = False
    for number, text in enumerate(content[: whole_lines(content)].split(b"\n"), start=1):
        if not text.strip():
            continue
        source = f"{file}, line {number}"
        document = _object(text)
        wrong = _wrong_checksum(document, needed)
        needed |= CHECKSUM in document
        try:
            found.append(Line(number, text, parse(Trial, text, source)))
        except ResultsError as error:
            later = _later(document)
            if later and wrong is None:
                raise
            wrong = wrong if later else str(error).removeprefix(f"{source}: ")
        if wrong is not None:
            damaged[number] = wrong
    if damaged:
        raise ResultsError(_refusal(file, damaged))
    yield from found


def _object(text: bytes) -> dict[str, object]:
    """The fields of a line; none if it is something else, of which `parse` says what is wrong."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _wrong_checksum(document: Mapping[str, object], needed: bool) -> str | None:
    """What is wrong with a line's checksum; None if it is right. needed: a line without one is damaged."""
    content = {key: value for key, value in document.items() if key != CHECKSUM}
    if CHECKSUM in document:
        right = document[CHECKSUM] == hashed(canonical(content))
        return None if right else "its checksum is another than that of its content"
    renamed = any(isinstance(value, str) and _LOOKS_LIKE_ONE.fullmatch(value) for value in content.values())
    return "expected a checksum, got none" if needed or renamed else None


def _later(document: Mapping[str, object]) -> bool:
    version = document.get("schema_version")
    return isinstance(version, int) and version > SCHEMA_VERSION


def _refusal(file: Path, damaged: dict[int, str]) -> str:
    first, *others = damaged
    also = f" (damaged, too: {', '.join(map(str, others))})" if others else ""
    them = "this line" if not others else "these lines"
    summary = file.with_name("summary.json")
    finished = f" and {summary}" if summary.exists() else ""
    return (
        f"{file}, line {first}: {damaged[first]}{also}; restore the file, or delete {them}{finished} and continue with "
        "--resume, which repeats what is missing"
    )
