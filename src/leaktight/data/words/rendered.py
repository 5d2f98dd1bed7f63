"""Rendered images of made-up words: a data set for text recognition that needs no download."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from leaktight.core.errors import DataError
from leaktight.core.rng import Rng
from leaktight.core.tasks import WordRecognition
from leaktight.core.text import as_written
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.settings import SplitSettings, check_minimum
from leaktight.data.words.drawing import HEIGHT, STYLES, WIDTH, Renderer
from leaktight.data.words.images import ALPHABET, encode_words

Style = Literal["synth90k", "synthtext"]

_LONGEST = 12  # longer words cannot be recognised from the 25 columns of features
_TRIES = 10_000
# A letter that is listed twice is drawn twice as often.
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
_OPEN = 0.4  # share of syllables that end in a vowel


def is_test_word(word: str, test_share: float, split_seed: int) -> bool:
    """Whether a word belongs to the test part. Only these arguments decide, so other settings never mix the parts.

    >>> 450 < sum(is_test_word(str(number), 0.25, 0) for number in range(2000)) < 550
    True
    """
    digest = hashlib.blake2b(f"{split_seed}/{word.lower()}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < test_share * 2**32


def syllables(generator: np.random.Generator) -> Iterator[str]:
    """An endless stream of syllables."""
    while True:
        draws = generator.random(4)
        onset, vowel = _ONSETS[int(draws[0] * len(_ONSETS))], _VOWELS[int(draws[1] * len(_VOWELS))]
        coda = "" if draws[2] < _OPEN else _CODAS[int(draws[3] * len(_CODAS))]
        yield f"{onset}{vowel}{coda}"


def made_word(length: int, generator: np.random.Generator) -> str:
    """A pronounceable word of `length` letters: syllables, cut off at the end."""
    word = ""
    for syllable in syllables(generator):
        word += syllable
        if len(word) >= length:
            break
    return word[:length]


def made_number(length: int, generator: np.random.Generator) -> str:
    """A number of `length` random digits."""
    return "".join(string.digits[digit] for digit in generator.integers(0, 10, length))


@dataclass(frozen=True, kw_only=True)
class RenderedWords(SplitSettings):
    """Made-up words drawn in two styles, one like Synth90k and one like SynthText, 32x100 colour; nothing to download.

    examples: images of each style, of which `test_share` are for testing. draw_seed: selects words and images.
    styles: "synth90k": letters in many fonts, nearly grey, curved, blurred, with borders and shadows; "synthtext":
    coloured words and numbers in any case, on photographs and in perspective. Each style is a group, so the partition
    by_source gives each to its own client.
    shortest, longest: number of letters, 1 to 12. distortion: 0 (upright, sharp and clean) to 2; 1 is as described.

    A word of the test part never occurs in the training part: `test_share` of all possible words, chosen by
    `split_seed`, are only for testing, in both styles. Both parts share backgrounds and fonts.
    Words are random syllables, not from a dictionary. Pixels depend on the versions of Pillow and Matplotlib.
    """

    examples: int = 5000
    draw_seed: int = 0
    styles: tuple[Style, ...] = ("synth90k", "synthtext")
    shortest: int = 3
    longest: int = 6
    distortion: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, 2, "examples")
        check_minimum(self, 1, "shortest")
        if not self.shortest <= self.longest <= _LONGEST:
            raise ValueError(
                f"expected shortest <= longest <= {_LONGEST}, got shortest {self.shortest}, longest {self.longest}"
            )
        if not 0 <= self.distortion <= 2:
            raise ValueError(f"expected distortion in [0, 2], got {self.distortion}; 1 is the default")
        unknown = next((style for style in self.styles if style not in STYLES), None)
        if unknown is not None or not self.styles or len(set(self.styles)) < len(self.styles):
            raise ValueError(f"expected different styles out of {', '.join(STYLES)}, got {as_written(self.styles)}")

    def load(self, root: Path) -> Dataset:
        held = min(max(round(self.test_share * self.examples), 1), self.examples - 1)
        kept = self.examples - held
        return Dataset(
            "rendered_words",
            self._part("train", kept),
            self._part("test", held),
            tuple(ALPHABET),
            WordRecognition(blank=len(ALPHABET)),
            groups=torch.arange(len(self.styles)).repeat_interleave(kept),
            group_names=tuple(f"{style}-like" for style in self.styles),
        )

    def _part(self, part: Literal["train", "test"], count: int) -> Examples:
        """`count` images of each style. Each has its own random stream, so a larger set begins with a smaller one."""
        images = torch.empty(len(self.styles) * count, 3, HEIGHT, WIDTH, dtype=torch.uint8)
        words = []
        place = 0
        for style in self.styles:
            renderer = Renderer(style, self.distortion)
            for index in range(count):
                generator = Rng(self.draw_seed).child("rendered words", style, part, index).public_numpy()
                word = self._word(style, part, generator)
                images[place] = torch.from_numpy(renderer(word, generator)).permute(2, 0, 1)
                words.append(word)
                place += 1
        return Examples(images, encode_words(words, self.longest))

    def _word(self, style: Style, part: str, generator: np.random.Generator) -> str:
        """A random word of the part, in upper, lower or mixed case."""
        for _ in range(_TRIES):
            length = int(generator.integers(self.shortest, self.longest + 1))
            number = generator.random() < STYLES[style].numbers
            word = made_number(length, generator) if number else made_word(length, generator)
            if is_test_word(word, self.test_share, self.split_seed) == (part == "test"):
                return STYLES[style].cased(word, generator)
        raise DataError(
            f"expected {part} words of {self.shortest} to {self.longest} letters, found none in {_TRIES} tries; raise "
            "longest, or choose another test_share"
        )
