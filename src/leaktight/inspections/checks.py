"""Checks of a captured update: does it look pruned, rounded, clipped, scaled, noisy or reversed?

Most checks use the last layer: with softmax and cross-entropy the gradient of its bias is the mean of p - y, which
sums to zero, whose absolute values sum to at most 2, and which for one example is negative for the label alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leaktight.attacks.labels.counts import step_effects
from leaktight.attacks.labels.last_layer import HeadGradient, head_gradient
from leaktight.core.errors import LeaktightError
from leaktight.core.tensors import squared_norm
from leaktight.core.types import Params
from leaktight.inspections.captured import Captured
from leaktight.inspections.dropout import dropouts, with_masks
from leaktight.models.surgery import CONVOLUTIONS, layer_inputs, mode_of
from leaktight.report.words import counted
from leaktight.results.schema import Flag

SPARSE = 0.3
COARSE_VALUES = 256
COARSE_FROM = 4096
CLOSE = 2e-4
_ROUND = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
_SLACK = 0.02


@dataclass(frozen=True)
class Looks:
    """Figures of an update. zeros: the share of exact zeros. pruned: that share without all-zero rows and columns.

    An inactive ReLU makes whole rows and columns zero, so zeros alone do not show pruning.
    """

    norm: float
    zeros: float
    pruned: float


@dataclass(frozen=True)
class CaptureCheck:
    """A reason for doubt. find: the numbers if the condition holds, else None."""

    code: str
    raised_if: str
    advice: str
    find: Callable[[Captured], str | None]


def looks_of(update: Params) -> Looks:
    tensors = list(update.values())
    entries = sum(tensor.numel() for tensor in tensors)
    zeros = sum(int((tensor == 0).sum()) for tensor in tensors)
    live = [_live_block(tensor) for tensor in tensors if tensor.ndim > 1]
    kept = sum(block.numel() for block in live)
    pruned = sum(int((block == 0).sum()) for block in live) / kept if kept else 0.0
    return Looks(math.sqrt(float(squared_norm(tensors))), zeros / entries, pruned)


def check_capture(captured: Captured, dropped: str | None = None) -> list[Flag]:
    """The flags that the update raises. dropped: how dropout explains that the true images do not."""
    found = [(check, check.find(captured)) for check in CHECKS]
    if dropped is not None:
        found = [(check, f"{detail}; {dropped}" if check.find is _dropout else detail) for check, detail in found]
    return [flag(check.code, check.raised_if, check.advice, detail) for check, detail in found if detail is not None]


def flag(code: str, raised_if: str, advice: str, detail: str) -> Flag:
    """A flag that concerns the whole run."""
    return Flag(code=code, cell=None, raised_if=raised_if, advice=advice, detail=detail)


def _partial(captured: Captured) -> str | None:
    number = len(captured.withheld)
    return f"{number} of {number + len(captured.seen.update.tensors)}: {captured.withheld[0]} ..." if number else None


def _sparse(captured: Captured) -> str | None:
    looks = looks_of(captured.seen.update.tensors)
    if looks.pruned < SPARSE:
        return None
    return f"{100 * looks.pruned:.0f} % of them; {100 * looks.zeros:.0f} % of all entries are zero"


def _coarse(captured: Captured) -> str | None:
    for name, tensor in captured.seen.update.tensors.items():
        if tensor.numel() >= COARSE_FROM and (count := len(tensor.unique())) <= COARSE_VALUES:
            return f"{name!r}: {count} values in {tensor.numel()} entries"
    half = [dtype for dtype in captured.stored if dtype.itemsize < 4]
    return f"stored as {str(half[0]).removeprefix('torch.')}" if half else None


def _clipped(captured: Captured) -> str | None:
    update, local = captured.seen.update, captured.seen.local_training
    norm = looks_of(update.tensors).norm
    sizes = {"the norm of the update": norm}
    if update.kind == "delta" and local is not None:
        sizes["its norm over the learning rate"] = norm / local.learning_rate
    for what, size in sizes.items():
        if _is_round(size):
            return f"{what} is {size:.4g}"
    norms = [float(squared_norm([tensor])) ** 0.5 for tensor in update.tensors.values()]
    if len(norms) > 2 and max(norms) - min(norms) <= CLOSE * max(norms):
        return f"all {len(norms)} tensors have the norm {norms[0]:.4g}"
    return None


def _is_round(value: float) -> bool:
    """
    >>> _is_round(1.00001), _is_round(0.25), _is_round(1.234)
    (True, True, False)
    """
    lead = value / 10 ** math.floor(math.log10(value)) if value > 0 else 0.0
    return any(abs(lead - each) <= CLOSE * each for each in (*_ROUND, 10))


def _scaled(captured: Captured) -> str | None:
    head, factor = _head(captured), _steps_factor(captured)
    if head is None or head.bias is None or factor is None:
        return None
    size = float(head.bias.abs().sum()) / factor
    return f"it sums to {size:.3g}" if size > 2 + _SLACK else None


def _not_cross_entropy(captured: Captured) -> str | None:
    head = _head(captured)
    if head is None or head.bias is None or not bool(head.bias.any()):
        return None
    share = float(head.bias.sum().abs() / head.bias.abs().sum())
    return f"the sum is {100 * share:.1f} % of that of absolute values" if share > _SLACK else None


def _turned(captured: Captured) -> str | None:
    head = _head(captured)
    if head is None or head.bias is None or captured.settings.num_examples != 1 or len(head.bias) < 3:
        return None
    raised, lowered = int((head.bias > 0).sum()), int((head.bias < 0).sum())
    if raised == 1 and lowered == len(head.bias) - 1:
        return f"the last layer moved towards {lowered} classes and away from one"
    return None


def _dropout(captured: Captured) -> str | None:
    layers = dropouts(captured.bare)
    if captured.settings.mode == "eval" or not layers:
        return None
    rates = max(layer.p for layer in layers.values())
    read = "shows their masks, which attacks use" if with_masks(captured.seen) else "does not show their masks"
    return f"{counted(len(layers), 'layer')}, up to {rates:g}; the update {read}"


def _other_inputs(captured: Captured) -> str | None:
    """If the first layer is linear, the update of one example reveals its input: compare that with the stated range."""
    local = captured.seen.local_training
    if captured.settings.num_examples != 1 or (local is not None and (local.weight_decay or local.optimizer != "sgd")):
        return None
    seen = captured.seen
    ends = torch.stack([torch.zeros(seen.inputs.shape), torch.ones(seen.inputs.shape)])
    with torch.no_grad(), mode_of(seen.model, "eval"):
        layers = layer_inputs(
            seen.model, seen.broadcast.params, seen.broadcast.buffers, ends, (nn.Linear, *CONVOLUTIONS)
        )
    if not layers or not isinstance(seen.model.get_submodule(layers[0][0]), nn.Linear) or layers[0][1].ndim != 2:
        return None
    name, (dark, bright) = layers[0]
    weight, bias = (seen.update.tensors.get(f"{name}.{part}" if name else part) for part in ("weight", "bias"))
    if weight is None or bias is None or not bool(bias.any()):
        return None
    unit = int(bias.abs().argmax())
    entered = weight[unit].double() / bias[unit].double()
    low, high = torch.minimum(dark, bright), torch.maximum(dark, bright)
    slack = 0.05 * (high - low).clamp_min(1e-6)
    outside = float(((entered < low - slack) | (entered > high + slack)).double().mean())
    if outside <= 0.01:
        return None
    return (
        f"{name!r} received {float(entered.min()):.3g} to {float(entered.max()):.3g}; images in [0, 1] would give "
        f"{float(low.min()):.3g} to {float(high.max()):.3g}"
    )


def _live_block(tensor: Tensor) -> Tensor:
    """A weight as a matrix, without all-zero rows and columns."""
    matrix = tensor.flatten(1)
    used = matrix != 0
    return matrix[used.any(1)][:, used.any(0)]


def _head(captured: Captured) -> HeadGradient | None:
    try:
        return head_gradient(captured.seen)
    except LeaktightError:  # the network does not end in a linear layer, so it cannot be checked
        return None


def _steps_factor(captured: Captured) -> float | None:
    """The largest factor by which the update multiplies the gradient of one step; None if unknown."""
    if captured.seen.update.kind == "gradient":
        return 1.0
    local, steps = captured.seen.local_training, captured.num_steps
    if local is None or steps is None or local.optimizer != "sgd" or local.weight_decay:
        return None
    return local.learning_rate * sum(step_effects(local, steps))


CHECKS: Sequence[CaptureCheck] = (
    CaptureCheck(
        "dropout",
        "the network was trained with dropout, whose masks are no setting that could be stated",
        "where the update does not show the masks, expect worse guesses than without dropout, with any defense",
        _dropout,
    ),
    CaptureCheck(
        "update-turned",
        "the update of one example moves the last layer away from one class instead of towards it",
        "swap --before and --after, or correct --kind: a gradient increases the loss, a delta decreases it",
        _turned,
    ),
    CaptureCheck(
        "update-scaled",
        "the bias of the last layer moved more than a mean cross-entropy allows; its absolute values sum to at most 2",
        "correct --local learning_rate and steps, or divide a gradient of a sum by the number of examples",
        _scaled,
    ),
    CaptureCheck(
        "not-plain-cross-entropy",
        "the update of the last layer's bias does not sum to zero, as that of softmax and cross-entropy does",
        "noise, weight decay, Adam or another loss changed it; state them with --local, or expect worse guesses",
        _not_cross_entropy,
    ),
    CaptureCheck(
        "inputs-normalised",
        "the first layer reveals its input, which images in [0, 1], normalised as stated, cannot have produced",
        "state the normalisation of training with --mean and --std, or leave out a wrong one",
        _other_inputs,
    ),
    CaptureCheck(
        "update-partial",
        "the update lacks parameters of the model",
        "missing parameters are not matched; labels cannot be read without the last layer",
        _partial,
    ),
    CaptureCheck(
        "update-sparse",
        f"over {100 * SPARSE:.0f} % of the entries of weights are exactly zero, apart from all-zero rows and columns",
        "it was pruned, or changes were too small for the precision of the stored parameters",
        _sparse,
    ),
    CaptureCheck(
        "update-coarse",
        "the update takes few values, or was stored in less than 32 bits",
        "it was quantised or rounded; guesses cannot be finer than it",
        _coarse,
    ),
    CaptureCheck(
        "update-clipped",
        "the size of the update is a round number",
        "it may have been clipped or rescaled; attacks that match directions (csdlg, inverting_gradients) still work",
        _clipped,
    ),
)
