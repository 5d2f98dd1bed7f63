"""Registration of restarts: images that differ by a shift are brought into line before they are averaged.

A convolutional network hardly minds where an object is, so restarts find it at different places.
"""

from __future__ import annotations

import torch
from torch import Tensor

_REACH = 0.25  # the largest shift, as a share of the image's side


def registered(images: Tensor) -> Tensor:
    """Images (R, N, C, H, W) of R restarts, each shifted to fit the mean of all best; what leaves comes in opposite.

    Reference: Yin et al., See through Gradients, CVPR 2021, section 3.4, with shifts in place of a flow.
    """
    mean = images.mean(0)
    return torch.stack([torch.stack([_fitted(one, to) for one, to in zip(each, mean, strict=True)]) for each in images])


def shift_to(image: Tensor, reference: Tensor) -> tuple[int, int]:
    """The cyclic shift (down, right) of `image` (C, H, W) that fits `reference` best in squared error.

    The correlation over all shifts is a product of Fourier transforms; shifts beyond a quarter of a side do not count.
    """
    height, width = image.shape[-2:]
    centred = [each - each.mean((-2, -1), keepdim=True) for each in (image, reference)]
    first, second = (torch.fft.rfft2(each) for each in centred)
    match = torch.fft.irfft2(first.conj() * second, s=(height, width)).sum(0)
    down, right = (_signed(size, match) for size in (height, width))
    near = (down.abs() <= _REACH * height)[:, None] & (right.abs() <= _REACH * width)[None]
    place = int(torch.where(near, match, -torch.inf).argmax())
    return int(down[place // width]), int(right[place % width])


def _fitted(image: Tensor, reference: Tensor) -> Tensor:
    return image.roll(shift_to(image, reference), (-2, -1))


def _signed(size: int, like: Tensor) -> Tensor:
    """The shifts 0, 1, ..., -2, -1 in the order of a Fourier transform."""
    shifts: Tensor = (torch.fft.fftfreq(size, device=like.device) * size).round().long()
    return shifts
