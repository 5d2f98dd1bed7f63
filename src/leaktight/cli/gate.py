"""The option `--fail-on`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leaktight.core.errors import UsageError

if TYPE_CHECKING:
    from leaktight.api.audit import PlannedAudit
    from leaktight.results.schema import Summary

LABELS = "labels"


def chosen_gate(levels: Sequence[str], *, dry_run: bool) -> str | None:
    """The level of `--fail-on`; None without one."""
    if not levels:
        return None
    from leaktight.report.machines.gate import parse_gate

    level = parse_gate(levels)
    if dry_run:
        raise UsageError("expected --fail-on or --dry-run, got both; a plan has no verdict, so leave one out")
    return level


def check_possible(level: str | None, planned: PlannedAudit) -> None:
    """Raise UsageError if no attack of the plan could read labels, and a leak of labels is to fail."""
    if level != LABELS:
        return
    from leaktight.audits.plan import LABELS_FOUND

    attacks = [entry for each in planned.experiments for entry in each.attacks if entry.role == "attack"]
    if not any(entry.labels_from in LABELS_FOUND for entry in attacks):
        names = ", ".join(dict.fromkeys(entry.name for entry in attacks)) or "none"
        raise UsageError(
            f"--fail-on labels: expected an attack that reads labels from the update, got only attacks that are given "
            f"them or need none ({names}); take labels out of threat.knows and let an attack infer them, or use "
            "--fail-on identified"
        )


def check(level: str | None, planned: PlannedAudit, summary: Summary) -> None:
    """Raise an error unless the run passes the gate; see `check_gate`."""
    if level is None:
        return
    from leaktight.report.machines.gate import check_gate
    from leaktight.report.machines.verdicts import Place

    trials = ((each.track, spec) for each in planned.experiments for spec in each.trials)
    places = [Place(track, spec.defense.name) for track, spec in trials if spec.attack.role == "attack"]
    check_gate(summary, level, dict.fromkeys(places))
