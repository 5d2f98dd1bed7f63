"""Packed Paillier: many quantised values to a ciphertext, exact sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from leaktight.core.rng import Rng
from leaktight.crypto.cipher import Cipher, Keys, Noise, Sealed, Values, WrongKeyError
from leaktight.crypto.packing import Slots
from leaktight.crypto.paillier_keys import LEAST_BITS, PublicKey, SecretKey
from leaktight.runtime.processes import available_cores

_MOST_WIDTH = 62  # bits of a slot: sums are counted in int64


@dataclass(frozen=True, kw_only=True)
class Paillier(Cipher):
    """Paillier encryption of quantised values, many to a ciphertext; sums with integer weights are exact.

    key_bits: of n, even; at least 2048; 3072 for long-term security. value_bits: of a quantised value, 2 to 52: the
    step is bound / (2^(value_bits - 1) - 1), and the error of a mean at most half of it. weight_bits: integer weights
    of a sum add up to at most 2^weight_bits. A slot has value_bits + weight_bits bits of a plaintext of key_bits - 1,
    and with noise about log2(1 + noise_bound / bound) more. unsafe_small: allows keys that can be broken, for tests.

    Reference: Paillier 1999; with precomputed powers as in Damgaard, Jurik and Nielsen 2010.
    Differs from the paper: the thesis on FedBoosting encrypts value by value, scaled by 1e32; its code under 128 bits.
    """

    key_bits: int = LEAST_BITS
    value_bits: int = 18
    weight_bits: int = 16
    unsafe_small: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_bits % 2 or self.key_bits < (64 if self.unsafe_small else LEAST_BITS):
            raise ValueError(f"expected an even key_bits of at least {LEAST_BITS}, got {self.key_bits}")
        if not 2 <= self.value_bits <= 52 or self.weight_bits < 1:
            raise ValueError(
                f"expected value_bits in 2..52 and weight_bits >= 1, got {self.value_bits} and {self.weight_bits}"
            )
        if self.slots.width > _MOST_WIDTH:
            raise ValueError(
                f"expected values, weights and noise to take at most {_MOST_WIDTH} bits together, got "
                f"{self.slots.width}; lower value_bits ({self.value_bits}), weight_bits ({self.weight_bits}) "
                f"or noise ({self.noise_bound / self.bound:g} times the bound)"
            )
        if not self.slots.per_integer:
            raise ValueError(f"expected key_bits above {self.slots.width}, the bits of a slot, got {self.key_bits}")

    @property
    def slots(self) -> Slots:
        return Slots(self.value_bits, self.weight_bits, self.bound, self.noise_bound, self.key_bits - 1)

    @property
    def resolution(self) -> float:
        return self.slots.step / 2

    @property
    def most_weight(self) -> int:
        return 1 << self.weight_bits

    def finest_noise(self, weight: int) -> float:
        """Four steps of a sum: rounding adds 1/12 to a variance of 16, in squared steps."""
        return 4 * self.slots.step / weight

    def new_keys(self, rng: Rng | None = None) -> Keys:
        key = SecretKey.generate(self.key_bits, rng=rng, unsafe_small=self.unsafe_small)
        return Keys(key.public.to_bytes(), key.to_bytes())

    def encrypt(self, values: Values, keys: Keys, *, rng: Rng | None = None, workers: int = 1) -> Sealed:
        """As in `Cipher`. workers: number of processes; more than 1 is faster only for millions of values."""
        self.check_values(values)
        key = self._public(keys.public)
        secret = _secret_key(keys.secret) if keys.secret else None
        if secret is not None:
            self.check_pair(key.fingerprint, secret.public.fingerprint)
        packed = self.slots.pack(self.slots.quantise(values))
        ciphers = key.encrypt(packed, rng=rng, workers=workers, secret=secret)
        return self._sealed(key, len(values), 1, False, ciphers)

    def combine(
        self, vectors: Sequence[Sealed], weights: Sequence[int], public: bytes, *, noise: Noise | None = None
    ) -> Sealed:
        key = self._public(public)
        self.check_alike(vectors, weights, key.fingerprint)
        count = vectors[0].count
        if noise is not None:
            self.check_noise(noise, count)
        columns = zip(*(key.part(vector.body, self.slots.num_integers(count)) for vector in vectors), strict=True)
        ciphers = [key.weighted_product(column, weights) for column in columns]
        weight = sum(own * vector.weight for own, vector in zip(weights, vectors, strict=True))
        if noise is not None:
            shifts = self.slots.pack(self.slots.noise_levels(noise, weight))
            ciphers = [key.shifted(cipher, shift) for cipher, shift in zip(ciphers, shifts, strict=True)]
        return self._sealed(key, count, weight, noise is not None, ciphers)

    def decrypt(self, sealed: Sealed, secret: bytes) -> Values:
        key = _secret_key(secret)
        self.check_own(sealed, key.public.fingerprint)
        ciphers = key.public.part(sealed.body, self.slots.num_integers(sealed.count))
        # also in a worker process: while one client decrypts the aggregate, the others have nothing to do
        messages = key.decrypt(ciphers, threads=available_cores())
        return self.slots.values(self.slots.unpack(messages, sealed.count), weight=sealed.weight, noisy=sealed.noisy)

    def _public(self, public: bytes) -> PublicKey:
        key = _public_key(public)
        if key.bits != self.key_bits:
            raise WrongKeyError(f"expected a key of {self.key_bits} bits, got {key.bits}")
        return key

    def _sealed(self, key: PublicKey, count: int, weight: int, noisy: bool, ciphers: Sequence[int]) -> Sealed:
        return Sealed(type(self).__name__, self.form, key.fingerprint, count, weight, noisy, key.join(ciphers))


@lru_cache(maxsize=4)
def _public_key(data: bytes) -> PublicKey:
    return PublicKey.from_bytes(data)


@lru_cache(maxsize=4)
def _secret_key(data: bytes) -> SecretKey:
    return SecretKey.from_bytes(data)
