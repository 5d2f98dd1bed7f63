"""Attacks on a captured update, one trial each, as a worker process runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leaktight.attacks.generative.ggl import Ggl
from leaktight.attacks.generative.gias import Gias
from leaktight.audits.blind import LabelDraws, blind_labels
from leaktight.audits.decoys import DecoyPool, identify
from leaktight.audits.experiment import Chances
from leaktight.audits.plan import LABELS_FOUND, AttackEntry, Entry
from leaktight.audits.requirements import with_labels
from leaktight.audits.trial import (
    Attempted,
    Finished,
    Judged,
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
from leaktight.core.protocols import Defense
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.types import Batch, Examples, Observation, Reconstruction
from leaktight.inspections.captured import Captured
from leaktight.inspections.copies import copies_of
from leaktight.inspections.dropout import with_masks
from leaktight.inspections.files import TrueExamples
from leaktight.inspections.truth import Examined, examine, label_read
from leaktight.metrics import BuiltMetrics, Resources, build_metrics, label_accuracy
from leaktight.models.surgery import has_batch_norm, mode_of, working_bytes
from leaktight.results.schema import SCHEMA_VERSION, Ledger, Pictures, TrialHead, TrialOutcome
from leaktight.runtime.executor import Tell
from leaktight.runtime.memory import processes_on

CAPTURED = "captured update"
METRICS = ("psnr", "mse", "ssim", "lpips_alex")


@dataclass(frozen=True)
class Inspection:
    """The attacks on a captured update; the work of a worker process: trial ids in, trials out.

    truth: for scoring only. decoys: images like the true ones, for the judge. assumed: assumptions about what the user
    did not state, in words. source: the file's name. defense: what the client is known to have done to the update;
    helpless: why no attack is adapted to it. device: where attacks and the networks of metrics run.
    """

    captured: Captured
    attacks: Sequence[AttackEntry]
    truth: TrueExamples | None
    assumed: Sequence[str]
    source: str
    seed: int
    data_root: Path
    decoys: TrueExamples | None = None
    defense: Entry[Defense] | None = None
    helpless: str | None = None
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
        return {
            f"captured.{slug(entry.name)}{'.adaptive' if entry.adaptive else ''}.t000.r000": entry
            for entry in self.attacks
        }

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

    @cached_property
    def batch(self) -> Batch | None:
        """The true examples with their labels; that of a single one is read from the update if it is not given."""
        if self.truth is None:
            return None
        labels = label_read(self.captured.seen) if self.true_labels is None else self.true_labels
        return None if labels is None else Batch(self.truth.images, labels)

    @cached_property
    def examined(self) -> Examined | None:
        """What the true examples have to do with the update; None if that cannot be told."""
        if self.batch is None:
            return None
        return examine(self.captured, self.batch, defended=self.defense is not None)

    @property
    def verified(self) -> bool:
        """Whether the update itself shows that the true images are behind it."""
        return self.examined is not None and self.examined.verified

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
            defense_settings={} if self.defense is None else dict(self.defense.settings),
            adaptive=entry.adaptive,
            searches=entry.value.searches,
            trial=0,
            round=0,
            client=self.source,
            seed=self.seed,
            threat=threat_of(entry.threat(self.threat) if entry.role == "attack" else self.threat),
            model_accuracy=None,
        )

    def guess(self, name: str) -> Reconstruction:
        """What the attack of the trial with this id makes of the update."""
        entry = self.by_id[name]
        rng = Rng(self.seed).child("inspect", entry.name).detached()
        return reconstructed(entry.value, [[self.shown(entry)]], rng=rng, device=self.device)

    def _run(self, name: str) -> Attempted:
        entry, found = self.by_id[name], self.guess(name)
        labels = self.true_labels
        judged = oracle = None
        if self.truth is not None:
            truth = Batch(self.truth.images, found.guess.targets if labels is None else labels)
            judged = judge(found.guess, truth, self.metrics, self.device)
            oracle = oracle_of(found, truth, judged, self.metrics, self.device)
        ledger = self._ledger(entry, found)
        true_path, guess_path = picture_paths(name)
        height, width = found.guess.inputs.shape[-2:]
        outcome = TrialOutcome(
            ledger=ledger,
            guesses=len(found.guess),
            scores=judged.scores if judged else dict.fromkeys(METRICS),
            metrics=judged.notes if judged else {},
            labels=tuple(found.guess.targets.tolist()),
            loss=found.loss,
            first_loss=found.first_loss if entry.value.searches else None,
            images=Pictures(
                truth=true_path if judged else None,
                guess=guess_path,
                size=judged.size if judged else (height, width),
                count=judged.count if judged else len(found.guess.inputs),
            ),
            certificate=proof_of(found),
            chosen=found.notes.get("chosen"),
            backend=found.notes.get("backend"),
            oracle=oracle,
            **(self._against_chance(entry, judged, found) if judged else Chances()),
        )
        if judged is None:
            return outcome, {guess_path: strip(found.guess.inputs)}
        return outcome, {true_path: judged.truth, guess_path: judged.guess}

    def _against_chance(self, entry: AttackEntry, judged: Judged, found: Reconstruction) -> Chances:
        """What a guess has of the true images, beyond what a guess without the update would have.

        Labels count as read if a guess that draws each class equally often would hardly have them.
        """
        chances = Chances()
        if entry.role == "control" or self.truth is None:
            return chances
        if (decoys := self._others(entry, self.truth)) is not None:
            chances["rank"], chances["decoy_scores"] = identify(judged.scored.inputs, self.truth.images, decoys)
        labels = judged.scored.targets if entry.value.labels_from in LABELS_FOUND else found.labels
        if labels is not None and self.true_labels is not None:
            labels, seen = labels[: len(self.truth)], self.captured.seen
            draws = LabelDraws.of([torch.arange(seen.num_classes).repeat(len(self.truth) * 10)])
            blind = blind_labels(labels, self.true_labels, [len(self.truth)], draws, self._stream("labels"))
            chances["label_accuracy"] = label_accuracy(labels, self.true_labels)
            chances["label_chance"], chances["blind_labels"] = blind
        return chances

    def _others(self, entry: AttackEntry, truth: TrueExamples) -> Examples | None:
        """What guesses are compared with: the decoys; without them copies of the true images, if these are verified.

        A guess that was made with images from elsewhere has their arrangement, so it needs decoys.
        """
        if self._pool is not None:
            true = self.batch or Batch(truth.images, torch.zeros(len(truth), dtype=torch.long))
            return self._pool.draw(true, true.inputs, self._stream("decoys"))
        foreign = isinstance(entry.value, Ggl | Gias) or Knowledge.PUBLIC_DATA in entry.value.requires
        return _stored(torch.cat(copies_of(truth.images)), None) if self.verified and not foreign else None

    @property
    def classed(self) -> bool:
        """Whether decoys are of the classes of the true images, as far as labels show."""
        return self.decoys is not None and self.decoys.labels is not None and self.batch is not None

    @cached_property
    def _pool(self) -> DecoyPool | None:
        """Decoys of the same class, as far as classes are known."""
        if self.decoys is None:
            return None
        labels = self.decoys.labels if self.classed else None
        return DecoyPool(_stored(self.decoys.images, labels), self.classed)

    def _stream(self, purpose: str) -> np.random.Generator:
        """The judge's own draws, which no attack sees."""
        return np.random.default_rng(Rng(self.seed).child("judge", purpose).entropy(8))

    @cached_property
    def _read(self) -> Observation:
        """The observation, with the masks of dropout that its update shows."""
        masked = with_masks(self.captured.seen) if self.captured.settings.mode == "train" else None
        return self.captured.seen if masked is None else masked

    def shown(self, entry: AttackEntry) -> Observation:
        """What an attack is given: no labels if it finds them by itself; a control gets no update."""
        seen = replace(self._read, defense=self.defense.value if self.defense and entry.adaptive else None)
        if entry.role == "control":
            return without_update(seen)
        seen = replace(seen, labels=None) if entry.labels_from in LABELS_FOUND else seen
        return with_labels(entry, seen, rng=Rng(self.seed).child("inspect", entry.name).detached())

    def _ledger(self, entry: AttackEntry, found: Reconstruction) -> Ledger:
        captured, local = self.captured, self.captured.seen.local_training
        steps, count = captured.num_steps, captured.settings.num_examples
        return Ledger(
            labels=entry.labels_from,
            batch_size=count if local is None or captured.seen.update.kind == "gradient" else local.batch_size,
            num_examples=count,
            local_steps="unknown" if steps is None else steps,
            learning_rate="unknown" if local is None else local.learning_rate,
            mode=captured.settings.mode,
            batch_norm=has_batch_norm(captured.bare),
            buffers_known=captured.seen.update.buffers is not None,
            init="captured",
            stage="captured",
            defense_known=entry.adaptive,
            assumed=(*self.assumed, *(str(note) for note in found.notes.get("assumed", ()))),
        )


def _stored(images: Tensor, labels: Tensor | None) -> Examples:
    """Images in [0, 1] as examples; of one class if they have no labels."""
    targets = torch.zeros(len(images), dtype=torch.long) if labels is None else labels
    return Examples((255 * images).round().to(torch.uint8), targets)
