"""What attacks need to know, compared with what the threat model discloses, before anything runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from leaktight.attacks.labels.rules import Inferred
from leaktight.audits.plan import AttackEntry, Experiment
from leaktight.core.errors import UsageError
from leaktight.core.protocols import ActiveAttack
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge
from leaktight.core.threat_presets import FACTS
from leaktight.core.types import Observation


def check_requirements(experiment: Experiment) -> None:
    """Raise UsageError if an attack needs a fact or a server that the threat model does not give it."""
    sent = {Knowledge.BATCH_SIZE} if "num_examples" in experiment.federation.setup.aggregator.needs else set()
    table = "production.threat" if experiment.track == "production" else "threat"
    for entry in experiment.attacks:
        threat = entry.threat(experiment.threat)
        if isinstance(entry.value, ActiveAttack) and experiment.threat.server != "malicious":
            raise UsageError(
                f"{entry.name} changes the model that the server sends, which the threat model does not allow; set in "
                f'[{table}]: server = "malicious"'
            )
        missing = entry.value.requires - threat.knows - sent - ({Knowledge.LABELS} if entry.reads_labels else set())
        if missing:
            raise UsageError(_lacking(entry, missing, experiment.threat.knows, table))


def _lacking(entry: AttackEntry, missing: Collection[Knowledge], known: Collection[Knowledge], table: str) -> str:
    facts = sorted(fact.value for fact in missing)
    knows = ", ".join(f'"{name}"' for name in sorted({*facts, *(fact.value for fact in known)}))
    inferred = ', or infer them: set in [[attack]] of it: labels = {kind = "inferred"}'
    return (
        f"{entry.name} needs {' and '.join(FACTS[fact] for fact in facts)}, which the threat model does not disclose; "
        f"set in [{table}]: knows = [{knows}]{inferred if facts == ['labels'] else ''}"
    )


def with_labels(entry: AttackEntry, seen: Observation, *, rng: Rng) -> Observation:
    """What an attack is given: with labels that a rule reads from the update, if it needs them and is not told."""
    if not entry.reads_labels:
        return seen
    labels = Inferred().infer(seen, seen.batch_size or 1, rng=rng.child("labels"))
    return replace(seen, labels=labels)
