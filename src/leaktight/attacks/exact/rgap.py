"""R-GAP: the input of a chain of layers, solved in closed form from the last layer to the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from leaktight.attacks.exact.analytic import Gradient, answer, entrance, gradient_of, only
from leaktight.attacks.exact.chains import Link, activation_of, chain_of
from leaktight.attacks.exact.rank_analysis import gradient_matrix
from leaktight.core.errors import ModelError, UsageError, require_above
from leaktight.core.protocols import Attack, Progress
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.fl.local import Trainer, loss_and_gradient

_TURN = 1.2784645427610738
"""The maximum of m / (1 + e^m) is here: a value has one root below and one above."""

_LARGEST_MARGIN = 600.0

_GROWN = 10.0
"""Times the tolerance: what a layer before the last may be off by, as errors grow from layer to layer."""


@dataclass(frozen=True)
class LayerReport:
    """How well a layer's input was determined. residual: relative error of its equations at the solution."""

    layer: str
    unknowns: int
    gradient_equations: int
    output_equations: int
    rank: int
    residual: float

    @property
    def determined(self) -> bool:
        return self.rank >= self.unknowns


@dataclass(frozen=True)
class _Attempt:
    """The solution for one possible input of the last layer."""

    image: Tensor
    label: int
    loss: float
    reports: Sequence[LayerReport]


@dataclass(frozen=True, kw_only=True)
class RGap(Attack):
    """R-GAP: recursive gradient attack on privacy, the input solved layer by layer from the last to the first.

    The last layer determines its input and the gradient with respect to it. Every convolution before it is solved by
    least squares: its weights' gradient (one matrix for all input channels) and its outputs, known from the next layer,
    are linear in its input. Other linear layers are solved like the last. With ReLU only positive outputs give
    equations. If one logit leaves two roots, or the label is unknown, all cases are solved, and the answer is the one
    whose gradient is nearest to the update.

    The rank analysis of every layer is in `notes["layers"]`; `notes["failed_at"]` is the first layer, from the last on,
    whose input is not determined, or None. Before it the answer is one of many.

    tolerance: the largest relative error of the last layer's equations, > 0; ten times as much in other layers. They
    hold up to rounding for one example, and not for what most defenses leave; beyond it the layers before are not
    solved, and there is no answer. None: any.
    Reference: Zhu and Blaschko, R-GAP: Recursive Gradient Attack on Privacy, ICLR 2021.
    Assumes: one example, a plain chain of convolutions, activations and linear layers; with the single output of the
    paper's network the size of the gradient too (learning rate and one step for model changes). Labels help.
    Differs from the paper: the roots are bracketed instead of searched by Adam, and both are tried; several outputs
    need a last layer with a bias. Both kinds of equations are scaled to equal weight.
    """

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE})

    tolerance: float | None = None

    def __post_init__(self) -> None:
        require_above(0, tolerance=self.tolerance)

    @property
    def searches(self) -> bool:
        return False

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        one = only(self, seen)
        require(one, *self.requires)
        if one.batch_size != 1:
            raise UsageError(f"expected one example for rgap, got {one.batch_size}; use a search")
        first, gradient = entrance(one), gradient_of(one)
        chain = chain_of(one)
        attempts: list[_Attempt] = []
        normals: dict[str, Tensor] = {}
        for label, entered, signal in self._last_inputs(one, chain[-1], gradient):
            inside, reports = _descend(chain[:-1], entered, signal, gradient, normals, self._limit)
            if inside is None:
                continue
            image = first.pixels(inside)
            attempts.append(_Attempt(image, label, _distance(one, image, label, gradient), reports))
            if progress is not None:
                progress(len(attempts) - 1, attempts[-1].loss, image)
        if not attempts:
            raise _no_single_example(reports[-1].layer, reports[-1].residual)
        best = min(attempts, key=lambda attempt: attempt.loss)
        failed = next((report.layer for report in best.reports if not report.determined), None)
        notes = {
            "assumed": list(gradient.notes),
            "layers": [vars(report) | {"determined": report.determined} for report in best.reports],
            "failed_at": failed,
            "attempts": len(attempts),
        }
        found = answer(best.image, torch.tensor([best.label]), best.loss, notes)
        return replace(found, first_loss=attempts[0].loss)

    @property
    def _limit(self) -> float:
        return math.inf if self.tolerance is None else _GROWN * self.tolerance

    def _last_inputs(self, seen: Observation, last: Link, gradient: Gradient) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every possible label, with the last layer's input and the gradient with respect to that input."""
        weight, slope = last.weight, gradient.needed(f"{last.name}.weight")
        known = None if seen.labels is None else int(seen.labels[0])
        if last.layer.bias is not None:
            signal = gradient.needed(f"{last.name}.bias")
            label = int(signal.argmin()) if known is None else known
            entered = signal @ slope / signal.square().sum()
            error = _error(slope, signal, entered)
            if self.tolerance is not None and not error <= self.tolerance:
                raise _no_single_example(last.name, error)
            yield label, entered, signal @ weight
            return
        if len(weight) != 1:
            raise ModelError(f"expected a bias in the last layer {last.name!r}, or a single output, got neither")
        if not gradient.scaled:
            raise UsageError("rgap needs the size of the gradient, and so 'local_training'; add it to knows")
        for label in (0, 1) if known is None else (known,):
            sign = 2 * label - 1
            for margin in margins(float((slope * weight).sum())):
                signal = torch.tensor([-sign / (1 + np.exp(margin))], dtype=torch.float64)
                yield label, slope[0] / signal, signal @ weight


def _no_single_example(layer: str, error: float) -> UsageError:
    return UsageError(
        f"expected the gradient of one example in {layer!r}, got one that differs from any such by {error:.2g} of its "
        "length; use a search"
    )


def _error(slope: Tensor, signal: Tensor, entered: Tensor) -> float:
    """How far a linear layer's gradient is from that of one example, relative to its length."""
    return float((slope - signal[:, None] * entered).norm() / slope.norm())


def margins(product: float) -> list[float]:
    """The margins m of the logistic loss with -m / (1 + e^m) = `product`, the gradient's product with the weights.

    >>> [round(m, 6) for m in margins(-1 / (1 + np.e))], [round(m, 6) for m in margins(2 / (1 + np.exp(-2)))]
    ([1.0, 1.596918], [-2.0])
    """
    from scipy.optimize import brentq  # slow to import

    def gap(margin: float) -> float:
        return float(-margin / (1 + np.exp(margin)) - product)

    if product >= 0:
        return [brentq(gap, -2 * product - 2, 0.0, xtol=1e-15, rtol=1e-14)]
    if gap(_TURN) > 0:  # beyond the maximum, by rounding
        return [_TURN]
    low = brentq(gap, 0.0, _TURN, xtol=1e-15, rtol=1e-14)
    if gap(_LARGEST_MARGIN) < 0:  # the other root is too large to be a logit
        return [low]
    return [low, brentq(gap, _TURN, _LARGEST_MARGIN, xtol=1e-15, rtol=1e-14)]


def _descend(
    chain: Sequence[Link],
    output: Tensor,
    signal: Tensor,
    gradient: Gradient,
    normals: dict[str, Tensor],
    limit: float,
) -> tuple[Tensor | None, list[LayerReport]]:
    """The input of the first link, (1, ...), from the output of the last link and the gradient with respect to it.

    normals: a cache, by layer, of the normal equations of its outputs, shared by all attempts. limit: the residual of a
    layer beyond which those before it are not solved; the input is then None.
    """
    reports: list[LayerReport] = []
    for link in reversed(chain):
        if reports and not reports[-1].residual <= limit:
            return None, reports
        inverse = activation_of(link)
        output, signal = (tensor.reshape(link.output_shape) for tensor in (output, signal))
        before, known = inverse.undo(output)
        signal = signal * inverse.slope(output)
        if isinstance(link.layer, nn.Linear):
            slope = gradient.needed(f"{link.name}.weight")
            entered = signal @ slope / signal.square().sum()
            error = _error(slope, signal, entered)
            count = link.layer.in_features
            reports.append(LayerReport(link.name, count, slope.numel(), int(known.sum()), count, error))
            signal = signal @ link.weight
        else:
            if link.name not in normals or not bool(known.all()):
                normals[link.name] = _output_normal(link, known)
            slope = gradient.needed(f"{link.name}.weight")
            entered, report = _solve(link, before, known, signal, slope, normals[link.name])
            reports.append(report)
            signal = _back(link, signal)
        output = entered
    return output[None], reports


def _solve(
    link: Link, before: Tensor, known: Tensor, signal: Tensor, slope: Tensor, outputs: Tensor
) -> tuple[Tensor, LayerReport]:
    """The input of a convolution, (C, H, W), by the normal equations of least squares."""
    layer = link.layer
    assert isinstance(layer, nn.Conv2d)
    channels, *size = link.input_shape
    matrix = gradient_matrix(layer, signal, size)
    gradients = matrix.T @ matrix  # of each channel
    bias = 0.0 if layer.bias is None else link.bias[:, None, None]
    from_outputs = _back(link, (before - bias) * known).flatten()
    rows = slope.transpose(0, 1).flatten(2).reshape(channels, -1)
    from_gradients = (rows @ matrix).flatten()
    traces = outputs.trace(), gradients.diagonal().repeat(channels)[:, None].expand(outputs.shape).trace()
    scales = [len(outputs) / max(float(trace), 1e-300) for trace in traces]
    normal = scales[0] * outputs
    for own in torch.arange(len(normal)).chunk(channels):
        normal[own[0] : own[-1] + 1, own[0] : own[-1] + 1] += scales[1] * gradients
    wanted = scales[0] * from_outputs + scales[1] * from_gradients
    found, rank = _least_squares(normal.numpy(), wanted.numpy())
    entered = torch.from_numpy(found).reshape(channels, *size)
    residual = float((rows - entered.flatten(1) @ matrix.T).norm() / rows.norm())
    return entered, LayerReport(link.name, len(found), slope.numel(), int(known.sum()), rank, residual)


def _output_normal(link: Link, known: Tensor) -> Tensor:
    """The normal equations of a convolution's known outputs, (n, n) for n inputs."""
    layer = link.layer
    assert isinstance(layer, nn.Conv2d)
    _, *size = link.input_shape
    cells = torch.eye(torch.Size(size).numel(), dtype=torch.float64).reshape(-1, 1, *size)
    parts = link.weight.split(1, 1)  # a cell of one channel meets the weights of that channel only
    outputs = torch.cat([F.conv2d(cells, part, None, layer.stride, layer.padding, layer.dilation) for part in parts])
    return _spread(link, outputs * known).flatten(1)


def _least_squares(normal: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, int]:
    """The solution of the normal equations and their rank, by a Cholesky factorisation with pivots.

    Unknowns beyond the rank are not determined and set to zero.
    """
    import scipy.linalg  # slow to import

    factor, pivots, rank, _ = scipy.linalg.lapack.dpstrf(normal, lower=0)
    order = pivots - 1
    upper = np.ascontiguousarray(factor)[:rank, :rank]  # what is below the diagonal is not read
    found = np.zeros_like(wanted)
    kept = order[:rank]
    for _ in range(3):  # the solution, and two refinements
        rest = (wanted - normal @ found)[kept]
        half = scipy.linalg.solve_triangular(upper, rest, trans=1, check_finite=False)
        found[kept] += scipy.linalg.solve_triangular(upper, half, check_finite=False)
    return found, int(rank)


def _spread(link: Link, outputs: Tensor) -> Tensor:
    """The transpose of a convolution without its bias: (N, outputs, h, w) to (N, C, H, W)."""
    layer = link.layer
    assert isinstance(layer, nn.Conv2d)
    shape = (len(outputs), *link.input_shape)
    found: Tensor = conv2d_input(shape, link.weight, outputs, layer.stride, layer.padding, layer.dilation)
    return found


def _back(link: Link, signal: Tensor) -> Tensor:
    return _spread(link, signal[None])[0]


def _distance(seen: Observation, image: Tensor, label: int, gradient: Gradient) -> float:
    """The relative distance of the guess's gradient from the observed one."""
    params = {name: tensor.double() for name, tensor in seen.broadcast.params.items()}
    trainer = Trainer(seen.model, LocalTraining(), seen.task)
    _, own = loss_and_gradient(trainer, params, {}, Batch(image.double(), torch.tensor([label])))
    both = [(own[name].flatten(), tensor.flatten()) for name, tensor in gradient.tensors.items()]
    guess, wanted = (torch.cat(parts) for parts in zip(*both, strict=True))
    return float((guess - wanted).norm() / wanted.norm())
