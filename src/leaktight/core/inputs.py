"""What one example is, and the checks and conversions that depend on it.

The family is closed: a new kind is a subclass of `Inputs` in this file and a member of `ALL_INPUTS`. Data sets name
the kind of their examples; attacks, defenses and metrics name in `takes` those that they work on, and `require_inputs`
refuses all others before work starts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from leaktight.core.errors import DataError, InputsError, UsageError
from leaktight.core.scope import checked_shape, outside_inputs
from leaktight.core.text import described, sides

GREY = 0.5


@dataclass(frozen=True)
class Inputs(ABC):
    """What one example is. Data sets keep examples in a stored form; models take another.

    kind: the name in messages.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one example as a model takes it."""

    @property
    def size(self) -> int:
        """The number of elements of one example."""
        return math.prod(self.shape)

    @classmethod
    @abstractmethod
    def of(cls, stored: Tensor) -> Self:
        """The inputs of stored examples (N, ...); DataError if they are of another kind."""

    @abstractmethod
    def loaded(self, stored: Tensor) -> Tensor:
        """Stored examples (N, ...) as a model takes them."""

    @classmethod
    def require(cls, name: str, inputs: Inputs) -> Self:
        """`inputs`, if they are of this kind; InputsError otherwise, for what is called `name` and takes no other."""
        if not isinstance(inputs, cls):
            raise _refused(name, [cls], inputs)
        return inputs

    @abstractmethod
    def blank(self, count: int, like: Tensor) -> Tensor:
        """`count` examples that carry no information, with the dtype and device of `like`: to run a model once."""


class ImageSize(NamedTuple):
    """The shape of one image, as users' functions get it."""

    channels: int
    height: int
    width: int


@dataclass(frozen=True)
class Images(Inputs):
    """Images (channels, height, width) of floats in [0, 1], 1 or 3 channels; stored as bytes."""

    kind = "images"

    channels: int
    height: int
    width: int

    def __post_init__(self) -> None:
        checked_shape(self.shape)

    def __str__(self) -> str:
        return f"{self.channels}x{self.height}x{self.width}"

    @property
    def shape(self) -> ImageSize:
        return ImageSize(self.channels, self.height, self.width)

    @classmethod
    def of(cls, stored: Tensor) -> Self:
        if stored.dtype != torch.uint8 or stored.ndim != 4:
            kind = str(stored.dtype).removeprefix("torch.")
            raise DataError(
                outside_inputs(stored.shape, number_kind(stored))
                or f"expected images (N, C, H, W) of bytes, got {sides(stored.shape)} of {kind}; convert them"
            )
        return cls(*stored.shape[1:])

    def loaded(self, stored: Tensor) -> Tensor:
        return stored.to(torch.float32).div_(255)

    def blank(self, count: int, like: Tensor) -> Tensor:
        return torch.zeros(count, *self.shape, dtype=like.dtype, device=like.device)

    def grey(self) -> Tensor:
        """One mid-grey image: a guess without any observation."""
        return torch.full(self.shape, GREY)

    @staticmethod
    def checked(images: Tensor) -> Tensor:
        """The same batch, if it is (N, C, H, W) of floats. Bytes are refused, because they are not in [0, 1]."""
        if images.ndim != 4 or not images.numel() or not images.is_floating_point():
            raise UsageError(
                f"expected images (N, C, H, W) of floats in [0, 1], got {described(images)}; divide bytes by 255"
            )
        return images

    @staticmethod
    def picture(images: Tensor) -> Tensor:
        """A batch side by side: bytes (H, N * W, C), or (H, N * W) if grey; what is not finite is black."""
        clean = images.detach().nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
        rows = (clean * 255).round().byte().permute(2, 0, 3, 1).flatten(1, 2).cpu()
        return rows[..., 0] if rows.shape[2] == 1 else rows


def number_kind(tensor: Tensor) -> str:
    """The kind of a tensor's numbers: "f" floats, "b" booleans, "u" bytes, "i" other integers."""
    if tensor.is_floating_point():
        return "f"
    return {torch.bool: "b", torch.uint8: "u"}.get(tensor.dtype, "i")


ONLY_IMAGES: frozenset[type[Inputs]] = frozenset({Images})
ALL_INPUTS: frozenset[type[Inputs]] = frozenset({Images})
"""All kinds of inputs."""


def require_inputs(name: str, takes: Collection[type[Inputs]], inputs: Inputs) -> None:
    """Raise InputsError unless `inputs` are of a kind that what is called `name` takes."""
    if type(inputs) not in takes:
        raise _refused(name, takes, inputs)


def _refused(name: str, takes: Collection[type[Inputs]], inputs: Inputs) -> InputsError:
    wanted = " or ".join(sorted(each.kind for each in takes))
    return InputsError(f"expected {wanted} for {name}, got {inputs.kind}; choose another method or other data")
