"""The digest of a run: one hash over all its trials, their pictures, its settings and its summary.

Every part has a SHA-256 hash of its own. JSON is hashed in a canonical form (keys sorted, no spaces, ASCII), files as
their bytes. The digest is the SHA-256 hash of the canonical form of all these hashes by name, so that neither the order
of trials nor the form of a file matters, and each content does. It shows that something was changed. It does not show
by whom: whoever can write to the folder can also compute a new digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from leaktight.results.history import HISTORY
from leaktight.results.lines import canonical, hashed, whole_lines
from leaktight.results.schema import Record, Summary, Trial, parse
from leaktight.results.store import read_file

MANIFEST = "digests.json"
"""The file that holds the hashes behind the digest, to say which part differs."""
SETTINGS = ("config.toml", "environment.json", "command.txt")
"""Files of a run that its digest covers, besides the trials, their pictures, the summary, and the history of a run that
grew."""


class Manifest(Record):
    """The hashes behind a digest. files, pictures: by path, None for a missing file. trials: by id."""

    files: dict[str, str | None]
    trials: dict[str, str]
    pictures: dict[str, str | None]
    summary: str

    @property
    def digest(self) -> str:
        """The digest of the run."""
        return hashed(canonical(self.document()))


@dataclass(frozen=True)
class Lines:
    """The lines of `trials.jsonl`. texts: their canonical forms by id. pictures: the paths that they name.

    torn: whether the last line is incomplete.
    """

    texts: Mapping[str, list[bytes]]
    pictures: tuple[str, ...]
    torn: bool


def make_manifest(folder: Path, lines: Lines, summary: Mapping[str, object]) -> Manifest:
    """The hashes of a run. summary: the content of its `summary.json`."""
    return Manifest(
        files={name: _hashed_file(folder, name) for name in (*SETTINGS, *_grown(folder))},
        trials={name: hashed(b"\n".join(texts)) for name, texts in lines.texts.items()},
        pictures={name: _hashed_file(folder, name) for name in lines.pictures},
        summary=hashed(canonical({key: value for key, value in summary.items() if key != "digest"})),
    )


def sealed(folder: Path, summary: Summary) -> tuple[Summary, Manifest]:
    """The summary with its digest, and the hashes behind it."""
    manifest = make_manifest(folder, read_lines(folder), summary.document())
    return summary.model_copy(update={"digest": manifest.digest}), manifest


def read_lines(folder: Path) -> Lines:
    """All lines of `trials.jsonl`, also repeated ones."""
    file = folder / "trials.jsonl"
    content = read_file(file) or b""
    whole = whole_lines(content)
    texts: dict[str, list[bytes]] = {}
    pictures: dict[str, None] = {}
    for number, line in enumerate(content[:whole].split(b"\n"), start=1):
        if line.strip():
            trial = parse(Trial, line, f"{file}, line {number}")
            texts.setdefault(trial.id, []).append(canonical(json.loads(line)))
            pictures |= dict.fromkeys(_pictures(trial))
    return Lines(texts, tuple(pictures), torn=bool(content[whole:].strip()))


def _grown(folder: Path) -> Iterable[str]:
    """The file with what the run was before it grew, if it did."""
    return (HISTORY,) if (folder / HISTORY).exists() else ()


def _pictures(trial: Trial) -> Iterable[str]:
    named = (trial.images.truth, trial.images.guess) if trial.images else ()
    return (name for name in named if name is not None)


def _hashed_file(folder: Path, name: str) -> str | None:
    """The hash of a file in the folder; None if it is missing, or elsewhere."""
    if "\0" in name or not (folder / name).resolve().is_relative_to(folder.resolve()):
        return None
    content = read_file(folder / name)
    return None if content is None else hashed(content)
