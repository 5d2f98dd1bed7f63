"""A whole inspection in its folder: the trials, the flags, the verdict and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from leaktight.audits.judge.cells import LEAKED_IF, CellTrials, gather
from leaktight.audits.judge.checks import Evidence, Raised, raise_flags
from leaktight.audits.judge.summary import cell_of
from leaktight.audits.judge.verdict import Panel
from leaktight.audits.run import Watcher, opened, run_missing
from leaktight.inspections.captured import Captured
from leaktight.inspections.checks import check_capture, flag
from leaktight.inspections.dropout import dropouts
from leaktight.inspections.inspection import CAPTURED, Inspection
from leaktight.inspections.verdict import DENIED, conclude, denied, fall_of, proven
from leaktight.models.source import Normalize
from leaktight.report.words import listed
from leaktight.results.folder import RunFolder
from leaktight.results.schema import SCHEMA_VERSION, Cell, Flag, Plain, Summary, Track, common_ledger, metrics_of
from leaktight.runtime.executor import Executor

WELL_FALLEN = 0.1
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
    shared |= {"no-adaptive-attacker"} if inspection.defense is not None else set()
    helpless: dict[tuple[Track, str], str] = {}
    if inspection.helpless is not None:
        helpless["diagnostic", CAPTURED] = inspection.helpless
    raised = [each for each in raise_flags(Evidence(panel, None, helpless)) if each.check.code in shared]
    summary = Summary(
        schema_version=SCHEMA_VERSION,
        run=str(folder.path),
        command=command,
        scenario=dict(scenario),
        cells=tuple(_cell(cell, panel, raised, scored=scored) for cell in cells),
        metrics=metrics_of(trials),
        leaked_if=LEAKED_IF,
        verdicts=(conclude(inspection, panel),),
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
    examined = inspection.examined
    found = check_capture(inspection.captured, None if examined is None else examined.dropout)
    if inspection.truth is None:
        found.append(
            flag(
                "no-truth",
                "the true images are not known",
                "nothing was scored; give --truth, or judge by a certificate or by eye",
                "no score, no control",
            )
        )
    if examined is not None and examined.flag is not None:
        found.append(examined.flag)
    sure = proven(cells)
    if wrong := [cell.attack for cell in sure if denied(cell)]:
        found.append(
            flag(
                "truth-contradicts-proof",
                f"an attack proves its guess from the update alone, but a true image is below {DENIED:g} dB",
                "these are probably not the client's images, or not as the client used them: check --truth",
                f"proven by {listed(wrong)}",
            )
        )
    falls = [fall for cell in cells if (fall := fall_of(cell)) is not None]
    right = examined is not None and examined.flag is None
    if falls and min(falls) > WELL_FALLEN and not (sure or right or _normalises(inspection.captured)):
        found.append(
            flag(
                "normalisation-unstated",
                "no attack's loss fell to a tenth of its start, and the normalisation of the inputs is not stated",
                _why_not_fallen(inspection.captured),
                f"the best fell to {min(falls):.2g} of its start",
            )
        )
    return found


def _why_not_fallen(captured: Captured) -> str:
    stated = "if images were normalised outside of the network, give --mean and --std; check --mode, too"
    random = captured.settings.mode == "train" and dropouts(captured.bare)
    return f"dropout alone makes that happen; else {stated}" if random else stated


def _normalises(captured: Captured) -> bool:
    inside = (isinstance(each, Normalize) or _named_so(each) for each in captured.bare.modules())
    return bool(captured.settings.mean) or any(inside)


def _named_so(module: nn.Module) -> bool:
    return "normaliz" in type(module).__name__.lower()
