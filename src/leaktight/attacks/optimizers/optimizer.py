"""The interface of optimisers: `minimize(problem, on_step)` for any loss that is a pure function of tensors.

Optimisers know nothing of attacks: `matching/problem.py` turns an observed update into a `Problem`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from leaktight.attacks.optimizers.compile import Backend
from leaktight.core.devices import CPU
from leaktight.core.rng import Rng

Tree: TypeAlias = dict[str, Any]
"""Tensors by name, nested: what a search moves."""

OnStep: TypeAlias = Callable[[int, float, Tree], None]
"""Called with the number of the iteration (L-BFGS: evaluation), the lowest loss so far and its variables."""

History: TypeAlias = tuple[tuple[int, float], ...]
"""Pairs of step and loss, for the first step and every `check_every`-th."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """When a search ends, and how it is computed.

    iterations: the most of each restart. patience: end a restart whose loss has not fallen by 1 % in this many steps;
    None: never. stop_below: end a restart whose loss is below this. check_every: steps between two checks of these.
    report_every: steps between two calls of `on_step`.
    backend, onednn: see `compile.make_runnable`. together: run all restarts as one traced function under vmap.
    """

    iterations: int
    patience: int | None = None
    stop_below: float | None = None
    check_every: int = 100
    report_every: int = 100
    backend: Backend = "fx"
    onednn: bool | None = None
    together: bool = False


_OTHERWISE = ("settings", "rngs", "constants")
"""Fields of a problem of which nothing is computed in its loss; constants are arguments."""


@dataclass(frozen=True, kw_only=True)
class Problem(ABC):
    """A loss to minimise, as a pure function of tensors, and the starting points of the restarts.

    rngs: one for each restart, so that its result does not depend on how many others run.
    precision, device: of the variables.
    constants: fixed tensors of the loss; a traced function takes them as inputs.
    consensus: weight of the term that pulls restarts towards their mean; 0 for none.
    keeps_best: return the iterate with the lowest loss, not the last.
    """

    settings: SearchSettings
    rngs: Sequence[Rng]
    precision: torch.dtype = torch.float32
    device: torch.device = CPU
    constants: Tree = field(default_factory=dict)
    consensus: float = 0.0
    keeps_best: bool = True

    @abstractmethod
    def start(self, rng: Rng) -> Tree:
        """The variables at the start of a restart."""

    @abstractmethod
    def loss(self, variables: Tree, group: Tree, constants: Tree, share: Tensor | None = None) -> Tensor:
        """The loss of one point, a 0-d tensor.

        group: what `common` returned, or empty. constants: those of this problem. share: the fraction of the search
        that is done, a 0-d tensor; None for all of it.
        """

    def form(self) -> object:
        """All that `loss` and `confined` compute with beside their arguments; problems with equal ones share graphs."""
        return type(self), {name: value for name, value in vars(self).items() if name not in _OTHERWISE}

    def confined(self, variables: Tree) -> Tree:
        """The nearest allowed variables."""
        return variables

    @property
    def boxed(self) -> int:
        """How many of the first entries of the variables L-BFGS with a line search keeps in [0, 1]."""
        return 0

    def noisy(self) -> Tree:
        """Variables with the names and shapes of those that get Langevin noise."""
        return self.start(self.rngs[0])

    def common(self, bests: Sequence[Tree], pull: float) -> Tree:
        """The constants of the consensus term. bests: the best variables of each restart. pull: the term's weight."""
        return {}


@dataclass(frozen=True)
class Candidate:
    """The result of one restart. steps: how many iterations it took, or evaluations of the loss."""

    variables: Tree
    loss: float
    steps: int
    history: History = ()

    def rank(self) -> float:
        """The loss, infinite if it is not a number."""
        return self.loss if math.isfinite(self.loss) else math.inf


@dataclass(frozen=True)
class SearchResult:
    """The results of all restarts in order, and how they were computed."""

    candidates: Sequence[Candidate]
    backend: Backend
    onednn: bool

    @property
    def best(self) -> Candidate:
        return min(self.candidates, key=Candidate.rank)


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """An algorithm that minimises a loss.

    abreast: whether restarts run side by side, each to its own end, so that vmap can make one function of them.
    Otherwise they run one after another, and the first that gets below `stop_below` is the last.
    smooth: whether it needs a loss with a continuous gradient.
    """

    abreast: ClassVar[bool] = False
    smooth: ClassVar[bool] = False

    @property
    def steps_per_iteration(self) -> int:
        """Roughly how many evaluations of the loss an iteration takes."""
        return 1

    @abstractmethod
    def minimize(self, problem: Problem, on_step: OnStep | None = None) -> SearchResult:
        """Run every restart of the problem."""

    def effort(self, candidates: Sequence[Candidate]) -> dict[str, int]:
        """The work of these restarts, by name of the unit."""
        return {"evaluations": sum(candidate.steps for candidate in candidates)}

    def first_loss(self, candidates: Sequence[Candidate]) -> float | None:
        """The loss after the first step of these restarts; None if there was none."""
        return next((candidate.history[0][1] for candidate in candidates if candidate.history), None)


class Monitor:
    """Keeps the history of one restart and decides when it ends."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self.history: list[tuple[int, float]] = []
        self.reference, self.since = math.inf, 0

    def __call__(self, step: int, loss: float) -> bool:
        """Whether to end: the loss is low enough or has stopped falling. Checked at every `check_every`-th step."""
        due = step % self.settings.check_every == 0
        if due or not self.history:
            self.history.append((step, loss))
        if not due:
            return False
        if self.settings.stop_below is not None and loss < self.settings.stop_below:
            return True
        if loss < 0.99 * self.reference:
            self.reference, self.since = loss, step
        return self.settings.patience is not None and step - self.since >= self.settings.patience


class Layout:
    """How variables with the names and shapes of `example` are laid out in a flat vector."""

    def __init__(self, example: Tree) -> None:
        leaves, self.spec = pytree.tree_flatten(example)
        self.shapes = [tensor.shape for tensor in leaves]

    def tree(self, point: Tensor) -> Tree:
        """The variables in a vector."""
        parts = torch.split(point, [shape.numel() for shape in self.shapes])
        leaves = [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        tree: Tree = pytree.tree_unflatten(leaves, self.spec)
        return tree


def vector(tree: Tree) -> Tensor:
    """All variables as one flat vector."""
    return torch.cat([tensor.reshape(-1) for tensor in pytree.tree_leaves(tree)])


def channels_last(tree: Tree) -> Tree:
    """The tree with the weights of convolutions in channels-last layout, which made a step 3 to 15 % faster.

    Not for use under vmap: PyTorch 2.13 then gives wrong gradients of weights, without an error.
    """
    laid_out: Tree = pytree.tree_map(
        lambda each: each.contiguous(memory_format=torch.channels_last) if each.ndim == 4 else each, tree
    )
    return laid_out
