"""Attacks on a captured update: what a worker process runs, and what it hands back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leaktight.audit.attempt import Attempt, Outcome, attempt
from leaktight.audit.experiment import SCHEMA_VERSION
from leaktight.audit.judge import judge, strip
from leaktight.audit.ledger import labels_of, threat_of
from leaktight.audit.plan import AttackEntry, slug
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.types import Batch, Reconstruction
from leaktight.inspect.captured import Captured
from leaktight.inspect.files import TrueExamples
from leaktight.metrics import BuiltMetrics, Resources, build_metrics
from leaktight.models.surgery import has_batch_norm
from leaktight.runtime.executor import Tell

CAPTURED = "captured update"
METRICS = ("psnr", "mse", "ssim", "lpips_alex")


@dataclass(frozen=True)
class Inspection:
    """What is tried on a captured update; the task of a worker process.

    truth: for the judge alone. assumed: what nobody said and was taken for granted.
    """

    captured: Captured
    attacks: Sequence[AttackEntry]
    truth: TrueExamples | None
    assumed: Sequence[str]
    source: str
    seed: int
    data_root: Path

    @cached_property
    def metrics(self) -> BuiltMetrics:
        return build_metrics(METRICS, Resources(root=self.data_root))

    @cached_property
    def by_id(self) -> dict[str, AttackEntry]:
        return {f"captured.{slug(entry.name)}.t000.r000": entry for entry in self.attacks}

    @property
    def threat(self) -> ThreatModel:
        """Who the user is: whoever captured the update knows what was said about it."""
        seen = self.captured.seen
        facts = {
            Knowledge.BATCH_SIZE: True,
            Knowledge.LABELS: seen.labels is not None,
            Knowledge.LOCAL_TRAINING: seen.local_training is not None,
            Knowledge.BUFFERS: seen.update.buffers is not None,
        }
        return ThreatModel(knows=frozenset(fact for fact, known in facts.items() if known))

    @property
    def true_labels(self) -> Tensor | None:
        """From the file of the truth, or else those disclosed, which are in the order of the images."""
        labels = self.captured.settings.labels
        if self.truth is not None and self.truth.labels is not None:
            return self.truth.labels
        return None if labels is None else torch.tensor(labels)

    def __call__(self, job: str, tell: Tell[object]) -> Attempt:
        """Run the attack of this id: its line for the store, and its pictures."""
        entry = self.by_id[job]
        return attempt(self._head(job, entry), lambda: self._run(entry))

    def _head(self, name: str, entry: AttackEntry) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "id": name,
            "attack": entry.name,
            "attack_settings": dict(entry.settings),
            "role": entry.role,
            "defense": CAPTURED,
            "defense_settings": {},
            "adaptive": False,
            "trial": 0,
            "round": 0,
            "client": self.source,
            "seed": self.seed,
            "status": "done",
            "error": None,
            "threat": threat_of(self.threat),
            "ledger": {},
            "scores": dict.fromkeys(METRICS),
            "label_accuracy": None,
            "labels": None,
            "loss": None,
            "first_loss": None,
            "update_changed": None,
            "model_accuracy": None,
            "images": None,
        }

    def _run(self, entry: AttackEntry) -> Outcome:
        first: list[float] = []
        found = entry.value.reconstruct(
            [self.captured.seen],
            rng=Rng(self.seed).child("inspect", entry.name).detached(),
            progress=lambda iteration, loss, guess: first.append(loss) if not first else None,
        )
        line = {
            "ledger": self._ledger(entry, found),
            "labels": found.guess.targets.tolist(),
            "loss": found.loss,
            "first_loss": first[0] if first else None,
        }
        images = found.guess.inputs
        if self.truth is None:
            picture = {"truth": None, "size": list(images.shape[-2:]), "count": len(images)}
            return {**line, "images": picture}, {"guess": strip(images)}
        labels = self.true_labels
        truth = Batch(self.truth.images, found.guess.targets if labels is None else labels)
        judged = judge(found.guess, truth, self.metrics)
        read = labels is not None and labels_of(entry.value) in ("inferred", "searched")
        scored = {
            "scores": judged.scores,
            "label_accuracy": judged.label_accuracy if read else None,
            "images": {"size": judged.size, "count": judged.count},
        }
        return {**line, **scored}, {"truth": judged.truth, "guess": judged.guess}

    def _ledger(self, entry: AttackEntry, found: Reconstruction) -> dict[str, Any]:
        captured, local = self.captured, self.captured.seen.local_training
        steps, count = captured.num_steps, captured.settings.num_examples
        return {
            "labels": labels_of(entry.value),
            "batch_size": count if local is None or captured.seen.update.kind == "gradient" else local.batch_size,
            "num_examples": count,
            "local_steps": "unknown" if steps is None else steps,
            "learning_rate": "unknown" if local is None else local.learning_rate,
            "mode": captured.settings.mode,
            "batch_norm": has_batch_norm(captured.bare),
            "buffers_known": captured.seen.update.buffers is not None,
            "init": "captured",
            "stage": "captured",
            "defense_known": False,
            "assumed": [*self.assumed, *(str(note) for note in found.notes.get("assumed", ()))],
        }
