"""What audits and inspections share of one trial: running it so that an error is recorded, scoring it, its ledger."""

from __future__ import annotations

import hashlib
import io
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from PIL import Image
from torch import Tensor, nn

from leaktight.audits.plan import GIVEN, RANDOM_INITS, Experiment, TrialSpec
from leaktight.core.devices import CPU, moved, placed
from leaktight.core.errors import LeaktightError, MachineError, ModelError
from leaktight.core.faults import raise_fault
from leaktight.core.inputs import Images
from leaktight.core.rng import Rng, global_seed
from leaktight.core.text import printable
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.types import Batch, Observation, Params, Reconstruction, RoundTrace, Update
from leaktight.metrics import BuiltMetrics, align, label_accuracy, match
from leaktight.metrics.spec import Extract
from leaktight.models.surgery import final_linear, has_batch_norm, mode_of, representation
from leaktight.report.words import counted
from leaktight.results.schema import Ledger, MetricNote, Oracle, Proof, Threat, Trial, TrialHead, TrialOutcome, mean

Attempted: TypeAlias = tuple[TrialOutcome, Mapping[str, bytes]]
"""The outcome of a trial, and its pictures by their paths in the run's folder."""

_DEFAULTS = {name: value for name, value in TrialOutcome() if name not in ("labels", "metrics", "certificate")}
"""Fields that are written for every trial, failed ones included."""

_LONGEST = 1000
"""Characters of a message of a method in results."""


class Finished(NamedTuple):
    """A trial, and its pictures by their paths in the run's folder."""

    trial: Trial
    pictures: Mapping[str, bytes]


@dataclass(frozen=True)
class Judged:
    """scores: by metric, one number per true example; None for a metric that cannot be computed here.

    notes: which way each metric leaks. guesses: the number that was handed in. scored: those that were judged, one for
    each example or fewer. aligned: one guess for each example, in their order. originals: the examples.
    """

    scores: dict[str, tuple[float | None, ...] | None]
    notes: dict[str, MetricNote]
    label_accuracy: float
    guesses: int
    scored: Batch
    aligned: Tensor
    originals: Tensor

    @property
    def truth(self) -> bytes:
        """A PNG strip of the `count` examples side by side, each of `size`."""
        return strip(self.originals)

    @property
    def guess(self) -> bytes:
        """The same of the guesses."""
        return strip(self.aligned)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of one image."""
        height, width = self.originals.shape[-2:]
        return height, width

    @property
    def count(self) -> int:
        return len(self.originals)


def attempt(head: TrialHead, run: Callable[[], Attempted]) -> Finished:
    """Run a trial. An error makes it a failed trial, with the message, so that the other trials still run.

    A fault of the machine says nothing of the attack, and is raised.
    The trial is returned as it reads from the run's file, so that a resumed run summarises the same values.
    """
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        outcome, pictures = _outcome(head, run)
    messages = sorted({printable(_first(each.message), _LONGEST) for each in warned if each.category is UserWarning})
    fields = {**_DEFAULTS, **head.facts(), **outcome.facts(), "seconds": time.perf_counter() - began}
    written = Trial.model_validate({**fields, "warnings": messages}).model_dump_json(exclude_unset=True)
    return Finished(Trial.model_validate_json(written), pictures)


def _outcome(head: TrialHead, run: Callable[[], Attempted]) -> Attempted:
    try:
        return run()
    except (Exception, SystemExit) as error:  # a defect in one attack must not end the others' trials
        try:
            raise_fault(error)
        except MachineError as fault:
            raise MachineError(f"trial {head.id}: {fault}; if that happens again, leave its attack out") from error
        return TrialOutcome(status="failed", error=reason_of(error)), {}


def reason_of(error: BaseException) -> str:
    """An error of a method in one line, for results."""
    if isinstance(error, LeaktightError):
        return printable(" ".join(str(error).split()), _LONGEST)
    return printable(f"{type(error).__name__}: {_first(error)}", _LONGEST)


def _first(message: object) -> str:
    return (str(message) or "no message").splitlines()[0]


def judge(guess: Batch, truth: Batch, metrics: BuiltMetrics, device: torch.device = CPU) -> Judged:
    """Match guesses to true examples once, then score them.

    Guesses beyond the number of examples are cut first, in the attack's own order. A guess with an infinite pixel has
    no score, like one with a NaN. device: where the networks of metrics run.
    """
    guesses = len(guess)
    shown = guess.inputs[: len(truth)].nan_to_num(*[torch.nan] * 3)
    guess = Batch(shown, guess.targets[: len(truth)])
    aligned = align(guess.inputs, truth.inputs, match(guess.inputs, truth.inputs))
    pair = placed((aligned, truth.inputs), device)
    scores: dict[str, tuple[float | None, ...] | None] = {
        name: tuple(metric(*pair).tolist()) for name, metric in metrics.metrics.items()
    }
    return Judged(
        scores=scores | dict.fromkeys(metrics.unavailable),
        notes={name: MetricNote(leaks_when=metric.leaks_when) for name, metric in metrics.metrics.items()},
        label_accuracy=label_accuracy(guess.targets, truth.targets),
        guesses=guesses,
        scored=guess,
        aligned=aligned,
        originals=truth.inputs,
    )


def oracle_of(
    found: Reconstruction, truth: Batch, chosen: Judged, metrics: BuiltMetrics, device: torch.device = CPU
) -> Oracle | None:
    """The best guess of an ensemble by its mean PSNR; None if the attack is none."""
    if "chosen" not in found.notes:
        return None
    guesses = {name: judge(guess, truth, metrics, device) for name, guess in found.others.items()}
    means = {
        name: {metric: mean(scores or ()) for metric, scores in each.scores.items()}
        for name, each in {str(found.notes["chosen"]): chosen, **guesses}.items()
    }
    best = max(means, key=lambda name: _number(means[name].get("psnr")))
    return Oracle(attack=best, scores=means[best])


def _number(score: float | None) -> float:
    return -math.inf if score is None or math.isnan(score) else score


def proof_of(found: Reconstruction) -> Proof | None:
    """The certificate of a guess as results hold it."""
    own = found.certificate
    return None if own is None else Proof(proof=own.proof, figure=own.figure, needed=own.needed, holds=own.holds)


def best_of(judged: Sequence[Judged]) -> Judged:
    """Several guesses for one victim as one: for each example the best score of all, and the picture of best PSNR."""
    first = judged[0]
    if len(judged) == 1:
        return first
    pick = {name: max if note.leaks_when == "high" else min for name, note in first.notes.items()}
    scores = {
        name: scores
        and tuple(_best(pick[name], each) for each in zip(*(one.scores[name] or () for one in judged), strict=True))
        for name, scores in first.scores.items()
    }
    psnr = [each.scores.get("psnr") or (None,) * first.count for each in judged]
    closest = [max(range(len(judged)), key=lambda draw: _number(psnr[draw][index])) for index in range(first.count)]
    aligned = torch.stack([judged[draw].aligned[index] for index, draw in enumerate(closest)])
    return replace(first, scores=scores, aligned=aligned)


def _best(pick: Callable[[list[float]], float], scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None and math.isfinite(score)]
    return pick(known) if known else None


def digest_of(examples: Batch) -> str:
    """16 hexadecimal digits that depend on the examples and their labels, and not on their order."""
    rows = zip(examples.inputs.numpy(), examples.targets.numpy(), strict=True)
    return hashlib.sha256(b"".join(sorted(image.tobytes() + label.tobytes() for image, label in rows))).hexdigest()[:16]


def extractor(model: nn.Module, params: Params, buffers: Params) -> Extract | None:
    """Maps images to the input of the network's final linear layer, in evaluation mode; None if it has none."""
    try:
        final_linear(model)
    except ModelError:
        return None

    def extract(images: Tensor) -> Tensor:
        network, weights, statistics = moved((model, params, buffers), images.device)
        with torch.no_grad(), mode_of(network, "eval"), global_seed(Rng(0).child("features")):
            return representation(network, weights, statistics, images)

    return extract


def without_update(seen: Observation) -> Observation:
    """What a control sees: all but what the client sent. The tensors of the update are zero."""
    nothing = {name: torch.zeros_like(tensor) for name, tensor in seen.broadcast.params.items()}
    return replace(seen, update=Update(nothing, seen.update.kind))


def strip(images: Tensor) -> bytes:
    """Images (N, C, H, W) in [0, 1] as one PNG, side by side; pixels that are not finite are black."""
    data = io.BytesIO()
    Image.fromarray(Images.picture(images).numpy()).save(data, format="PNG", optimize=True)
    return data.getvalue()


def picture_paths(trial_id: str) -> tuple[str, str]:
    """The paths in a run's folder of the PNG strips of the originals and of the guesses."""
    return f"images/{trial_id}-truth.png", f"images/{trial_id}-guess.png"


def threat_of(threat: ThreatModel) -> Threat:
    """A threat model as result files hold it."""
    return Threat(server=threat.server, sees=threat.sees, knows=tuple(sorted(fact.value for fact in threat.knows)))


def ledger_of(
    experiment: Experiment,
    spec: TrialSpec,
    trace: RoundTrace,
    victim: str,
    threat: ThreatModel,
    found: Reconstruction,
    given: Sequence[Sequence[Observation]],
) -> Ledger:
    """The conditions of a trial's scores. given: the observations that the attack had, one list for each guess."""
    truth = trace.clients[victim].truth
    return Ledger(
        labels=spec.attack.labels_from,
        batch_size=max(len(step) for step in truth.steps),
        num_examples=len(truth.examples),
        local_steps=len(truth.steps),
        learning_rate=trace.local.learning_rate,
        mode=trace.mode,
        batch_norm=has_batch_norm(trace.model),
        buffers_known=Knowledge.BUFFERS in threat.knows,
        init=experiment.init if experiment.init in (*RANDOM_INITS, GIVEN) else f"file {Path(experiment.init).name}",
        stage=stage_of(experiment.init, given[0][0].broadcast.round),
        defense_known=Knowledge.DEFENSE in threat.knows,
        assumed=tuple(str(note) for note in found.notes.get("assumed", ())),
        server=threat.server,
        queries=sum(len(seen) for seen in given),
    )


def stage_of(init: str, round_index: int) -> str:
    """The training stage of the attacked model.

    >>> stage_of("wide", 0), stage_of("wide", 1), stage_of("w.pt", 0), stage_of("given", 20)
    ('untrained', 'after 1 round', 'weights of a file', 'given weights, after 20 rounds')
    """
    rounds = f"after {counted(round_index, 'round')}" if round_index else ""
    if init in RANDOM_INITS:
        return rounds or "untrained"
    weights = "given weights" if init == GIVEN else "weights of a file"
    return f"{weights}, {rounds}" if rounds else weights
