"""Text of others (clients, files) made safe to show in a terminal, a log or a table."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Protocol

LONGEST = 300
_JOINERS = "\u200c\u200d"
"""Parts of words in Persian and Hindi, and of emoji."""


def shown(text: str) -> str:
    """Text of any length without control or formatting characters, which become "?"; its lines are kept.

    >>> shown("a\\x1b[2J\\nb")
    'a?[2J\\nb'
    """
    return text if text.isprintable() else "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


def printable(text: object, most: int = LONGEST) -> str:
    """One line of at most `most` characters without control or formatting characters, which become "?".

    >>> printable("lost\\x1b[2J connection")
    'lost?[2J connection'
    >>> printable("a\\nforged line", most=8)
    'a?for...'
    """
    raw = str(text)
    shown = "".join(letter if letter.isprintable() else "?" for letter in raw[:most])
    return shown if len(raw) <= most else f"{shown[: most - 3]}..."


def as_written(value: object) -> str:
    """A value in a sentence, as a config writes it.

    >>> as_written((3.0, 2.0)), as_written({"a": None}), as_written(True), as_written("x"), as_written(["x"])
    ('[3.0, 2.0]', '{a = nothing}', 'true', "'x'", '["x"]')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_inside(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return f"[{', '.join(map(_inside, items))}]" if items else "an empty list"
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def _inside(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else as_written(value)


def sides(shape: Iterable[int]) -> str:
    """The shape of a tensor in a sentence.

    >>> sides((3, 32, 32)), sides((10,)), sides(())
    ('3 x 32 x 32', '10', 'a single number')
    """
    return " x ".join(map(str, shape)) or "a single number"


class _Array(Protocol):
    """A tensor of PyTorch or an array of NumPy."""

    @property
    def shape(self) -> Iterable[int]: ...
    @property
    def dtype(self) -> object: ...


def described(array: _Array) -> str:
    """The shape and the type of an array in a sentence: "4 x 3 of float32"."""
    return f"{sides(array.shape)} of {str(array.dtype).removeprefix('torch.')}"


def is_plain_name(name: str) -> bool:
    """Whether the name of a file has no control or formatting characters; spaces and joiners of any script are none.

    >>> is_plain_name("Screenshot 9.41\\u202fAM.png"), is_plain_name("a\\u202egnp.exe")
    (True, False)
    """
    return name.isprintable() or all(
        each.isprintable() or each in _JOINERS or unicodedata.category(each) == "Zs" for each in name
    )
