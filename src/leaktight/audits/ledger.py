"""What stands behind a score: the facts without which two numbers cannot be compared."""

from __future__ import annotations

from pathlib import Path

from leaktight.audits.plan import GIVEN, RANDOM_INITS, Experiment, TrialSpec
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.types import Reconstruction, RoundTrace
from leaktight.models.surgery import has_batch_norm
from leaktight.results.schema import Ledger, Threat

LABELS_FOUND = ("inferred", "searched")
"""How an attack comes by labels that nobody gave it; only then they are scored."""


def threat_of(threat: ThreatModel) -> Threat:
    """A threat model as results have it."""
    return Threat(server=threat.server, sees=threat.sees, knows=tuple(sorted(fact.value for fact in threat.knows)))


def ledger_of(
    experiment: Experiment,
    spec: TrialSpec,
    trace: RoundTrace,
    victim: str,
    threat: ThreatModel,
    found: Reconstruction,
    *,
    queries: int,
) -> Ledger:
    """queries: in how many rounds the attacker asked the victim for an update."""
    truth = trace.clients[victim].truth
    return Ledger(
        labels=spec.attack.value.labels_from,
        batch_size=max(len(step) for step in truth.steps),
        num_examples=len(truth.examples),
        local_steps=len(truth.steps),
        learning_rate=trace.local.learning_rate,
        mode=trace.mode,
        batch_norm=has_batch_norm(trace.model),
        buffers_known=Knowledge.BUFFERS in threat.knows,
        init=experiment.init if experiment.init in (*RANDOM_INITS, GIVEN) else f"file {Path(experiment.init).name}",
        stage=stage_of(experiment.init, spec.round),
        defense_known=Knowledge.DEFENSE in threat.knows,
        assumed=tuple(str(note) for note in found.notes.get("assumed", ())),
        server=threat.server,
        queries=queries,
    )


def stage_of(init: str, round_index: int) -> str:
    """
    >>> stage_of("wide", 0), stage_of("wide", 1), stage_of("w.pt", 0), stage_of("given", 20)
    ('untrained', 'after 1 round', 'weights of a file', 'given weights, after 20 rounds')
    """
    rounds = f"after {round_index} round{'' if round_index == 1 else 's'}" if round_index else ""
    if init in RANDOM_INITS:
        return rounds or "untrained"
    weights = "given weights" if init == GIVEN else "weights of a file"
    return f"{weights}, {rounds}" if rounds else weights
