"""Text of others (clients, files) made safe to show in a terminal, a log or a table."""

from __future__ import annotations

import unicodedata

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


def is_plain_name(name: str) -> bool:
    """Whether the name of a file has no control or formatting characters; spaces and joiners of any script are none.

    >>> is_plain_name("Screenshot 9.41\\u202fAM.png"), is_plain_name("a\\u202egnp.exe")
    (True, False)
    """
    return name.isprintable() or all(
        each.isprintable() or each in _JOINERS or unicodedata.category(each) == "Zs" for each in name
    )
