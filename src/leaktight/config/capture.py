"""What a user states about a captured update, as results record it and as readers see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from leaktight.config.tables import Table
from leaktight.config.toml import settings_of, table_of
from leaktight.core.devices import CPU
from leaktight.core.tensors import digest
from leaktight.core.text import as_written
from leaktight.core.training import LocalTraining
from leaktight.core.types import Mode
from leaktight.inspections.captured import Captured, ChangeKind
from leaktight.inspections.checks import looks_of
from leaktight.inspections.files import TensorFile, Tensors
from leaktight.inspections.inspection import Inspection
from leaktight.report.words import counted


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """What a user states about a captured update; None for what is not stated.

    model: a network or a kind. before: the model that the client received. Other fields: see `api.inspect.Capture`.
    """

    model: str | nn.Module
    before: Tensors
    shape: Sequence[int]
    after: Tensors | None = None
    update: Tensors | None = None
    kind: Literal["delta", "gradient"] | None = None
    classes: int | None = None
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    mode: Mode | None = None
    batch_size: int | None = None
    labels: Sequence[int] | None = None
    local: LocalTraining | Table = field(default_factory=dict)
    attacks: object = ()
    truth: Tensor | Path | str | None = None
    decoys: Tensor | Path | str | None = None
    defenses: object = ()
    settings: Sequence[str] = ()
    device: str = "cpu"

    @property
    def model_name(self) -> str:
        return self.model if isinstance(self.model, str) else type(self.model).__name__


def record_of(
    request: CaptureRequest, inspection: Inspection, before: TensorFile, change: TensorFile, kind: ChangeKind
) -> dict[str, Any]:
    """All that the results depend on; a run is resumed only if this is the same."""
    settings = inspection.captured.settings
    truth = inspection.truth
    asked = {
        "before": str(before.path),
        "before_sha256": before.digest,
        "change": str(change.path),
        "change_sha256": change.digest,
        "change_is": kind,
        "shape": list(settings.inputs.shape),
        "classes": inspection.captured.seen.num_classes,
        "mean": list(settings.mean),
        "std": list(settings.std),
        "mode": settings.mode,
        "batch_size": settings.num_examples,
        **({} if settings.labels is None else {"labels": list(settings.labels)}),
        **({} if truth is None else {"truth": _place(request.truth), "truth_digest": digest({"images": truth.images})}),
        **_decoys_record(request, inspection),
    }
    return {
        "seed": inspection.seed,
        **({} if inspection.device == CPU else {"device": str(inspection.device)}),
        "inspect": asked,
        "model": table_of(settings.model),
        **({} if settings.local is None else {"local": table_of(settings.local)}),
        **({} if inspection.defense is None else {"defense": table_of(inspection.defense.value)}),
        "attack": [table_of(entry.value) for entry in inspection.attacks if not entry.adaptive],
    }


def _decoys_record(request: CaptureRequest, inspection: Inspection) -> dict[str, str]:
    decoys = inspection.decoys
    return (
        {}
        if decoys is None
        else {
            "decoys": _place(request.decoys),
            "decoys_digest": digest({"images": decoys.images}),
        }
    )


def facts_of(
    request: CaptureRequest, inspection: Inspection, before: TensorFile, change: TensorFile, kind: ChangeKind
) -> dict[str, Any]:
    captured, settings = inspection.captured, inspection.captured.settings
    seen = captured.seen
    looks = looks_of(seen.update.tensors)
    files = f"{change.path.name} minus {before.path.name}" if kind == "after" else f"{kind} {change.path.name}"
    parameters = sum(tensor.numel() for tensor in seen.broadcast.params.values())
    inputs = (
        f"inputs normalised by {as_written(settings.mean)} and {as_written(settings.std)}"
        if settings.mean
        else "inputs in [0, 1]"
    )
    options = [f"{key} {value}" for key, value in settings_of(settings.model).items() if value not in ([], "")]
    own = f" ({', '.join(options)})" if options else ""
    types = ", ".join(str(each).removeprefix("torch.") for each in captured.stored)
    return {
        "data": f"{files}: {counted(settings.num_examples, 'example')} of "
        f"{' x '.join(map(str, settings.inputs.shape))}, {seen.num_classes} classes",
        "model": f"{request.model_name}{own}, {parameters} parameters, {settings.mode} mode, {inputs}",
        "update": f"norm {looks.norm:.4g}, {100 * looks.zeros:.1f} % exact zeros, {types}, "
        f"{len(seen.update.tensors)} of {len(seen.broadcast.params)} tensors",
        "local": _local_words(captured),
        "labels": "given" if settings.labels is not None else "not given",
        "truth": "not given" if request.truth is None else _place(request.truth),
        **_further_facts(request, inspection),
        **({} if inspection.device == CPU else {"device": str(inspection.device)}),
    }


def _further_facts(request: CaptureRequest, inspection: Inspection) -> dict[str, str]:
    """Decoys and defense, if they are stated."""
    facts = {}
    if inspection.decoys is not None:
        classes = "of the same class" if inspection.classed else "taken to be of the same class"
        facts["decoys"] = f"{counted(len(inspection.decoys), 'image')} of {_place(request.decoys)}, {classes}"
    if inspection.defense is not None:
        facts["defense"] = f"{inspection.defense.name}, known to the attacker"
        if inspection.helpless is not None:
            facts["defense"] += f", which does not help: {inspection.helpless}"
    return facts


def _place(truth: Tensor | Path | str | None) -> str:
    return "given" if isinstance(truth, Tensor) else str(truth)


def _local_words(captured: Captured) -> str:
    local = captured.seen.local_training
    if captured.seen.update.kind == "gradient":
        return "none: the gradient of one batch"
    if local is None:
        return "unknown; treated as one step on one batch"
    return (
        f"{counted(local.num_steps(captured.settings.num_examples), 'step')} of {local.optimizer} on "
        f"{local.batch_size} at learning rate {local.learning_rate:g}"
    )
