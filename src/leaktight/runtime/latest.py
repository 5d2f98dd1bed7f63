"""A memory of one value."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """Keeps the value of the key that was asked for last. The old one is dropped before a new one is made."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of this key, made now unless it is the kept one."""
        if key not in self._kept:
            self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]
