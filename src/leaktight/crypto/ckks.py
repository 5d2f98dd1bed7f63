"""CKKS: fast, approximate sums of encrypted vectors (TenSEAL, Microsoft SEAL)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leaktight.core.rng import Rng
from leaktight.crypto.cipher import Cipher, CiphertextError, Keys, Noise, Sealed, Values, WrongKeyError, largest_of
from leaktight.crypto.seal import SecretKey, bench, new_secret, secret_of

_RINGS = (8192, 16384)
_ROOM_BITS = 58  # of the 59 that a number may have of either sign, for scale, weights and noise
_WEIGHT_BITS = 16
_MOST_NOISE = 2.0**12  # in bounds
_ERROR = 2.0**14  # ten times the largest error measured in a million numbers, before the scale is divided out
_MARGIN = 1.1  # on the largest mean and noise; a damaged ciphertext decrypts to far larger numbers
_TAG = 16  # bytes that tell keys apart
_LENGTH = 8  # bytes of the length before a ciphertext
_PUBLIC, _SECRET = b"leaktight ckks public 2\n", b"leaktight ckks secret 2\n"
_FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Ckks(Cipher):
    """CKKS encryption of floating-point vectors (TenSEAL): quick, approximate; 8 bytes a value, 16 of a sum.

    ring: the degree of the polynomials, 8192 or 16384; a ciphertext has as many values, two to a complex slot. Both
    have more than 128 bits of security, with a modulus of 60 bits.

    Reference: Cheon, Kim, Kim and Song 2017. Ciphertexts are made with the secret key, so that half of each is a seed.
    Assumes: only holders of the secret key see decrypted values. A decrypted value has the error of the encryption,
    from which the key can be computed (Li and Micciancio 2021); if the server gets the decrypted aggregate, as it does
    here, choose paillier, whose results are exact.
    Differs from the others: keys and ciphertexts always use the operating system's entropy, not the seed; a repeated
    run has the same numbers only up to the resolution.
    """

    ring: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ring not in _RINGS:
            raise ValueError(f"expected ring to be one of {', '.join(map(str, _RINGS))}, got {self.ring}")
        if self.noise_bound > _MOST_NOISE * self.bound:
            raise ValueError(
                f"expected noise of at most {_MOST_NOISE:g} times the bound, got {self.noise_bound / self.bound:g}; "
                "raise bound or lower noise"
            )

    @property
    def scale(self) -> float:
        """By which values in bounds are multiplied before rounding: what weights and noise leave of the modulus."""
        noise_bits = math.ceil(math.log2(1 + self.noise_bound / self.bound))
        return 2.0 ** (_ROOM_BITS - _WEIGHT_BITS - noise_bits)

    @property
    def resolution(self) -> float:
        """Ten times the largest error measured in a million values at the bound."""
        return _ERROR / self.scale * self.bound

    @property
    def most_weight(self) -> int:
        return 1 << _WEIGHT_BITS

    @property
    def form(self) -> str:
        return f"{self!r}, format {_FORMAT}"

    def finest_noise(self, weight: int) -> float:
        """The resolution, which is ten times the largest error of the encryption."""
        return self.resolution

    def new_keys(self, rng: Rng | None = None) -> Keys:
        tag = secrets.token_bytes(_TAG)
        return Keys(_PUBLIC + tag, _SECRET + tag + new_secret(self.ring))

    def encrypt(self, values: Values, keys: Keys, *, rng: Rng | None = None) -> Sealed:
        self.check_values(values)
        tag, secret = _secret_of(keys.secret, self.ring)
        self.check_pair(_tag(keys.public), tag)
        body = bytearray()
        with bench(self.ring, self.scale) as tool:
            for start in range(0, len(values), self.ring):
                _append(body, tool.encrypted(values[start : start + self.ring], 1 / self.bound, secret))
        return self._sealed(tag, len(values), 1, False, body)

    def combine(
        self, vectors: Sequence[Sealed], weights: Sequence[int], public: bytes, *, noise: Noise | None = None
    ) -> Sealed:
        tag = _tag(public)
        self.check_alike(vectors, weights, tag)
        count = vectors[0].count
        if noise is not None:
            self.check_noise(noise, count)
        total = sum(own * vector.weight for own, vector in zip(weights, vectors, strict=True))
        used = [(vector, own) for vector, own in zip(vectors, weights, strict=True) if own]
        body = bytearray()
        with bench(self.ring, self.scale) as tool:
            columns = zip(*(self._parted(vector) for vector, _ in used), strict=True)
            for place, column in enumerate(columns):
                terms = (tool.weighted(part, own) for part, (_, own) in zip(column, used, strict=True))
                mean = next(terms)
                for term in terms:
                    tool.added(mean, term)
                if noise is not None:
                    tool.shifted(mean, noise[place * self.ring : (place + 1) * self.ring], total / self.bound)
                _append(body, tool.saved(mean))
        return self._sealed(tag, count, total, noise is not None, body)

    def decrypt(self, sealed: Sealed, secret: bytes) -> Values:
        tag, key = _secret_of(secret, self.ring)
        self.check_own(sealed, tag)
        parts = self._parted(sealed)
        values = np.empty(sealed.count)
        with bench(self.ring, self.scale) as tool:
            for start, part in zip(range(0, sealed.count, self.ring), parts, strict=True):
                values[start : start + self.ring] = tool.decrypted(part, key)[: sealed.count - start]
        values *= self.bound / sealed.weight
        most = self.bound + (self.noise_bound if sealed.noisy else 0.0)
        if not largest_of(values) < _MARGIN * most:
            raise CiphertextError(
                f"expected {sealed.count} values within the bound, got others: the ciphertext is damaged"
            )
        return values

    def _sealed(self, tag: str, count: int, weight: int, noisy: bool, body: bytearray) -> Sealed:
        return Sealed(type(self).__name__, self.form, tag, count, weight, noisy, body)

    def _parted(self, sealed: Sealed) -> list[memoryview]:
        """The ciphertexts of a sealed vector, without a copy."""
        body, expected = memoryview(sealed.body), -(-sealed.count // self.ring)
        parts: list[memoryview] = []
        place = 0
        while place + _LENGTH <= len(body) and len(parts) < expected:
            start = place + _LENGTH
            place = start + int.from_bytes(body[place:start], "big")
            parts.append(body[start:place])
        if place != len(body) or len(parts) != expected:
            raise CiphertextError(f"expected {sealed.count} encrypted values, got a truncated or foreign ciphertext")
        return parts


def _append(body: bytearray, part: bytes) -> None:
    body += len(part).to_bytes(_LENGTH, "big")
    body += part


def _tag(public: bytes) -> str:
    return _after(public, _PUBLIC, "public").hex()


def _secret_of(secret: bytes, ring: int) -> tuple[str, SecretKey]:
    """The tag and the key."""
    data = _after(secret, _SECRET, "secret")
    return data[:_TAG].hex(), secret_of(data[_TAG:], ring)


def _after(data: bytes, head: bytes, kind: str) -> bytes:
    """What follows the header of a key."""
    if not data.startswith(head) or len(data) < len(head) + _TAG:
        raise WrongKeyError(
            f"expected a {kind} key of CKKS of this version, got {len(data)} other bytes; agree on new keys"
        )
    return data[len(head) :]
