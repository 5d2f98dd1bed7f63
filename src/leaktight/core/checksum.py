"""A checksum in front of stored state, so that damage is noticed before anything of it is used."""

from __future__ import annotations

import hashlib

from leaktight.core.errors import CheckpointError

_MARK = b"leaktight state sha256 "


def with_checksum(content: bytes) -> bytes:
    """The content behind a line with its SHA-256."""
    return _line(content) + content


def without_checksum(stored: bytes, where: str, *, remedy: str) -> bytes:
    """The inverse of `with_checksum`; `CheckpointError` if a bit differs. where, remedy: for its message.

    Cannot: show who changed it; whoever can write the file can also write its checksum.

    >>> without_checksum(with_checksum(b"state"), "here", remedy="start a new run")
    b'state'
    """
    end = stored.find(b"\n") + 1
    content = stored[end:]
    if stored[:end] != _line(content):
        raise CheckpointError(
            f"{where} is damaged, or of an older version of Leaktight: its checksum does not fit; {remedy}"
        )
    return content


def _line(content: bytes) -> bytes:
    return _MARK + hashlib.sha256(content).hexdigest().encode() + b"\n"
