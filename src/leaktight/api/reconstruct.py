"""`leaktight.reconstruct`: the images behind one update, in memory. The path is that of `leaktight.inspect`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from leaktight.api.scenario import Method
from leaktight.audits.trial import judge
from leaktight.config.capture import CaptureRequest
from leaktight.config.inspect import prepare
from leaktight.config.tables import Table
from leaktight.core.errors import UsageError
from leaktight.core.inputs import Images
from leaktight.core.protocols import Attack
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Certificate, Mode, Reconstruction
from leaktight.inspections.checks import check_capture
from leaktight.inspections.files import Tensors, read_truth
from leaktight.inspections.inspection import Inspection
from leaktight.report.words import counted
from leaktight.results.schema import Flag
from leaktight.results.schema import mean as mean_of


@dataclass(frozen=True)
class Reconstructed:
    """What an attack guesses from one update.

    images: (N, C, H, W) in [0, 1]. labels: their classes (N,), read from the update unless given. loss: the attack's
    own loss at the end; first_loss: at its start, None for an attack that does not search. certificate: what the attack
    proves about the guess from the update alone, None if nothing. attack: the name of the one that made the guess.
    assumed: what was not stated. flags: reasons for doubt about the update. inspection: what was attacked, and how.
    """

    images: Tensor = field(repr=False)
    labels: Tensor
    loss: float
    first_loss: float | None
    certificate: Certificate | None
    attack: str
    assumed: tuple[str, ...]
    flags: tuple[Flag, ...] = field(repr=False)
    inspection: Inspection = field(repr=False)

    def score(self, truth: Tensor) -> dict[str, float]:
        """The scores of the guess against the true images (N, C, H, W) in [0, 1], by metric: the mean over all of them.

        The order of images does not matter. A metric that is not finite or cannot be computed here is left out.
        """
        settings = self.inspection.captured.settings
        known = read_truth(truth, settings.inputs)
        if len(known) != settings.num_examples:
            raise UsageError(
                f"expected {counted(settings.num_examples, 'true image')}, as many as are behind the update, got "
                f"{len(known)}; give all, or correct batch_size"
            )
        unknown = torch.zeros(len(known), dtype=torch.long)
        found = judge(Batch(self.images, unknown), Batch(known.images, unknown), self.inspection.metrics)
        means = {name: mean_of(scores or ()) for name, scores in found.scores.items()}
        return {name: value for name, value in means.items() if value is not None and math.isfinite(value)}


def reconstruct(
    model: str | nn.Module,
    update: Tensors,
    inputs: Images | Sequence[int],
    *,
    kind: Literal["gradient", "delta"] = "gradient",
    before: Tensors | None = None,
    attack: Attack | Method = "auto",
    labels: Sequence[int] | Tensor | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    steps: int | None = None,
    local: LocalTraining | Table | None = None,
    classes: int | None = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    mode: Mode | None = None,
    seed: int = 0,
) -> Reconstructed:
    """Guess the images behind an update; nothing is written.

    model: the network with the weights that the client received; or a kind, with these weights in `before`. It is not
    changed. update: tensors by name or in the order of the parameters, or a file of them. inputs: the size of one
    image, (C, H, W) or `Images`. kind: "gradient" of one batch, or "delta", the weights after training minus before.
    attack: an object or a kind; `auto` tries an ensemble. labels: if the attacker is to know them. batch_size: the
    number of images (default: that of the labels, else 1). learning_rate, steps: of the local training behind a delta,
    on one batch; local: all of its settings instead, as in `leaktight.inspect`. mode: of batch normalisation and
    dropout (default: as the model is now). seed: of the attack. Other arguments: as in `leaktight.inspect`.
    """
    if isinstance(attack, list | tuple):
        raise UsageError(f"expected one attack, got {len(attack)}; call reconstruct for each, or use auto")
    given = CaptureRequest(
        model=model,
        before=_received(model, before),
        shape=inputs.shape if isinstance(inputs, Images) else inputs,
        update=update,
        kind=kind,
        classes=classes,
        mean=mean,
        std=std,
        mode=mode or ("eval" if isinstance(model, nn.Module) and not model.training else None),
        batch_size=batch_size,
        labels=labels.tolist() if isinstance(labels, Tensor) else labels,
        local=_local(local, learning_rate, steps),
        attacks=attack,
        settings=[f"seed={seed}"],
    )
    prepared = prepare(given)
    name = [*prepared.inspection.by_id][-1]  # before a control there is another attack
    return _told(prepared.inspection, name, prepared.inspection.guess(name))


def _received(model: str | nn.Module, before: Tensors | None) -> Tensors:
    """The weights that the client received: those stated, or else the model's own."""
    if before is not None:
        return before
    if not isinstance(model, nn.Module):
        got = f"the name {model!r} alone" if isinstance(model, str) else f"a {type(model).__name__}"
        raise UsageError(f"expected a model with the weights that the client received, got {got}; give before, too")
    return dict(model.state_dict())


def _local(
    local: LocalTraining | Table | None, learning_rate: float | None, steps: int | None
) -> LocalTraining | Table:
    said = {name: value for name, value in (("learning_rate", learning_rate), ("steps", steps)) if value is not None}
    if local is None:
        return said
    if said:
        raise UsageError(f"expected either local or {' and '.join(said)}, got both; put them into local")
    return local


def _told(inspection: Inspection, name: str, found: Reconstruction) -> Reconstructed:
    return Reconstructed(
        images=found.guess.inputs.detach().clamp(0, 1),
        labels=found.guess.targets,
        loss=found.loss,
        first_loss=found.first_loss,
        certificate=found.certificate,
        attack=str(found.notes.get("chosen") or inspection.by_id[name].name),
        assumed=(*inspection.assumed, *(str(note) for note in found.notes.get("assumed", ()))),
        flags=tuple(check_capture(inspection.captured)),
        inspection=inspection,
    )
