"""What an inspection concludes: the levels of an audit's judge, for one update.

Guesses are compared with decoys, if the user gives images like the true ones, of the same class where classes are
known. Without decoys they are compared with copies of the true images (mirrored, turned, shifted), but only if the
update itself shows that these images are behind it (`truth.verified`). So no level can be earned with wrong images.
Where there is neither, only an exact guess counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leaktight.audits.judge.cells import CellTrials
from leaktight.audits.judge.reasons import by_chance, faults, named, scores
from leaktight.audits.judge.verdict import Panel
from leaktight.audits.plan import LABELS_FOUND
from leaktight.inspections.inspection import CAPTURED, Inspection
from leaktight.report.words import listed
from leaktight.results.schema import FALLEN, AttackerVerdict, Level, Verdict, Word, severity

DENIED = 30.0
"""PSNR in dB below which a true image is another than the one guessed."""


@dataclass(frozen=True)
class Conclusion:
    """What can be said of the update. cell: of the attack that it rests on. advice: what to do, or ""."""

    cell: CellTrials
    word: Word
    because: str
    advice: str = ""


def conclude(inspection: Inspection, panel: Panel) -> Verdict:
    """The verdict on the update: the worst that any attack found, or why nothing can be concluded."""
    valid = [cell for cell in panel.attacks if cell.valid]
    sure = proven(valid)
    if not valid:
        reasons = listed(f"{named(cell)}: {faults(cell)}" for cell in panel.attacks)
        own = Conclusion(panel.attacks[0], "cannot-conclude", f"no trial is valid: {reasons}.")
    elif inspection.truth is not None:
        own = _scored(inspection, panel, valid)
    elif sure:
        own = Conclusion(sure[0], "reconstructed", _certified(sure[0]))
    else:
        best = min(valid, key=_rank)
        own = Conclusion(best, "cannot-conclude", _unscored(best))
    return Verdict(
        defense=CAPTURED,
        threat=own.cell.threat,
        verdict=own.word,
        because=own.because,
        advice=own.advice,
        worst_attack=own.cell.attack,
        trial_id=own.cell.trials[0].id,
        certified=own.word == "reconstructed" and own.cell in sure and not denied(own.cell),
        attackers=tuple(_attacker(cell, own, panel) for cell in panel.attacks if inspection.truth is not None),
    )


def _attacker(cell: CellTrials, own: Conclusion, panel: Panel) -> AttackerVerdict:
    """What one attack found by itself."""
    level = panel.level(cell) or "cannot-conclude"
    return AttackerVerdict(
        attack=cell.attack,
        adaptive=cell.adaptive,
        threat=cell.threat,
        verdict=own.word if cell is own.cell else level,
        because=own.because if cell is own.cell else f"{named(cell)}: {scores(cell) if cell.valid else faults(cell)}.",
        victims=len(cell.victims),
        reconstructed=len(cell.reconstructed),
    )


def _scored(inspection: Inspection, panel: Panel, valid: Sequence[CellTrials]) -> Conclusion:
    """By the levels of the judge of audits; of attacks on one level, the one with the highest SSIM."""

    def order(cell: CellTrials) -> tuple[int, float]:
        return severity(panel.level(cell) or "cannot-conclude"), -(cell.valid[0].score("ssim") or -1.0)

    best = min(valid, key=order)
    level = panel.level(best)
    if level is None:
        return Conclusion(best, "cannot-conclude", _failure(inspection, best, valid), _advice(inspection))
    return Conclusion(best, level, _found(inspection, panel, best, level))


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
    """Smaller is better: how far a search fell, or the relative error of a closed form."""
    fall = fall_of(cell)
    return cell.done[0].loss or 0.0 if fall is None else fall


def _found(inspection: Inspection, panel: Panel, cell: CellTrials, level: Level) -> str:
    if level == "reconstructed":
        return f"{named(cell)} reconstructed it: {_scores(inspection, cell)}."
    if level == "labels-read":
        return (
            f"{named(cell)} read the labels from the update, {by_chance(panel.label_reading.get(cell.key))} if all "
            f"classes are equally frequent; the images were not found: {_scores(inspection, cell)}."
        )
    rank = cell.valid[0].rank
    place = "" if rank is None else f"place {rank.place} of {rank.decoys + 1}"
    return (
        f"The guess of {named(cell)} picks out {_truth(inspection)} among {_others(inspection)}: {place}, "
        f"{by_chance(panel.identification.get(cell.key))}; {_scores(inspection, cell)}."
    )


def _truth(inspection: Inspection) -> str:
    return "the true image" if inspection.captured.settings.num_examples == 1 else "the true images"


def _scores(inspection: Inspection, cell: CellTrials) -> str:
    """Those of the judge; there is no average over a single image."""
    words = scores(cell)
    return words.replace(" on average", "") if inspection.captured.settings.num_examples == 1 else words


def _others(inspection: Inspection) -> str:
    if inspection.decoys is None:
        own = "its own copies" if inspection.captured.settings.num_examples == 1 else "their own copies"
        return f"{own}, mirrored, turned and shifted"
    return "decoys of the same class" if inspection.classed else "decoys, taken to be of the same class"


def _failure(inspection: Inspection, best: CellTrials, done: Sequence[CellTrials]) -> str:
    score, control, rank = best.done[0].score("ssim"), best.control("ssim"), best.done[0].rank
    scored = "no score is finite" if score is None else f"SSIM {score:.2f} at best, by {named(best)}"
    beside = "" if control is None else f" (without the update {control:.2f})"
    failure = f"{listed([named(cell) for cell in done])} did not reconstruct it: {scored}{beside}"
    if rank is not None:
        place = f"place {rank.place} of {rank.decoys + 1} for {_truth(inspection)}"
        return f"{failure}; among {_others(inspection)} that is {place}, which may be chance."
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
