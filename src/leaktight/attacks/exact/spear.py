"""SPEAR: exact batches from the gradient of a linear layer before a ReLU, with a proof that needs no truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leaktight.attacks.exact.analytic import answer, gradient_of, only
from leaktight.attacks.exact.first_layer import FirstLayer, confirmed, first_linear, labels_of_inputs
from leaktight.attacks.exact.sparse import Rows, basis_of, columns, distinct, orthogonal_to
from leaktight.core.errors import ModelError, UsageError, require_at_least
from leaktight.core.protocols import Attack, LabelSource, Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Certificate, Observation, Reconstruction

PROVEN = 0.999
"""The share of signs that must agree. Of batches that were not recovered none had more than 0.9969."""
_PROOF = "relu signs"
_FLOOR = 1e-8
_CLOSE_TO_ZERO = 1e-4
_KEPT = 4


@dataclass(frozen=True, kw_only=True)
class Spear(Attack):
    """SPEAR: all examples of a batch at once, exactly, from the gradient of a linear layer before a ReLU.

    The gradient of the weights is D X: X the inputs, D the gradient at the outputs. Its rank is the number of examples.
    Where a ReLU is closed, D is zero, so D consists of the sparse directions of the gradient's column space. They are
    searched for; X follows, its scale from the bias, and the labels from the last layer.
    certificate: the share of units that are open exactly where D is not zero, counted for examples that the zeros of D
    determine; lower if the guess does not explain the layer's gradient, and 0 if layers before it change in training or
    the number of examples is known to be another. It is near 1 only for the true batch.
    rounds: >= 1, of the search, which ends once the batch is proven. starts: >= 1, for each example and round.

    Assumes: one local step of plain gradient descent on one batch of fewer examples than the layer has units and
    inputs; several units for each example.
    Cannot: find examples whose gradient is zero; two equal examples count as one; prove a batch after several steps, or
    where dropout makes gradients random. Before the last layer of a network for two classes differences of columns are
    as sparse as columns, and it mostly fails.
    Reference: Dimitrov et al., SPEAR: Exact Gradient Inversion of Batches in Federated Learning, NeurIPS 2024.
    Differs from it: instead of sampling sets of rows, directions are found by reweighted least squares, and mixtures of
    columns with common zeros are taken apart; so the time does not grow as 2 to the number of examples.
    """

    rounds: int = 6
    starts: int = 15

    def __post_init__(self) -> None:
        require_at_least(1, rounds=self.rounds, starts=self.starts)

    @property
    def labels_from(self) -> LabelSource:
        return "inferred"

    @property
    def searches(self) -> bool:
        return False

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        one = only(self, seen)
        gradient = gradient_of(one)
        first = first_linear(one, gradient)
        if first.pixels is None or not first.gated(one):
            raise ModelError(
                f"expected pixels before {first.name!r} and a ReLU behind it, got other layers; use cocktail_party"
            )
        mixed = Mixed.of(first, one.batch_size)
        history: list[tuple[int, float]] = []

        def tell(turn: int, loss: float) -> None:
            history.append((turn, loss))
            if progress is not None:
                progress(turn, loss, None)

        found = solve(mixed, self, rng, tell)
        inputs = found.shares @ mixed.right
        images = first.pixels.pixels(inputs)
        notes = {"assumed": list(gradient.notes), "examples": len(images)}
        made = answer(images, labels_of_inputs(one, gradient, images), 1 - found.figure, notes)
        figure = min(found.figure, confirmed(one, gradient, first.name, made.guess))
        return Reconstruction(
            made.guess,
            made.loss,
            notes,
            first_loss=history[0][1],
            history=tuple(history),
            certificate=Certificate(_PROOF, figure, PROVEN),
        )


@dataclass(frozen=True)
class Mixed:
    """The gradient of the weights as left @ right, both of the rank of the batch.

    rows: those of left (m, b), for the search. right: (b, n), orthonormal. total: (b,), the gradient of the bias
    is left @ total. outputs: right through the layer without its bias, (b, m). bias: (m,).
    """

    rows: Rows
    left: Tensor
    right: Tensor
    total: Tensor
    outputs: Tensor
    bias: Tensor

    @classmethod
    def of(cls, first: FirstLayer, most: int | None = None) -> Mixed:
        """most: the number of examples, if it is known; a higher rank is that of a defense or of several steps."""
        _, sizes, turn = torch.linalg.svd(first.weight_gradient, full_matrices=False)
        rank = rank_of(sizes)
        if rank == len(sizes):
            raise UsageError(
                f"expected fewer examples than units and inputs of {first.name!r}, {len(sizes)}, got as many or more, "
                "or noise; use a search"
            )
        rank = rank if most is None else min(rank, most)
        right = turn[:rank]
        left = first.weight_gradient @ right.T
        rest = (first.weight_gradient - left @ right).norm(dim=1) / (right.shape[1] - rank) ** 0.5
        noise = rest.clamp_min(torch.finfo(torch.float32).eps * float(left.norm(dim=1).max()) * 1e-3)
        total = torch.linalg.lstsq(left, first.bias_gradient[:, None]).solution[:, 0]
        return cls(Rows.of(left, noise), left, right, total, right @ first.weight.T, first.bias)

    def scaled(self, shares: Tensor) -> Tensor:
        """Shares (..., b) of `right` with the scale that the gradient of the bias demands."""
        scale = shares @ self.total
        return shares / torch.where(scale.abs() < 1e-30, 1e-30, scale)[..., None]


def rank_of(sizes: Tensor) -> int:
    """The numerical rank: where singular values, largest first, fall most; all of them if they do not fall tenfold.

    >>> rank_of(torch.tensor([3.0, 1.0, 1e-7, 1e-8, 0.0]))
    2
    """
    floored = sizes.clamp_min(_FLOOR * float(sizes[0]))
    falls = floored[:-1] / floored[1:]
    return int(falls.argmax()) + 1 if len(falls) and float(falls.max()) >= 10 else len(sizes)


class Solution(NamedTuple):
    """directions: (b, b). shares: (b, b), of `Mixed.right` in each example. open: (b, m), by the examples' outputs.

    figure: that of the certificate.
    """

    directions: Tensor
    shares: Tensor
    open: Tensor
    figure: float


def solve(mixed: Mixed, search_by: Spear, rng: Rng, tell: Callable[[int, float], None]) -> Solution:
    """The batch, by the directions that agree best with the signs of the outputs. tell: after each round."""
    rows, size = mixed.rows, len(mixed.right)
    generator = rng.public()
    pool = rows.values[:0]
    best: Solution | None = None
    for turn in range(search_by.rounds):
        number = search_by.starts * size
        some = torch.randperm(len(rows.values), generator=generator)[:number]
        starts = [torch.randn(number, size, generator=generator, dtype=torch.float64), rows.values[some]]
        pool = columns(rows, torch.cat(starts), pool, generator)[: _KEPT * size]
        now = _swapped(mixed, pool)
        best = now if best is None or now.figure > best.figure else best
        tell(turn, 1 - best.figure)
        if best.figure >= PROVEN:
            break
    assert best is not None, "there is at least one round"
    return best


def _swapped(mixed: Mixed, pool: Tensor) -> Solution:
    """The sparsest independent directions of the pool; then others in their place while more signs agree.

    Others are those of the pool and those to which the units are orthogonal that an example leaves closed: the example
    of a wrong direction is right, if all other directions are.
    """
    best = _sparsest(mixed, pool)
    for _ in range(len(mixed.right)):
        if best.figure >= PROVEN:
            break
        pool = distinct(mixed.rows, torch.cat([pool, orthogonal_to(mixed.rows, ~best.open[:, mixed.rows.live])]))
        tried = max(_sparsest(mixed, pool), _greedy(mixed, pool, best), key=lambda each: each.figure)
        if tried.figure <= best.figure:
            break
        best = tried
    return best


def _sparsest(mixed: Mixed, pool: Tensor) -> Solution:
    return _solution(mixed, basis_of(torch.cat([pool, torch.eye(len(mixed.right), dtype=pool.dtype)])))


def _greedy(mixed: Mixed, pool: Tensor, best: Solution) -> Solution:
    """Each direction of the pool in the best place, if more signs agree then."""
    for direction in pool:
        place, figure = _best_place(mixed, best.directions, direction)
        if figure > best.figure:
            directions = best.directions.clone()
            directions[place] = direction
            best = max(best, _solution(mixed, directions), key=lambda each: each.figure)
    return best


def _solution(mixed: Mixed, directions: Tensor) -> Solution:
    rows = mixed.rows
    shares = mixed.scaled(torch.linalg.pinv(rows.map @ directions.T))
    outputs = shares @ mixed.outputs + mixed.bias
    determined = torch.tensor([len(rows.determined(one[None])) == 1 for one in directions])
    agree = _agree(outputs, _closed(mixed, directions)) & determined[:, None]
    return Solution(directions, shares, outputs > 0, float(agree.double().mean()))


def _best_place(mixed: Mixed, directions: Tensor, other: Tensor) -> tuple[int, float]:
    """Where `other` is best put in place of one of the directions, and the share of signs that agree then."""
    shares = torch.linalg.pinv(mixed.rows.map @ directions.T)
    parts = shares @ (mixed.rows.map @ other)
    places = (parts.abs() > 1e-3 * parts.abs().max()).nonzero()[:, 0]
    change = parts / parts[places, None]  # (p, b): the inverse after a change of one column
    change[torch.arange(len(places)), places] = 1 - 1 / parts[places]
    moved = mixed.scaled(shares - change[:, :, None] * shares[places, None])
    closed = _closed(mixed, directions).expand(len(places), -1, -1).clone()
    closed[torch.arange(len(places)), places] = _closed(mixed, other[None])[0]
    agree = _agree(moved @ mixed.outputs + mixed.bias, closed).double().mean((1, 2))
    return int(places[agree.argmax()]), float(agree.max())


def _closed(mixed: Mixed, directions: Tensor) -> Tensor:
    """Where the gradient at the outputs is zero, (k, m)."""
    closed = torch.ones(len(directions), len(mixed.bias), dtype=torch.bool)
    closed[:, mixed.rows.live] = mixed.rows.zeros(directions)
    return closed


def _agree(outputs: Tensor, closed: Tensor) -> Tensor:
    """Which units are open by their outputs where the gradient is not zero, or too close to zero to say."""
    size = outputs.abs()
    return ((outputs > 0) != closed) | (size <= _CLOSE_TO_ZERO * size.flatten(-2).median(-1).values[..., None, None])
