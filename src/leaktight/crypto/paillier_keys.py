"""Paillier's key pair: numbers modulo n are encrypted as numbers modulo n^2, and products of these decrypt to sums.

Encryption is (1 + m n) h^(n r) mod n^2 with a short random r (Damgaard, Jurik and Nielsen 2010): h^n is part of the
public key, and its powers come from a table. The result is an ordinary Paillier ciphertext (generator n + 1),
compatible with other implementations.

>>> keys = SecretKey.generate(256, rng=Rng.fresh(), unsafe_small=True)
>>> one, two = keys.public.encrypt([20, 1], rng=Rng.fresh())
>>> keys.decrypt([keys.public.weighted_product([one, two], [2, 2])])
[42]

Assumes: factoring n and composite residuosity are hard, and powers of h with exponents half as long as n are
indistinguishable from random squares.
Reference: Paillier 1999; Damgaard, Jurik and Nielsen, A generalization of Paillier's public-key system, 2010.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import chain
from types import ModuleType

from leaktight.core.errors import LeaktightError
from leaktight.core.rng import Rng
from leaktight.crypto.cipher import Body, CipherError, CiphertextError, WrongKeyError
from leaktight.runtime.executor import Tell
from leaktight.runtime.processes import run_all

LEAST_BITS = 2048
_WINDOW = 8  # bits of the exponent that one entry of the table covers
_WORTH_A_TABLE = 48  # encryptions; the table takes as long as this many powers without it
_PRIME_TESTS = 40
_PUBLIC, _SECRET = b"leaktight paillier public 1\n", b"leaktight paillier secret 1\n"


def _gmpy2() -> ModuleType:
    try:
        return import_module("gmpy2")
    except ImportError as error:
        raise LeaktightError("Paillier encryption needs gmpy2; install leaktight[he]") from error


@dataclass(frozen=True)
class PublicKey:
    """Encrypts, adds, and multiplies by known numbers. base: h^n mod n^2, whose powers hide messages."""

    n: int
    base: int

    @property
    def bits(self) -> int:
        return self.n.bit_length()

    @property
    def exponent_bits(self) -> int:
        return -(-self.bits // 2)

    @property
    def ciphertext_bytes(self) -> int:
        return -(-self.bits // 4)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that tells keys apart."""
        return hashlib.sha256(self.to_bytes()).hexdigest()[:32]

    def encrypt(
        self, messages: Sequence[int], *, rng: Rng | None = None, workers: int = 1, secret: SecretKey | None = None
    ) -> list[int]:
        """Encrypt integers from 0 to n - 1.

        workers: number of processes. secret: with its primes it takes less time. Neither changes the result.
        """
        if any(not 0 <= message < self.n for message in messages):
            raise CipherError("expected messages from 0 to n - 1, got one outside")
        draws = _draws(rng, self.exponent_bits)
        exponents = [next(draws) for _ in messages]
        size = max(1, -(-len(messages) // max(workers, 1)))
        jobs = [
            (self, secret, list(messages[start : start + size]), exponents[start : start + size])
            for start in range(0, len(messages), size)
        ]
        return [cipher for part in run_all(_encrypt, jobs, workers=workers) for cipher in part]

    def weighted_product(self, ciphers: Sequence[int], weights: Sequence[int]) -> int:
        """The encrypted sum of weights times messages. Processes the bits of all weights together."""
        square = _gmpy2().mpz(self.n) ** 2
        result = _gmpy2().mpz(1)
        for bit in reversed(range(max(weights).bit_length())):
            result = result * result % square
            for cipher, weight in zip(ciphers, weights, strict=True):
                if weight >> bit & 1:
                    result = result * cipher % square
        return int(result)

    def shifted(self, cipher: int, message: int) -> int:
        """The encrypted sum of an encrypted message and a known one."""
        square = self.n * self.n
        return int(_gmpy2().mpz(cipher) * (1 + message * self.n) % square)

    def to_bytes(self) -> bytes:
        return _PUBLIC + _joined(self.n, self.base)

    @classmethod
    def from_bytes(cls, data: bytes) -> PublicKey:
        n, base = _parted(data, _PUBLIC, 2)
        return cls(n, base)

    def join(self, ciphers: Sequence[int]) -> bytes:
        """Ciphertexts as bytes, all of the same length."""
        return b"".join(cipher.to_bytes(self.ciphertext_bytes, "big") for cipher in ciphers)

    def part(self, body: Body, number: int) -> list[int]:
        """The inverse of `join`; an impossible ciphertext under this key is an error."""
        size = self.ciphertext_bytes
        if len(body) != number * size:
            raise CiphertextError(
                f"expected {number} ciphertexts of {size} bytes, got {len(body)} bytes: "
                "the ciphertext is truncated or foreign"
            )
        ciphers = [int.from_bytes(body[start : start + size], "big") for start in range(0, len(body), size)]
        n, product = _gmpy2().mpz(self.n), _gmpy2().mpz(1)
        for cipher in ciphers:
            product = product * cipher % n
        # a ciphertext has no common factor with n, so neither has their product: one test is enough for all
        if max(ciphers, default=0) >= n * n or _gmpy2().gcd(product, n) != 1:
            raise CiphertextError("expected ciphertexts under this key, got impossible numbers")
        return ciphers


@dataclass(frozen=True)
class SecretKey:
    """The primes. Decryption works modulo p^2 and q^2 and combines the two (Chinese remainders)."""

    p: int
    q: int
    public: PublicKey

    @classmethod
    def generate(cls, bits: int = LEAST_BITS, *, rng: Rng | None = None, unsafe_small: bool = False) -> SecretKey:
        """A new key whose n has exactly `bits` bits. unsafe_small: allows keys that can be broken, for tests.

        The seed of the stream determines the key, so a deployed client passes None, or a stream of `Rng.fresh`.
        """
        if bits % 2 or bits < (64 if unsafe_small else LEAST_BITS):
            raise ValueError(f"expected an even number of bits, at least {LEAST_BITS}, got {bits}")
        draws = _draws(rng, bits // 2)
        p = next(_primes(draws, bits // 2))
        # the condition of Damgaard, Jurik and Nielsen; it also rules out q = p
        q = next(prime for prime in _primes(draws, bits // 2) if math.gcd(p - 1, prime - 1) == 2)
        n = p * q
        x = next(draw for draw in _draws(None if rng is None else rng.child("base"), bits) if math.gcd(draw, n) == 1)
        base = int(_gmpy2().powmod(-x * x % n, n, n * n))
        return cls(p, q, PublicKey(n, base))

    def decrypt(self, ciphers: Sequence[int], *, threads: int = 1) -> list[int]:
        """The messages, from 0 to n - 1. Powers are computed without Python's lock, so that threads run in parallel."""
        gmp = _gmpy2()
        p, q = gmp.mpz(self.p), gmp.mpz(self.q)
        size = max(1, -(-len(ciphers) // max(threads, 1)))
        parts = [ciphers[start : start + size] for start in range(0, len(ciphers), size)]
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            of_p, of_q = (list(chain(*pool.map(lambda part, x=x: self._residues(part, x), parts))) for x in (p, q))
        return [int(message) for message in _joined_residues(zip(of_p, of_q, strict=True), p, q)]

    def _residues(self, ciphers: Sequence[int], prime: int) -> list[int]:
        """The messages modulo one of the primes."""
        gmp = _gmpy2()
        square = prime * prime
        # (1 + n)^(prime - 1) = 1 + (prime - 1) n modulo prime^2
        unit = gmp.invert((prime - 1) * (self.public.n // prime) % prime, prime)
        powers = gmp.powmod_base_list([gmp.mpz(cipher) % square for cipher in ciphers], prime - 1, square)
        return [(power - 1) // prime * unit % prime for power in powers]

    def to_bytes(self) -> bytes:
        return _SECRET + _joined(self.p, self.q, self.public.base)

    @classmethod
    def from_bytes(cls, data: bytes) -> SecretKey:
        p, q, base = _parted(data, _SECRET, 3)
        return cls(p, q, PublicKey(p * q, base))


def _encrypt(job: tuple[PublicKey, SecretKey | None, list[int], list[int]], tell: Tell[object]) -> list[int]:
    """Encrypt messages with given exponents, in one process."""
    key, secret, messages, exponents = job
    gmp = _gmpy2()
    n, square = gmp.mpz(key.n), gmp.mpz(key.n) ** 2
    if secret is None:
        hiders = _hiders(key.base, square, exponents)
    else:
        p, q = gmp.mpz(secret.p) ** 2, gmp.mpz(secret.q) ** 2
        pairs = zip(_hiders(key.base, p, exponents), _hiders(key.base, q, exponents), strict=True)
        hiders = _joined_residues(pairs, p, q)
    return [int((1 + n * message) * hider % square) for message, hider in zip(messages, hiders, strict=True)]


def _hiders(base: int, modulus: int, exponents: Sequence[int]) -> list[int]:
    """The powers of the base, from a table if there are many."""
    gmp = _gmpy2()
    if len(exponents) < _WORTH_A_TABLE:
        powers: list[int] = gmp.powmod_exp_list(gmp.mpz(base), [gmp.mpz(each) for each in exponents], modulus)
        return powers
    table = _powers(base, modulus, -(-max(exponents).bit_length() // _WINDOW))
    mask = (1 << _WINDOW) - 1
    result = []
    for exponent in exponents:
        power = gmp.mpz(1)
        for row in table:
            if exponent & mask:
                power = power * row[exponent & mask] % modulus
            exponent >>= _WINDOW
        result.append(power)
    return result


def _joined_residues(pairs: Iterable[tuple[int, int]], first: int, second: int) -> list[int]:
    """The numbers with these residues modulo two numbers without common factor (Chinese remainders)."""
    inverse = _gmpy2().invert(first, second)
    return [a + first * ((b - a) * inverse % second) for a, b in pairs]


@lru_cache(maxsize=4)
def _powers(base: int, modulus: int, rows: int) -> list[list[int]]:
    """base^(k 2^(8 i)) for every byte k of an exponent and its place i: 17 MB modulo n^2 for 2048 bits."""
    gmp = _gmpy2()
    current, table = gmp.mpz(base) % modulus, []
    for _ in range(rows):
        row = [gmp.mpz(1)]
        for _ in range((1 << _WINDOW) - 1):
            row.append(row[-1] * current % modulus)
        table.append(row)
        current = row[-1] * current % modulus
    return table


def _draws(rng: Rng | None, bits: int) -> Iterator[int]:
    """Random numbers of at most `bits` bits: from the operating system, or expanded from `rng` (SHAKE-256)."""
    size, spare = -(-bits // 8), -bits % 8
    place = 0
    while True:
        if rng is None:
            yield secrets.randbits(bits)
        else:
            seed = rng.secret_bytes(64) + place.to_bytes(8, "big")
            yield int.from_bytes(hashlib.shake_256(b"leaktight paillier" + seed).digest(size), "big") >> spare
        place += 1


def _primes(draws: Iterator[int], bits: int) -> Iterator[int]:
    """Primes of exactly `bits` bits that are 3 modulo 4; the two top bits are set, so that n has its full length."""
    gmp = _gmpy2()
    for draw in draws:
        candidate = draw | (3 << (bits - 2)) | 3
        if gmp.is_prime(candidate, _PRIME_TESTS):
            yield candidate


def _joined(*numbers: int) -> bytes:
    parts = [number.to_bytes(-(-number.bit_length() // 8), "big") for number in numbers]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _parted(data: bytes, head: bytes, number: int) -> list[int]:
    """The numbers after a header; invalid data is an error that does not contain them."""
    found: list[int] = []
    rest = data[len(head) :] if data.startswith(head) else b""
    while len(rest) >= 4 and len(found) < number:
        size = int.from_bytes(rest[:4], "big")
        if len(rest) < 4 + size:
            break
        found.append(int.from_bytes(rest[4 : 4 + size], "big"))
        rest = rest[4 + size :]
    if len(found) != number or rest or min(found) < 3:
        kind = head.split()[2].decode()
        raise WrongKeyError(f"expected a {kind} key of Paillier, got {len(data)} other bytes")
    return found
