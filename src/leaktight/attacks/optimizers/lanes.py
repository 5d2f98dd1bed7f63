"""Searches side by side: victims x restarts as one traced function under vmap, or each by itself.

A lane is one restart of one victim. A block is what one call of the traced function moves on: all lanes, or one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.func import vmap
from torch.utils import _pytree as pytree

Tree: TypeAlias = dict[str, Any]
"""Tensors by name, nested."""

Step: TypeAlias = Callable[..., Tree]
"""(state and noise of the lane, what its victim's restarts share, what all share, the victim's constants) -> state."""


@dataclass(frozen=True)
class Lanes:
    """Where lanes are kept. together: all in one block; a dimension of one is left out, as it would only cost time."""

    victims: int
    restarts: int
    together: bool

    def own(self, trees: Sequence[Sequence[Tree]]) -> list[Tree]:
        """The blocks of what every lane has of its own; given by victim and restart."""
        if not self.together:
            return [tree for row in trees for tree in row]
        return [_stacked([_stacked(row) for row in trees])]

    def of_victims(self, trees: Sequence[Tree]) -> list[Tree]:
        """The same for what the restarts of a victim have in common."""
        return [_stacked(trees)] if self.together else [tree for tree in trees for _ in range(self.restarts)]

    def constants(self, trees: Sequence[Tree]) -> tuple[list[Tree], Any]:
        """The same for what never changes, and over which dimension it is mapped: none where all victims agree."""
        if not self.together or self.victims == 1:
            return [tree for tree in trees for _ in range(1 if self.together else self.restarts)], None
        leaves, spec = zip(*(pytree.tree_flatten(tree) for tree in trees), strict=True)
        columns = list(zip(*leaves, strict=True))
        shared = [all(each is column[0] or torch.equal(each, column[0]) for each in column) for column in columns]
        joined = [column[0] if same else torch.stack(column) for column, same in zip(columns, shared, strict=True)]
        dims = [None if same else 0 for same in shared]
        return [pytree.tree_unflatten(joined, spec[0])], pytree.tree_unflatten(dims, spec[0])

    def over(self, step: Step, dims: Any) -> Step:
        """The step of a block. dims: as `constants` gave them."""
        if self.together and self.restarts > 1:
            step = vmap(step, in_dims=(0, 0, None, None, None), randomness="different")
        if self.together and self.victims > 1:
            step = vmap(step, in_dims=(0, 0, 0, None, dims), randomness="different")
        return step

    @property
    def mapped(self) -> bool:
        """Whether vmap is used."""
        return self.together and self.victims * self.restarts > 1

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return 1 if self.together else self.victims * self.restarts

    @property
    def places(self) -> list[tuple[int, int]]:
        """All lanes, as pairs of victim and restart."""
        return [(victim, restart) for victim in range(self.victims) for restart in range(self.restarts)]

    def block(self, victim: int, restart: int) -> int:
        """The block that a lane is in."""
        return 0 if self.together else victim * self.restarts + restart

    def lane(self, blocks: Sequence[Tree], victim: int, restart: int) -> Tree:
        """What a lane has of its own."""
        tree = blocks[self.block(victim, restart)]
        places = [victim] * (self.victims > 1) + [restart] * (self.restarts > 1)
        if not self.together or not places:
            return tree
        picked: Tree = pytree.tree_map(lambda leaf: leaf[tuple(places)], tree)
        return picked


def _stacked(trees: Sequence[Tree]) -> Tree:
    if len(trees) == 1:
        return trees[0]
    stacked: Tree = pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)
    return stacked
