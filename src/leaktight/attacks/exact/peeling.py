"""Peeling: the image behind a ReLU network of convolutions, solved layer by layer, trained or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, fx
from torch.nn.grad import conv2d_weight

from leaktight.attacks.exact.analytic import answer, entrance, gradient_of, only
from leaktight.attacks.exact.descent import Solver
from leaktight.attacks.exact.features import Pieces, search
from leaktight.attacks.exact.graph import Graph, Known
from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.protocols import Attack, LabelSource, Progress
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Certificate, Observation, Reconstruction
from leaktight.models.surgery import has_batch_norm

PROVEN = 0.999
"""The share of the convolutions' gradients that must be explained; images of 29 to 50 dB explained 0.83 to 0.98."""
_PROOF = "gradients of all convolutions"
_RETURNS = 0.02  # the largest root mean square of a determined image after a search from beside it
_SMOOTH = (3e-2, 3e-3, 3e-4, 3e-5)  # weights of total variation, one stage each


@dataclass(frozen=True, kw_only=True)
class Peeling(Attack):
    """Peeling: the images behind a ReLU network of convolutions, exactly, from its last convolution to its first.

    The gradient of a late convolution's weights has the patches of its input as its row space, if it has at least as
    many channels as there are positions in all images. Patches behind a ReLU are not negative and mostly zero, so a
    linear program tells them apart, and neighbours put them in order. With the input of one convolution everything
    behind it is known, and so is the gradient at the outputs of the one before it; the gradient of that one's weights
    then gives its input by least squares, and so on. Where equations are fewer than unknowns, near the image, an image
    is sought by L-BFGS that has the values found so far.

    iterations: >= 1, of L-BFGS (of up to 20 evaluations) in each of four stages with ever less total variation.
    certificate: the share of the gradients of all convolutions that the guess explains, of the image with the least
    say in them; 0 if a search that starts beside the guess ends elsewhere.
    Assumes: one local step of plain gradient descent in evaluation mode, or without batch norm; the number of images.
    Cannot: read batch norm in training mode; batches with more positions than channels; networks without ReLU or whose
    late convolutions are all narrower than their inputs are large; gradients with noise.
    Reference: none; SPEAR (Dimitrov et al. 2024) for sparse factors of a gradient, R-GAP (Zhu and Blaschko 2021) for
    the recursion.
    """

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE})

    iterations: int = 20

    def __post_init__(self) -> None:
        require_at_least(1, iterations=self.iterations)

    @property
    def labels_from(self) -> LabelSource:
        return "inferred"

    @property
    def searches(self) -> bool:
        return False

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        one = only(self, seen)
        require(one, *self.requires)
        assert one.batch_size is not None
        if has_batch_norm(one.model) and one.mode != "eval":
            raise UsageError(
                "expected evaluation mode or a network without batch norm, got batch norm in training mode"
            )
        gradient = gradient_of(one)
        solver = Solver(Graph(one), gradient, one.batch_size)
        known = solver.descend(solver.start(rng.public()))
        solved = [each.name for each in solver.graph.convolutions if each.entered in known]
        first = solver.graph.convolutions[0].entered
        sought = None if first in known else Sought.of(solver, known, self.iterations)
        generator = rng.child("images").public()
        images = entrance(one).pixels(known[first]) if sought is None else sought.images(generator)
        slopes, misfit = explained(solver, images)
        if progress is not None:
            progress(0, misfit, images)
        figure = max(0.0, 1 - misfit)
        if figure >= PROVEN and sought is not None and not sought.determines(images, generator):
            figure = 0.0
        notes: dict[str, object] = {"assumed": list(gradient.notes), "solved": solved}
        found = answer(images, slopes.argmin(1), misfit, notes)
        return replace(found, certificate=Certificate(_PROOF, figure, PROVEN))


@dataclass(frozen=True)
class Sought:
    """Images by the values that are known first in a network, a search for each. wanted: the values, (N, ...) each."""

    pieces: Pieces
    gated: Sequence[bool]
    wanted: Sequence[Tensor]
    shape: Sequence[int]
    iterations: int

    @classmethod
    def of(cls, solver: Solver, known: Known, iterations: int) -> Sought:
        graph = solver.graph
        nodes = _earliest(graph, known)
        gated = [graph.is_relu(node) for node in nodes]
        pieces = graph.pieces([graph.gated(node) or node for node in nodes])
        return cls(pieces, gated, [known[node] for node in nodes], graph.shape, iterations)

    def images(self, generator: torch.Generator) -> Tensor:
        grey = torch.full((len(self.wanted[0]), *self.shape), 0.5, dtype=torch.float64)
        return self._found(_disturbed(grey, generator), _SMOOTH)

    def determines(self, images: Tensor, generator: torch.Generator) -> bool:
        """Whether a search that starts beside the images comes back to them: pixels that nothing hangs on do not."""
        again = self._found(_disturbed(images, generator), _SMOOTH[-2:])
        return bool((again - images).flatten(1).square().mean(1).sqrt().max() < _RETURNS)

    def _found(self, starts: Tensor, weights: Sequence[float]) -> Tensor:
        stages = [(weight, self.iterations) for weight in weights]
        one = [[each[place : place + 1] for each in self.wanted] for place in range(len(starts))]
        parts = zip(one, starts, strict=True)
        return torch.cat([search(self.pieces, self.gated, wanted, start[None], stages) for wanted, start in parts])


def _disturbed(images: Tensor, generator: torch.Generator) -> Tensor:
    noise = 0.1 * torch.randn(images.shape, generator=generator, dtype=images.dtype)
    return (images + noise).clamp(0, 1)


def _earliest(graph: Graph, known: Known) -> list[fx.Node]:
    """The first known node that all else hangs on, and the known ones before it."""
    cut = next(node for node in graph.cuts if node in known)
    later = graph.after(cut)
    return [node for node in graph.nodes if node in known and node not in later]


def explained(solver: Solver, images: Tensor) -> tuple[Tensor, float]:
    """The gradient at the outputs (N, classes) of images, and how far the gradients of convolutions are from theirs.

    That at the outputs is read from the last layer, as confidences near 1 are lost in rounding. The distance is the
    root mean square over convolutions of the error relative to the part of the image that has the smallest one.
    """
    values = solver.graph.run(images)
    known = [each for each in solver.graph.convolutions if f"{each.name}.weight" in solver.gradient.tensors]
    errors = []
    for each, signal in zip(known, solver.signals(known, values), strict=True):
        layer, entered = each.layer, values.of[each.entered].detach()
        settings = layer.stride, layer.padding, layer.dilation, layer.groups
        parts = [
            conv2d_weight(entered[place : place + 1], layer.weight.shape, signal[place : place + 1], *settings)
            for place in range(len(images))
        ]
        error = (torch.stack(parts).sum(0) - solver.slope(each)).norm()
        errors.append(float(error / min(float(part.norm()) for part in parts)) if all(map(Tensor.any, parts)) else 1.0)
    return solver.slopes(values), float(torch.tensor(errors).square().mean().sqrt())
