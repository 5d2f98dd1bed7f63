"""Attacks on a captured update, one trial each, as a worker process runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from leaktight.audits.plan import LABELS_FOUND, AttackEntry
from leaktight.audits.trial import (
    Attempted,
    Finished,
    attempt,
    judge,
    oracle_of,
    picture_paths,
    proof_of,
    strip,
    threat_of,
    without_update,
)
from leaktight.audits.watching import reconstructed
from leaktight.core.devices import CPU, moved, working_on
from leaktight.core.files import slug
from leaktight.core.inputs import require_inputs
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.inspections.captured import Captured
from leaktight.inspections.files import TrueExamples
from leaktight.metrics import BuiltMetrics, Resources, build_metrics
from leaktight.models.surgery import has_batch_norm, mode_of, working_bytes
from leaktight.results.schema import SCHEMA_VERSION, Ledger, Pictures, TrialHead, TrialOutcome
from leaktight.runtime.executor import Tell
from leaktight.runtime.memory import processes_on

CAPTURED = "captured update"
METRICS = ("psnr", "mse", "ssim", "lpips_alex")


@dataclass(frozen=True)
class Inspection:
    """The attacks on a captured update; the work of a worker process: trial ids in, trials out.

    truth: for scoring only. assumed: assumptions about what the user did not state, in words. source: the file's name.
    device: where attacks and the networks of metrics run.
    """

    captured: Captured
    attacks: Sequence[AttackEntry]
    truth: TrueExamples | None
    assumed: Sequence[str]
    source: str
    seed: int
    data_root: Path
    device: torch.device = CPU

    def __post_init__(self) -> None:
        for entry in self.attacks:
            require_inputs(entry.name, entry.value.takes, self.captured.seen.inputs)

    @property
    def most_processes(self) -> int | None:
        """How many worker processes the device has memory for; None on the CPU: one for every core."""
        if self.device.type == "cpu":
            return None
        seen = moved(self.captured.seen, self.device)
        params, buffers = seen.broadcast.params, seen.broadcast.buffers
        inputs = seen.inputs.blank(seen.batch_size or 1, next(iter(params.values())))
        with mode_of(seen.model, seen.mode or "train"), working_on(self.device):
            return processes_on(self.device, working_bytes(seen.model, params, buffers, inputs))

    @cached_property
    def metrics(self) -> BuiltMetrics:
        return build_metrics(METRICS, Resources(root=self.data_root))

    @cached_property
    def by_id(self) -> dict[str, AttackEntry]:
        return {f"captured.{slug(entry.name)}.t000.r000": entry for entry in self.attacks}

    @property
    def threat(self) -> ThreatModel:
        """The attacker knows all that was stated about the update."""
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
        """Those of the truth, or else the disclosed labels, which are in the order of the images."""
        labels = self.captured.settings.labels
        if self.truth is not None and self.truth.labels is not None:
            return self.truth.labels
        return None if labels is None else torch.tensor(labels)

    def __call__(self, job: str, tell: Tell[object]) -> Finished:
        """Run the trial with the id `job`."""
        return attempt(self._head(job), lambda: self._run(job))

    def _head(self, name: str) -> TrialHead:
        entry = self.by_id[name]
        return TrialHead(
            schema_version=SCHEMA_VERSION,
            id=name,
            attack=entry.name,
            attack_settings=dict(entry.settings),
            role=entry.role,
            defense=CAPTURED,
            defense_settings={},
            adaptive=False,
            searches=entry.value.searches,
            trial=0,
            round=0,
            client=self.source,
            seed=self.seed,
            threat=threat_of(self.threat),
            model_accuracy=None,
        )

    def _run(self, name: str) -> Attempted:
        entry = self.by_id[name]
        rng = Rng(self.seed).child("inspect", entry.name).detached()
        found = reconstructed(entry.value, [[self._shown(entry)]], rng=rng, device=self.device)
        labels = self.true_labels
        judged = oracle = None
        if self.truth is not None:
            truth = Batch(self.truth.images, found.guess.targets if labels is None else labels)
            judged = judge(found.guess, truth, self.metrics, self.device)
            oracle = oracle_of(found, truth, judged, self.metrics, self.device)
        ledger = self._ledger(entry, found)
        read = judged is not None and labels is not None and ledger.labels in LABELS_FOUND
        true_path, guess_path = picture_paths(name)
        height, width = found.guess.inputs.shape[-2:]
        outcome = TrialOutcome(
            ledger=ledger,
            guesses=len(found.guess),
            scores=judged.scores if judged else dict.fromkeys(METRICS),
            metrics=judged.notes if judged else {},
            label_accuracy=judged.label_accuracy if judged and read else None,
            labels=tuple(found.guess.targets.tolist()),
            loss=found.loss,
            first_loss=found.first_loss,
            images=Pictures(
                truth=true_path if judged else None,
                guess=guess_path,
                size=judged.size if judged else (height, width),
                count=judged.count if judged else len(found.guess.inputs),
            ),
            certificate=proof_of(found),
            chosen=found.notes.get("chosen"),
            oracle=oracle,
        )
        if judged is None:
            return outcome, {guess_path: strip(found.guess.inputs)}
        return outcome, {true_path: judged.truth, guess_path: judged.guess}

    def _shown(self, entry: AttackEntry) -> Observation:
        """What an attack is given: no labels if it finds them by itself; a control gets no update."""
        seen = self.captured.seen
        if entry.role == "control":
            return without_update(seen)
        return replace(seen, labels=None) if entry.value.labels_from in LABELS_FOUND else seen

    def _ledger(self, entry: AttackEntry, found: Reconstruction) -> Ledger:
        captured, local = self.captured, self.captured.seen.local_training
        steps, count = captured.num_steps, captured.settings.num_examples
        return Ledger(
            labels=entry.value.labels_from,
            batch_size=count if local is None or captured.seen.update.kind == "gradient" else local.batch_size,
            num_examples=count,
            local_steps="unknown" if steps is None else steps,
            learning_rate="unknown" if local is None else local.learning_rate,
            mode=captured.settings.mode,
            batch_norm=has_batch_norm(captured.bare),
            buffers_known=captured.seen.update.buffers is not None,
            init="captured",
            stage="captured",
            defense_known=False,
            assumed=(*self.assumed, *(str(note) for note in found.notes.get("assumed", ()))),
        )
