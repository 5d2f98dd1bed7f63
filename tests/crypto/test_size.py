"""Encryption at size: the work grows in proportion to the number of values, and nothing unpacks without a limit."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.crypto.test_ciphers import keys_of, numbers, sealed_by

from leaktight.core.errors import MachineError
from leaktight.crypto import seal
from leaktight.crypto.cipher import CiphertextError, Keys, Sealed, WrongKeyError
from leaktight.crypto.ckks import Ckks


class Counted(bytes):
    """Bytes that count how many of them are copied by slicing, also of slices."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, bytes):
            Counted.copied += len(found)
            return Counted(found)
        return found


def test_reading_a_vector_copies_it_once_at_most() -> None:
    """A reader that copies what is left after every part copies 20 times as much for 40 parts."""
    cipher, Counted.copied = Ckks(), 0
    vector = sealed_by(cipher, numbers(40 * cipher.ring))
    cipher.decrypt(replace(vector, body=Counted(vector.body)), keys_of(cipher).secret)
    assert Counted.copied <= len(vector.body)


def test_a_value_takes_eight_bytes_and_a_sum_sixteen() -> None:
    cipher, keys = Ckks(), keys_of(Ckks())
    vector = sealed_by(cipher, numbers(4 * cipher.ring))
    assert len(vector.body) / vector.count < 8.1
    assert len(cipher.combine([vector, vector], [1, 1], keys.public).body) / vector.count < 16.1


@pytest.mark.parametrize("ring", [8192, 16384])
@pytest.mark.parametrize("noise", [0.0, 96.0, 4096.0])
def test_the_resolution_is_far_above_the_error(ring: int, noise: float) -> None:
    """Ten times the largest of a million; here of 130 thousand, half of them at the bound."""
    cipher = Ckks(bound=0.03, ring=ring, noise_bound=0.03 * noise)
    values = numbers(1 << 17, cipher.bound)
    values[::2] = cipher.bound * np.sign(values[::2])
    vector = cipher.encrypt(values, keys_of(cipher))
    error = np.abs(cipher.decrypt(vector, keys_of(cipher).secret) - values).max()
    assert 0.02 * cipher.resolution < error < 0.15 * cipher.resolution


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 2**14), min_size=1, max_size=4), st.integers(1, 20_000), st.integers(0, 99))
def test_a_mean_is_right_up_to_the_resolution(weights: list[int], count: int, seed: int) -> None:
    assume(sum(weights) > 0)
    cipher, keys = Ckks(), keys_of(Ckks())
    values = [numbers(count, seed=seed + place) for place in range(len(weights))]
    mean = cipher.decrypt(
        cipher.combine([cipher.encrypt(each, keys) for each in values], weights, keys.public), keys.secret
    )
    assert np.abs(mean - np.average(values, axis=0, weights=weights)).max() <= cipher.resolution


def _with_part(vector: Sealed, part: bytes) -> Sealed:
    return replace(vector, body=len(part).to_bytes(8, "big") + part)


def _packed(*blocks: bytes) -> bytes:
    """Data of SEAL, compressed: a frame of Zstandard with these blocks."""
    frame = bytes.fromhex("28b52ffd 00 58") + b"".join(blocks)
    return bytes.fromhex("5ea1100403020000") + (16 + len(frame)).to_bytes(8, "little") + frame


def test_what_would_unpack_to_gigabytes_is_refused_before_it_is_unpacked() -> None:
    zeros = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"\0"  # a block of 128 KB in four bytes
    last = (1).to_bytes(3, "little")
    cipher, keys = Ckks(), keys_of(Ckks())
    vector = sealed_by(cipher, numbers(9))
    hostile = _with_part(vector, _packed(*[zeros] * 10_000, last))
    assert len(hostile.body) < len(vector.body)
    for use in (lambda: cipher.combine([hostile], [1], keys.public), lambda: cipher.decrypt(hostile, keys.secret)):
        with pytest.raises(CiphertextError, match="unpacks to more than a ciphertext"):
            use()


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"x" * 40,
        _packed(),
        _packed((7).to_bytes(3, "little")),
        _packed((1).to_bytes(3, "little")) + b"more",
        _packed((1).to_bytes(3, "little")),
    ],
    ids=["nothing", "text", "no blocks", "no such block", "more behind", "empty"],
)
def test_what_is_no_ciphertext_is_named(part: bytes) -> None:
    cipher, keys = Ckks(), keys_of(Ckks())
    vector = _with_part(sealed_by(cipher, numbers(9)), part)
    with pytest.raises(CiphertextError, match="expected a ciphertext of CKKS, got something else"):
        cipher.combine([vector], [1], keys.public)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 200))
def test_no_bytes_crash_the_reader(data: bytes, kept: int) -> None:
    cipher, keys = Ckks(), keys_of(Ckks())
    vector = sealed_by(cipher, numbers(9))
    for part in (data, bytes(vector.body[8 : 8 + kept]) + data):
        with pytest.raises(CiphertextError):
            cipher.combine([_with_part(vector, part)], [1], keys.public)


def test_a_ciphertext_of_another_scale_or_ring_is_refused() -> None:
    cipher, keys = Ckks(), keys_of(Ckks())
    vector = sealed_by(cipher, numbers(9))
    noisy, large = Ckks(noise_bound=9.0), Ckks(ring=16384)
    coarse = replace(vector, body=noisy.encrypt(numbers(9), keys).body)
    with pytest.raises(CiphertextError, match="with these settings, got one with others"):
        cipher.combine([coarse], [1], keys.public)
    foreign = replace(vector, body=sealed_by(large, numbers(9)).body)
    with pytest.raises(CiphertextError):
        cipher.combine([foreign], [1], keys.public)
    with pytest.raises(WrongKeyError, match="with ring 16384, got one with other settings"):
        large.encrypt(numbers(9), keys)


def test_keys_of_an_earlier_version_are_refused_with_a_remedy() -> None:
    for keys in (Keys(b"\n\x12", b"\n\x12"), Keys(keys_of(Ckks()).public, b"")):
        with pytest.raises(WrongKeyError, match=r"secret key of CKKS of this version, got .*; agree on new keys"):
            Ckks().encrypt(numbers(3), keys)


def test_systems_without_files_in_memory_use_a_temporary_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cipher, keys = Ckks(), keys_of(Ckks())
    values = numbers(9000)
    mean = cipher.decrypt(cipher.combine([cipher.encrypt(values, keys)], [3], keys.public), keys.secret)
    assert np.abs(mean - values).max() <= cipher.resolution
    assert not list(tmp_path.iterdir())


def test_ciphertexts_that_cancel_are_named() -> None:
    """The sum of a ciphertext and its negative hides nothing, and SEAL refuses it."""
    with seal.bench(8192, 2.0**42) as tool:
        body = memoryview(sealed_by(Ckks(), numbers(9)).body)[8:]
        one, other = tool.weighted(body, 1), tool.weighted(body, -1)
        with pytest.raises(CiphertextError, match="some that cannot be added up"):
            tool.added(one, other)


def test_no_room_for_a_ciphertext_is_a_fault_of_the_machine() -> None:
    with seal.bench(8192, 2.0**42) as tool:
        full = replace(tool, path="/dev/full")
        with pytest.raises(MachineError, match="could not be stored"):
            full.encrypted(numbers(3), 1.0, seal.secret_of(seal.new_secret(8192), 8192))
