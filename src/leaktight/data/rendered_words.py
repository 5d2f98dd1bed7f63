"""Words drawn here: a set for text recognition that needs no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from leaktight.core.errors import DataError
from leaktight.core.rng import Rng
from leaktight.core.tasks import WordRecognition
from leaktight.core.types import Examples
from leaktight.data.alphabet import ALPHABET, encode_words
from leaktight.data.dataset import Dataset
from leaktight.data.made_words import is_test_word, made_number, made_word
from leaktight.data.settings import SplitSettings, check_minimum
from leaktight.data.word_drawing import HEIGHT, STYLES, WIDTH, Renderer

Style = Literal["synth90k", "synthtext"]

_LONGEST = 12  # of what can still be told apart on 25 columns
_TRIES = 10_000


@dataclass(frozen=True, kw_only=True)
class RenderedWords(SplitSettings):
    """Made-up words drawn in two styles, one like Synth90k and one like SynthText, 32x100 colour; nothing to download.

    examples: images of each style, of which `test_share` are for testing. draw_seed: which words and pictures.
    styles: "synth90k": letters in many fonts, nearly grey, curved, blurred, with borders and shadows; "synthtext":
    coloured words and numbers in any case, on photographs and in perspective. Each is a group, so that the partition
    by_source gives each to a client of its own.
    shortest, longest: number of letters. distortion: 1 as described; less is milder, 0 is upright, sharp and clean.

    A word of the test part never occurs in the training part: `test_share` of all words there are, chosen by
    `split_seed`, are for testing alone, in both styles. Backgrounds and fonts are those of the training part.
    Words are syllables put together, not a dictionary. Pixels depend on the versions of Pillow and Matplotlib.
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
            raise ValueError(f"expected distortion in [0, 2], got {self.distortion}; 1 is the usual")
        unknown = next((style for style in self.styles if style not in STYLES), None)
        if unknown is not None or not self.styles or len(set(self.styles)) < len(self.styles):
            raise ValueError(f"expected different styles out of {', '.join(STYLES)}, got {self.styles}")

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
        """So many images of each style. Every image has a stream of its own: a larger set begins with the smaller."""
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
        """A word of the part, in the case in which it is drawn."""
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
