"""A whole inspection in its folder: the trials, the flags, the verdict and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from leaktight.audits.judge.cells import LEAKED_IF, CellTrials, gather
from leaktight.audits.judge.checks import Evidence, Raised, raise_flags
from leaktight.audits.judge.reasons import faults, scores
from leaktight.audits.judge.summary import cell_of
from leaktight.audits.judge.verdict import Panel
from leaktight.audits.plan import LABELS_FOUND
from leaktight.audits.run import Watcher, opened, run_missing
from leaktight.audits.trial import threat_of
from leaktight.core.types import Batch
from leaktight.inspections.captured import Captured
from leaktight.inspections.checks import check_capture, flag
from leaktight.inspections.inspection import CAPTURED, Inspection
from leaktight.inspections.truth import check_truth
from leaktight.models.source import Normalize
from leaktight.report.words import listed
from leaktight.results.folder import RunFolder
from leaktight.results.schema import (
    FALLEN,
    SCHEMA_VERSION,
    Cell,
    Flag,
    Plain,
    Summary,
    Verdict,
    Word,
    common_ledger,
    metrics_of,
)
from leaktight.runtime.executor import Executor

WELL_FALLEN = 0.1
DENIED = 30.0
UNLIKELY = 0.05
_SHARED_CHECKS = frozenset({"loss-did-not-fall", "not-finite", "trials-failed"})


def run_inspection(
    inspection: Inspection,
    folder: RunFolder,
    *,
    executor: Executor,
    scenario: Mapping[str, Plain],
    command: str,
    retry_failed: bool = False,
    watcher: Watcher | None = None,
) -> Summary:
    """Run the missing trials, write `summary.json` and return it. Without the truth it has no scores.

    scenario: facts about the update for readers. executor: runs the trials. retry_failed: repeat those that ended in an
    error.
    """
    store = opened(folder, retry_failed=retry_failed)
    run_missing(inspection, list(inspection.by_id), store, executor, watcher or Watcher())
    trials = [store.trials[name] for name in inspection.by_id]
    cells = gather(trials)
    panel = Panel(cells, confidence=1.0)
    scored = inspection.truth is not None
    shared = _SHARED_CHECKS | ({"no-control"} if scored else set())
    raised = [each for each in raise_flags(Evidence(panel)) if each.check.code in shared]
    summary = Summary(
        schema_version=SCHEMA_VERSION,
        run=str(folder.path),
        command=command,
        scenario=dict(scenario),
        cells=tuple(_cell(cell, panel, raised, scored=scored) for cell in cells),
        metrics=metrics_of(trials),
        leaked_if=LEAKED_IF,
        verdicts=(_verdict(inspection, cells),),
        flags=(*_flags(inspection, cells), *(each.flag for each in raised)),
        ledger=common_ledger(trials),
        training_failed={},
        tradeoff=None,
        over_time=None,
        truth_given=scored,
    )
    return folder.write_summary(summary)


def _cell(cell: CellTrials, panel: Panel, raised: Sequence[Raised], *, scored: bool) -> Cell:
    trial, found = cell.trials[0], cell_of(cell, panel, raised)
    own = {"loss": trial.loss, "first_loss": trial.first_loss, "labels": trial.labels}
    return found.model_copy(update=own if scored else {**own, "success_rate": None})


def _flags(inspection: Inspection, cells: Sequence[CellTrials]) -> list[Flag]:
    found = check_capture(inspection.captured)
    if inspection.truth is None:
        found.append(
            flag(
                "no-truth",
                "the true images are not known",
                "nothing was scored; give --truth, or judge by a certificate or by eye",
                "no score, no control",
            )
        )
    labels = inspection.true_labels
    if inspection.truth is not None and labels is not None:
        wrong = check_truth(inspection.captured, Batch(inspection.truth.images, labels))
        found += [] if wrong is None else [wrong]
    proven = _proven(cells)
    if denied := [cell.attack for cell in proven if _denied(cell)]:
        found.append(
            flag(
                "truth-contradicts-proof",
                f"an attack proves its guess from the update alone, but a true image is below {DENIED:g} dB",
                "these are probably not the client's images, or not as the client used them: check --truth",
                f"proven by {listed(denied)}",
            )
        )
    best = min(map(_rank, cells), default=1.0)
    if best > WELL_FALLEN and not proven and not _normalises(inspection.captured):
        found.append(
            flag(
                "normalisation-unstated",
                "no attack's loss fell to a tenth of its start, and the normalisation of the inputs is not stated",
                "if images were normalised outside of the network, give --mean and --std; check --mode, too",
                f"the best fell to {best:.2g} of its start",
            )
        )
    return found


def _normalises(captured: Captured) -> bool:
    inside = (isinstance(each, Normalize) or _named_so(each) for each in captured.bare.modules())
    return bool(captured.settings.mean) or any(inside)


def _named_so(module: nn.Module) -> bool:
    return "normaliz" in type(module).__name__.lower()


def _verdict(inspection: Inspection, cells: Sequence[CellTrials]) -> Verdict:
    """reconstructed: an image was, by the rule of audits or, without the truth, by the attack's own proof.

    labels-read: all labels were. Otherwise cannot-conclude.
    """
    attacks = [cell for cell in cells if cell.role == "attack"]
    valid = [cell for cell in attacks if cell.valid]
    best = min(valid or attacks, key=_rank)
    proven = _proven(cells)
    word: Word = "cannot-conclude"
    if not valid:
        because = f"no trial is valid: {listed(f'{cell.attack}: {faults(cell)}' for cell in attacks)}."
    elif inspection.truth is None and proven:
        best, word, because = proven[0], "reconstructed", _certified(proven[0])
    elif inspection.truth is None:
        because = _unscored(best)
    else:
        best = max(valid, key=lambda cell: (len(cell.reconstructed), cell.values("ssim").get(cell.trials[0].id, -1.0)))
        word, because = _scored(inspection, best, valid)
    return Verdict(
        defense=CAPTURED,
        threat=threat_of(inspection.threat),
        verdict=word,
        because=because,
        worst_attack=best.attack,
        trial_id=best.trials[0].id,
        certified=word == "reconstructed" and best in proven and not _denied(best),
    )


def _proven(cells: Sequence[CellTrials]) -> list[CellTrials]:
    """Those of attacks whose certificate holds."""
    valid = (cell for cell in cells if cell.role == "attack" and cell.valid)
    return [cell for cell in valid if (own := cell.done[0].certificate) is not None and own.holds]


def _denied(cell: CellTrials) -> bool:
    """Whether a true image is another than the one guessed."""
    return any(score is not None and score < DENIED for score in cell.done[0].scores.get("psnr") or ())


def _certified(cell: CellTrials) -> str:
    own = cell.done[0].certificate
    assert own is not None, "only proven cells come here"
    return (
        f"{cell.attack} proves its guess from the update alone ({own.proof}: {own.figure:.4f}, needed {own.needed:g})."
    )


def _unscored(best: CellTrials) -> str:
    start = "without the true images nothing can be scored; look at the pictures."
    fall = _fall(best)
    trial = best.done[0]
    if fall is None:
        search = f"{best.attack} reports no loss."
    elif fall > FALLEN:
        search = "no attack's own loss fell, so its picture shows the initial guess and nothing of the update."
    else:
        search = (
            f"{best.attack}'s matching loss fell from {trial.first_loss:.3g} to {trial.loss:.3g}, {fall:.2g} of its "
            "start: the lower, the better the picture explains the update, which does not prove that it is true."
        )
    read = trial.ledger.labels in LABELS_FOUND
    labels = f" Labels read from the update: {', '.join(map(str, trial.labels or ()))}." if read else ""
    return f"{start} {search}{labels}"


def _scored(inspection: Inspection, best: CellTrials, done: Sequence[CellTrials]) -> tuple[Word, str]:
    if best.reconstructed:
        return "reconstructed", f"{best.attack} reconstructed it: {scores(best)}."
    chance = inspection.captured.seen.num_classes ** -float(inspection.captured.settings.num_examples)
    reader = next((cell for cell in done if cell.done[0].label_accuracy == 1.0), None)
    score = best.done[0].score("ssim")
    scored = "no score is finite" if score is None else f"SSIM {score:.2f} at best, by {best.attack}"
    control = best.control("ssim")
    beside = "" if control is None else f" (without the update {control:.2f})"
    failure = f"{', '.join(cell.attack for cell in done)} did not reconstruct it: {scored}{beside}"
    if reader is not None and chance < UNLIKELY:
        return "labels-read", f"{failure}; but {reader.attack} read all its labels from the update."
    return "cannot-conclude", (
        f"{failure}. One update does not show whether a defense, a weak attack or a wrong setting is the reason: see "
        "the flags, give attacks more iterations, or run `leaktight audit` on a similar federation."
    )


def _rank(cell: CellTrials) -> float:
    fall = _fall(cell)
    return 1.0 if fall is None else fall


def _fall(cell: CellTrials) -> float | None:
    """An attack's last loss as a share of its first; None if it has none."""
    if cell.role != "attack" or not cell.done:
        return None
    first, last = cell.done[0].first_loss, cell.done[0].loss
    return None if first is None or last is None or first <= 0 else last / first
