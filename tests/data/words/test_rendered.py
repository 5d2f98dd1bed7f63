from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.seeds import replayed
from torch import Tensor

from leaktight.core.errors import DataError
from leaktight.core.inputs import Images
from leaktight.core.tasks import WordRecognition
from leaktight.data.dataset import Dataset
from leaktight.data.joined import Joined
from leaktight.data.partition import BySource
from leaktight.data.words.collections import Iiit5k
from leaktight.data.words.drawing import HEIGHT, STYLES, WIDTH, Renderer, _font, _perspective
from leaktight.data.words.images import ALPHABET, decode_words
from leaktight.data.words.rendered import RenderedWords, is_test_word, made_number, made_word

NOWHERE = Path("/nowhere/at/all")


@pytest.fixture(scope="module")
def data() -> Dataset:
    return RenderedWords(examples=200).load(NOWHERE)


def of_style(data: Dataset, place: int) -> Tensor:
    assert data.groups is not None
    return data.train.inputs[data.groups == place].double() / 255


def colourfulness(images: Tensor) -> float:
    """How far the channels are apart, on average."""
    return float((images.amax(1) - images.amin(1)).mean())


def test_it_is_what_the_other_sets_of_words_are(data: Dataset) -> None:
    assert (len(data.train), len(data.test)) == (320, 80)
    assert data.inputs == Images(3, 32, 100)
    assert data.train.inputs.dtype == torch.uint8
    assert data.class_names == tuple(ALPHABET)
    assert data.task == WordRecognition(blank=36)
    assert data.train.targets.shape == (320, 6)
    lengths = {len(word) for word in decode_words(data.train.targets)}
    assert lengths == {3, 4, 5, 6}
    inputs = data.train.batch().inputs
    assert 0 <= float(inputs.min()) < 0.1 < 0.9 < float(inputs.max()) <= 1


def test_test_words_are_unseen_in_either_style(data: Dataset) -> None:
    train, test = (decode_words(part.targets) for part in (data.train, data.test))
    assert not set(train) & set(test)
    assert all(is_test_word(word, 0.2, 0) for word in test)
    assert not any(is_test_word(word, 0.2, 0) for word in train)
    assert len(set(test)) > 60


def test_which_words_are_for_testing_is_the_choice_of_the_split_seed_alone() -> None:
    other = RenderedWords(examples=100, draw_seed=5, longest=4, styles=("synthtext",)).load(NOWHERE)
    assert all(is_test_word(word, 0.2, 0) for word in decode_words(other.test.targets))
    again = RenderedWords(examples=100, split_seed=1).load(NOWHERE)
    assert not all(is_test_word(word, 0.2, 0) for word in decode_words(again.test.targets))


def test_seeds_and_sizes(data: Dataset) -> None:
    smaller = RenderedWords(examples=20).load(NOWHERE)
    for place in (0, 1):
        # 16 of 20 and 160 of 200 are for training; the few are the first of the many.
        assert torch.equal(smaller.train.inputs[16 * place : 16 * place + 16], data.train.inputs[160 * place :][:16])
    other = RenderedWords(examples=20, draw_seed=1).load(NOWHERE)
    assert decode_words(other.train.targets) != decode_words(smaller.train.targets)


def test_each_style_is_a_client(data: Dataset) -> None:
    clients = BySource(validation=0.25).split(data, rng=replayed(0)).clients
    assert list(clients) == ["client-000-synth90k-like", "client-001-synthtext-like"]
    assert [(len(holding.train), len(holding.validation)) for holding in clients.values()] == [(120, 40)] * 2
    alone = RenderedWords(examples=20, styles=("synthtext",)).load(NOWHERE)
    assert alone.group_names == ("synthtext-like",)
    assert torch.equal(alone.train.inputs, RenderedWords(examples=20).load(NOWHERE).train.inputs[16:])


def test_the_styles_differ_as_their_models_do(data: Dataset) -> None:
    grey, colour = of_style(data, 0), of_style(data, 1)
    assert colourfulness(colour) > 2 * colourfulness(grey)
    assert data.groups is not None
    words = decode_words(data.train.targets)
    digits = Counter(place for word, place in zip(words, data.groups.tolist(), strict=True) if word.isdigit())
    assert digits[0] == 0
    assert 5 < digits[1] < 40


def test_pictures_differ_within_a_style() -> None:
    renderer = Renderer("synth90k")
    drawn = [renderer("same", replayed(0).child(index).public_numpy()) for index in range(8)]
    assert len({picture.tobytes() for picture in drawn}) == 8
    assert np.array_equal(drawn[0], renderer("same", replayed(0).child(0).public_numpy()))
    assert drawn[0].shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("distortion", [0.0, 1.0, 2.0])
def test_a_word_can_be_told_from_another_by_its_pixels(style: str, distortion: float) -> None:
    """The same draws with another word change the image, and much of it: the word is there and not faint."""
    renderer = Renderer(style, distortion)
    for index in range(10):
        one, other = (
            renderer(word, replayed(3).child(index).public_numpy()).astype(float) for word in ("month", "axial")
        )
        assert np.abs(one - other).max() > 40
        assert (np.abs(one - other).max(2) > 20).mean() > 0.08


def test_without_distortion_the_background_is_one_colour() -> None:
    for index in range(5):
        picture = Renderer("synthtext", 0.0)("ill", replayed(4).child(index).public_numpy())
        assert len(np.unique(picture[:, 0].reshape(-1, 3), axis=0)) == 1
        assert np.abs(picture.astype(float) - picture[0, 0]).max() > 50


@pytest.mark.parametrize("name", sorted({font for look in STYLES.values() for font in look.fonts}))
def test_every_font_has_all_letters_and_they_differ(name: str) -> None:
    font = _font(name, 34)
    letters = ALPHABET + ALPHABET[10:].upper()
    shapes = {letter: font.getmask(letter) for letter in letters}
    assert all(shape.getbbox() for shape in shapes.values())
    missing = bytes(font.getmask("\u0378"))  # no character: the font's sign for what it lacks
    drawn = {letter: (shape.size, bytes(shape)) for letter, shape in shapes.items()}
    assert missing not in [content for _, content in drawn.values()]
    # A capital I and a small l may look alike; small letters and digits among themselves do not.
    assert len({drawn[letter] for letter in ALPHABET}) == len(ALPHABET)


def test_perspective_takes_corners_to_corners() -> None:
    target = np.array([[3.0, 2.0], [95.0, 6.0], [90.0, 30.0], [5.0, 27.0]])
    source = np.array([[0.0, 0.0], [60.0, 0.0], [60.0, 20.0], [0.0, 20.0]])
    a, b, c, d, e, f, g, h = _perspective(target, source)
    for (x, y), (u, v) in zip(target, source, strict=True):
        below = g * x + h * y + 1
        assert ((a * x + b * y + c) / below, (d * x + e * y + f) / below) == pytest.approx((u, v))
    sheet = Image.new("L", (60, 20), 255)
    seen = np.asarray(sheet.transform((100, 32), Image.Transform.PERSPECTIVE, _perspective(target, source)))
    assert seen[15, 50] == 255
    assert seen[0].max() == 0


def test_made_words_are_pronounceable_and_use_every_letter() -> None:
    generator = replayed(0).public_numpy()
    words = [made_word(6, generator) for _ in range(2000)]
    assert all(len(word) == 6 and word.isalpha() and set(word) & set("aeiouy") for word in words)
    counts = Counter("".join(words))
    assert set(counts) == set(ALPHABET[10:])
    assert min(counts.values()) > 20
    assert len(set(words)) > 1900
    assert {len(made_number(4, generator)) for _ in range(20)} == {4}


def test_a_share_without_words_is_an_error() -> None:
    with pytest.raises(DataError, match="expected test words of 1 to 1 letters, found none"):
        RenderedWords(examples=2, shortest=1, longest=1, test_share=1e-9).load(NOWHERE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"examples": 1}, "expected examples >= 2"),
        ({"shortest": 0}, "expected shortest >= 1"),
        ({"shortest": 7}, "shortest 7, longest 6"),
        ({"longest": 13}, "longest 13"),
        ({"distortion": 3.0}, "expected distortion in"),
        ({"styles": ()}, "expected different styles"),
        ({"styles": ("synth90k", "synth90k")}, "expected different styles"),
        ({"styles": ("comic",)}, "out of synth90k, synthtext"),
        ({"test_share": 0.0}, "expected test_share"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RenderedWords(**settings)  # type: ignore[arg-type]


def test_rendered_and_real_words_are_joined_as_one_set(real_data: Path) -> None:
    joined = Joined(parts=(RenderedWords(examples=20), Iiit5k())).load(real_data)
    assert joined.inputs == Images(3, 32, 100)
    assert joined.group_names == ("rendered_words", "iiit5k")
    assert joined.train.targets.shape == (32 + 320, 24)
