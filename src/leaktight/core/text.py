"""Text of others (clients, files) made safe to show in a terminal, a log or a table."""

from __future__ import annotations

LONGEST = 300


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
