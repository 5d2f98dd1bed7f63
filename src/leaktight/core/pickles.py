"""A look at a pickle before it is loaded: it runs nothing, and finds what would take minutes or end in a crash."""

from __future__ import annotations

import pickletools
from collections.abc import Sequence
from io import BufferedReader
from typing import IO

MOST_OPERATIONS = 1_000_000
"""The most operations of a pickle; a state dict has about forty for each tensor."""
MOST_NESTED = 1_000
"""The deepest nesting; hashing a tuple in a tuple in a tuple ... overflows the stack at some ten thousand."""
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})


def check_pickles(file: IO[bytes], most: int) -> None:
    """Raise ValueError unless the first `most` pickles of a file, or all, are short and not nested deeply."""
    operations = 0
    for _ in range(most):
        if isinstance(file, BufferedReader) and not file.peek(1):
            return
        depths = _Depths()
        for code, argument, _place in pickletools.genops(file):
            operations += 1
            if operations > MOST_OPERATIONS:
                raise ValueError(f"expected a pickle of at most {MOST_OPERATIONS} operations, got more")
            depths.do(code, argument)


class _Depths:
    """What a pickle puts on its stack, as the depth of nesting of each value; None is a mark."""

    def __init__(self) -> None:
        self.stack: list[int | None] = []
        self.memo: dict[object, int | None] = {}

    def do(self, code: pickletools.OpcodeInfo, argument: object) -> None:
        if code.name in _PUT:
            self.memo[argument] = self.stack[-1]
        elif code.name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif code.name in _GET:
            self.stack.append(self.memo.get(argument))
        else:
            depth = 1 + max(self._taken(code.stack_before), default=-1)
            if depth > MOST_NESTED:
                raise ValueError(f"expected a pickle nested at most {MOST_NESTED} deep, got deeper")
            marked = (kind is pickletools.markobject for kind in code.stack_after)
            self.stack += [None if mark else depth for mark in marked]

    def _taken(self, kinds: Sequence[pickletools.StackObject]) -> list[int]:
        """Take what an operation uses off the stack."""
        taken: list[int | None] = []
        if pickletools.markobject in kinds:
            while (top := self.stack.pop()) is not None:
                taken.append(top)
            kinds = kinds[: list(kinds).index(pickletools.markobject)]
        taken += [self.stack.pop() for _ in kinds]
        return [depth for depth in taken if depth is not None]
