"""`junit.xml`: a test suite for each track, a test case for each defense.

A leak is a failure, a verdict that cannot be given is an error. The undefended update of a run with defenses is the
positive control: its case is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree as Xml

from leaktight import __version__
from leaktight.report.judgements import chance_words
from leaktight.report.machines.verdicts import Place, cells_of, deciding, worst_verdicts
from leaktight.report.words import defense_name
from leaktight.results.schema import LEVELS, AttackerVerdict, Cell, Summary, Verdict

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow."""


def to_junit(summary: Summary) -> str:
    """The document of a finished run."""
    entries, counting = worst_verdicts(summary), deciding(summary)
    root = Xml.Element("testsuites", name="leaktight")
    for track in dict.fromkeys(place.track for place in entries):
        suite = Xml.SubElement(root, "testsuite", name=f"leaktight {track}")
        properties = Xml.SubElement(suite, "properties")
        for name, value in _facts(summary).items():
            Xml.SubElement(properties, "property", name=name, value=_line(value))
        for place, entry in entries.items():
            if place.track == track:
                suite.append(_case(place, entry, summary, counts=place in counting))
        _count(suite, suite.findall("testcase"))
    _count(root, root.findall("testsuite/testcase"))
    Xml.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{Xml.tostring(root, encoding="unicode")}\n'


def _facts(summary: Summary) -> dict[str, str]:
    facts = {"version": __version__, "run": summary.run, "command": summary.command, "digest": summary.digest or ""}
    return {name: value for name, value in facts.items() if value}


def _case(place: Place, entry: Verdict | None, summary: Summary, *, counts: bool) -> Xml.Element:
    cells = cells_of(summary).get(place, [])
    seconds = sum((cell.seconds or 0.0) * cell.trials for cell in cells)
    name = defense_name(summary, place.defense, place.track)
    case = Xml.Element("testcase", name=_line(name), classname=f"leaktight.{place.track}", time=f"{seconds:.3f}")
    if entry is None:
        reason = summary.training_failed.get(place.training, "the run gave no verdict")
        _outcome(case, "error", "no-verdict", reason, "")
        return case
    details = "\n".join([entry.because, *([entry.advice] if entry.advice else []), *_attackers(entry, cells)])
    if not counts:
        message = f"{entry.verdict}: not decided upon: the run has defenses, and this update has none"
        Xml.SubElement(case, "skipped", message=message)
    elif entry.verdict in LEVELS:
        _outcome(case, "failure", entry.verdict, entry.because, details)
    elif entry.verdict == "cannot-conclude":
        _outcome(case, "error", entry.verdict, entry.because, details)
    if case.find("failure") is None and case.find("error") is None:
        Xml.SubElement(case, "system-out").text = _legal(f"{entry.verdict}\n{details}")
    return case


def _outcome(case: Xml.Element, tag: str, kind: str, message: str, text: str) -> None:
    Xml.SubElement(case, tag, type=kind, message=_line(f"{kind}: {message}")).text = _legal(text)


def _attackers(entry: Verdict, cells: Sequence[Cell]) -> Iterable[str]:
    for each in entry.attackers:
        knows = ", knows the defense" if each.adaptive else ""
        yield f"- {each.attack}{knows}: {each.verdict}; {each.because}{_chances(each, cells)}"


def _chances(each: AttackerVerdict, cells: Sequence[Cell]) -> str:
    mine = [cell for cell in cells if (cell.attack, cell.adaptive) == (each.attack, each.adaptive)]
    tests = [("identification", cell.identification) for cell in mine]
    tests += [("labels", cell.label_reading) for cell in mine]
    return "".join(f" [{name}: by chance {chance_words(test.corrected)}]" for name, test in tests if test is not None)


def _count(element: Xml.Element, cases: Sequence[Xml.Element]) -> None:
    kinds = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    element.set("tests", str(len(cases)))
    for name, tag in kinds.items():
        element.set(name, str(sum(case.find(tag) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")


def _legal(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)


def _line(text: str) -> str:
    """Text for an attribute: one line of legal characters."""
    return " ".join(_legal(text).split())
