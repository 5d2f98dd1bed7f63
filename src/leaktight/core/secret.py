"""A cryptographic random stream, for everything that protects a client.

PyTorch's CPU generator keeps 32 bits of its seed, so that a server can try all seeds in a minute and subtract the
noise. Here the key has 256 bits, and the numbers are the keystream of AES-256 in counter mode (OpenSSL's, by
`cryptography`). Normal numbers are made by the Box-Muller transform, as fast as `torch.randn`; NumPy's generator over a
cryptographic bit generator (`randomgen`) takes 2.5 to 6 times as long (docs/results/privacy.md).

Draws in float32 are for noise without a guarantee; `released` adds the noise of differential privacy.

>>> stream = SecretStream(bytes(32))
>>> stream.permutation(5).tolist() == SecretStream(bytes(32)).permutation(5).tolist()
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from torch import Tensor

from leaktight.core.errors import require_above
from leaktight.core.keys import KEY_BYTES
from leaktight.core.tensors import unflattened
from leaktight.core.types import Params

Numbers: TypeAlias = NDArray[np.floating]
Words: TypeAlias = NDArray[np.signedinteger]
Dtype: TypeAlias = type[np.float32] | type[np.float64]

GRID_BITS = 12
"""`released` rounds to a grid whose spacing is the noise's standard deviation / 2^GRID_BITS, or up to half of that."""

_COUNTER = bytes(16)  # a key serves one stream
_SPARE = 15  # bytes that `update_into` needs at the end of its buffer and does not write
_CHUNK = 1 << 16  # numbers made at a time, which fit in the processor's cache
_MANTISSA: Mapping[np.dtype[np.floating], int] = {np.dtype(np.float32): 24, np.dtype(np.float64): 53}
_WORDS: Mapping[np.dtype[np.floating], np.dtype[np.signedinteger]] = {
    np.dtype(np.float32): np.dtype("<i4"),
    np.dtype(np.float64): np.dtype("<i8"),
}


class SecretStream:
    """Random numbers from a secret key, each used once. Made by `Rng.secret`.

    Draws are flat NumPy arrays of float32 or float64. A float32 is made of 32 random bits and a float64 of 64; 31 and
    63 of them determine the magnitude of a normal number, so that the largest is 6.56 in float32 and 9.35 in float64.
    Of true normal numbers, one in 2e10 is larger than the first, and one in 1e20 than the second.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"expected a key of {KEY_BYTES} bytes, got {len(key)}")
        self._keystream = Cipher(AES256(key), CTR(_COUNTER)).encryptor()

    def bytes(self, count: int) -> bytes:
        return self._keystream.update(bytes(count))

    def uniform(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        """Uniform draws from [0, 1), of 24 or 53 random bits."""
        kind: np.dtype[np.floating] = np.dtype(dtype)
        raw = self._words(count, _WORDS[kind])
        unsigned = raw.view(f"<u{kind.itemsize}")
        unsigned >>= unsigned.dtype.type(8 * kind.itemsize - _MANTISSA[kind])
        values: Numbers = raw.astype(kind)
        values *= kind.type(2.0 ** -_MANTISSA[kind])
        return values

    def normal(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        """Normal draws of mean 0 and variance 1."""
        result = np.empty(count + count % 2, dtype=dtype)
        for start in range(0, len(result), _CHUNK):
            self._normal_pairs(result[start : start + _CHUNK])
        return result[:count]

    def exponential(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        """Exponential draws of mean 1."""
        values = self._open(count, np.dtype(dtype))
        _apply("log", values, values)
        return np.negative(values, out=values)

    def laplace(self, count: int, dtype: Dtype = np.float64) -> Numbers:
        """Laplace draws of mean 0 and variance 1: differences of two exponentials, as the logarithm of a ratio."""
        kind: np.dtype[np.floating] = np.dtype(dtype)
        result = np.empty(count, dtype=kind)
        for start in range(0, count, _CHUNK):
            out = result[start : start + _CHUNK]
            both = self._open(2 * len(out), kind)
            np.divide(both[: len(out)], both[len(out) :], out=out)
            _apply("log", out, out)
            out *= kind.type(math.sqrt(0.5))
        return result

    def permutation(self, count: int) -> Tensor:
        """The numbers from 0 to count - 1 in a random order: the argsort of random 64-bit numbers."""
        return torch.from_numpy(np.argsort(self._words(count, np.dtype("<i8"))))

    def normal_like(self, tensors: Params) -> dict[str, Tensor]:
        """Normal noise of variance 1 for every element of these tensors, in one draw."""
        return self._shaped("normal", tensors)

    def laplace_like(self, tensors: Params) -> dict[str, Tensor]:
        """As `normal_like`, Laplace noise."""
        return self._shaped("laplace", tensors)

    def _shaped(self, law: Literal["normal", "laplace"], tensors: Params) -> dict[str, Tensor]:
        wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
        draw = self.normal if law == "normal" else self.laplace
        count = sum(tensor.numel() for tensor in tensors.values())
        return unflattened(torch.from_numpy(draw(count, np.float64 if wide else np.float32)), tensors)

    def _words(self, count: int, word: np.dtype[np.signedinteger]) -> Words:
        """Random integers of this type: the keystream over zeros, in place."""
        size = word.itemsize * count
        buffer = bytearray(size + _SPARE)
        self._keystream.update_into(memoryview(buffer)[:size], buffer)
        return np.frombuffer(buffer, word, count)

    def _open(self, count: int, kind: np.dtype[np.floating]) -> Numbers:
        return _in_open_interval(self._words(count, _WORDS[kind]), kind)

    def _normal_pairs(self, out: Numbers) -> None:
        """Fill an array of even length with normal draws, in place for speed."""
        half, kind = len(out) // 2, out.dtype
        words = self._words(2 * half, _WORDS[kind])
        radius = _in_open_interval(words[:half], kind)
        _apply("log", radius, radius)
        radius *= kind.type(-2)
        _apply("sqrt", radius, radius)
        angle = words[half:].astype(kind)
        angle *= kind.type(math.pi * 2.0 ** -(8 * kind.itemsize - 1))
        _apply("cos", angle, out[:half])
        _apply("sin", angle, out[half:])
        out[:half] *= radius
        out[half:] *= radius


def released(tensors: Params, noise_std: float, stream: SecretStream) -> dict[str, Tensor]:
    """These tensors with Gaussian noise on every element, safe for differential privacy.

    The sum is computed in float64, with noise of up to 9.35 standard deviations, and rounded to multiples of
    `grid_spacing`, which are the same for all data; a multiple that is possible for one value of the data is also
    possible for its neighbours. Unrounded floating-point noise has gaps at positions that depend on the data and reveal
    it (Mironov 2012; Jin et al. 2022). Later steps, such as the conversion to the tensors' type, use only the rounded
    numbers. The remaining effect of floating point, for d elements of up to 32 standard deviations, is estimated as at
    most d 2^-30 in epsilon and d 2^-66 in delta (docs/results/privacy.md). Rounding adds 5e-9 to the noise's variance.
    """
    spacing = grid_spacing(noise_std)
    wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    kind = torch.float64 if wide else torch.float32
    flat = torch.cat([tensor.detach().reshape(-1).to("cpu", kind) for tensor in tensors.values()])
    values: Numbers = flat.numpy()
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        noisy = stream.normal(len(part))
        noisy *= noise_std
        noisy += part
        noisy *= 1 / spacing
        np.rint(noisy, out=noisy)
        np.multiply(noisy, spacing, out=part, casting="same_kind")
    return unflattened(flat, tensors)


def grid_spacing(noise_std: float) -> float:
    """The power of two to whose multiples numbers with noise of this standard deviation are rounded.

    >>> grid_spacing(1.0) * 2**12, grid_spacing(0.75) * 2**12
    (1.0, 0.5)
    """
    require_above(0, noise_std=noise_std)
    return math.ldexp(1.0, math.frexp(noise_std)[1] - 1 - GRID_BITS)


def _in_open_interval(words: Words, kind: np.dtype[np.floating]) -> Numbers:
    """Uniform numbers from (0, 1], from all bits of these words but one; never zero, so that a logarithm exists."""
    words &= words.dtype.type(np.iinfo(words.dtype).max)
    words |= words.dtype.type(1)
    values: Numbers = words.astype(kind)
    values *= kind.type(2.0 ** -(8 * kind.itemsize - 1))
    return values


def _apply(function: Literal["log", "sqrt", "cos", "sin"], values: Numbers, out: Numbers) -> None:
    """Apply a function elementwise: NumPy in float32, PyTorch in float64, where it is seven times as fast."""
    if values.dtype == np.float32:
        getattr(np, function)(values, out=out)
    else:
        getattr(torch, function)(torch.from_numpy(values), out=torch.from_numpy(out))
