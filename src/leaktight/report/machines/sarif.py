"""`sarif.json`: the leaks, missing verdicts and flags of a run in SARIF 2.1.0.

Rules are the levels of verdicts and the codes of flags. Defenses against which nothing was found have no result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from leaktight import __version__
from leaktight.report.machines.verdicts import cells_of, deciding, worst_verdicts
from leaktight.report.words import defense_name
from leaktight.results.schema import Cell, Flag, Summary, Verdict, Word

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ARTIFACT = "config.toml"
"""The file that results point to: the resolved settings in the run's folder."""

_LEVELS: Mapping[Word, str] = {
    "reconstructed": "error",
    "identified": "error",
    "labels-read": "warning",
    "cannot-conclude": "warning",
}
"""The SARIF level of each verdict that has a result."""
_RULES: Mapping[Word, tuple[str, str]] = {
    "reconstructed": (
        "Training examples were reconstructed from updates.",
        "Add or strengthen a defense, and audit again. See the pictures in report.html.",
    ),
    "identified": (
        "Reconstructions pick out their own victims from others of the same class.",
        "The update says more about the example than its class. Add or strengthen a defense, and audit again.",
    ),
    "labels-read": (
        "Labels were read from updates better than by chance.",
        "If labels are confidential, choose a defense that changes the last layer's update, or aggregate securely.",
    ),
    "cannot-conclude": (
        "The run can neither show nor exclude a leak.",
        "Read the reason and the advice in the message; this is no evidence of protection.",
    ),
}

Json = dict[str, JsonValue]


def to_sarif(summary: Summary, config: str) -> str:
    """The document of a finished run. config: its resolved settings, which results of the same settings share."""
    results = [*_verdict_results(summary, config), *_flag_results(summary, config)]
    run: Json = {
        "tool": {
            "driver": {
                "name": "Leaktight",
                "version": __version__,
                "semanticVersion": __version__,
                "rules": [*_rules(summary)],
            }
        },
        "invocations": [{"executionSuccessful": True, "commandLine": summary.command}],
        "columnKind": "unicodeCodePoints",
        "results": [*results],
        "properties": {"run": summary.run, "digest": summary.digest, "verdicts": _overview(summary)},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rules(summary: Summary) -> Iterator[JsonValue]:
    for word, (short, advice) in _RULES.items():
        yield _rule(word, short, advice, _LEVELS[word])
    for code in dict.fromkeys(flag.code for flag in summary.flags):
        first = next(flag for flag in summary.flags if flag.code == code)
        yield _rule(code, f"{first.raised_if[:1].upper()}{first.raised_if[1:]}.", first.advice, "note")


def _rule(name: str, short: str, advice: str, level: str) -> Json:
    return {
        "id": name,
        "name": "".join(word.capitalize() for word in name.split("-")),
        "shortDescription": _message(short),
        "fullDescription": _message(short),
        "help": _message(advice or short),
        "defaultConfiguration": {"level": level},
    }


def _verdict_results(summary: Summary, config: str) -> Iterator[Json]:
    counting, cells = deciding(summary), cells_of(summary)
    for place, entry in worst_verdicts(summary).items():
        word: Word = entry.verdict if entry else "cannot-conclude"
        if word == "nothing-found":
            continue
        attack = entry.worst_attack if entry else None
        because = entry.because if entry else summary.training_failed.get(place.training, "the run gave no verdict")
        advice = f" {entry.advice}" if entry and entry.advice else ""
        control = "" if place in counting else " This update has no defense; nothing is decided upon it."
        yield {
            "ruleId": word,
            "level": _LEVELS[word] if place in counting else "note",
            "message": _message(f"{place.words(summary)}: {word.replace('-', ' ')}. {because}{advice}{control}"),
            "locations": [_location(("track", place.track), ("defense", place.defense), ("attack", attack))],
            "partialFingerprints": _fingerprint(config, word, place.track, place.defense),
            "properties": _evidence(entry, cells.get(place, [])) if entry else {},
        }


def _flag_results(summary: Summary, config: str) -> Iterator[Json]:
    seen: dict[tuple[str, str, str], int] = {}
    for flag in summary.flags:
        defense, attack = (flag.cell.defense, flag.cell.attack or "") if flag.cell else ("", "")
        key = (flag.code, defense, attack)
        seen[key] = seen.get(key, -1) + 1  # flags of the same place, such as those of two tracks
        yield {
            "ruleId": flag.code,
            "level": "note",
            "message": _message(_flag_text(flag, summary)),
            "locations": [_location(("defense", defense), ("attack", attack))],
            "partialFingerprints": _fingerprint(config, *key, str(seen[key])),
        }


def _flag_text(flag: Flag, summary: Summary) -> str:
    named = (flag.cell.attack, defense_name(summary, flag.cell.defense)) if flag.cell else ()
    where = f"{' on '.join(filter(None, named))}: " if named else ""
    return f"{where}{flag.raised_if} ({flag.detail}); {flag.advice}"


def _message(text: str) -> Json:
    """A text in which braces are no placeholders and brackets no links."""
    return {"text": text.replace("{", "{{").replace("}", "}}").replace("](", "] (")}


def _location(*names: tuple[str, str | None]) -> Json:
    """A location: the settings, and what stands inside of each other there. names: (kind, name) from the outside."""
    known = [(kind, name) for kind, name in names if name]
    logical: list[JsonValue] = [
        {"kind": kind, "name": name, "fullyQualifiedName": "/".join(each for _, each in known[: at + 1])}
        for at, (kind, name) in enumerate(known)
    ]
    place: Json = {"physicalLocation": {"artifactLocation": {"uri": ARTIFACT}, "region": {"startLine": 1}}}
    return place | ({"logicalLocations": logical} if logical else {})


def _fingerprint(config: str, *parts: str) -> JsonValue:
    """The same for the same finding in runs of the same settings."""
    return {"primaryLocationLineHash": hashlib.sha256(json.dumps([config, *parts]).encode()).hexdigest()}


def _evidence(entry: Verdict, cells: Sequence[Cell]) -> Json:
    tests = {(cell.attack, cell.adaptive): cell for cell in cells}
    attackers: list[JsonValue] = []
    for each in entry.attackers:
        cell = tests.get((each.attack, each.adaptive))
        attackers.append(
            {
                "attack": each.attack,
                "adaptive": each.adaptive,
                "verdict": each.verdict,
                "victims": each.victims,
                "reconstructed": each.reconstructed,
                "identification": cell.identification.document() if cell and cell.identification else None,
                "labelReading": cell.label_reading.document() if cell and cell.label_reading else None,
            }
        )
    return {
        "track": entry.track,
        "defense": entry.defense,
        "victims": entry.victims,
        "worstAttack": entry.worst_attack,
        "trial": entry.trial_id,
        "attackers": attackers,
    }


def _overview(summary: Summary) -> JsonValue:
    """Every verdict, also where nothing was found."""
    return [
        {"track": place.track, "defense": place.defense, "verdict": entry.verdict if entry else None}
        for place, entry in worst_verdicts(summary).items()
    ]
