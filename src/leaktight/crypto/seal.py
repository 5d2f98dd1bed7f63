"""Microsoft SEAL through TenSEAL's bindings: CKKS vectors of complex slots, and ciphertexts as bytes.

TenSEAL's own vectors have real slots, half as many, and send two polynomials where a key holder needs to send one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from leaktight.core.errors import LeaktightError, MachineError
from leaktight.crypto.cipher import CiphertextError, Values, WrongKeyError

_MODULI = (60, 60)  # bits: of the ciphertexts' modulus, and of one that only key switching would need
_HEADER = 16  # bytes of SEAL before the data
_STORED, _ZSTD = 0, 2  # how the data are compressed
_BLOCK = 1 << 17  # bytes that a block of Zstandard unpacks to, at most
_MAGIC = bytes.fromhex("28b52ffd")


def _bindings(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise LeaktightError("CKKS encryption needs TenSEAL; install leaktight[ckks]") from error


def new_secret(ring: int) -> bytes:
    """A new secret key from the operating system's entropy, as bytes."""
    sealing = _bindings("tenseal")
    context = sealing.context(sealing.SCHEME_TYPE.CKKS, ring, coeff_mod_bit_sizes=list(_MODULI), n_threads=1)
    data: bytes = context.serialize(
        save_public_key=False, save_secret_key=True, save_galois_keys=False, save_relin_keys=False
    )
    return data


class SecretKey(NamedTuple):
    """A secret key of SEAL, and TenSEAL's context, which owns it."""

    key: Any
    context: Any


@dataclass(frozen=True)
class Bench:
    """Encodes, encrypts, adds and decrypts vectors of up to `ring` numbers, two to a slot.

    scale: by which numbers are multiplied before they are rounded. path, handle: of a file through which ciphertexts
    pass, since SEAL's bindings take no bytes.
    """

    ring: int
    scale: float
    path: str
    handle: int

    def encoded(self, values: Values, factor: float) -> Any:
        """A plaintext of up to `ring` numbers, multiplied by a factor in double precision."""
        pairs = np.zeros(len(values) + len(values) % 2)
        pairs[: len(values)] = values
        pairs *= factor
        plain = _seal().Plaintext()
        encoder_of(self.ring).encode(pairs.view(np.complex128).tolist(), self._level, self.scale, plain)
        return plain

    def encrypted(self, values: Values, factor: float, secret: SecretKey) -> bytes:
        """A ciphertext whose second polynomial is random, and so is sent as the seed of 64 bytes that it came from."""
        encryptor = _seal().Encryptor(context_of(self.ring), secret.key)
        return self.saved(encryptor.encrypt_symmetric(self.encoded(values, factor)))

    def weighted(self, part: memoryview, weight: int) -> Any:
        """The ciphertext in these bytes times a whole number; CiphertextError if it is none under these settings."""
        factor, result = _seal().Plaintext(), _seal().Ciphertext()
        encoder_of(self.ring).encode(float(weight), self._level, 1.0, factor)
        with _named("one that cannot be added up"):
            _seal().Evaluator(context_of(self.ring)).multiply_plain(self._read(part), factor, result)
        return result

    def added(self, total: Any, other: Any) -> None:
        """Add a ciphertext to another."""
        with _named("some that cannot be added up"):
            _seal().Evaluator(context_of(self.ring)).add_inplace(total, other)

    def shifted(self, total: Any, values: Values, factor: float) -> None:
        """Add known numbers, multiplied by a factor, to a ciphertext."""
        _seal().Evaluator(context_of(self.ring)).add_plain_inplace(total, self.encoded(values, factor))

    def decrypted(self, part: memoryview, secret: SecretKey) -> Values:
        """The `ring` numbers of a ciphertext."""
        plain = _seal().Plaintext()
        with _named("one that cannot be decrypted"):
            _seal().Decryptor(context_of(self.ring), secret.key).decrypt(self._read(part), plain)
        values: Values = np.asarray(encoder_of(self.ring).decode_complex(plain), dtype=np.complex128).view(np.float64)
        return values

    @property
    def _level(self) -> Any:
        return context_of(self.ring).first_parms_id()

    def saved(self, cipher: Any) -> bytes:
        """A ciphertext as bytes."""
        with _room(OSError, RuntimeError):
            cipher.save(self.path)
            return os.pread(self.handle, os.fstat(self.handle).st_size, 0)

    def _read(self, part: memoryview) -> Any:
        """The ciphertext in these bytes, checked before anything is unpacked and after."""
        if _unpacked(part) > 16 * self.ring + 2 * _BLOCK:
            raise CiphertextError("expected a ciphertext of CKKS, got one that unpacks to more than a ciphertext")
        cipher = _seal().Ciphertext()
        with _room(OSError):
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, part, 0)
        with _named("something else"):
            cipher.load(context_of(self.ring), self.path)
        if cipher.size() != 2 or cipher.scale != self.scale or cipher.parms_id() != self._level:
            raise CiphertextError("expected a ciphertext of CKKS with these settings, got one with others")
        return cipher


@contextmanager
def bench(ring: int, scale: float) -> Iterator[Bench]:
    """A bench with its file, in memory where the system has such files. Nothing but ciphertexts passes through it."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("leaktight"), "rb") as file:
            yield Bench(ring, scale, f"/proc/self/fd/{file.fileno()}", file.fileno())
        return
    with tempfile.TemporaryDirectory(prefix="leaktight-") as folder, Path(folder, "ciphertext").open("w+b") as file:
        yield Bench(ring, scale, file.name, file.fileno())


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Errors of SEAL, of the types that its bindings raise, as CiphertextError."""
    try:
        yield
    except (ValueError, RuntimeError, IndexError) as error:
        raise CiphertextError(f"expected a ciphertext of CKKS, got {what}") from error


@contextmanager
def _room(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise MachineError(f"a ciphertext could not be stored ({error}); free memory, or space at TMPDIR") from error


@lru_cache(maxsize=4)
def secret_of(data: bytes, ring: int) -> SecretKey:
    """The secret key in these bytes; WrongKeyError if there is none, or one of another ring."""
    try:
        context = _bindings("tenseal").context_from(data, n_threads=1)
        same = context.seal_context().data.first_parms_id() == context_of(ring).first_parms_id()
        found = SecretKey(context.secret_key().data, context)
    except LeaktightError:
        raise
    except Exception as error:
        raise WrongKeyError(f"expected a secret key of CKKS, got {len(data)} other bytes") from error
    if not same:
        raise WrongKeyError(f"expected a secret key of CKKS with ring {ring}, got one with other settings")
    return found


@lru_cache(maxsize=4)
def context_of(ring: int) -> Any:
    seal = _seal()
    settings = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
    settings.set_poly_modulus_degree(ring)
    settings.set_coeff_modulus(seal.CoeffModulus.Create(ring, list(_MODULI)))
    return seal.SEALContext(settings, True, seal.SEC_LEVEL_TYPE.TC192)


@lru_cache(maxsize=4)
def encoder_of(ring: int) -> Any:
    return _seal().CKKSEncoder(context_of(ring))


def _seal() -> ModuleType:
    return _bindings("tenseal.sealapi")


def _unpacked(part: memoryview) -> int:
    """The most bytes that data of SEAL unpack to, from the sizes of their blocks (RFC 8878); else CiphertextError."""
    try:
        if part[5] == _STORED:
            return len(part)
        if part[5] != _ZSTD or part[_HEADER : _HEADER + 4] != _MAGIC:
            raise ValueError
        kind, place, total, last = part[_HEADER + 4], _HEADER + 5, 0, False
        single = kind >> 5 & 1
        place += (1 - single) + (0, 1, 2, 4)[kind & 3] + (single, 2, 4, 8)[kind >> 6]
        while not last:
            head = int.from_bytes(part[place : place + 3], "little")
            last, shape, size = bool(head & 1), head >> 1 & 3, head >> 3
            if place + 3 > len(part) or shape == 3:
                raise ValueError
            total += _BLOCK if shape == 2 else size
            place += 3 + (1 if shape == 1 else size)
        if place + 4 * (kind >> 2 & 1) != len(part):
            raise ValueError
    except (IndexError, ValueError):
        raise CiphertextError("expected a ciphertext of CKKS, got something else") from None
    return total
