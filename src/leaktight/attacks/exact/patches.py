"""The input of a convolution behind a ReLU, unmixed from the gradient of its weights.

That gradient is D P: row p of P is the patch of the input that position p of the output reads, and D the gradient at
the outputs. With no more positions than output channels the patches lie in the row space of the gradient. Behind a ReLU
they are not negative, and mostly zero: each is an extreme ray of the cone of vectors in that space that are not
negative, and the easiest ones to meet. A linear program finds one. Its neighbours share most of their entries with it,
so they follow by least squares, and so does the whole image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from leaktight.attacks.exact.equations import let_through

Floats: TypeAlias = NDArray[np.float64]
Place: TypeAlias = tuple[int, int]

_ROUNDING = 1e-6  # singular values below this, relative to the largest, are rounding
_ZERO = 1e-3  # entries of a ray below this, relative to the largest, are taken for zeros
_FITS = 1e-2  # the largest relative residual of a neighbour; places beyond the border had 0.4 and more
_NOISE = 1e-5  # how negative an entry may be, relative to the largest: rounding moves true zeros
_TRIES = 12  # linear programs for each image
_MOST_COLUMNS = 1500  # of a linear program
_SPARE = 8  # zeros that a ray has beyond those that any ray has


def unmixed(gradient: Tensor, size: Place, number: int, generator: torch.Generator) -> Tensor | None:
    """The inputs (number, c, *size), each up to a positive factor; None if they are not found.

    gradient: of the weight (C, c, k, k) of a convolution with stride 1 that keeps the size (h, w).
    """
    channels, kernel = gradient.shape[1], gradient.shape[2]
    if not bool(gradient.any()):
        return None
    space = _row_space(gradient.flatten(1))
    found: list[Floats] = []
    for _ in range(_TRIES * number):
        ray = _ray(space, generator)
        if ray is None or any(_met(ray, image, kernel) for image in found):
            continue
        image = _assembled(_grown(space, ray, channels, kernel, size), channels, kernel, size)
        if image is not None:
            found.append(image)
        if len(found) == number:
            return torch.stack([_sharpened(space, let_through(torch.from_numpy(image))[0], kernel) for image in found])
    return None


def _patches(image: Tensor, kernel: int) -> Tensor:
    """The patches (h * w, c * k * k) of an image (c, h, w), zeros around it."""
    return F.unfold(image[None], kernel, padding=kernel // 2)[0].T


def _sharpened(space: Floats, image: Tensor, kernel: int) -> Tensor:
    """An image (c, h, w) whose patches are determined by their zeros, at the scale that they had."""
    patches = _patches(image, kernel).numpy()
    middle = kernel * kernel // 2
    result = image.flatten(1).clone()
    for place, patch in enumerate(patches):
        zeros = patch == 0
        if patch.any() and zeros.sum() >= len(space) + _SPARE:
            ray = _exact(space, zeros)
            share = ray @ patch / (ray @ ray)
            result[:, place] = torch.from_numpy(share * ray.reshape(len(image), -1)[:, middle])
    return let_through(result.reshape(image.shape))[0]


def _row_space(gradient: Tensor) -> Floats:
    """An orthonormal basis (r, n) of the rows, each of which is taken at equal length: its rounding is relative."""
    lengths = gradient.norm(dim=1)
    rows = gradient[lengths > 0] / lengths[lengths > 0, None]
    _, sizes, turn = torch.linalg.svd(rows, full_matrices=False)
    basis: Floats = turn[sizes > _ROUNDING * sizes.max()].numpy()
    return basis


def _ray(space: Floats, generator: torch.Generator) -> Floats | None:
    """A random extreme ray (n,) of the vectors of a space that are not negative; None if it has too few zeros."""
    from scipy.optimize import linprog  # slow to import

    sizes = np.linalg.norm(space, axis=0)
    columns = np.flatnonzero(sizes > 1e-4 * sizes.max(initial=0.0))
    columns = columns[torch.randperm(len(columns), generator=generator)[:_MOST_COLUMNS].numpy()]
    if len(columns) <= len(space):
        return None
    some = space[:, columns]
    costs = some @ torch.rand(len(columns), generator=generator, dtype=torch.float64).numpy()
    found = linprog(
        costs,
        A_ub=-some.T,
        b_ub=np.full(len(columns), _NOISE * np.abs(some).max()),
        A_eq=some[:, :1].T,
        b_eq=[1.0],
        bounds=(None, None),
    )
    if found.status != 0:
        return None
    ray = found.x @ space
    zeros = np.abs(ray) < _ZERO * np.abs(ray).max()
    if zeros.sum() < len(space) + _SPARE:
        return None
    return _exact(space, zeros)


def _exact(space: Floats, zeros: NDArray[np.bool_]) -> Floats:
    """The vector of the space with these zeros, its largest entry 1."""
    ray: Floats = np.linalg.svd(space[:, zeros].T, full_matrices=False)[2][-1] @ space
    largest: np.float64 = ray[np.abs(ray).argmax()]
    return ray / largest


def _met(ray: Floats, image: Floats, kernel: int) -> bool:
    """Whether a ray is a patch of an image (c, h, w) that was found."""
    rows = _patches(torch.from_numpy(image), kernel)
    lengths = rows.norm(dim=1).clamp_min(1e-12)
    alike = rows @ torch.from_numpy(ray) / lengths / float(np.linalg.norm(ray))
    return bool(alike.max() > 1 - _FITS)


class _Overlap(NamedTuple):
    """What is known of a patch from others. taps: (k * k,), whether known. values: (c, k * k)."""

    taps: NDArray[np.bool_]
    values: Floats


def _grown(space: Floats, ray: Floats, channels: int, kernel: int, size: Place) -> dict[Place, Floats]:
    """The patches (c, k * k) by their place relative to that of the first, as far as neighbours are found.

    They span no more than the size, for a patch can be its own neighbour.
    """
    grid = {(0, 0): ray.reshape(channels, -1)}
    left, refused = [(0, 0)], set[Place]()
    while left:
        row, column = left.pop(0)
        for place in ((row, column + 1), (row, column - 1), (row + 1, column), (row - 1, column)):
            if place in grid or place in refused:
                continue
            if any(extent > most for extent, most in zip(_span([*grid, place]), size, strict=True)):
                continue
            patch = _fitted(space, _overlap(grid, place, channels, kernel))
            if patch is None:
                refused.add(place)
            else:
                grid[place] = patch
                left.append(place)
    return grid


def _span(places: Sequence[Place]) -> Place:
    """How many rows and columns places extend over."""
    rows, columns = ([place[axis] for place in places] for axis in (0, 1))
    return max(rows) - min(rows) + 1, max(columns) - min(columns) + 1


def _overlap(grid: dict[Place, Floats], place: Place, channels: int, kernel: int) -> _Overlap:
    values, count = np.zeros((channels, kernel * kernel)), np.zeros(kernel * kernel)
    for other, taps, others in _shared(place, kernel):
        if other in grid:
            values[:, taps] += grid[other][:, others]
            count[taps] += 1
    return _Overlap(count > 0, values / np.maximum(count, 1))


def _shared(place: Place, kernel: int) -> Iterator[tuple[Place, list[int], list[int]]]:
    """The places whose patches share pixels with that of a place, with the taps of the shared pixels in both."""
    reach = range(1 - kernel, kernel)
    for down in reach:
        for right in reach:
            pairs = [
                (row * kernel + column, (row - down) * kernel + column - right)
                for row in range(kernel)
                for column in range(kernel)
                if 0 <= row - down < kernel and 0 <= column - right < kernel
            ]
            yield (place[0] + down, place[1] + right), [own for own, _ in pairs], [other for _, other in pairs]


def _fitted(space: Floats, overlap: _Overlap) -> Floats | None:
    """The vector of the space with the known entries, as a patch; None if there is none."""
    columns = np.broadcast_to(overlap.taps, overlap.values.shape).ravel()
    goal = overlap.values.ravel()[columns]
    length = np.linalg.norm(goal)
    if length < _ZERO:
        return None
    shares = np.linalg.lstsq(space[:, columns].T, goal, rcond=None)[0]
    if np.linalg.norm(space[:, columns].T @ shares - goal) > _FITS * length:
        return None
    patch: Floats = shares @ space
    return None if patch.min() < -10 * _FITS * patch.max() else patch.reshape(overlap.values.shape)


def _assembled(grid: dict[Place, Floats], channels: int, kernel: int, size: Place) -> Floats | None:
    """The image (c, h, w) of the patches' middles; None if they do not span it."""
    if _span([*grid]) != tuple(size):
        return None
    first = [min(place[axis] for place in grid) for axis in (0, 1)]
    image = np.zeros((channels, *size))
    for (row, column), patch in grid.items():
        image[:, row - first[0], column - first[1]] = patch[:, kernel * kernel // 2]
    return image
