"""The gate of `--fail-on`: whether a verdict of a run is as bad as a level, or worse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from leaktight.core.errors import LeakFoundError, LeaktightError, UsageError, suggestion
from leaktight.report.machines.verdicts import Place, deciding, worst_verdicts
from leaktight.results.schema import ERROR, UNDEFENDED, WORDS, Summary, Verdict, Word, severity

GATES: Mapping[str, Word] = {"reconstructed": "reconstructed", "identified": "identified", "labels": "labels-read"}
"""The verdict behind each level of `--fail-on`, the worst first."""


def parse_gate(levels: Sequence[str]) -> str | None:
    """The level of one or more `--fail-on`; None without any."""
    for level in levels:
        if level not in GATES:
            raise UsageError(f"expected --fail-on {', '.join(GATES)}, got {level!r}; {_hint(level)}")
    if len(set(levels)) > 1:
        raise UsageError(f"expected one --fail-on, got {' and '.join(dict.fromkeys(levels))}; give the mildest alone")
    return levels[0] if levels else None


def check_gate(summary: Summary, level: str, planned: Iterable[Place] = ()) -> None:
    """Raise LeakFoundError if a verdict that counts is `level` or worse, else LeaktightError if one is missing.

    Verdicts on defended updates count, of all tracks; those on undefended ones only in a run without a defense.
    planned: all that was to be attacked, so that nothing is missed that a spent budget left out.
    """
    limit = severity(GATES[level])
    entries = deciding(summary, planned)
    leaks = [
        f"{place.words(summary)}: {_found(entry)}"
        for place, entry in entries.items()
        if entry and severity(entry.verdict) <= limit
    ]
    if leaks:
        raise LeakFoundError(_line(f"--fail-on {level}: {'; '.join(leaks)}; see {summary.run}"))
    unsure = [reason for place, entry in entries.items() for reason in _unsure(place, entry, summary)]
    if unsure or not entries:
        reasons = "; ".join(unsure) or "the run has no verdict"
        raise LeaktightError(_line(f"--fail-on {level} can be neither passed nor failed: {reasons}; see {summary.run}"))


def _hint(level: str) -> str:
    if level in WORDS and level not in GATES.values():
        return "this verdict is no leak: name the mildest leak that is to fail"
    return suggestion(level, GATES)


def _line(text: str) -> str:
    return " ".join(text.split())


def _found(entry: Verdict) -> str:
    knowing = " with knowledge of the defense" if "defense" in entry.threat.knows else ""
    return entry.verdict.replace("-", " ") + (f" by {entry.worst_attack}{knowing}" if entry.worst_attack else "")


def _unsure(place: Place, entry: Verdict | None, summary: Summary) -> Iterator[str]:
    """Why the verdict does not show that nothing worse was there to be found."""
    name = place.words(summary)
    if entry is None:
        reason = summary.training_failed.get(place.training)
        yield f"{name}: no verdict" + (f", training failed: {reason}" if reason else "")
    elif entry.verdict == "cannot-conclude":
        yield f"{name}: cannot conclude, {_sentences(entry.because, entry.advice)}"
    elif entry.verdict != "nothing-found":
        yield from (f"{name}: {_found(entry)}, but {reason}" for reason in _worse_is_possible(entry, summary))


def _worse_is_possible(entry: Verdict, summary: Summary) -> Iterator[str]:
    """Why there may be a worse leak than the one that was found."""
    tried, confidence = entry.victims, summary.confidence
    if tried is not None and confidence is not None and (1 - confidence) ** tried > ERROR:
        yield f"{tried} victims are too few to exclude a worse leak for {100 * confidence:.0f} % of them"
    working = _working(summary)
    for each in entry.attackers:
        if each.verdict == "cannot-conclude" and each.attack in working:
            yield f"{each.attack} cannot be judged, {_sentences(each.because)}"
        elif each.reconstructed:
            yield f"{each.attack} seems to reconstruct {each.reconstructed} of {each.victims} victims, maybe by chance"


def _sentences(*sentences: str) -> str:
    return " ".join(filter(None, sentences)).rstrip(".")


def _working(summary: Summary) -> frozenset[str]:
    """The attacks that reconstruct or identify undefended victims."""
    undefended = (entry for place, entry in worst_verdicts(summary).items() if place.defense == UNDEFENDED and entry)
    return frozenset(
        each.attack
        for entry in undefended
        for each in entry.attackers
        if each.verdict in ("reconstructed", "identified")
    )
