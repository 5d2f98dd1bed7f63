"""Encryption at size: the work grows in proportion to the number of values, and nothing unpacks without a limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.crypto.test_ciphers import keys_of, numbers, sealed_by

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
