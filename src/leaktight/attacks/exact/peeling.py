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
from leaktight.attacks.exact.features import search
from leaktight.attacks.exact.graph import Graph, Known
from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.protocols import Attack, LabelSource, Progress
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Certificate, Observation, Reconstruction
from leaktight.models.surgery import has_batch_norm

PROVEN = 0.999
"""The share of the convolutions' gradients that must be explained. Features that are right to 5 % explain about 0.9."""
_PROOF = "gradients of all convolutions"
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
    certificate: the share of the gradients of all convolutions that the guess explains.
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
        images = self._images(one, solver, known, rng)
        slopes, misfit = explained(solver, images)
        if progress is not None:
            progress(0, misfit, images)
        solved = [each.name for each in solver.graph.convolutions if each.entered in known]
        notes: dict[str, object] = {"assumed": list(gradient.notes), "solved": solved, "searched from": solved[0]}
        found = answer(images, slopes.argmin(1), misfit, notes)
        return replace(found, certificate=Certificate(_PROOF, max(0.0, 1 - misfit), PROVEN))

    def _images(self, seen: Observation, solver: Solver, known: Known, rng: Rng) -> Tensor:
        """The images of the values that are known, solved or sought."""
        graph = solver.graph
        first = graph.convolutions[0].entered
        if first in known:
            return entrance(seen).pixels(known[first])
        nodes = _earliest(graph, known)
        reads = [read for node in nodes if (read := graph.gated(node)) is not None]
        pieces = graph.pieces(reads)
        grey = 0.5 + 0.1 * torch.randn(1, *graph.shape, generator=rng.child("images").public(), dtype=torch.float64)

        stages = [(weight, self.iterations) for weight in _SMOOTH]
        return torch.cat(
            [
                search(pieces, [known[node][each : each + 1] for node in nodes], grey.clamp(0, 1), stages)
                for each in range(solver.number)
            ]
        )


def _earliest(graph: Graph, known: Known) -> list[fx.Node]:
    """The first known node that all else hangs on, and the known ones before it."""
    cut = next(node for node in graph.cuts if node in known)
    later = graph.after(cut)
    return [node for node in graph.nodes if node in known and node not in later]


def explained(solver: Solver, images: Tensor) -> tuple[Tensor, float]:
    """The gradient at the outputs (N, classes) of images, and how far the gradients of convolutions are from theirs.

    That at the outputs is read from the last layer, as confidences near 1 are lost in rounding. The distance is the
    root mean square over convolutions of the error relative to the length.
    """
    values = solver.graph.run(images)
    slopes = solver.slopes(values)
    convolutions = solver.graph.convolutions
    errors = []
    for each, signal in zip(
        convolutions, values.back([each.node for each in convolutions], signal=slopes), strict=True
    ):
        layer, wanted = each.layer, solver.slope(each)
        entered = values.of[each.entered].detach()
        own = conv2d_weight(
            entered, layer.weight.shape, signal, layer.stride, layer.padding, layer.dilation, layer.groups
        )
        errors.append(float((own - wanted).norm() / wanted.norm().clamp_min(1e-300)))
    return slopes, float(torch.tensor(errors).square().mean().sqrt())
