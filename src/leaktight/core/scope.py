"""What Leaktight works on today, and what errors say of all else. Imports nothing slow.

Data and outputs are told apart by shape and by the kind of their numbers, as NumPy names it: "f" floats, "i" and "u"
integers, "b" booleans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from leaktight.core.errors import InputsError
from leaktight.core.text import sides

SUPPORTED = "images of 1 or 3 channels with one class each, and words in images"
CHANNELS = (1, 3)
"""Grey and colour."""

_SUFFIXES = {
    "tables": (".csv", ".tsv", ".parquet", ".feather", ".arrow", ".xls", ".xlsx", ".sqlite", ".db"),
    "text": (".txt", ".jsonl", ".json"),
    "sound": (".wav", ".mp3", ".flac", ".ogg"),
    "video": (".mp4", ".avi", ".mov", ".mkv"),
    "medical volumes": (".nii", ".dcm", ".mha"),
}
_BOX = (4, 5)
"""The numbers of a box: its corners, perhaps with a class."""


def not_supported(what: str, remedy: str = "") -> str:
    """The words of an error for what is out of scope.

    >>> not_supported("tables")
    'not supported yet: tables; supported: images of 1 or 3 channels with one class each, and words in images'
    """
    return f"not supported yet: {what}; supported: {SUPPORTED}" + (f"; {remedy}" if remedy else "")


def outside_file(name: str) -> str | None:
    """What the end of a file's name says to be out of scope, as an error; None for any other file.

    >>> outside_file("cat.png")
    """
    ending = Path(name).suffix.lower()
    return next((not_supported(f"{what} ({ending})") for what, endings in _SUFFIXES.items() if ending in endings), None)


def outside_inputs(shape: Sequence[int], kind: str) -> str | None:
    """Why examples (N, ...) of this shape are out of scope, as an error; None if they may be images.

    >>> outside_inputs((24, 8, 8), "u"), outside_inputs((24, 3, 8, 8), "f")
    (None, None)
    """
    got = f"inputs of shape {sides(shape)}"
    if len(shape) < 3:
        what = "tokens, and tables of integers" if kind == "i" else "tables"
        return not_supported(f"{what} ({got})", "if they are flattened images, reshape to (N, H, W)")
    if len(shape) > 4:
        return not_supported(f"volumes and video ({got})")
    return None


def outside_targets(shape: Sequence[int], kind: str, count: int) -> str | None:
    """Why targets of this shape for `count` examples are out of scope, as an error; None if they may be classes.

    >>> outside_targets((24,), "i", 24), outside_targets((20,), "f", 24)
    (None, None)
    """
    if not shape or shape[0] != count:
        return None
    got = f"labels of shape {sides(shape)}"
    if len(shape) == 1 and kind == "f":
        return not_supported("regression (labels are floats)", "if they are numbers of classes, save them as integers")
    if len(shape) == 2 and shape[1] > 1:
        what = "multi-label or several numbers to predict" if kind == "f" else "multi-label"
        return not_supported(f"{what} ({got})", "if each row has a single 1, save labels.argmax(1)")
    if len(shape) > 2:
        return not_supported(f"{'detection' if shape[-1] in _BOX and len(shape) == 3 else 'segmentation'} ({got})")
    return None


def outside_outputs(shape: Sequence[int]) -> str | None:
    """Why outputs (N, ...) for a classifier are out of scope, as an error; None if they may be logits (N, C).

    >>> outside_outputs((2, 10))
    """
    got = f"outputs of shape {sides(shape)} for two examples"
    if len(shape) == 4:
        return not_supported(f"segmentation ({got})", "choose a model for this task: one logit for each class")
    if len(shape) == 3:
        return not_supported(f"sequences of outputs ({got})", "choose a model for this task: one logit for each class")
    if math.prod(shape[1:]) == 1:
        return not_supported(
            f"regression, and two classes by a single output ({got})", "give one output for each class"
        )
    return None


def checked_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Channels, height and width of images; InputsError for anything else.

    >>> checked_shape([1, 28, 28])
    (1, 28, 28)
    """
    got = ",".join(map(str, shape)) or "nothing"
    if len(shape) == 1:
        raise InputsError(f"{not_supported('tables and tokens')}; expected the shape C,H,W of an image, got {got}")
    if len(shape) == 2:
        raise InputsError(f"expected the shape C,H,W of an image, got {got}; for grey images give 1,{got}")
    if len(shape) != 3 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in shape):
        raise InputsError(f"expected the shape C,H,W of an image, three numbers from 1, got {got}; correct it")
    first, middle, last = shape
    if first not in CHANNELS and last in CHANNELS:
        raise InputsError(f"expected the shape C,H,W with channels first, got {got}; give {last},{first},{middle}")
    if first not in CHANNELS:
        raise InputsError(f"expected images of {channels_words(first)}")
    return first, middle, last


def channels_words(channels: int) -> str:
    """What is said of another number of channels than 1 or 3, after the word "expected" or "images of"."""
    return f"1 or 3 channels, got {channels}; give grey or colour images, without other channels such as alpha"
