"""CKKS with TenSEAL: fast, approximate sums in large ciphertexts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Protocol

import numpy as np

from leaktight.core.errors import LeaktightError
from leaktight.core.rng import Rng
from leaktight.crypto.cipher import Cipher, CiphertextError, Keys, Noise, Sealed, Values, WrongKeyError

_MODULI = {8192: (60, 40, 60), 16384: (60, 40, 40, 60)}
_SCALE_BITS = 40
_ROOM = 2.0**18  # the largest sum, in bounds: 60 bits of modulus less 40 of scale are 2^20, which would overflow
_MARGIN = 1.1  # on the largest mean and noise; a damaged ciphertext decrypts to far larger numbers
_TAG = 16  # bytes of the public key's hash before a secret key


class _CkksVector(Protocol):
    """`tenseal.CKKSVector`, which has no types."""

    def serialize(self) -> bytes: ...
    def decrypt(self) -> list[float]: ...
    def __add__(self, other: _CkksVector | list[float]) -> _CkksVector: ...
    def __mul__(self, factor: float) -> _CkksVector: ...


@dataclass(frozen=True, kw_only=True)
class Ckks(Cipher):
    """CKKS encryption of floating-point vectors (TenSEAL): quick, approximate, ciphertexts ten times as large.

    ring: the degree of the polynomials, 8192 or 16384; a ciphertext has half as many values. Both have 128 bits of
    security with the moduli used here. 4096 is too inaccurate.

    Reference: Cheon, Kim, Kim and Song 2017.
    Assumes: only holders of the secret key see decrypted values. A decrypted value has the error of the encryption,
    from which the key can be computed (Li and Micciancio 2021); if the server gets the decrypted aggregate, as it does
    here, choose paillier, whose results are exact.
    Differs from the others: keys and ciphertexts always use the operating system's entropy, not the seed; a repeated
    run has the same numbers only up to the resolution.
    """

    ring: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ring not in _MODULI:
            raise ValueError(f"expected ring to be one of {', '.join(map(str, _MODULI))}, got {self.ring}")
        if self.bound + self.noise_bound > _ROOM * self.bound:
            raise ValueError(
                f"expected noise of at most {_ROOM:g} times the bound, got {self.noise_bound / self.bound:g}; "
                "raise bound or lower noise"
            )

    @property
    def resolution(self) -> float:
        """Ten times the largest error measured in a million values at the bound."""
        return 1e-5 * self.bound

    @property
    def most_weight(self) -> int:
        return 1 << 20

    def finest_noise(self, weight: int) -> float:
        """The resolution, which is ten times the largest error of the encryption."""
        return self.resolution

    def new_keys(self, rng: Rng | None = None) -> Keys:
        sealing = _tenseal()
        context = sealing.context(
            sealing.SCHEME_TYPE.CKKS, self.ring, coeff_mod_bit_sizes=list(_MODULI[self.ring]), n_threads=1
        )
        context.global_scale = 2.0**_SCALE_BITS
        plain = {"save_galois_keys": False, "save_relin_keys": False}
        public = context.serialize(save_public_key=True, save_secret_key=False, **plain)
        secret = context.serialize(save_public_key=True, save_secret_key=True, **plain)
        return Keys(public, bytes.fromhex(_fingerprint(public)) + secret)

    def encrypt(self, values: Values, public: bytes, *, rng: Rng | None = None) -> Sealed:
        self.check_values(values)
        context = _context(public)
        size = self.ring // 2
        parts = [values[start : start + size] / self.bound for start in range(0, len(values), size)]
        body = _joined([_tenseal().ckks_vector(context, part.tolist()).serialize() for part in parts])
        return Sealed(type(self).__name__, self.form, _fingerprint(public), len(values), 1, False, body)

    def combine(
        self, vectors: Sequence[Sealed], weights: Sequence[int], public: bytes, *, noise: Noise | None = None
    ) -> Sealed:
        self.check_alike(vectors, weights, _fingerprint(public))
        context, count, size = _context(public), vectors[0].count, self.ring // 2
        if noise is not None:
            self.check_noise(noise, count)
        total = sum(own * vector.weight for own, vector in zip(weights, vectors, strict=True))
        shares = [own * vector.weight / total for own, vector in zip(weights, vectors, strict=True)]
        rows = [self._parted(vector, context) for vector in vectors]
        sums = []
        for place, column in enumerate(zip(*rows, strict=True)):
            terms = [cipher * share for cipher, share in zip(column, shares, strict=True) if share]
            mean = sum(terms[1:], terms[0])
            if noise is not None:
                mean = mean + (noise[place * size : (place + 1) * size] / self.bound).tolist()
            sums.append(mean.serialize())
        return Sealed(type(self).__name__, self.form, vectors[0].key, count, total, noise is not None, _joined(sums))

    def decrypt(self, sealed: Sealed, secret: bytes) -> Values:
        self.check_own(sealed, secret[:_TAG].hex())
        context = _context(secret[_TAG:])
        parts = [cipher.decrypt() for cipher in self._parted(sealed, context)]
        values: Values = np.concatenate([np.asarray(part, dtype=np.float64) for part in parts]) * self.bound
        most = self.bound + (self.noise_bound if sealed.noisy else 0.0)
        if len(values) != sealed.count or not float(np.abs(values).max()) < _MARGIN * most:
            raise CiphertextError(
                f"expected {sealed.count} values within the bound, got others: the ciphertext is damaged"
            )
        return values

    def _parted(self, sealed: Sealed, context: object) -> list[_CkksVector]:
        """The TenSEAL vectors of a sealed vector; an error if any is damaged."""
        parts, rest = [], sealed.body
        while rest:
            size = int.from_bytes(rest[:8], "big")
            parts.append(rest[8 : 8 + size])
            if len(parts[-1]) < size:
                break
            rest = rest[8 + size :]
        if rest or len(parts) != -(-sealed.count // (self.ring // 2)):
            raise CiphertextError(f"expected {sealed.count} encrypted values, got a truncated or foreign ciphertext")
        return [_read(context, part) for part in parts]


def _tenseal() -> ModuleType:
    try:
        return import_module("tenseal")
    except ImportError as error:
        raise LeaktightError("CKKS encryption needs TenSEAL; install leaktight[ckks]") from error


@lru_cache(maxsize=4)
def _context(data: bytes) -> object:
    try:
        context: object = _tenseal().context_from(data, n_threads=1)
        return context
    except LeaktightError:
        raise
    except Exception as error:
        raise WrongKeyError(f"expected a key of CKKS, got {len(data)} other bytes") from error


def _read(context: object, part: bytes) -> _CkksVector:
    try:
        vector: _CkksVector = _tenseal().ckks_vector_from(context, part)
        return vector
    except Exception as error:
        raise CiphertextError("expected a ciphertext of CKKS under this key, got something else") from error


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _fingerprint(public: bytes) -> str:
    return hashlib.sha256(public).hexdigest()[: 2 * _TAG]
