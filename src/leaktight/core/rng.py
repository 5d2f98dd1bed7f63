"""A tree of random streams, named by their paths, so that a new stream does not change any other.

An `Rng` is a value, not a stream. It has children, and streams to draw from; the same call returns the same stream
again. It has two roots:

- `seed`, for initial weights, partitions, an attack's first guess. `public()` draws from it, with PyTorch's generator,
  which keeps 32 bits of a seed.
- `key`, 256 bits, for what protects a client: noise, masks, keys, the order of batches, learning rates. `secret()`
  draws from it, and is an error without a key.

>>> a = Rng(7).child("client", 3, "round", 1)
>>> a == Rng(7).child("client", 3).child("round", 1)
True
>>> bool(torch.equal(torch.rand(2, generator=a.public()), torch.rand(2, generator=a.public())))
True
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from leaktight.core.errors import LeaktightError
from leaktight.core.keys import KEY_BYTES
from leaktight.core.secret import SecretStream

_TYPE_TAG = {int: b"i", str: b"s"}
_BYTES = b"leaktight secret"  # 16 bytes, the most that BLAKE2b takes
_STREAM = b"leaktight stream"  # another, so that `secret_bytes` does not reveal the stream of the same path


class NoSecretsError(LeaktightError):
    """A secret was to be drawn without a secret key."""


@dataclass(frozen=True)
class Rng:
    """A node of the tree of random streams. Draw on the CPU, then move to a device."""

    seed: int
    path: tuple[int | str, ...] = ()
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.key is not None and len(self.key) != KEY_BYTES:
            raise ValueError(f"expected a key of {KEY_BYTES} bytes, got {len(self.key)}")

    @classmethod
    def fresh(cls) -> Rng:
        """Seed and key from the operating system's entropy, for use in production."""
        return cls(secrets.randbits(128), key=secrets.token_bytes(KEY_BYTES))

    def child(self, *path: int | str) -> Rng:
        return Rng(self.seed, self.path + path, self.key)

    def keyed(self, key: bytes) -> Rng:
        """The same path with this secret key."""
        return Rng(self.seed, self.path, key)

    def apart(self) -> Rng:
        """The same path with a derived key, from which only the secrets below this node can be computed."""
        return self if self.key is None else self.keyed(self.child("apart").secret_bytes())

    def detached(self) -> Rng:
        """A new tree without a key, for an attack. Neither a secret nor any other stream of this tree can be computed
        from it, nor the seed; without a key, a seed that is guessed can be recognised."""
        return Rng(self.entropy() if self.key is None else int.from_bytes(self.secret_bytes(), "big"))

    def entropy(self, num_bytes: int = 32) -> int:
        """An integer that depends only on the seed and the whole path."""
        return int.from_bytes(_hashed((self.seed, *self.path), hashlib.blake2b(digest_size=num_bytes)), "big")

    def public(self) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(self.entropy(8) >> 1)

    def public_numpy(self) -> np.random.Generator:
        return np.random.default_rng(self.entropy())

    def secret(self) -> SecretStream:
        return SecretStream(self._derived(KEY_BYTES, _STREAM))

    def secret_bytes(self, num_bytes: int = KEY_BYTES) -> bytes:
        """Up to 64 bytes that depend on the key and on the whole path; a cheap draw where few are needed."""
        return self._derived(num_bytes, _BYTES)

    def _derived(self, num_bytes: int, purpose: bytes) -> bytes:
        if self.key is None:
            raise NoSecretsError(
                "expected random streams with a secret key, got none; give the federation its key, or use Rng.fresh()"
            )
        return _hashed(self.path, hashlib.blake2b(digest_size=num_bytes, key=self.key, person=purpose))


def _hashed(parts: tuple[int | str, ...], digest: hashlib.blake2b) -> bytes:
    for part in parts:
        encoded = str(part).encode()
        digest.update(_TYPE_TAG[type(part)] + len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()


@contextmanager
def global_seed(rng: Rng) -> Iterator[None]:
    """Seed PyTorch's global generator for code that draws from it (initialisation); restore it afterwards.

    Only this and `secret_model` set the global generator.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.entropy(8) >> 1)  # noqa: TID251
        yield


_model_stream: ContextVar[SecretStream | None] = ContextVar("model_stream", default=None)


class ModelSecrets:
    """The random numbers of a client's network, over any number of forward passes.

    `drawn_like` takes noise from the secret stream. Code that draws from PyTorch's global generator (dropout, initial
    weights of a private layer) gets one whose whole state, 19,968 bits, is secret, so that it cannot be searched. That
    generator is not cryptographic: many of its numbers determine the others.
    """

    def __init__(self, rng: Rng) -> None:
        self._stream = rng.secret()
        self._state = _mersenne_state(self._stream)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from these secrets inside the block, continuing where the last pass ended."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._state)
            token = _model_stream.set(self._stream)
            try:
                yield
            finally:
                _model_stream.reset(token)
                self._state = torch.get_rng_state()


def secret_model(rng: Rng) -> AbstractContextManager[None]:
    """Give the random layers of a network a client's secrets inside the block; see `ModelSecrets`."""
    return ModelSecrets(rng).drawing()


def draws_secrets() -> bool:
    """Whether networks currently draw from a client's secrets."""
    return _model_stream.get() is not None


class SecretPasses:
    """Hooks that let every forward pass of a network draw from the round's secrets; a copy has no secrets."""

    def __init__(self) -> None:
        self.source: ModelSecrets | None = None
        self._open: AbstractContextManager[None] | None = None

    def drawing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.source is None else self.source.drawing()

    def begin(self, module: nn.Module, inputs: object) -> None:
        if self.source is not None and not draws_secrets():
            self._open = self.source.drawing()
            self._open.__enter__()

    def end(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def __reduce__(self) -> tuple[type[SecretPasses], tuple[()]]:
        return type(self), ()


def drawn_like(like: Tensor) -> Tensor:
    """Normal noise in the shape of a tensor, for a layer of a network; different for each example, also under `vmap`.

    Inside `secret_model` it is from the secret stream, elsewhere from PyTorch's global generator.
    """
    if not draws_secrets():
        return torch.randn_like(like)
    return _secret_noise(like)


class _VmapInfo(Protocol):
    batch_size: int


class _SecretNoise(torch.autograd.Function):
    """A draw that works under PyTorch's transforms: constant for `grad`, different for each example for `vmap`."""

    @staticmethod
    def forward(like: Tensor) -> Tensor:
        stream = _model_stream.get()
        assert stream is not None
        return stream.normal_like({"": like})[""]

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> None:
        return None

    @staticmethod
    def vmap(info: _VmapInfo, in_dims: tuple[int | None, ...], like: Tensor) -> tuple[Tensor, int]:
        place = in_dims[0]
        rows = like.movedim(place, 0) if place is not None else like.expand(info.batch_size, *like.shape)
        return _secret_noise(rows), 0


def _secret_noise(like: Tensor) -> Tensor:
    apply: Callable[[Tensor], Tensor] = _SecretNoise.apply
    return apply(like)


def _mersenne_state(stream: SecretStream) -> Tensor:
    """A state of PyTorch's CPU generator with all its 624 words drawn from the stream."""
    generator = torch.Generator("cpu").manual_seed(0)
    state = generator.get_state()
    words = torch.frombuffer(bytearray(stream.bytes(4 * _WORDS)), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
    state[_WORDS_AT : _WORDS_AT + 8 * _WORDS] = words.view(torch.uint8)
    return state


_WORDS = 624
_WORDS_AT = 24
"""Offset of the words in the generator's state, eight bytes each (ATen's CPUGeneratorImplStateLegacy)."""
