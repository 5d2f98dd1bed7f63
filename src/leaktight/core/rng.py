"""Randomness as a tree: a stream is named by its path, so a new consumer shifts no other stream.

An `Rng` is a value, not a stream. Ask it for a child, or for a stream to draw from; asking twice gives the same stream
twice. It has two roots:

- `seed`, for what protects nobody: initial weights, partitions, an attack's first guess. `public()` draws from it, with
  PyTorch's generator, which keeps 32 bits of a seed.
- `key`, 256 bits, for what protects a client: noise, masks, keys, the order of batches, learning rates. `secret()`
  draws from it. A tree without a key has no secrets to give and says so.

>>> a = Rng(7).child("client", 3, "round", 1)
>>> a == Rng(7).child("client", 3).child("round", 1)
True
>>> bool(torch.equal(torch.rand(2, generator=a.public()), torch.rand(2, generator=a.public())))
True
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leaktight.core.errors import LeaktightError
from leaktight.core.keys import KEY_BYTES
from leaktight.core.secret import SecretStream

_TYPE_TAG = {int: b"i", str: b"s"}
_BYTES = b"leaktight secret"  # 16 bytes, the most that BLAKE2b takes
_STREAM = b"leaktight stream"  # another, so that who is told a place's bytes cannot compute its stream


class NoSecretsError(LeaktightError):
    """Something that protects a client was to be drawn from a tree that has no secret key."""


@dataclass(frozen=True)
class Rng:
    """A named place in the tree of random streams. Draw on the CPU, then move."""

    seed: int
    path: tuple[int | str, ...] = ()
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.key is not None and len(self.key) != KEY_BYTES:
            raise ValueError(f"expected a key of {KEY_BYTES} bytes, got {len(self.key)}")

    @classmethod
    def fresh(cls) -> Rng:
        """Roots from the operating system's entropy: what a defense in production uses."""
        return cls(secrets.randbits(128), key=secrets.token_bytes(KEY_BYTES))

    def child(self, *path: int | str) -> Rng:
        return Rng(self.seed, self.path + path, self.key)

    def keyed(self, key: bytes) -> Rng:
        """The same place in a tree with this secret key."""
        return Rng(self.seed, self.path, key)

    def apart(self) -> Rng:
        """The same place under a key of its own: who holds it can compute the secrets below it and no others."""
        return self if self.key is None else self.keyed(self.child("apart").secret_bytes())

    def detached(self) -> Rng:
        """A tree of its own with no key: what an attack is given. No secret can be computed from it, nor, unless the
        seed is guessed, any other stream of this tree."""
        return Rng(self.entropy())

    def entropy(self, num_bytes: int = 32) -> int:
        """An integer that depends on the seed and on the whole path, and on nothing else."""
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
                "expected a tree of random streams with a secret key, got one without; "
                "give the federation its key, or use Rng.fresh()"
            )
        return _hashed(self.path, hashlib.blake2b(digest_size=num_bytes, key=self.key, person=purpose))


def _hashed(parts: tuple[int | str, ...], digest: hashlib.blake2b) -> bytes:
    for part in parts:
        encoded = str(part).encode()
        digest.update(_TYPE_TAG[type(part)] + len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()


@contextmanager
def global_seed(rng: Rng) -> Iterator[None]:
    """Run code that draws from PyTorch's global generator (initialisation); restore the generator after.

    This and `secret_model` are the places where the global generator is set.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.entropy(8) >> 1)  # noqa: TID251
        yield


_model_stream: ContextVar[SecretStream | None] = ContextVar("model_stream", default=None)


class ModelSecrets:
    """What the random layers of a network draw while it works for a client, over as many passes as there are.

    `drawn_like` takes its noise from the secret stream. What draws from PyTorch's global generator (dropout, the
    initial weights of a private layer) meets one whose whole state, 19,968 bits, is secret: nobody can try all of them.
    The generator itself is not a cryptographic one: who knows many of its numbers can compute the others.
    """

    def __init__(self, rng: Rng) -> None:
        self._stream = rng.secret()
        self._state = _mersenne_state(self._stream)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Run a network that draws from here, going on where the last pass ended."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._state)
            token = _model_stream.set(self._stream)
            try:
                yield
            finally:
                _model_stream.reset(token)
                self._state = torch.get_rng_state()


def secret_model(rng: Rng) -> AbstractContextManager[None]:
    """Run a network whose random layers protect a client; see `ModelSecrets`."""
    return ModelSecrets(rng).drawing()


def draws_secrets() -> bool:
    """Whether networks that run here draw from a client's secrets."""
    return _model_stream.get() is not None


class SecretPasses:
    """Has every forward pass of a network draw from the round's secrets; copied or stored, it has none to give."""

    def __init__(self) -> None:
        self.source: ModelSecrets | None = None
        self._open: AbstractContextManager[None] | None = None

    def drawing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.source is None else self.source.drawing()

    def begin(self, module: nn.Module, inputs: Any) -> None:
        if self.source is not None and not draws_secrets():
            self._open = self.source.drawing()
            self._open.__enter__()

    def end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def __reduce__(self) -> tuple[type[SecretPasses], tuple[()]]:
        return type(self), ()


def drawn_like(like: Tensor) -> Tensor:
    """Normal noise in the shape of a tensor, for a layer of a network; each example has its own, under `vmap` too.

    Inside `secret_model` it comes from the secret stream, elsewhere from PyTorch's global generator.
    """
    if not draws_secrets():
        return torch.randn_like(like)
    noise: Tensor = _SecretNoise.apply(like)  # type: ignore[no-untyped-call]
    return noise


class _SecretNoise(torch.autograd.Function):
    """A draw that PyTorch's transforms can pass through: a number to `grad`, one for each example to `vmap`."""

    @staticmethod
    def forward(like: Tensor) -> Tensor:
        stream = _model_stream.get()
        assert stream is not None
        return stream.normal_like({"": like})[""]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], like: Tensor) -> tuple[Tensor, int]:
        place = in_dims[0]
        rows = like.movedim(place, 0) if place is not None else like.expand(info.batch_size, *like.shape)
        noise: Tensor = _SecretNoise.apply(rows)  # type: ignore[no-untyped-call]
        return noise, 0


def _mersenne_state(stream: SecretStream) -> Tensor:
    """A state of PyTorch's CPU generator with all its 624 words drawn from the stream."""
    generator = torch.Generator("cpu").manual_seed(0)
    state = generator.get_state()
    words = torch.frombuffer(bytearray(stream.bytes(4 * _WORDS)), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
    state[_WORDS_AT : _WORDS_AT + 8 * _WORDS] = words.view(torch.uint8)
    return state


_WORDS = 624
_WORDS_AT = 24
"""Where the words lie in the generator's state, eight bytes each (ATen's CPUGeneratorImplStateLegacy)."""
