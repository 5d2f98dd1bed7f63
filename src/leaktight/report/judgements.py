"""Verdicts, answers, tests and tracks as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from leaktight.report.words import MISSING, VERDICTS, counted, defense_words, listed, percent, seconds
from leaktight.results.schema import (
    Answer,
    AttackerVerdict,
    Cell,
    Recommendation,
    Significance,
    Spending,
    Summary,
    Track,
    Tradeoff,
    Verdict,
    Word,
)

EARLIER: Mapping[Word, str] = {
    "reconstructed": "Leaks",
    "identified": "Leaks in part",
    "nothing-found": "No leak found by these attacks",
}
"""What files of schema version 1 called a verdict, where it differs."""
MEANINGS: Mapping[Word, str] = {
    "reconstructed": "an attack rebuilt a victim's example, closer than any guess without the update",
    "identified": "too poor to show the example, but good enough to pick the victim out of others of its class",
    "labels-read": "only the labels were read, better than a blind guess reads them",
    "cannot-conclude": "too few valid trials, or attacks that fail without a defense too",
    "nothing-found": "none of these, by attacks that work without the defense; not a proof that nothing leaks",
}
ANSWERS: Mapping[str, str] = {
    "leaks": "What leaks",
    "to_whom": "To whom",
    "how_sure": "How sure",
    "helps": "What helps",
    "costs": "What it costs",
}
"""The five sentences of an answer, and the question of each."""
TRACKS: Mapping[Track, str] = {
    "diagnostic": "An upper bound: updates that are easier to attack than those of training. It shows what an update "
    "can give away at worst, not what a federation in training gives away.",
    "production": "Updates as in training: the federation's own local training. Closer to a real federation, and "
    "harder to attack.",
}
"""What an update of each track is."""
ENDED: Mapping[str, str] = {
    "decided": "the rule asks for no more trials",
    "all trials": "all planned trials were run",
    "budget": "the budget was spent; raise --budget and --resume",
}


def verdict_words(word: Word, version: int) -> str:
    """A verdict for readers, by the version of its file.

    >>> verdict_words("identified", 2), verdict_words("identified", 1)
    ('Identified', 'Leaks in part')
    """
    return EARLIER.get(word, VERDICTS[word]) if version == 1 else VERDICTS[word]


def tracks_of(summary: Summary) -> tuple[Track, ...]:
    """The tracks that the run has, diagnostic first."""
    found = {cell.track for cell in summary.cells} | {entry.track for entry in summary.verdicts}
    order: tuple[Track, ...] = get_args(Track)
    return tuple(track for track in order if track in found)


def answer_lines(answer: Answer) -> list[tuple[str, str]]:
    """The five questions and their answers; a trade-off begins with what is recommended."""
    lead = [] if answer.recommended is None else [("Recommended", answer.recommended)]
    return [*lead, *((label, getattr(answer, name)) for name, label in ANSWERS.items())]


def recommended_words(tradeoff: Tradeoff) -> str:
    """What a trade-off recommends, as a sentence; its reason follows.

    >>> advice = Recommendation(because="", among=("noise", "outpost"))
    >>> recommended_words(Tradeoff(rows=(), recommendation=advice))
    'Any of noise and outpost: they cannot be told apart.'
    """
    found = tradeoff.recommendation or Recommendation(because="")
    settings = {row.defense: row.settings for row in tradeoff.rows}
    if found.defense is not None:
        return f"{defense_words(found.defense, settings.get(found.defense))}."
    if found.among:
        among = listed(defense_words(name, settings.get(name)) for name in found.among)
        return f"Any of {among}: they cannot be told apart."
    return "Nothing can be recommended from this run."


def accuracy_note(tradeoff: Tradeoff) -> str:
    """What accuracies of a trade-off are compared with."""
    return (
        f"accuracy on {tradeoff.examples} examples; always naming the largest class has {percent(tradeoff.chance)}; "
        "accuracies whose 95 % intervals overlap are not told apart"
    )


def leaked_words(cell: Cell) -> str:
    """The number of victims that were reconstructed."""
    if not cell.judged:
        return "no valid trial" if cell.done else "all trials failed"
    if cell.leaked is None:
        return counted(cell.judged, "trial")
    if cell.victims is None:
        return f"{cell.leaked} of {counted(cell.judged, 'trial')} leaked"
    return f"{cell.leaked} of {cell.judged} reconstructed"


def valid_trials(cell: Cell) -> int:
    """The number of valid trials; in files of earlier versions, of finished ones."""
    return cell.done if cell.valid is None else cell.valid


def leaked_share(cell: Cell) -> str:
    """How many victims were reconstructed, such as "3 of 5"."""
    return MISSING if cell.leaked is None else f"{cell.leaked} of {cell.judged}"


def fault_words(cell: Cell) -> list[str]:
    """The trials that count for nothing, and why."""
    if not cell.faults:
        return [f"{counted(cell.failed, 'trial')} failed"] if cell.failed else []
    return [f"{amount} invalid: {reason}" for reason, amount in cell.faults.items()]


def chosen_words(cell: Cell) -> str:
    """How often each attack of an ensemble was chosen, the most frequent first.

    >>> chosen_words(Cell.model_construct(chosen={"csdlg": 15, "dlg": 5}))
    'csdlg 15, dlg 5'
    """
    return ", ".join(f"{name} {count}" for name, count in cell.chosen.items())


def victims_words(entry: AttackerVerdict) -> str:
    """How many victims an attack reconstructed.

    >>> victims_words(AttackerVerdict.model_construct(victims=20, reconstructed=3))
    '3 of 20 reconstructed'
    """
    return f"{entry.reconstructed} of {entry.victims} reconstructed" if entry.victims else "no valid victim"


def claim_words(entry: Verdict) -> str:
    """What a verdict rests on, and how far "nothing found" reaches; empty if it is not recorded."""
    if entry.victims is None:
        return ""
    tried = f"Rests on {counted(entry.victims, 'victim')}."
    if entry.verdict != "nothing-found" or entry.below is None:
        return tried
    return f"With 95 % confidence, fewer than {100 * entry.below:.0f} % of victims are reconstructed. {tried}"


def chance_words(chance: float) -> str:
    """A probability.

    >>> chance_words(0.0004), chance_words(0.012), chance_words(0.345), chance_words(1.0)
    ('< 0.1 %', '1.2 %', '34 %', '100 %')
    """
    return "< 0.1 %" if chance < 0.001 else percent(chance, 1 if chance < 0.1 else 0)


def identification_words(test: Significance, among: int | None) -> str:
    """Whether the victims were picked out. among: the number of candidates, the victim included.

    >>> identification_words(Significance(victims=5, chance=1e-9, corrected=1e-8), 100)
    'picked out of 100; by chance < 0.1 %'
    >>> identification_words(Significance(victims=5, chance=0.2, corrected=0.4), 100)
    'not picked out of 100; by chance 40 %'
    """
    found = "picked" if test.passed else "not picked"
    return f"{found} out of {among or 'others'}; by chance {chance_words(test.corrected)}"


def label_words(test: Significance) -> str:
    """Whether the labels were read."""
    found = "labels read" if test.passed else "labels not read"
    return f"{found}; by chance {chance_words(test.corrected)}"


def spending_facts(spending: Spending | None, confidence: float | None) -> dict[str, str]:
    """What a run spent and what its verdicts may claim, by name."""
    facts = {}
    if spending is not None:
        facts["Trials"] = f"{spending.trials} of at most {spending.planned}"
        facts["Time"] = seconds(60 * spending.minutes)
        if spending.budget is not None:
            facts["Budget"] = f"{spending.budget:g} min"
        facts["Ended because"] = ENDED[spending.ended]
    if confidence is not None:
        facts["Nothing found"] = f"claims that fewer than {100 * confidence:.0f} % of victims are reconstructed"
    return facts
