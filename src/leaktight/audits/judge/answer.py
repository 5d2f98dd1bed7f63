"""The result of an audit in five sentences: what leaks, to whom, how sure, what helps, what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from leaktight.audits.judge.cells import CellTrials
from leaktight.audits.judge.recommend import SAME_TIME
from leaktight.audits.judge.statistics import rate_interval
from leaktight.report.judgements import recommended_words
from leaktight.report.words import counted, defense_words, listed, percent, threat_words
from leaktight.results.schema import (
    LEVELS,
    UNDEFENDED,
    Answer,
    AttackerVerdict,
    Track,
    Tradeoff,
    Verdict,
    Word,
    severity,
)

_GIVES: dict[Word, str] = {
    "reconstructed": "gives away its training images",
    "identified": "lets an attacker tell its training images from others, though none was reconstructed",
    "labels-read": "gives away the labels of its training images, though no image was found",
    "nothing-found": "gave nothing away to these attacks",
    "cannot-conclude": "cannot be judged by this run",
}
Names = Mapping[str, str]
"""Defenses with their settings, by name."""
_SAME_TIME = 0.25
"""Times of single rounds that differ by less than a quarter count as equal."""


def answer(
    verdicts: Sequence[Verdict], cells: Sequence[CellTrials], tradeoff: Tradeoff | None, *, earlier_looks: int = 0
) -> Answer | None:
    """The answer of a run; None without a verdict. earlier_looks: at summaries of fewer trials."""
    if not verdicts:
        return None
    lead = _undefended(verdicts, "diagnostic") or min(verdicts, key=lambda each: severity(each.verdict))
    others = [each for each in verdicts if each.defense != UNDEFENDED and each.track == lead.track]
    names = {cell.defense: cell.named_defense for cell in cells if cell.track == lead.track}
    advice = None if tradeoff is None else tradeoff.recommendation
    return Answer(
        recommended=None if tradeoff is None or advice is None else f"{recommended_words(tradeoff)} {advice.because}",
        leaks=_leaks(lead, _undefended(verdicts, "production"), names),
        to_whom=_to_whom(lead, others, names),
        how_sure=_how_sure(lead, others, grown=earlier_looks > 0),
        helps=_helps(others, names),
        costs=_costs([each.defense for each in others], cells, tradeoff, names),
    )


def _undefended(verdicts: Sequence[Verdict], track: Track) -> Verdict | None:
    return next((each for each in verdicts if each.defense == UNDEFENDED and each.track == track), None)


def _leaks(lead: Verdict, production: Verdict | None, names: Names) -> str:
    subject = "An undefended update" if lead.defense == UNDEFENDED else f"An update with {names[lead.defense]}"
    attack = _strongest(lead)
    how_many = ""
    if attack is not None and lead.verdict == "reconstructed":
        how_many = f": {attack.attack} reconstructed {attack.reconstructed} of {counted(attack.victims, 'victim')}"
    text = f"{subject} {_GIVES[lead.verdict]}{how_many}."
    if production is not None and lead.track == "diagnostic":
        text += f" That update is easier to attack than a real one; one of real training {_GIVES[production.verdict]}."
    return text


def _to_whom(lead: Verdict, others: Sequence[Verdict], names: Names) -> str:
    if not _leaking(lead):
        return f"Tried was: {_lower(threat_words(lead.threat))}"
    knowing = [names[each.defense] for each in others if _leaking(each) and _takes_knowledge(each)]
    more = f" Who also knows the defense gets through {listed(knowing)}." if knowing else ""
    return threat_words(lead.threat) + more


def _how_sure(lead: Verdict, others: Sequence[Verdict], *, grown: bool) -> str:
    claims = [each for each in others if each.verdict == "nothing-found"]
    if claims:
        fewest = min(claims, key=lambda each: each.victims or 0)
        about = (
            f"Nothing found means: none of {fewest.victims} victims, so fewer than {percent(fewest.below, 0)} of all "
            "with 95 % confidence, by attacks that work without the defense."
        )
    else:
        about = _lead_words(lead)
    often = "10 % of runs that go on after a look at their results, as this one did" if grown else "5 % of runs"
    return f"{about} Attacks that ignore the update would be taken for a leak in at most {often}."


def _lead_words(lead: Verdict) -> str:
    attack = _strongest(lead)
    if attack is None or lead.verdict != "reconstructed":
        return lead.because
    low, high = rate_interval(attack.reconstructed, attack.victims)
    return (
        f"{attack.reconstructed} of {counted(attack.victims, 'victim')}: with 95 % confidence {100 * low:.0f} to "
        f"{100 * high:.0f} % of all. A reconstruction is much closer to its image than any guess without the update."
    )


def _helps(others: Sequence[Verdict], names: Names) -> str:
    if not others:
        return "No defense was tried; name some with --defense."
    groups: dict[str, list[str]] = {}
    for each in sorted(others, key=lambda each: -severity(each.verdict)):
        groups.setdefault(_standing(each), []).append(names[each.defense])
    first = "None of the defenses that were tried. " if all(_leaking(each) for each in others) else ""
    return first + " ".join(f"{standing}: {listed(behind)}." for standing, behind in groups.items())


def _standing(verdict: Verdict) -> str:
    """How a defense stands, as the start of a sentence that lists such defenses."""
    if verdict.verdict == "nothing-found":
        return "Nothing was found behind"
    if verdict.verdict == "cannot-conclude":
        return "Not decided"
    what = {"reconstructed": "Victims were reconstructed", "identified": "Victims were identified"}
    knowing = " by attackers who know the defense" if _takes_knowledge(verdict) else ""
    return f"{what.get(verdict.verdict, 'Labels were read')}{knowing} behind"


def _strongest(verdict: Verdict) -> AttackerVerdict | None:
    return next((each for each in verdict.attackers if each.attack == verdict.worst_attack), None)


def _leaking(verdict: Verdict) -> bool:
    return verdict.verdict in LEVELS


def _takes_knowledge(verdict: Verdict) -> bool:
    """Whether only attackers who were adapted to the defense get so much."""
    return all(each.adaptive for each in verdict.attackers if each.verdict == verdict.verdict)


def _costs(defenses: Sequence[str], cells: Sequence[CellTrials], tradeoff: Tradeoff | None, names: Names) -> str:
    if not defenses:
        return "No defense, no cost."
    if tradeoff is not None:
        return _weighed(tradeoff)
    base = _seconds(UNDEFENDED, cells)
    times = {defense: _seconds(defense, cells) for defense in defenses}
    ratios: dict[str, list[str]] = {}
    for name, own in times.items():
        if own and base:
            ratios.setdefault(_ratio(own / base, _SAME_TIME), []).append(names[name])
    known = "; ".join(f"{ratio} with {listed(those)}" for ratio, those in ratios.items())
    time = f"Time of a client's round: {known}. " if known else ""
    return f"{time}Accuracy was not measured; `leaktight tradeoff` measures it."


def _weighed(tradeoff: Tradeoff) -> str:
    base = next((row for row in tradeoff.rows if row.defense == UNDEFENDED), None)
    parts = []
    for row in tradeoff.rows:
        if row.defense != UNDEFENDED and row.accuracy is not None:
            time = base.seconds_per_round if base is not None else None
            slower = (
                f", time {_ratio(row.seconds_per_round / time, SAME_TIME)}" if row.seconds_per_round and time else ""
            )
            parts.append(f"{defense_words(row.defense, row.settings)} {percent(row.accuracy)}{slower}")
    accuracy = "" if base is None else f" (without a defense {percent(base.accuracy)})"
    return f"Accuracy{accuracy}: {listed(parts)}." if parts else "No defense could be trained."


def _seconds(defense: str, cells: Sequence[CellTrials]) -> float | None:
    """The median time of a client's round."""
    own = [cell for cell in cells if cell.defense == defense and cell.track == "diagnostic"]
    times = [trial.client_seconds for cell in own for trial in cell.done if trial.client_seconds is not None]
    return median(times) if times else None


def _ratio(value: float, same: float) -> str:
    """
    >>> _ratio(1.04, 0.1), _ratio(2.345, 0.1)
    ('about the same', 'x 2.3')
    """
    return "about the same" if abs(value - 1) <= same else f"x {value:.1f}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
