"""The sparse columns of a matrix D of which only the column space is known: the directions q for which U q has zeros.

Each zero of a column says that a row of U is orthogonal to q. A search by reweighted least squares finds directions
that are orthogonal to many rows; rounding makes them exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

_WIDEST, _NARROWEST = 1.5, 1e-3
_POWER = 0.5
_TOLERANCE = 30.0
_DETERMINED = 100.0
_SAME = 0.9999
_INDEPENDENT = 1e-2
_MORE_ZEROS = 4
_PASSES = 8
_AT_ONCE = 2
_DIMENSIONS = 8


@dataclass(frozen=True)
class Rows:
    """The rows of U that are not zero, in coordinates in which they are spread evenly and have length 1.

    values: (m, b). map: (b, b), from a direction in these coordinates to one of U. noise: (m,), the error of each row's
    product with a direction that has length 1 in U. live: (all rows of U,), which ones they are.
    """

    values: Tensor
    map: Tensor
    noise: Tensor
    live: Tensor

    @classmethod
    def of(cls, left: Tensor, noise: Tensor) -> Rows:
        """left: U, (all rows, b). noise: (all rows,), the expected error of an entry of each."""
        live = left.norm(dim=1) > (_TOLERANCE * noise).clamp_min(1e-9 * float(left.norm(dim=1).max()))
        live = live if int(live.sum()) >= left.shape[1] else torch.ones_like(live)  # all are noise
        map = torch.eye(left.shape[1], dtype=left.dtype)
        values, size = left[live], torch.ones(int(live.sum()), dtype=left.dtype)
        for _ in range(2):
            _, spread, turn = torch.linalg.svd(values, full_matrices=False)
            even = turn.T / spread.clamp_min(1e-12 * float(spread[0]))
            values, map = values @ even, map @ even
            length = values.norm(dim=1).clamp_min(1e-30)
            values, size = values / length[:, None], size * length
        return cls(values, map, (noise[live] / size).clamp_min(1e-12), live)

    def missed(self, directions: Tensor) -> Tensor:
        """The product of each of the directions (k, b) with each row, in units of its noise: (k, m)."""
        length: Tensor = (directions @ self.map.T).norm(dim=1, keepdim=True)
        return (directions @ self.values.T).abs() / (length * self.noise)

    def zeros(self, directions: Tensor) -> Tensor:
        """Which rows are orthogonal to each of the directions (k, b) but for noise: (k, m)."""
        return self.missed(directions) <= _TOLERANCE

    def orthogonal(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that a direction (b,) is orthogonal to, (m,), and all that are orthogonal to these rows: (b, r)."""
        zeros = self.zeros(direction[None])[0]
        noise = self.noise[zeros, None] * float((self.map @ direction).norm())
        _, spread, turn = torch.linalg.svd(self.values[zeros] / noise, full_matrices=True)
        return zeros, turn[int((spread > _DETERMINED).sum()) :].T

    def determined(self, directions: Tensor) -> Tensor:
        """Those of the directions (k, b) that are the only ones with their zeros."""
        return directions[[self.orthogonal(one)[1].shape[1] == 1 for one in directions]]


def search(rows: Rows, starts: Tensor, *, iterations: int = 40, widest: float = _WIDEST) -> Tensor:
    """Directions (k, b) near `starts` (k, b) that are orthogonal to many rows: minima of a concave sum of |row q|.

    widest: the product of row and direction, against that of a random direction, that counts as near zero at first.
    """
    size = starts.shape[1]
    products = _products(rows)
    noise = size**0.5 * float(rows.noise.median() * rows.map.norm(dim=0).median())
    widths = torch.logspace(0, 1, iterations, base=min(max(_NARROWEST, 3 * noise) / widest, 1.0)) * widest
    found = normalize(starts)
    for width in widths.tolist():
        weights = (size * (found @ rows.values.T).square() + width**2) ** (_POWER / 2 - 1)
        found = _least(weights / weights.mean(1, keepdim=True) @ products)
    return _rounded(rows, found)


def orthogonal_to(rows: Rows, chosen: Tensor) -> Tensor:
    """The direction that is most nearly orthogonal to the rows chosen in each of `chosen` (k, m), rounded: (k, b)."""
    return _rounded(rows, _nearest(rows, chosen))


def _nearest(rows: Rows, chosen: Tensor) -> Tensor:
    return _least(chosen.double() @ _products(rows))


def _rounded(rows: Rows, found: Tensor) -> Tensor:
    """Each direction again from the rows that are most nearly orthogonal to it, b + 4 or all within the noise."""
    least = min(found.shape[1] + 4, len(rows.values))
    for _ in range(3):
        missed = (found @ rows.values.T).abs()
        near = missed <= missed.kthvalue(least, dim=1).values[:, None]
        found = _nearest(rows, near | rows.zeros(found))
    return found


def _products(rows: Rows) -> Tensor:
    """The product of each row with itself, (m, b * b)."""
    return (rows.values[:, :, None] * rows.values[:, None, :]).flatten(1)


def _least(covariances: Tensor) -> Tensor:
    """The eigenvector of the least eigenvalue of each of the matrices (k, b * b): (k, b)."""
    size = round(covariances.shape[1] ** 0.5)
    vectors: Tensor = torch.linalg.eigh(covariances.reshape(-1, size, size)).eigenvectors
    return vectors[:, :, 0]


def columns(rows: Rows, starts: Tensor, earlier: Tensor, generator: torch.Generator) -> Tensor:
    """Candidates for the columns (k, b), sparsest first: from `starts` (k, b) and from what was found `earlier`.

    Where two columns have many zeros in common, every mixture of both has these, and a search finds mixtures first.
    Those that are no mixtures of known columns are taken apart, until every column is known.
    """
    size = starts.shape[1]
    pool = distinct(rows, torch.cat([earlier, search(rows, starts, iterations=30)]))
    for _ in range(_PASSES):
        known = rows.determined(basis_of(pool))
        across = known @ pool.T if not len(known) else torch.linalg.qr(known.T).Q.T @ pool.T
        outside = pool[(1 - across.square().sum(0)) > _INDEPENDENT**2]
        if len(known) == size or not len(outside):
            break
        apart = [known, outside[_AT_ONCE * size :], _taken_apart(rows, outside[: _AT_ONCE * size], generator)]
        pool = distinct(rows, torch.cat(apart))
    return pool


def _taken_apart(rows: Rows, found: Tensor, generator: torch.Generator) -> Tensor:
    """The sparse ones among all directions with the zeros of each direction: the same problem in fewer dimensions."""
    inside = [found[:0]]
    for direction in found:
        zeros, basis = rows.orthogonal(direction)
        size, others = basis.shape[1], rows.values[~zeros] @ basis
        if 2 <= size <= _DIMENSIONS and len(others) > size + _MORE_ZEROS:
            inner = Rows.of(others, rows.noise[~zeros] * float((rows.map @ direction).norm()))
            starts = inner.values[torch.randperm(len(inner.values), generator=generator)[: 8 * size]]
            inside.append(search(inner, starts, iterations=20) @ (basis @ inner.map).T)
    return _rounded(rows, normalize(torch.cat(inside)))


def distinct(rows: Rows, found: Tensor) -> Tensor:
    """The directions with more zeros than any b - 1 rows give to some direction, each once, sparsest first."""
    number = rows.zeros(found).sum(1)
    enough = number >= found.shape[1] - 1 + _MORE_ZEROS
    kept = found[enough][number[enough].argsort(descending=True, stable=True)]
    alike = (kept @ kept.T).abs() > _SAME
    return kept[~alike.tril(-1).any(1)]


def basis_of(found: Tensor) -> Tensor:
    """Independent ones among the directions, the first ones first, (k, b) with k <= b.

    A mixture of columns has fewer zeros than each of them. So if all columns were found, sparsest first, these are the
    columns.
    """
    chosen: list[int] = []
    left = torch.eye(found.shape[1], dtype=found.dtype)
    for place, direction in enumerate(found):
        rest = left @ direction
        if len(chosen) < found.shape[1] and float(rest.norm()) > _INDEPENDENT:
            chosen.append(place)
            left = left - torch.outer(rest, rest) / rest.square().sum()
    return found[chosen]
