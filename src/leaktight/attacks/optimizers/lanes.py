"""Restarts side by side: all of them as one traced function under vmap, or each by itself.

A lane is one restart. A block is what one call of the traced function moves on: all lanes, or one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.func import vmap
from torch.utils import _pytree as pytree

from leaktight.attacks.optimizers.trees import Tree, stacked

LaneStep: TypeAlias = Callable[..., Tree]
"""(state of the lane, its noise, what lanes share, rates of this step, constants) -> state."""


@dataclass(frozen=True)
class Lanes:
    """Where lanes are kept. number: of lanes. together: all in one block."""

    number: int
    together: bool

    @property
    def mapped(self) -> bool:
        """Whether vmap is used; for a single lane it would only cost time."""
        return self.together and self.number > 1

    def blocks(self, trees: Sequence[Tree]) -> list[Tree]:
        """The blocks of what every lane has of its own, given lane by lane."""
        return [stacked(trees)] if self.together else list(trees)

    def over(self, step: LaneStep) -> LaneStep:
        """The step of a block, made of that of a lane."""
        return vmap(step, in_dims=(0, 0, None, None, None), randomness="different") if self.mapped else step

    def block(self, lane: int) -> int:
        """The block that a lane is in."""
        return 0 if self.together else lane

    def lane(self, blocks: Sequence[Tree], lane: int) -> Tree:
        """What a lane has of its own."""
        tree = blocks[self.block(lane)]
        if not self.mapped:
            return tree
        picked: Tree = pytree.tree_map(lambda leaf: leaf[lane], tree)
        return picked
