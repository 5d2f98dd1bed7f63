"""The secret key of a federation as text, without heavy imports."""

from __future__ import annotations

KEY_BYTES = 32


def parse_key(text: str) -> bytes:
    """A secret key from its hexadecimal digits.

    >>> parse_key("00" * 32) == bytes(32)
    True
    """
    digits = text.lower()
    if len(digits) != 2 * KEY_BYTES or not set(digits) <= set("0123456789abcdef"):
        raise ValueError(f"expected {2 * KEY_BYTES} hexadecimal digits, got {len(text)} characters")
    return bytes.fromhex(digits)
