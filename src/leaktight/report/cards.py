"""The verdict cards: one for each defense and track, with the evidence of one victim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leaktight.report.pictures import Album, Place, data_uri, most_leaking
from leaktight.report.words import attack_words, listed
from leaktight.results.schema import (
    UNDEFENDED,
    AttackerVerdict,
    Cell,
    Summary,
    Trial,
    Verdict,
    severity,
)


@dataclass(frozen=True, kw_only=True)
class View:
    """What one attack made of the victim. kind: "this" attack, its "positive" control or the "negative" control.

    share: SSIM, clipped to [0, 1]; None if it is not known. picture: a data URI.
    """

    kind: str
    label: str
    share: float | None
    scores: tuple[tuple[str, str], ...]
    picture: str | None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One example of one victim: the original, and what the strongest attack and the controls made of it.

    pictures: whether the trial has any. known: whether the originals are. missing: which controls this victim lacks,
    as sentences.
    """

    anchor: str
    title: str
    truth: str | None
    width: int
    height: int
    known: bool
    pictures: bool
    views: tuple[View, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Card:
    """A verdict and its evidence."""

    verdict: Verdict
    evidence: Evidence | None


def cards_of(verdicts: Sequence[Verdict], trials: Sequence[Trial], album: Album) -> tuple[Card, ...]:
    """A card for each verdict. trials: of the verdicts' track."""
    found = {trial.id: trial for trial in trials}
    cards = []
    for entry in verdicts:
        trial = found.get(entry.trial_id or "")
        cards.append(Card(verdict=entry, evidence=_evidence(entry, trial, trials, album) if trial else None))
    return tuple(cards)


def one_a_defense(summary: Summary) -> tuple[Verdict, ...]:
    """One verdict for each defense and track; of files with one for each attacker, the gravest leads the others."""
    held: dict[tuple[str, str], list[Verdict]] = {}
    for entry in summary.verdicts:
        held.setdefault((entry.track, entry.defense), []).append(entry)
    return tuple(_joined(entries, summary.cells) for entries in held.values())


def _joined(entries: Sequence[Verdict], cells: Sequence[Cell]) -> Verdict:
    ordered = sorted(entries, key=lambda entry: severity(entry.verdict))
    if len(ordered) == 1:
        return ordered[0]
    attackers = tuple(_attacker(entry, cells) for entry in ordered)
    return ordered[0].model_copy(update={"attackers": attackers})


def _attacker(entry: Verdict, cells: Sequence[Cell]) -> AttackerVerdict:
    """The verdict of an older file on one attacker."""
    mine = [cell for cell in cells if cell.defense == entry.defense and cell.threat == entry.threat]
    mine = [cell for cell in mine if cell.role == "attack"]
    judged = max(mine, key=lambda cell: cell.success_rate or 0.0, default=None)
    return AttackerVerdict(
        attack=listed(dict.fromkeys(cell.attack for cell in mine)) or entry.worst_attack or "all attacks",
        adaptive="defense" in entry.threat.knows,
        threat=entry.threat,
        verdict=entry.verdict,
        because=entry.because,
        victims=judged.judged if judged else 0,
        reconstructed=(judged.leaked or 0) if judged else 0,
    )


def _evidence(entry: Verdict, trial: Trial, trials: Sequence[Trial], album: Album) -> Evidence | None:
    place = _shown(entry, trial)
    same = [each for each in trials if _victim(each) == _victim(trial)]
    views = [_view("this", attack_words(trial.attack, trial.adaptive), place, album)]
    missing = []
    if trial.defense != UNDEFENDED:
        bare = next((each for each in same if each.defense == UNDEFENDED and each.attack == trial.attack), None)
        if bare is not None and bare.fault is None:
            views.append(_view("positive", f"{trial.attack} without a defense", Place(bare, place.index), album))
        else:
            missing.append(_no_positive(trial.attack, bare))
    guesses = [each for each in same if each.role == "control" and each.status == "done"]
    guesses = [each for each in guesses if each.defense == trial.defense] or guesses
    if guesses:
        best = min((Place(each, place.index) for each in guesses), key=lambda each: each.leak)
        views.append(_view("negative", _guess_words(best.trial), best, album))
    else:
        missing.append("No negative control of this victim.")
    if not any(view.scores or view.picture for view in views):
        return None
    truth, guess = album.truth(place), album.guess(place)
    sample = truth or guess
    return Evidence(
        anchor=album.anchor(),
        title=place.words,
        truth=data_uri(truth),
        width=sample.width if sample else 32,
        height=sample.height if sample else 32,
        known=trial.images is not None and trial.images.truth is not None,
        pictures=trial.images is not None,
        views=tuple(views),
        missing=tuple(missing),
    )


def _victim(trial: Trial) -> tuple[str, int, int, str | None]:
    """What the trials of one victim share: a client trains on other examples in another round."""
    return trial.track, trial.trial, trial.round, trial.examples


def _shown(entry: Verdict, trial: Trial) -> Place:
    """The example that the judge names; in files that name none, the most leaking one."""
    count = trial.images.count if trial.images else max(map(len, filter(None, trial.scores.values())), default=0)
    named = entry.example
    return most_leaking(trial) if named is None or named >= count else Place(trial, named)


def _no_positive(attack: str, bare: Trial | None) -> str:
    reason = " was not run" if bare is None else f" {bare.fault}" if bare.status == "failed" else f": {bare.fault}"
    return f"No positive control of this victim: {attack} without a defense{reason}."


def _guess_words(trial: Trial) -> str:
    """The name of a control. Of several guesses the closest one is shown."""
    draws = trial.attack_settings.get("draws")
    best = f"best of {draws} guesses, " if isinstance(draws, int) and draws > 1 else ""
    return f"{trial.attack}, {best}ignores the update"


def _view(kind: str, label: str, place: Place, album: Album) -> View:
    ssim = place.score("ssim")
    return View(
        kind=kind,
        label=label,
        share=None if ssim is None else min(max(ssim, 0.0), 1.0),
        scores=tuple(pair for pair in place.figures if pair[0] in ("SSIM", "PSNR")),
        picture=data_uri(album.guess(place)),
    )
