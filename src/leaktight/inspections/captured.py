"""A captured update, fitted to its network and checked, as an attacker would observe it.

The observation holds only what the user states. The true images, if given, are kept apart and used for scoring only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leaktight.core.errors import ModelError, OutOfScopeError, UsageError
from leaktight.core.inputs import Images
from leaktight.core.protocols import Defense
from leaktight.core.rng import Rng
from leaktight.core.scope import not_supported
from leaktight.core.tasks import Classification
from leaktight.core.tensors import buffers_of, cloned, first_non_finite, parameters_of
from leaktight.core.text import sides
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Mode, Observation, Update, UpdateKind
from leaktight.inspections.files import TensorFile, TrueExamples
from leaktight.models.initialise import build_model
from leaktight.models.source import ModelSource, Normalize, check_fits, check_normalisation, outputs_of
from leaktight.models.user import GivenModel

ChangeKind = Literal["after", "delta", "gradient"]
"""What the second file holds: the model after training, its change (after minus before), or a gradient."""


@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """What the user states about a captured update.

    num_classes: None for the number of rows of the last layer. mean, std: normalisation of the inputs outside of the
    network, 1 or C numbers; empty for none. num_examples: behind the update. labels: known to the attacker, or None.
    local: None if the local training is unknown.
    """

    model: ModelSource
    inputs: Images
    num_classes: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    mode: Mode = "train"
    num_examples: int = 1
    labels: tuple[int, ...] | None = None
    local: LocalTraining | None = None

    def __post_init__(self) -> None:
        if self.num_classes is not None and self.num_classes < 2:
            raise ValueError(f"expected classes >= 2, got {self.num_classes}")
        if self.num_examples < 1:
            raise ValueError(f"expected batch size >= 1, got {self.num_examples}")
        if self.labels is not None and len(self.labels) != self.num_examples:
            raise ValueError(f"expected labels of {self.num_examples} examples, got {len(self.labels)}")
        if self.local is not None and self.local.batch_size > self.num_examples:
            raise ValueError(
                f"expected a local batch_size of at most {self.num_examples}, the examples behind the update, got "
                f"{self.local.batch_size}"
            )
        self._check_normalisation()

    def _check_normalisation(self) -> None:
        check_normalisation(self.mean, self.std, self.inputs.channels)
        if any(abs(value) > 1 for value in self.mean):
            got = ", ".join(f"{value:g}" for value in self.mean)
            raise ValueError(f"expected mean and std for images in [0, 1], got mean {got}; divide both by 255")


@dataclass(frozen=True)
class Captured:
    """seen: what the attacker has. bare: the network without the normalisation of `settings`.

    withheld: parameters that are missing from the update. stored: the floating-point types in the files.
    """

    seen: Observation
    bare: nn.Module
    settings: CaptureSettings
    withheld: tuple[str, ...]
    stored: tuple[torch.dtype, ...]

    @property
    def num_steps(self) -> int | None:
        """The local steps behind the update; None if unknown."""
        return self.seen.num_steps


def count_examples(batch_size: int | None, labels: Sequence[int] | None, truth: TrueExamples | None) -> int | None:
    """The number of examples behind the update, from whichever is given; None if nothing is."""
    given = {
        "--batch-size": batch_size,
        "--labels": None if labels is None else len(labels),
        "--truth": None if truth is None else len(truth),
    }
    known = {name: number for name, number in given.items() if number is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{name} {number}" for name, number in known.items())
        raise UsageError(
            f"expected the same number of examples everywhere, and one class for each example, got {listed}; correct "
            "one of them"
        )
    return next(iter(known.values()), None)


def load_capture(
    settings: CaptureSettings,
    before: TensorFile,
    change: TensorFile,
    kind: ChangeKind,
    defense: Defense | None = None,
) -> Captured:
    """The update of two files, as observed. Raises UsageError, which names the mismatch, if a file does not fit.

    defense: that the client is known to have used; it may have changed the network.
    """
    classes = settings.num_classes or _outputs_in_memory(settings) or rows_of_last_layer(before)
    if settings.labels is not None and not all(0 <= label < classes for label in settings.labels):
        raise UsageError(f"expected labels from 0 to {classes - 1}, got {', '.join(map(str, settings.labels))}")
    rng = Rng(0).child("captured")
    model = build_model(settings.model, settings.inputs, classes, rng=rng).to(torch.float32)
    model = model if defense is None else defense.prepare(model, rng=rng.child("defense"))
    held = _fitted(before, model, classes)
    _load(model, held, before)
    seen_model = normalising(model, settings.mean, settings.std)
    _check_model(seen_model, settings, classes)
    params, buffers = cloned(parameters_of(model)), cloned(buffers_of(model))
    found = _fitted(change, model, classes, partly=True)
    tensors = {name: _change(found[name], held[name], kind) for name in params if name in found}
    _check_update(tensors, before, change, kind)
    after = {name: found[name].to(tensor) for name, tensor in buffers.items() if name in found}
    seen = Observation(
        model=seen_model,
        task=Classification(),
        broadcast=Broadcast(params, buffers, 0),
        update=Update(
            tensors,
            _update_kind(kind),
            settings.num_examples,
            after if kind == "after" and buffers and after.keys() == buffers.keys() else None,
        ),
        inputs=settings.inputs,
        num_classes=classes,
        labels=None if settings.labels is None else torch.tensor(sorted(settings.labels)),
        batch_size=settings.num_examples,
        local_training=settings.local,
        mode=settings.mode,
    )
    stored = tuple(dict.fromkeys(t.dtype for t in (*held.values(), *found.values()) if t.is_floating_point()))
    return Captured(seen, model, settings, tuple(name for name in params if name not in tensors), stored)


def normalising(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """A copy of the network that first normalises its inputs; its parameters keep their names."""
    result = copy.deepcopy(model)
    if mean:
        result.register_forward_pre_hook(_Before(Normalize(mean, std)))
    return result


@dataclass(frozen=True)
class _Before:
    """A forward pre-hook that applies a module to the first input; it can be copied and pickled."""

    change: nn.Module

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.change(args[0]), *args[1:])


def _outputs_in_memory(settings: CaptureSettings) -> int | None:
    """The number of outputs of a network in memory; None for others, and if it does not take such images."""
    if not isinstance(settings.model, GivenModel):
        return None
    model = settings.model.build(settings.inputs, 0)
    with suppress(ModelError):
        outputs = outputs_of(model, settings.inputs)
        return outputs.shape[1] if isinstance(outputs, Tensor) and outputs.ndim > 1 and outputs.shape[1] > 1 else None
    return None


def rows_of_last_layer(held: TensorFile) -> int:
    """The number of classes: the rows of the last matrix of a file."""
    matrices = [tensor for tensor in held.tensors.values() if tensor.ndim == 2 and tensor.is_floating_point()]
    if not matrices:
        raise UsageError(f"cannot read the number of classes from {held.path}: it has no linear layer; give --classes")
    if len(matrices[-1]) < 2:
        outside = not_supported("regression, and two classes by a single output", "give one output for each class")
        raise UsageError(f"{held.path}: {outside}; or give --classes, if another layer is the last")
    return len(matrices[-1])


def _fitted(held: TensorFile, model: nn.Module, classes: int, *, partly: bool = False) -> dict[str, Tensor]:
    """A file's tensors by the network's own names. partly: allow missing parameters."""
    own = model.state_dict()
    tensors = _in_order(held, model) if held.ordered else dict(held.tensors)
    optional = set(own) if partly else {name for name in own if name.endswith("num_batches_tracked")}
    both = {name: (tensors[name], own[name]) for name in own if name in tensors}
    faults = {
        "missing": [name for name in own if name not in tensors and name not in optional],
        "unexpected": [name for name in tensors if name not in own],
        "of another shape": [
            f"{name} {sides(got.shape)} (the model has {sides(wanted.shape)})"
            for name, (got, wanted) in both.items()
            if got.shape != wanted.shape
        ],
        "of another type": [
            f"{name} {_type(got)}, the model has {_type(wanted)}"
            for name, (got, wanted) in both.items()
            if wanted.is_floating_point() and not got.is_floating_point()
        ],
    }
    listed = [f"{kind}: {_first_few(names)}" for kind, names in faults.items() if names]
    if listed or not both:
        remedy = _remedy(held, classes, faults["of another shape"])
        raise UsageError(f"{held.path} does not fit the model; {'; '.join(listed)}; {remedy}")
    return {name: got for name, (got, _) in both.items()}


def _remedy(held: TensorFile, classes: int, shapes: Sequence[str]) -> str:
    matrices = [tensor for tensor in held.tensors.values() if tensor.ndim == 2]
    if shapes and matrices and len(matrices[-1]) != classes:
        return f"the last layer of the file has {len(matrices[-1])} rows, but --classes is {classes}"
    return "choose the model, --shape and --classes that the file was made with"


def _in_order(held: TensorFile, model: nn.Module) -> dict[str, Tensor]:
    """Names for arrays without names, as Flower exchanges them: of the whole state dict, or of the parameters alone."""
    own = model.state_dict()
    orders = {
        "the state dict": list(own),
        "the parameters": [name for name, _ in model.named_parameters()],
        "the trainable parameters": list(parameters_of(model)),
    }
    given = list(held.tensors.values())
    possible = [names for names in orders.values() if len(names) == len(given)]
    if not possible:
        counts = {len(names): what for what, names in reversed(orders.items())}
        wanted = " or ".join(f"{number} ({what})" for number, what in sorted(counts.items(), reverse=True))
        raise UsageError(f"expected {wanted} arrays in {held.path}, got {len(given)}; save them in the model's order")
    fitting = (names for names in possible if all(own[n].shape == t.shape for n, t in zip(names, given, strict=True)))
    return dict(zip(next(fitting, possible[0]), given, strict=True))


def _load(model: nn.Module, held: Mapping[str, Tensor], source: TensorFile) -> None:
    broken = first_non_finite(held)
    if broken is not None:
        raise UsageError(f"{source.path}: {broken!r} holds a NaN or an infinity; the model has diverged")
    model.load_state_dict(held, strict=False)


def _check_model(model: nn.Module, settings: CaptureSettings, classes: int) -> None:
    if settings.mean and getattr(settings.model, "mean", ()):
        raise UsageError("the model normalises its inputs already; leave --mean and --std out")
    try:
        check_fits(model, settings.inputs, classes, mode=settings.mode)
    except OutOfScopeError:
        raise
    except ModelError as error:
        raise UsageError(f"{error}; check --shape and --classes") from error


def _change(found: Tensor, before: Tensor, kind: ChangeKind) -> Tensor:
    """The update of one parameter; a difference is computed in float64, so that it is rounded only once."""
    wide = found.to(torch.float64)
    return (wide - before.to(torch.float64) if kind == "after" else wide).to(torch.float32)


def _update_kind(kind: ChangeKind) -> UpdateKind:
    return "gradient" if kind == "gradient" else "delta"


def _check_update(tensors: Mapping[str, Tensor], before: TensorFile, change: TensorFile, kind: ChangeKind) -> None:
    if not tensors:
        raise UsageError(f"{change.path} holds no trainable parameter of the model; nothing to attack")
    broken = first_non_finite(tensors)
    if broken is not None:
        raise UsageError(f"{change.path}: {broken!r} holds a NaN or an infinity; there is nothing to match")
    if not any(bool(tensor.any()) for tensor in tensors.values()):
        same = f"{before.path} and {change.path} are equal" if kind == "after" else f"{change.path} is all zeros"
        raise UsageError(f"{same}: nothing to attack; capture the model before and after local training")


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first_few(names: Iterable[str], limit: int = 3) -> str:
    known = list(names)
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return ", ".join(known[:limit]) + more
