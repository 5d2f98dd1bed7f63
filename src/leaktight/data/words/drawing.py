"""Draws a word as an image: fonts, baseline, perspective, background, colours, border, shadow, blur and noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from leaktight.core.errors import DataError
from leaktight.data.embedded import PHOTOGRAPHS, load_photograph

HEIGHT, WIDTH = 32, 100

Pixels = NDArray[np.floating]

_T = TypeVar("_T")

_SIZES = (26, 34)  # of the letters before they are fitted into the image
_SANS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique", "cmss10")
_SERIF = (
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic", "STIXGeneral"),
    *("STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta", "cmr10", "cmb10", "cmti10"),
)
_MONO = ("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "cmtt10")
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_SCALE = 200  # shorter side of photographs before backgrounds are cropped


@dataclass(frozen=True)
class Look:
    """The settings of one style; distances and strengths are the largest that are drawn, at distortion 1.

    fonts: names of Matplotlib's font files. cases: shares of lower case, Capitalised, UPPER CASE and mIxEd.
    numbers: share of words that are numbers. colour: how far colours are from grey.
    grey: whether photographs and noise are grey. photograph: range of its share in the background.
    tilt, slant, corner: how far corners of the word move, in pixels. curve: of the baseline, in letter heights.
    spacing: between letters, in letter heights. blur: radius in pixels. noise: standard deviation.
    border, shadow: shares of words that have one.
    """

    fonts: tuple[str, ...]
    cases: tuple[float, float, float, float]
    numbers: float
    colour: float
    grey: bool
    photograph: tuple[float, float]
    tilt: float
    slant: float
    corner: float
    curve: float
    spacing: float
    blur: float
    noise: float
    border: float
    shadow: float

    def cased(self, word: str, generator: np.random.Generator) -> str:
        """The word in a random case."""
        draw = generator.random()
        lower, capital, upper, _ = self.cases
        if draw < lower:
            return word
        if draw < lower + capital:
            return word.capitalize()
        if draw < lower + capital + upper:
            return word.upper()
        raised = generator.random(len(word)) < 0.5
        return "".join(letter.upper() if up else letter for letter, up in zip(word, raised, strict=True))


STYLES: Mapping[str, Look] = {
    "synth90k": Look(
        fonts=(*_SANS, *_SERIF, *_MONO),
        cases=(0.5, 0.25, 0.25, 0.0),
        numbers=0.0,
        colour=0.06,
        grey=True,
        photograph=(0.0, 0.25),
        tilt=1.5,
        slant=8.0,
        corner=1.5,
        curve=0.12,
        spacing=0.12,
        blur=0.9,
        noise=0.05,
        border=0.25,
        shadow=0.25,
    ),
    "synthtext": Look(
        fonts=(*_SANS, "DejaVuSerif", "DejaVuSerif-Bold", "STIXGeneral", "STIXGeneralBol", "DejaVuSansMono-Bold"),
        cases=(0.35, 0.3, 0.3, 0.05),
        numbers=0.12,
        colour=0.5,
        grey=False,
        photograph=(0.8, 1.0),
        tilt=4.0,
        slant=5.0,
        corner=4.0,
        curve=0.0,
        spacing=0.05,
        blur=0.4,
        noise=0.02,
        border=0.15,
        shadow=0.1,
    ),
}


@dataclass(frozen=True)
class Renderer:
    """Draws words in one style; `distortion`, 0 to 2, scales slant, curve, blur and noise."""

    style: str
    distortion: float = 1.0

    def __call__(self, word: str, generator: np.random.Generator) -> NDArray[np.uint8]:
        """An image (HEIGHT, WIDTH, 3) of bytes."""
        look = STYLES[self.style]
        letters = self._placed(self._letters(word, look, generator), look, generator)
        background = self._background(look, generator)
        ink = _ink(background, look, generator)
        image = background
        if generator.random() < look.shadow:
            image = _painted(image, _shifted(letters, generator), _mixed(ink, background, 0.6))
        if generator.random() < look.border:
            grown = letters.filter(ImageFilter.MaxFilter(3))
            image = _painted(image, grown, _mixed(ink, background, float(generator.uniform(-0.6, 0.4))))
        image = _painted(image, letters, ink)
        return self._photographed(image, look, generator)

    def _letters(self, word: str, look: Look, generator: np.random.Generator) -> Image.Image:
        """The word in a random font, letter by letter along a curved baseline, without margins."""
        font = _font(_one_of(look.fonts, generator), _one_of(_SIZES, generator))
        spacing, bend = generator.uniform(-0.3, 1), generator.uniform(-1, 1)
        size = font.size
        advances = [_length(font, letter) + self.distortion * look.spacing * spacing * size for letter in word]
        starts = np.cumsum([size, *advances])
        across = (starts[:-1] + np.array(advances) / 2 - size) / max(starts[-1] - size, 1) * 2 - 1
        drops = self.distortion * look.curve * bend * size * (across**2 - 0.5)
        sheet = Image.new("L", (int(starts[-1] + size), int(2.5 * size)))
        pen = ImageDraw.Draw(sheet)
        for letter, start, drop in zip(word, starts, drops, strict=False):
            pen.text((float(start), 1.6 * size + float(drop)), letter, fill=255, font=font, anchor="ls")
        box = sheet.getbbox()
        if box is None:
            raise DataError(f"expected the font {font.getname()} to have the letters of {word!r}, got blanks")
        return sheet.crop(box)

    def _placed(self, letters: Image.Image, look: Look, generator: np.random.Generator) -> Image.Image:
        """The word at image size, with random margins and perspective."""
        left, top = generator.uniform(2, 6), generator.uniform(2, 5)
        right, bottom = WIDTH - generator.uniform(2, 6), HEIGHT - generator.uniform(2, 5)
        tilt, slant = generator.uniform(-1, 1, 2) * (look.tilt, look.slant)
        moves = generator.uniform(-1, 1, (4, 2)) * look.corner
        # Clockwise from the top left; a tilt lowers one side, a slant pushes the upper edge against the lower one.
        leans = np.array([[slant, -tilt], [slant, tilt], [-slant, tilt], [-slant, -tilt]]) / 2
        corners = np.array([[left, top], [right, top], [right, bottom], [left, bottom]])
        corners = (corners + self.distortion * (leans + moves)).clip((1, 1), (WIDTH - 1, HEIGHT - 1))
        width, height = letters.size
        source = np.array([[0, 0], [width, 0], [width, height], [0, height]], dtype=np.float64)
        return letters.transform(
            (WIDTH, HEIGHT), Image.Transform.PERSPECTIVE, _perspective(corners, source), Image.Resampling.BICUBIC
        )

    def _background(self, look: Look, generator: np.random.Generator) -> Pixels:
        """A colour gradient with a photograph blended into it."""
        ends = _colour(look, generator, 0.1, 0.9), _colour(look, generator, 0.1, 0.9)
        reach = self.distortion * generator.uniform(0, 0.5)
        ramp = np.linspace(0, reach, WIDTH, dtype=np.float32)[None, :, None]
        plain = np.broadcast_to(ends[0] + ramp * (ends[1] - ends[0]), (HEIGHT, WIDTH, 3))
        share = generator.uniform(*look.photograph) if self.distortion else 0.0
        cut = _photograph_crop(generator)
        if look.grey:
            cut = (cut @ _LUMA)[..., None]
        return (plain + share * (cut - plain)).astype(np.float32)

    def _photographed(self, image: Pixels, look: Look, generator: np.random.Generator) -> NDArray[np.uint8]:
        """The image with blur, contrast and noise, as a camera adds them."""
        radius = self.distortion * look.blur * generator.random()
        contrast, brightness = generator.uniform(0.7, 1), generator.uniform(-0.1, 0.1)
        noise = self.distortion * look.noise * generator.random()
        if radius > 0.2:
            bytes_ = Image.fromarray((image.clip(0, 1) * 255).astype(np.uint8))
            image = np.asarray(bytes_.filter(ImageFilter.GaussianBlur(radius)), dtype=np.float32) / 255
        if self.distortion:
            image = (image - 0.5) * contrast + 0.5 + brightness
        grain = generator.standard_normal((HEIGHT, WIDTH, 1 if look.grey else 3), dtype=np.float32)
        noisy: NDArray[np.uint8] = np.rint((image + noise * grain).clip(0, 1) * 255).astype(np.uint8)
        return noisy


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"
    if not path.is_file():
        raise DataError(f"expected the font {path} of Matplotlib, found nothing; install matplotlib again")
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


@cache
def _length(font: ImageFont.FreeTypeFont, letter: str) -> float:
    return font.getlength(letter)


def _one_of(choices: Sequence[_T], generator: np.random.Generator) -> _T:
    return choices[int(generator.integers(len(choices)))]


@cache
def _photographs() -> tuple[NDArray[np.uint8], ...]:
    """All embedded photographs, scaled down."""
    found = []
    for name in PHOTOGRAPHS:
        picture = load_photograph(name)
        scale = _SCALE / min(picture.size)
        found.append(np.asarray(picture.resize((round(picture.width * scale), round(picture.height * scale)))))
    return tuple(found)


def _photograph_crop(generator: np.random.Generator) -> Pixels:
    """A random crop of a photograph (HEIGHT, WIDTH, 3), mirrored half of the time."""
    picture = _one_of(_photographs(), generator)
    top = int(generator.integers(picture.shape[0] - HEIGHT + 1))
    left = int(generator.integers(picture.shape[1] - WIDTH + 1))
    cut = picture[top : top + HEIGHT, left : left + WIDTH].astype(np.float32) / 255
    return cut[:, ::-1] if generator.random() < 0.5 else cut


def _colour(look: Look, generator: np.random.Generator, low: float, high: float) -> Pixels:
    """A random colour (3,) with a luminance between `low` and `high`."""
    tint = generator.uniform(-look.colour, look.colour, 3).astype(np.float32)
    return (np.float32(generator.uniform(low, high)) + tint - tint @ _LUMA).clip(0, 1)


def _ink(background: Pixels, look: Look, generator: np.random.Generator) -> Pixels:
    """A colour (3,) that is legible on the background: clearly lighter or darker."""
    level = float((background @ _LUMA).mean())
    gap = float(generator.uniform(0.35, 0.7))
    lighter = level < 0.35 or (level < 0.65 and generator.random() < 0.5)
    wanted = min(level + gap, 1.0) if lighter else max(level - gap, 0.0)
    return _colour(look, generator, wanted, wanted)


def _mixed(ink: Pixels, background: Pixels, share: float) -> Pixels:
    """The ink moved towards the mean colour of the background, or away from it if `share` is negative."""
    mean = background.mean((0, 1))
    mixed: Pixels = (ink + share * (mean - ink)).clip(0, 1)
    return mixed


def _painted(image: Pixels, mask: Image.Image, colour: Pixels) -> Pixels:
    """The image with `colour` painted where the mask is set."""
    cover = np.asarray(mask, dtype=np.float32)[..., None] / 255
    return image + cover * (colour - image)


def _shifted(mask: Image.Image, generator: np.random.Generator) -> Image.Image:
    right, down = int(generator.integers(-2, 3)), int(generator.integers(1, 3))
    return mask.transform(mask.size, Image.Transform.AFFINE, (1, 0, -right, 0, 1, -down))


def _perspective(target: NDArray[np.float64], source: NDArray[np.float64]) -> list[float]:
    """Pillow's 8 perspective coefficients, which map the 4 corners `target` to the 4 corners `source`."""
    rows = []
    for (x, y), (u, v) in zip(target, source, strict=True):
        rows.append([x, y, 1, 0, 0, 0, -u * x, -u * y])
        rows.append([0, 0, 0, x, y, 1, -v * x, -v * y])
    solved: list[float] = np.linalg.solve(np.array(rows), source.reshape(-1)).tolist()
    return solved
