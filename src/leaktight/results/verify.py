"""Checking a finished run against the digest in its `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from leaktight.core.errors import LeaktightError, ResultsError, UsageError
from leaktight.core.text import printable
from leaktight.results.digest import MANIFEST, Manifest, make_manifest, read_lines
from leaktight.results.schema import SCHEMA_VERSION, parse
from leaktight.results.store import read_file, read_summary

TORN = "trials.jsonl: an incomplete last line"
ADDED = "added"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a check. differences: what is not as it was, in words; empty if all is well.

    digest: that of the run as it is now.
    """

    trials: int
    pictures: int
    digest: str
    differences: tuple[str, ...]


def verify(folder: Path) -> Verification:
    """Check a run. Raises UsageError for what cannot be checked: no run, not finished, of another version, damaged."""
    _require_run(folder)
    summary = read_summary(folder)
    if summary is None:
        raise UsageError(
            f"the run in {folder} is not finished and has no digest yet; continue it with its command and "
            f"--resume --out {folder}"
        )
    if summary.schema_version < SCHEMA_VERSION:
        raise UsageError(
            f"{folder} was made by an earlier version: it has no digest; run `leaktight report {folder}` to read it"
        )
    lines = read_lines(folder)
    now = make_manifest(folder, lines, json.loads(read_file(folder / "summary.json") or b"{}"))
    found = list(_differences(folder, now, summary.digest))
    if lines.torn:
        found.append(TORN)
    return Verification(trials=len(now.trials), pictures=len(now.pictures), digest=now.digest, differences=tuple(found))


def require_unchanged(folder: Path) -> None:
    """Raise UsageError if a run that is to be continued was changed, as its new digest would hide that.

    A run that was interrupted after its last digest has more trials, maybe one of them torn; these are no change.
    """
    try:
        found = [each for each in verify(folder).differences if each != TORN and not each.endswith(f": {ADDED}")]
    except LeaktightError:
        return
    if found:
        raise UsageError(
            f"{folder} was changed after it was written ({found[0]}); restore it, or choose another --out and start "
            "again"
        )


def doubt(folder: Path) -> str | None:
    """Why a finished run is not as it was written, in one line; None if all is well or nothing can be checked."""
    try:
        found = verify(folder).differences
    except LeaktightError:
        return None
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{folder} was changed after it was written: {found[0]}{more}; see leaktight verify" if found else None


def _require_run(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"expected the folder of a run, got {folder}; name a folder such as runs/audit-001")
    if not any((folder / name).exists() for name in ("summary.json", "trials.jsonl", "config.toml")):
        raise UsageError(f"{folder} is not a run: it has no summary.json; name a folder below runs")


def _differences(folder: Path, now: Manifest, digest: str | None) -> Iterator[str]:
    if digest is None:
        yield "summary.json: the digest was removed"
        return
    if now.digest == digest:
        return
    then = _written(folder)
    if then is None:
        yield f"the digest is another, and {MANIFEST}, which tells what was changed, is missing or damaged"
        return
    named = [
        *_compared("", then.files, now.files),
        *_compared("trial ", then.trials, now.trials),
        *_compared("picture ", then.pictures, now.pictures),
        *(["summary.json: changed"] if then.summary != now.summary else []),
    ]
    if then.digest != digest:
        named.append(f"summary.json or {MANIFEST}: the digest in one does not belong to the hashes in the other")
    yield from named


def _compared(kind: str, then: Mapping[str, str | None], now: Mapping[str, str | None]) -> Iterator[str]:
    for name in dict.fromkeys((*then, *now)):
        before, after = then.get(name), now.get(name)
        if before != after:
            how = ADDED if before is None else "missing" if after is None else "changed"
            yield f"{kind}{printable(name)}: {how}"


def _written(folder: Path) -> Manifest | None:
    """The hashes as they were written with the summary; None if they cannot be read."""
    try:
        return parse(Manifest, read_file(folder / MANIFEST) or b"", MANIFEST)
    except ResultsError:
        return None
