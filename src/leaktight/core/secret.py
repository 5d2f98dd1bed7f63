"""A stream that nobody else can compute: whatever protects a client is drawn from one.

PyTorch's CPU generator keeps 32 bits of its seed, so that a server tries all seeds in a minute and subtracts the noise.
Here the key has 256 bits, and the numbers are the keystream of AES-256 in counter mode (OpenSSL's, by `cryptography`).
Normal numbers are made of it by Box and Muller's transform: at the price of `torch.randn`, where NumPy's generator over
a cryptographic bit generator (`randomgen`) takes 2.5 to 6 times that (docs/results/privacy.md).

>>> stream = SecretStream(bytes(32))
>>> stream.permutation(5).tolist() == SecretStream(bytes(32)).permutation(5).tolist()
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from torch import Tensor

from leaktight.core.types import Params

Numbers: TypeAlias = NDArray[Any]
Dtype: TypeAlias = type[np.float32] | type[np.float64]

KEY_BYTES = 32
_COUNTER = bytes(16)  # a key serves one stream
_CHUNK = 1 << 15  # pairs of normal numbers made at a time: they stay in the processor's cache
_BITS: Mapping[np.dtype[Any], int] = {np.dtype(np.float32): 24, np.dtype(np.float64): 53}
_WORDS: Mapping[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype("<u4"),
    np.dtype(np.float64): np.dtype("<u8"),
}


class SecretStream:
    """Numbers from a secret key, one after the other; each is given out once. Made by `Rng.secret`.

    Draws are flat NumPy arrays of float32 (24 random bits each) or float64 (53 bits).
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"expected a key of {KEY_BYTES} bytes, got {len(key)}")
        self._keystream = Cipher(AES256(key), CTR(_COUNTER)).encryptor()

    def bytes(self, count: int) -> bytes:
        return self._keystream.update(bytes(count))

    def uniform(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        """Even draws from [0, 1)."""
        kind = np.dtype(dtype)
        values = self._whole(count, kind).astype(kind)
        values *= kind.type(2.0 ** -_BITS[kind])
        return values

    def normal(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        """Draws of mean 0 and variance 1."""
        kind = np.dtype(dtype)
        result = np.empty(count + count % 2, dtype=kind)
        for start in range(0, len(result), 2 * _CHUNK):
            self._normal_pairs(result[start : start + 2 * _CHUNK])
        return result[:count]

    def exponential(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        """Draws of mean 1; the logarithm is of numbers in (0, 1], so none is infinite."""
        values = self._open(count, np.dtype(dtype))
        np.log(values, out=values)
        return np.negative(values, out=values)

    def laplace(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        """Draws of mean 0 and variance 1: the difference of two exponentials."""
        both = self.exponential(2 * count, dtype)
        values: Numbers = (both[:count] - both[count:]) * both.dtype.type(math.sqrt(0.5))
        return values

    def permutation(self, count: int) -> Tensor:
        """The numbers from 0 to count - 1 in a random order: places of random 64-bit numbers, sorted."""
        return torch.from_numpy(np.argsort(np.frombuffer(self.bytes(8 * count), dtype="<u8"), kind="stable"))

    def normal_like(self, tensors: Params) -> dict[str, Tensor]:
        """Noise of variance 1 for every element of these tensors, all of it drawn at once."""
        return self._shaped("normal", tensors)

    def laplace_like(self, tensors: Params) -> dict[str, Tensor]:
        return self._shaped("laplace", tensors)

    def _shaped(self, law: str, tensors: Params) -> dict[str, Tensor]:
        wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
        sizes = [tensor.numel() for tensor in tensors.values()]
        flat = torch.from_numpy(getattr(self, law)(sum(sizes), np.float64 if wide else np.float32))
        parts = flat.split(sizes)
        return {
            name: part.view(tensor.shape).to(tensor)
            for (name, tensor), part in zip(tensors.items(), parts, strict=True)
        }

    def _whole(self, count: int, kind: np.dtype[Any]) -> Numbers:
        """Whole numbers from 0 to 2^24 - 1 or 2^53 - 1."""
        word = _WORDS[kind]
        raw = np.frombuffer(self.bytes(word.itemsize * count), dtype=word)
        whole: Numbers = raw >> word.type(8 * word.itemsize - _BITS[kind])
        return whole

    def _open(self, count: int, kind: np.dtype[Any]) -> Numbers:
        """Even draws from (0, 1]."""
        values = self._whole(count, kind).astype(kind)
        values += kind.type(1)
        values *= kind.type(2.0 ** -_BITS[kind])
        return values

    def _normal_pairs(self, out: Numbers) -> None:
        """Fill an even number of places. In place throughout: this is what noise costs."""
        half, kind = len(out) // 2, out.dtype
        raw = self._whole(2 * half, kind).astype(kind)
        radius, angle = raw[:half], raw[half:]
        radius += kind.type(1)
        radius *= kind.type(2.0 ** -_BITS[kind])
        np.log(radius, out=radius)
        radius *= kind.type(-2)
        np.sqrt(radius, out=radius)
        angle *= kind.type(2 * math.pi * 2.0 ** -_BITS[kind])
        np.cos(angle, out=out[:half])
        np.sin(angle, out=out[half:])
        out[:half] *= radius
        out[half:] *= radius
