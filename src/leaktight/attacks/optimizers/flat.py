"""Variables as one flat vector, for optimisers that know of nothing else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from leaktight.attacks.optimizers.lanes import Tree


class Layout:
    """How variables like those of `example` lie in a vector."""

    def __init__(self, example: Tree) -> None:
        leaves, self.spec = pytree.tree_flatten(example)
        self.shapes = [tensor.shape for tensor in leaves]

    def tree(self, point: Tensor) -> Tree:
        """The variables in a vector."""
        parts = torch.split(point, [shape.numel() for shape in self.shapes])
        tree: Tree = pytree.tree_unflatten(
            [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)], self.spec
        )
        return tree


def vector(tree: Tree) -> Tensor:
    """All variables one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in pytree.tree_leaves(tree)])
