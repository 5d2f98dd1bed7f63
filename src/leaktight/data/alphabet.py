"""How words become numbers: the symbols 0-9a-z, whatever the case."""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch
from torch import Tensor

from leaktight.core.errors import DataError

ALPHABET = string.digits + string.ascii_lowercase
_NUMBERS = {symbol: number for number, symbol in enumerate(ALPHABET)}


def is_readable(word: str) -> bool:
    """Whether a word has letters and digits of the alphabet only, whatever their case."""
    return bool(word) and all(symbol in _NUMBERS for symbol in word.lower())


def encode_words(words: Sequence[str], length: int | None = None) -> Tensor:
    """Words as symbol numbers (N, L), padded with -1; `length` is L, or the longest word decides.

    >>> encode_words(["A1", "b"])
    tensor([[10,  1],
            [11, -1]])
    """
    strange = next((word for word in words if not is_readable(word)), None)
    if strange is not None:
        raise DataError(f"expected words of the letters a-z and the digits 0-9, got {strange!r}; leave it out")
    longest = max((len(word) for word in words), default=0)
    if length is not None and longest > length:
        raise DataError(f"expected words of at most {length} symbols, got one of {longest}; raise max_length")
    encoded = torch.full((len(words), longest if length is None else length), -1)
    for place, word in enumerate(words):
        encoded[place, : len(word)] = torch.tensor([_NUMBERS[symbol] for symbol in word.lower()])
    return encoded


def decode_words(encoded: Tensor) -> list[str]:
    """The inverse of `encode_words`, in lower case: (N, L) to N words.

    >>> decode_words(encode_words(["A1", "b"]))
    ['a1', 'b']
    """
    return ["".join(ALPHABET[number] for number in row if number >= 0) for row in encoded.tolist()]
