"""What every optimiser is: `minimize(problem, on_step)`, for any loss that is a pure function of tensors.

Optimisers know nothing of attacks: `matching/problem.py` makes a `Problem` of an update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from leaktight.attacks.optimizers.compile import Backend
from leaktight.attacks.optimizers.trees import Tree
from leaktight.core.rng import Rng

OnStep: TypeAlias = Callable[[int, float, Tree], None]
"""Called with the iteration (L-BFGS: evaluation), the lowest loss so far and its variables. It changes no result."""

History: TypeAlias = tuple[tuple[int, float], ...]
"""Pairs of step and loss: the first step, then every `check_every`-th."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How long a search goes on, and how it is computed.

    iterations: at most so many in each restart.
    patience: end a restart whose loss has not fallen by 1 % in so many steps (None: never).
    stop_below: end a restart at such a loss. check_every: steps between two looks at whether to end.
    report_every: steps between two calls of `on_step`.
    backend, onednn: see `compile.make_runnable`. together: all restarts are one traced function under vmap.
    """

    iterations: int
    patience: int | None = None
    stop_below: float | None = None
    check_every: int = 100
    report_every: int = 100
    backend: Backend = "fx"
    onednn: bool | None = None
    together: bool = False


@dataclass(frozen=True, kw_only=True)
class Problem(ABC):
    """What is minimised: a loss as a pure function of tensors, and where restarts begin.

    rngs: one for each restart. Each draws from its own, so that a restart comes out the same in whatever company.
    constants: tensors that the loss needs and that never change; a traced function takes them as inputs.
    consensus: the weight that draws restarts to their common mean; 0: none.
    keeps_best: whether the best iterate is the answer, or else the last.
    """

    settings: SearchSettings
    rngs: Sequence[Rng]
    precision: torch.dtype = torch.float32
    constants: Tree = field(default_factory=dict)
    consensus: float = 0.0
    keeps_best: bool = True

    @abstractmethod
    def start(self, rng: Rng) -> Tree:
        """Tensors by name: where a restart begins."""

    @abstractmethod
    def loss(self, variables: Tree, group: Tree, constants: Tree, share: Tensor | None = None) -> Tensor:
        """The loss of one guess, a 0-d tensor.

        group: what `common` gave, or empty. constants: those of this problem. share: of the search that is done, a 0-d
        tensor; None: all of it.
        """

    def confined(self, variables: Tree) -> Tree:
        """The nearest variables that are allowed."""
        return variables

    @property
    def boxed(self) -> int:
        """How many entries of the variables, from the first on, L-BFGS with a line search keeps in [0, 1]."""
        return 0

    def noisy(self) -> Tree:
        """Variables like those that Langevin noise is added to."""
        return self.start(self.rngs[0])

    def common(self, bests: Sequence[Tree], pull: float) -> Tree:
        """What draws restarts together: made of the best variables of each, and how strongly it does."""
        return {}


@dataclass(frozen=True)
class Candidate:
    """What one restart found. steps: how many it took; iterations, or evaluations of the loss."""

    variables: Tree
    loss: float
    steps: int
    history: History = ()

    def rank(self) -> float:
        """The lower the better."""
        return self.loss if math.isfinite(self.loss) else math.inf


@dataclass(frozen=True)
class SearchResult:
    """What the restarts found, in their order, and how it was computed."""

    candidates: Sequence[Candidate]
    backend: Backend
    onednn: bool

    @property
    def best(self) -> Candidate:
        return min(self.candidates, key=Candidate.rank)


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """A way to minimise.

    abreast: whether restarts run side by side, each to its own end, and so may be one function under vmap. Otherwise
    they take turns, and a restart below `stop_below` is the last.
    smooth: whether it wants a loss with a continuous slope.
    """

    abreast: ClassVar[bool] = False
    smooth: ClassVar[bool] = False

    @property
    def steps_per_iteration(self) -> int:
        """How many evaluations of the loss an iteration takes, about."""
        return 1

    @abstractmethod
    def minimize(self, problem: Problem, on_step: OnStep | None = None) -> SearchResult:
        """Search from every start of the problem."""

    def effort(self, candidates: Sequence[Candidate]) -> dict[str, int]:
        """How much work these restarts were, by name of the unit."""
        return {"evaluations": sum(candidate.steps for candidate in candidates)}

    def first_loss(self, candidates: Sequence[Candidate]) -> float | None:
        """The loss after the first step of these restarts; None where none came so far."""
        return next((candidate.history[0][1] for candidate in candidates if candidate.history), None)


class Watch:
    """Follows one restart: keeps its history, and says when it ends."""

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self.history: list[tuple[int, float]] = []
        self.reference, self.since = math.inf, 0

    def __call__(self, step: int, loss: float) -> bool:
        """Whether to end: the loss is low enough, or has stopped falling. Only every `check_every`-th step counts."""
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
