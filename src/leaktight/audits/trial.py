"""What audits and inspections share of one trial: running it so that an error is recorded, scoring it, its ledger."""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from PIL import Image
from torch import Tensor

from leaktight.audits.plan import GIVEN, RANDOM_INITS, Experiment, TrialSpec
from leaktight.core.errors import LeaktightError
from leaktight.core.inputs import Images
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.types import Batch, Observation, Reconstruction, RoundTrace
from leaktight.metrics import BuiltMetrics, align, label_accuracy, match
from leaktight.models.surgery import has_batch_norm
from leaktight.report.words import counted
from leaktight.results.schema import Ledger, MetricNote, Threat, Trial, TrialHead, TrialOutcome

LABELS_FOUND = ("inferred", "searched")
"""Values of `Attack.labels_from` for which labels are scored: the attack was not given them."""

Attempted: TypeAlias = tuple[TrialOutcome, Mapping[str, bytes]]
"""The outcome of a trial, and its pictures by their paths in the run's folder."""

_DEFAULTS = {name: value for name, value in TrialOutcome() if name not in ("labels", "metrics")}
"""Fields that are written for every trial, failed ones included."""


class Finished(NamedTuple):
    """A trial, and its pictures by their paths in the run's folder."""

    trial: Trial
    pictures: Mapping[str, bytes]


@dataclass(frozen=True)
class Judged:
    """scores: by metric, one number per true example; None for a metric that cannot be computed here.

    notes: which way each metric leaks. truth, guess: PNG strips of `count` images side by side, each of `size` (height,
    width).
    """

    scores: dict[str, tuple[float | None, ...] | None]
    notes: dict[str, MetricNote]
    label_accuracy: float
    truth: bytes
    guess: bytes
    size: tuple[int, int]
    count: int


def attempt(head: TrialHead, run: Callable[[], Attempted]) -> Finished:
    """Run a trial. An error makes it a failed trial, with the message, so that the other trials still run.

    The trial is returned as it reads from the run's file, so that a resumed run summarises the same values.
    """
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        outcome, pictures = _outcome(run)
    messages = sorted({str(each.message).splitlines()[0] for each in warned if each.category is UserWarning})
    fields = {**_DEFAULTS, **head.facts(), **outcome.facts(), "seconds": time.perf_counter() - began}
    written = Trial.model_validate({**fields, "warnings": messages}).model_dump_json(exclude_unset=True)
    return Finished(Trial.model_validate_json(written), pictures)


def _outcome(run: Callable[[], Attempted]) -> Attempted:
    try:
        return run()
    except LeaktightError as error:
        return TrialOutcome(status="failed", error=" ".join(str(error).split())), {}
    except Exception as error:  # a defect in one attack must not end the others' trials
        first = (str(error) or "no message").splitlines()[0]
        return TrialOutcome(status="failed", error=f"{type(error).__name__}: {first}"), {}


def judge(guess: Batch, truth: Batch, metrics: BuiltMetrics) -> Judged:
    """Match guesses to true examples once, then score them. No other function sees both."""
    aligned = align(guess.inputs, truth.inputs, match(guess.inputs, truth.inputs))
    scores: dict[str, tuple[float | None, ...] | None] = {
        name: tuple(metric(aligned, truth.inputs).tolist()) for name, metric in metrics.metrics.items()
    }
    height, width = truth.inputs.shape[-2:]
    return Judged(
        scores=scores | dict.fromkeys(metrics.unavailable),
        notes={name: MetricNote(leaks_when=metric.leaks_when) for name, metric in metrics.metrics.items()},
        label_accuracy=label_accuracy(guess.targets, truth.targets),
        truth=strip(truth.inputs),
        guess=strip(aligned),
        size=(height, width),
        count=len(truth),
    )


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
        labels=spec.attack.value.labels_from,
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
