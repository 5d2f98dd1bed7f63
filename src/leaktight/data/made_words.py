"""Words that are made up: pronounceable, endless, and divided for good into those of training and those of testing."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterator

import numpy as np

# What stands twice comes twice as often.
_ONSETS = (
    *"bcdfghjklmnprstvwxyz",
    *("bl", "br", "ch", "cl", "cr", "dr", "fl", "fr", "gl", "gr", "kn", "ph", "pl", "pr", "qu", "sc", "sh", "sk"),
    *("sl", "sm", "sn", "sp", "st", "str", "sw", "th", "tr", "tw", "wh"),
)
_VOWELS = (*"aaaeeeiiiooouuy", "ai", "au", "ea", "ee", "ie", "oa", "oo", "ou")
_CODAS = (
    *"bdfgjklmnnprrssttvwxz",
    *("ck", "ff", "ll", "lt", "mp", "nd", "ng", "nt", "rd", "rk", "rm", "rn", "rt", "sk", "ss", "st", "th"),
)
_OPEN = 0.4  # share of syllables that end in their vowel
_PARTS = 2**32


def is_test_word(word: str, test_share: float, split_seed: int) -> bool:
    """Whether a word is for testing alone. It depends on nothing but these three, so no other setting mixes the parts.

    >>> 450 < sum(is_test_word(str(number), 0.25, 0) for number in range(2000)) < 550
    True
    """
    digest = hashlib.blake2b(f"{split_seed}/{word.lower()}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < test_share * _PARTS


def syllables(generator: np.random.Generator) -> Iterator[str]:
    """Syllables without end."""
    while True:
        draws = generator.random(4)
        onset, vowel = _ONSETS[int(draws[0] * len(_ONSETS))], _VOWELS[int(draws[1] * len(_VOWELS))]
        coda = "" if draws[2] < _OPEN else _CODAS[int(draws[3] * len(_CODAS))]
        yield f"{onset}{vowel}{coda}"


def made_word(length: int, generator: np.random.Generator) -> str:
    """A word of so many letters: syllables one after the other, cut off where it is long enough."""
    word = ""
    for syllable in syllables(generator):
        word += syllable
        if len(word) >= length:
            break
    return word[:length]


def made_number(length: int, generator: np.random.Generator) -> str:
    """So many digits."""
    return "".join(string.digits[digit] for digit in generator.integers(0, 10, length))
