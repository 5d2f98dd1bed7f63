"""The interface of homomorphic ciphers: vectors that a server can add up but not read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from leaktight.core.errors import LeaktightError, require_above, require_at_least
from leaktight.core.rng import Rng
from leaktight.core.text import sides
from leaktight.core.types import State

Values = NDArray[np.floating]
Noise = Values
Body = bytes | bytearray | memoryview


class CipherError(LeaktightError):
    """Encrypted data that cannot be used."""


class WrongKeyError(CipherError):
    """A ciphertext or a key that belongs to another key pair."""


class CiphertextError(CipherError):
    """A ciphertext that is truncated, damaged, of other settings, or not one at all."""


class QuantiserOverflowError(CipherError):
    """A value or noise outside the agreed range."""


@dataclass(frozen=True)
class Keys:
    """A key pair as bytes. public: enough to add up. secret: to encrypt and decrypt; empty where it is not known."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class Sealed:
    """An encrypted vector of `count` values, or an encrypted weighted sum of several.

    cipher, form: the name of the cipher and its settings; only vectors with the same ones can be added. key: a hash of
    the public key. weight: the sum of the integer weights; 1 for a client's vector. noisy: whether noise was added.
    body: the ciphertexts. It is large, so that messages and ciphers refer to it and do not copy it.
    """

    cipher: str
    form: str
    key: str
    count: int
    weight: int
    noisy: bool
    body: Body

    def to_state(self) -> State:
        """As values for a message; the body is a tensor of bytes, which is sent without another encoding."""
        fields = {name: getattr(self, name) for name in ("cipher", "form", "key", "count", "weight", "noisy")}
        body = bytearray(self.body) if isinstance(self.body, bytes) else self.body
        return {**fields, "body": torch.frombuffer(body, dtype=torch.uint8)}

    @classmethod
    def from_state(cls, state: State) -> Sealed:
        """The inverse of `to_state`. Checks every field, since the state may come from anybody."""
        try:
            body = state["body"]
            sealed = cls(
                **{name: state[name] for name in ("cipher", "form", "key", "count", "weight", "noisy")},
                body=memoryview(body.numpy()),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise CiphertextError(f"expected an encrypted vector, got something else ({error!r:.80})") from error
        texts = (sealed.cipher, sealed.form, sealed.key)
        counts = (sealed.count, sealed.weight)
        if (
            body.dtype != torch.uint8
            or body.ndim != 1
            or not body.is_contiguous()
            or any(type(text) is not str for text in texts)
            or any(type(number) is not int or number < 1 for number in counts)
            or type(sealed.noisy) is not bool
        ):
            raise CiphertextError("expected an encrypted vector, got one with invalid fields")
        return sealed


@dataclass(frozen=True, kw_only=True)
class Cipher(ABC):
    """A homomorphic cipher for vectors of bounded numbers.

    bound: the largest absolute value that can be encrypted; a larger one is an error. noise_bound: the largest absolute
    noise on a mean; 0: no noise can be added. Encrypted aggregation computes it from its fusion.
    """

    bound: float = 1.0
    noise_bound: float = 0.0

    def __post_init__(self) -> None:
        require_above(0, bound=self.bound)
        require_at_least(0, noise_bound=self.noise_bound)

    @property
    @abstractmethod
    def resolution(self) -> float:
        """The largest error of a decrypted weighted mean."""

    @property
    @abstractmethod
    def most_weight(self) -> int:
        """The largest sum of integer weights that fits."""

    @abstractmethod
    def finest_noise(self, weight: int) -> float:
        """The smallest standard deviation of noise on a mean of this weight that rounding changes by less than 1 %."""

    @abstractmethod
    def new_keys(self, rng: Rng | None = None) -> Keys:
        """A key pair: from the operating system's entropy, or from `rng` for runs that can be repeated exactly."""

    @abstractmethod
    def encrypt(self, values: Values, keys: Keys, *, rng: Rng | None = None) -> Sealed:
        """Encrypt a vector (d,). rng: as for `new_keys`; a stream must not be used twice."""

    @abstractmethod
    def combine(
        self, vectors: Sequence[Sealed], weights: Sequence[int], public: bytes, *, noise: Noise | None = None
    ) -> Sealed:
        """The encrypted weighted mean of encrypted vectors, plus plain noise (d,) within `noise_bound`, if any."""

    @abstractmethod
    def decrypt(self, sealed: Sealed, secret: bytes) -> Values:
        """The vector, or the weighted mean, (d,)."""

    def check_values(self, values: Values) -> None:
        """Raise unless every value is a number within the bound."""
        largest = largest_of(values)
        if not largest <= self.bound:
            raise QuantiserOverflowError(
                f"expected values within ±{self.bound:g}, got {largest:g}; raise the cipher's bound, clip updates, "
                "or lower local.learning_rate"
            )

    def check_noise(self, noise: Noise, count: int) -> None:
        """Raise unless this is noise (count,) within `noise_bound`."""
        if noise.shape != (count,):
            raise CipherError(f"expected noise for {count} values, got noise of shape {sides(noise.shape)}")
        largest = largest_of(noise)
        if not largest <= self.noise_bound:
            raise QuantiserOverflowError(
                f"expected noise within ±{self.noise_bound:g}, got {largest:g}; raise the cipher's noise_bound, "
                "or add less noise"
            )

    def check_alike(self, vectors: Sequence[Sealed], weights: Sequence[int], key: str) -> None:
        """Raise unless these vectors can be added with these weights under the public key with hash `key`."""
        if len(vectors) != len(weights) or not vectors:
            raise CipherError(f"expected a weight for each vector, got {len(vectors)} vectors, {len(weights)} weights")
        total = sum(weight * vector.weight for weight, vector in zip(weights, vectors, strict=True))
        if min(weights) < 0 or not 0 < total <= self.most_weight:
            raise CipherError(f"expected weights >= 0 with a sum in 1..{self.most_weight}, got a sum of {total}")
        for vector in vectors:
            self.check_own(vector, key)
            if vector.count != vectors[0].count:
                raise CiphertextError(f"expected {vectors[0].count} encrypted values, got {vector.count}")
            if vector.noisy:
                raise CiphertextError("expected vectors without noise in a sum, got one with noise")

    def check_pair(self, public: str, secret: str) -> None:
        """Raise unless the hashes of a public and a secret key are the same: a server may have sent another."""
        if public != secret:
            raise WrongKeyError(f"expected the public key {secret}, which belongs to the secret one, got {public:.32}")

    def check_own(self, sealed: Sealed, key: str) -> None:
        """Raise unless a vector was made with this cipher, its settings and the key with hash `key`."""
        if (sealed.cipher, sealed.form) != (type(self).__name__, self.form):
            raise CiphertextError(
                f"expected a ciphertext of {type(self).__name__} ({self.form}), got one of "
                f"{sealed.cipher:.40} ({sealed.form:.80}); give all participants the same settings"
            )
        if sealed.key != key:
            raise WrongKeyError(f"expected a ciphertext under key {key}, got one under {sealed.key:.32}")
        if sealed.weight > self.most_weight:
            raise CiphertextError(f"expected a weight of at most {self.most_weight}, got a larger one")

    @property
    def form(self) -> str:
        """The settings as text: only ciphertexts with the same settings can be added."""
        return repr(self)


def largest_of(values: Noise) -> float:
    """The largest absolute value, NaN if there is one, 0 of nothing; no copy is made."""
    return float(max(values.max(initial=0.0), -values.min(initial=0.0)))


def integer_weights(shares: Mapping[str, float], scale: int) -> dict[str, int]:
    """Whole numbers in proportion to `shares` that sum to `scale` exactly; the largest remainders are rounded up.

    >>> integer_weights({"a": 1, "b": 1, "c": 1}, 100)
    {'a': 34, 'b': 33, 'c': 33}
    """
    total = math.fsum(shares.values())
    if not (0 < total < math.inf) or min(shares.values()) < 0:
        raise ValueError(f"expected shares >= 0 that are not all 0, got {dict(shares)}")
    exact = {name: scale * share / total for name, share in shares.items()}
    whole = {name: int(value) for name, value in exact.items()}
    order = sorted(shares, key=lambda name: (whole[name] - exact[name], name))
    for name in order[: scale - sum(whole.values())]:
        whole[name] += 1
    return whole
