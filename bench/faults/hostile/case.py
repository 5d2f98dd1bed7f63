"""One hostile input: how it is made, and the command that is to refuse it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Maker = Callable[[Path], Sequence[str]]


@dataclass(frozen=True)
class Case:
    """A hostile input. make: writes it into an empty folder, and returns the words after `leaktight` that read it.

    names: what the refusal has to name. codes: the exit codes that are right; 0 where the input is odd but harmless.
    """

    group: str
    name: str
    make: Maker
    names: str = ""
    codes: tuple[int, ...] = (2,)

    @property
    def id(self) -> str:
        return f"{self.group}: {self.name}"
