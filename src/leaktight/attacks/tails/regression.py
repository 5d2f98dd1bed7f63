"""What enters a tail, estimated from its gradients by a regression over public images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from leaktight.attacks.exact.graph import Convolution
from leaktight.attacks.tails.tail import Tail

_SKETCHED = 2048  # numbers that are left of the gradient of a convolution
_AT_ONCE = 20_000_000  # elements of gradients that are computed at once


def estimate(rows: Tensor, goals: Tensor, query: Tensor, weight: float) -> Tensor:
    """The goal (...) at a query (D,), by ridge regression from rows (N, D) to goals (N, ...).

    weight: of the penalty, relative to the mean square of a column.
    """
    mean, centre = rows.mean(0), goals.mean(0)
    rows = rows - mean
    penalty = weight * rows.square().sum() / rows.shape[1]
    factor = torch.linalg.cholesky(rows @ rows.T + penalty * torch.eye(len(rows)))
    shares = torch.cholesky_solve((rows @ (query - mean))[:, None], factor)[:, 0]
    found: Tensor = centre + torch.tensordot(shares, goals - centre, 1)
    return found


class Sketch:
    """Gradients of a tail as short rows, and the features.

    Each gradient has length 1; its elements are added up in random groups with random signs, which keeps inner products
    on average.

    signal: the gradient by the features (K, C) of the K examples behind each gradient.
    """

    def __init__(self, tail: Tail, signal: Tensor, generator: torch.Generator) -> None:
        self.tail, self.signal = tail, signal
        self.plain = [each for each in tail.convolutions if _is_plain(each)]
        sizes = [each.layer.weight.numel() for each in self.plain]
        self.groups = [torch.randint(_SKETCHED, (size,), generator=generator) for size in sizes]
        self.signs = [2.0 * torch.randint(2, (size,), generator=generator) - 1 for size in sizes]
        self.chunk = max(1, _AT_ONCE // (len(signal) * max(sizes, default=_AT_ONCE)))

    def of(self, gradients: Sequence[Tensor], features: Tensor) -> Tensor:
        """Gradients (N, ...) of the plain convolutions and features (N, K, C) to rows (N, D)."""
        parts = [features.flatten(1) / self.unit]
        for gradient, groups, signs in zip(gradients, self.groups, self.signs, strict=True):
            flat = F.normalize(gradient.flatten(1), dim=1) * signs
            parts.append(torch.zeros(len(flat), _SKETCHED).index_add_(1, groups, flat))
        return torch.cat(parts, 1)

    def of_values(self, values: Tensor) -> Tensor:
        """The rows (N, D) of values (N, K, ...) that enter the tail, with the signal of the update."""
        gradients = self._gradients(values)
        first = next(gradients)
        self.unit = first[1].norm(dim=2).mean()
        return torch.cat([self.of(*first), *(self.of(*each) for each in gradients)])

    def _gradients(self, values: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
        """The gradients of every K values by themselves, and their features."""
        entered = [each.entered for each in self.plain]
        outputs = [each.node for each in self.plain]
        module = self.tail.module(self.tail.features, *entered, *outputs).requires_grad_(False)
        for part in values.split(self.chunk):
            features, *rest = module(part.flatten(0, 1).requires_grad_())
            read, made = rest[: len(entered)], rest[len(entered) :]
            features = features.unflatten(0, part.shape[:2])
            slopes = torch.autograd.grad((features * self.signal).sum(), made) if made else ()
            found = zip(self.plain, read, slopes, strict=True)
            yield [_weight_gradient(*each).unflatten(0, part.shape[:2]).sum(1) for each in found], features.detach()


def _is_plain(each: Convolution) -> bool:
    return each.layer.groups == 1 and each.layer.padding_mode == "zeros" and not isinstance(each.layer.padding, str)


def _weight_gradient(convolution: Convolution, entered: Tensor, slope: Tensor) -> Tensor:
    """The gradients of the weights (N, O, C x rows x columns), of every example by itself."""
    layer = convolution.layer
    assert not isinstance(layer.padding, str)
    patches = F.unfold(entered.detach(), layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return slope.flatten(2) @ patches.transpose(1, 2)
