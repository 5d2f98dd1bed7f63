"""Copies of the true images, mirrored, turned and shifted: what a judge has to compare with where there are no decoys.

A guess that knows nothing of how an image is arranged is as close to the copies as to the image itself. A guess of
another image of the same class is not, so copies count only if the update itself shows that the image is behind it.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor


def copies_of(images: Tensor) -> list[Tensor]:
    """The images (N, C, H, W), mirrored, turned by quarters if they are square, and shifted around their edges.

    All N are changed alike. There are 199 copies of square images, 99 of others.
    """
    height, width = images.shape[-2:]
    turned = [images.flip(dims) for dims in ((), (-1,), (-2,), (-2, -1))]
    if height == width:
        turned += [each.transpose(-1, -2) for each in turned]
    places = list(product(turned, _shifts(height), _shifts(width)))
    return [
        torch.roll(each, (down, right), (-2, -1))
        for each, down, right in places
        if down or right or each is not turned[0]
    ]


def _shifts(size: int) -> list[int]:
    """
    >>> _shifts(28), _shifts(4)
    ([-7, -3, 0, 3, 7], [-2, -1, 0, 1, 2])
    """
    near, far = max(1, size // 8), max(2, size // 4)
    return [-far, -near, 0, near, far]
