"""What an inspection concludes: the levels of an audit's judge, for one update.

Guesses are compared with decoys, if the user gives images like the true ones, of the same class where classes are
known. Without decoys they are compared with copies of the true images (mirrored, turned, shifted), but only if the
update itself shows that these images are behind it (`truth.verified`). So no level can be earned with wrong images.
Where there is neither, only an exact guess counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from leaktight.audits.judge.cells import CellTrials
from leaktight.audits.judge.reasons import by_chance, faults, named, scores
from leaktight.audits.judge.verdict import Panel
from leaktight.audits.plan import LABELS_FOUND
from leaktight.audits.trial import threat_of
from leaktight.inspections.inspection import CAPTURED, Inspection
from leaktight.report.words import listed
from leaktight.results.schema import FALLEN, Verdict, Word, severity

DENIED = 30.0
"""PSNR in dB below which a true image is another than the one guessed."""


def conclude(inspection: Inspection, panel: Panel) -> Verdict:
    """The verdict on the update: the worst that any attack found, or why nothing can be concluded."""
    attacks = panel.attacks
    valid = [cell for cell in attacks if cell.valid]
    sure = proven(attacks)
    advice = ""
    word: Word = "cannot-conclude"
    best = min(valid or attacks, key=_rank)
    if not valid:
        because = f"no trial is valid: {listed(f'{named(cell)}: {faults(cell)}' for cell in attacks)}."
    elif inspection.truth is None and sure:
        best, word, because = sure[0], "reconstructed", _certified(sure[0])
    elif inspection.truth is None:
        because = _unscored(best)
    else:
        best = min(valid, key=lambda cell: _order(panel, cell))
        word = _level(panel, best)
        because = _found(inspection, panel, best, word)
        if word == "cannot-conclude":
            because, advice = _failure(inspection, best, valid), _advice(inspection)
    return Verdict(
        defense=CAPTURED,
        threat=threat_of(inspection.threat),
        verdict=word,
        because=because,
        advice=advice,
        worst_attack=best.attack,
        trial_id=best.trials[0].id,
        certified=word == "reconstructed" and best in sure and not denied(best),
    )


def proven(cells: Sequence[CellTrials]) -> list[CellTrials]:
    """Those of attacks whose certificate holds."""
    valid = (cell for cell in cells if cell.role == "attack" and cell.valid)
    return [cell for cell in valid if (own := cell.done[0].certificate) is not None and own.holds]


def denied(cell: CellTrials) -> bool:
    """Whether a true image is another than the one guessed."""
    return any(score is not None and score < DENIED for score in cell.done[0].scores.get("psnr") or ())


def fall_of(cell: CellTrials) -> float | None:
    """An attack's last loss as a share of its first; None for attacks that do not search."""
    if cell.role != "attack" or not cell.done or not cell.done[0].searches:
        return None
    first, last = cell.done[0].first_loss, cell.done[0].loss
    return None if first is None or last is None or first <= 0 else last / first


def _rank(cell: CellTrials) -> float:
    """Smaller is better, for attacks that have no scores: a closed form, then how far a search fell."""
    fall = fall_of(cell)
    return (cell.done[0].loss or 0.0 if cell.done else 2.0) if fall is None else fall


def _order(panel: Panel, cell: CellTrials) -> tuple[int, float]:
    return severity(_level(panel, cell)), -(cell.valid[0].score("ssim") or -1.0)


def _level(panel: Panel, cell: CellTrials) -> Word:
    return panel.level(cell) or "cannot-conclude"


def _found(inspection: Inspection, panel: Panel, cell: CellTrials, word: Word) -> str:
    if word == "reconstructed":
        return f"{named(cell)} reconstructed it: {scores(cell)}."
    if word == "labels-read":
        return (
            f"{named(cell)} read the labels from the update, {by_chance(panel.label_reading.get(cell.key))} if all "
            f"classes are equally frequent; the images were not found: {scores(cell)}."
        )
    rank = cell.valid[0].rank
    place = "" if rank is None else f"place {rank.place} of {rank.decoys + 1}"
    return (
        f"The guess of {named(cell)} picks out the true images among {_others(inspection)}: {place}, "
        f"{by_chance(panel.identification.get(cell.key))}; {scores(cell)}."
    )


def _others(inspection: Inspection) -> str:
    if inspection.decoys is None:
        return "their own copies, mirrored, turned and shifted"
    return "decoys of the same class" if inspection.classed else "decoys, taken to be of the same class"


def _failure(inspection: Inspection, best: CellTrials, done: Sequence[CellTrials]) -> str:
    score, control, rank = best.done[0].score("ssim"), best.control("ssim"), best.done[0].rank
    scored = "no score is finite" if score is None else f"SSIM {score:.2f} at best, by {named(best)}"
    beside = "" if control is None else f" (without the update {control:.2f})"
    failure = f"{listed([named(cell) for cell in done])} did not reconstruct it: {scored}{beside}"
    if rank is not None:
        place = f"among {_others(inspection)} the true images come in place {rank.place} of {rank.decoys + 1}"
        return f"{failure}; {place}, which may be chance."
    return (
        f"{failure}. Whether that is more than the kind of image was not tested: there are no images to compare with."
    )


def _advice(inspection: Inspection) -> str:
    more = (
        ""
        if inspection.decoys is not None
        else (
            "Give images like the true ones, of the same class, with --decoys (a folder, an .npz or a data set): "
            "the guess is compared with them. "
        )
    )
    return (
        f"{more}One update does not show whether a defense, a weak attack or a wrong setting is the reason: see the "
        "flags, give attacks more iterations, or run `leaktight audit` on a similar federation."
    )


def _certified(cell: CellTrials) -> str:
    own = cell.done[0].certificate
    assert own is not None, "only proven cells come here"
    return (
        f"{named(cell)} proves its guess from the update alone ({own.proof}: {own.figure:.4f}, needed {own.needed:g})."
    )


def _unscored(best: CellTrials) -> str:
    start = "Without the true images nothing can be scored; look at the pictures."
    fall, trial = fall_of(best), best.done[0]
    if fall is None:
        error = "" if trial.loss is None else f", with a relative error of {trial.loss:.2g} in the equations it solves"
        by = named(best) if trial.chosen in (None, best.attack) else f"{trial.chosen} (chosen by {named(best)})"
        search = f"{by} computes the picture from the update{error}; it proves nothing more."
    elif fall > FALLEN:
        search = "No attack's own loss fell, so its picture shows the initial guess and nothing of the update."
    else:
        search = (
            f"{named(best)}'s matching loss fell from {trial.first_loss:.3g} to {trial.loss:.3g}, {fall:.2g} of its "
            "start: the lower, the better the picture explains the update, which does not prove that it is true."
        )
    read = trial.ledger.labels in LABELS_FOUND
    labels = f" Labels read from the update: {', '.join(map(str, trial.labels or ()))}." if read else ""
    return f"{start} {search}{labels}"
