"""What stands behind a score: the facts without which two numbers cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leaktight.audit.plan import RANDOM_INITS, Experiment, TrialSpec
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.types import Reconstruction, RoundTrace
from leaktight.models.surgery import has_batch_norm

VARIES = "varies"


def threat_of(threat: ThreatModel) -> dict[str, Any]:
    """A threat model as plain values."""
    return {"server": threat.server, "sees": threat.sees, "knows": sorted(fact.value for fact in threat.knows)}


def ledger_of(
    experiment: Experiment,
    spec: TrialSpec,
    trace: RoundTrace,
    victim: str,
    threat: ThreatModel,
    found: Reconstruction,
    *,
    queries: int,
) -> dict[str, Any]:
    """queries: in how many rounds the attacker asked the victim for an update."""
    truth = trace.clients[victim].truth
    return {
        "labels": spec.attack.value.labels_from,
        "batch_size": max(len(step) for step in truth.steps),
        "num_examples": len(truth.examples),
        "local_steps": len(truth.steps),
        "learning_rate": trace.local.learning_rate,
        "mode": trace.mode,
        "batch_norm": has_batch_norm(trace.model),
        "buffers_known": Knowledge.BUFFERS in threat.knows,
        "init": experiment.init if experiment.init in RANDOM_INITS else f"file {Path(experiment.init).name}",
        "stage": stage_of(experiment.init, spec.round),
        "defense_known": Knowledge.DEFENSE in threat.knows,
        "assumed": [str(note) for note in found.notes.get("assumed", ())],
        "server": threat.server,
        "queries": queries,
    }


def stage_of(init: str, round_index: int) -> str:
    """
    >>> stage_of("wide", 0), stage_of("wide", 1), stage_of("w.pt", 0), stage_of("w.pt", 20)
    ('untrained', 'after 1 round', 'weights of a file', 'weights of a file, after 20 rounds')
    """
    rounds = f"after {round_index} round{'' if round_index == 1 else 's'}" if round_index else ""
    if init in RANDOM_INITS:
        return rounds or "untrained"
    return f"weights of a file, {rounds}" if rounds else "weights of a file"


def common_ledger(ledgers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts that all trials share; "varies" where they do not.

    >>> common_ledger([{"mode": "train", "labels": "given"}, {"mode": "train", "labels": "searched"}])
    {'mode': 'train', 'labels': 'varies'}
    """
    first = ledgers[0] if ledgers else {}
    return {key: value if all(other.get(key) == value for other in ledgers) else VARIES for key, value in first.items()}
