"""Tail matching: the images that dominate an update, found from the end of the network to its beginning."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, fx

from leaktight.attacks.exact.analytic import Gradient, gradient_of, only
from leaktight.attacks.exact.features import search
from leaktight.attacks.exact.graph import Graph
from leaktight.attacks.matching.slopes import leading_slopes
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.optimizer import Candidate, History, SearchSettings, Tree
from leaktight.attacks.tails.regression import Sketch, estimate
from leaktight.attacks.tails.tail import Tail, TailProblem, directions
from leaktight.core.errors import UsageError, require_above, require_at_least
from leaktight.core.protocols import Attack, LabelSource, Progress
from leaktight.core.rng import Rng
from leaktight.core.text import sides
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.models.surgery import has_batch_norm

_PENALTIES = (6.0, 0.6, 2.0, 20.0)  # of the regressions whose estimates are starts
_SECOND = 0.02  # the least second singular value of the last layer's gradient, relative, of which an example is sought
_FROM_VALUES = 0.3  # penalty of the regression from inner values to pixels
_SMOOTH = (1.0, 0.3, 0.1)  # weights of total variation of the images between two tails
_SMOOTH_AT_LAST = (0.3, 0.1, 0.03)
_EVALUATIONS = 4  # iterations of L-BFGS, of up to 20 evaluations, for each of these weights
_FOUND = 0.01  # the loss of a first search that has found what enters the tail
_LONGER = 3  # times as many iterations for the first tail, which is the quickest and decides
_AT_ONCE = 250  # images
_FIRST, _LATER = (0.2, 0.01), (0.1, 0.005)  # temperatures of ReLUs at the start and at the end of a search


@dataclass(frozen=True, kw_only=True)
class TailMatching(Attack):
    """Tail matching: the images that dominate an update, by the gradients of ever longer tails of the network.

    A trained network is sure of most examples of a batch, so its gradient is nearly that of the one or two that it is
    least sure of. Their slopes and features are solved from the last layer. The gradients of the last block then hang
    on what enters it alone. That is estimated by a regression over public images, whose gradients are computed with the
    slopes of the update, and then searched for by Adam, with softened ReLUs. An image with these inner values gives the
    start for the tail that is one block longer, and so on. The answer has these one or two images, no more.

    iterations: >= 1, of Adam for each tail; three times as many for the first. starts: 1 to 4, the most of the first
    search; the loss chooses. learning_rate: > 0. most: public images that are used, >= 2. pull: weight of the value
    that was found for the tail before, >= 0; small, as that value is less exact than one that also explains the
    gradients before it.
    Assumes: one local step of plain gradient descent in evaluation mode, or without batch norm; public images like the
    client's; a network that ends in a linear layer; for two images the number of examples.
    Cannot: read batch norm in training mode; find the other examples of a batch, or any where more than two dominate.
    Reference: none; Wu et al., Learning to Invert, UAI 2023, for the regression from gradients of public images.
    """

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.PUBLIC_DATA})

    iterations: int = 400
    starts: int = 4
    learning_rate: float = 0.05
    most: int = 8192
    pull: float = 0.1

    def __post_init__(self) -> None:
        require_at_least(1, iterations=self.iterations, starts=self.starts)
        require_at_least(2, most=self.most)
        require_at_least(0, pull=self.pull)
        require_above(0, learning_rate=self.learning_rate)
        if self.starts > len(_PENALTIES):
            raise UsageError(f"expected at most {len(_PENALTIES)} starts, got {self.starts}")

    @property
    def labels_from(self) -> LabelSource:
        return "inferred"

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        one = only(self, seen)
        require(one, *self.requires)
        if has_batch_norm(one.model) and one.mode != "eval":
            raise UsageError(
                "expected evaluation mode or a network without batch norm, got batch norm in training mode"
            )
        public = one.public_data
        if public is None or len(public) < 2:
            raise UsageError(f"expected at least 2 public images, got {0 if public is None else len(public)}")
        if public.inputs.shape[1:] != one.inputs.shape:
            shapes = sides(one.inputs.shape), sides(public.inputs.shape[1:])
            raise UsageError(f"expected public images of {shapes[0]}, as the client's are, got {shapes[1]}")
        gradient, graph = gradient_of(one), Graph(one)
        dominating = Dominating.of(graph, gradient, one.batch_size or 1)
        searches = _Searches(self, graph, gradient, dominating, progress)
        images = searches.images(public.inputs[: self.most].float(), rng)
        loss, first_loss = searches.ended[0].loss, searches.begun[0]  # of the first tail, which decides
        notes = {
            "assumed": list(gradient.notes),
            "share": dominating.share,
            "losses": [each.loss for each in searches.ended],
        }
        guess = Batch(images, dominating.slopes.argmin(1))
        return Reconstruction(guess, loss, notes, first_loss=first_loss, history=searches.history)


@dataclass(frozen=True)
class Dominating:
    """The examples that the gradient of the last layer is mostly of, one or two, the one with the most say first.

    slopes: the gradient by their outputs (K, classes), up to a positive factor. features: what the last layer reads of
    them (K, C). share: of the squared length of the gradient that the first one explains.
    """

    slopes: Tensor
    features: Tensor
    share: float

    @classmethod
    def of(cls, graph: Graph, gradient: Gradient, number: int) -> Dominating:
        """Of `number` examples: two if the gradient is no product of two vectors and two examples explain it better."""
        name = str(graph.head.target)
        weight, bias = (gradient.needed(f"{name}.{part}") for part in ("weight", "bias"))
        left, lengths, right = torch.linalg.svd(weight, full_matrices=False)
        along = bias @ left[:, 0]
        if not along or not lengths[0]:
            raise UsageError("expected an update that is not zero in the last layer, got one that is")
        share = float(lengths[0] ** 2 / lengths.square().sum())
        one = cls((left[:, 0] * along.sign())[None], (right[0] * lengths[0] / along)[None], share)
        ratio = float(lengths[1] / lengths[0]) if len(lengths) > 1 else 0.0
        if not gradient.scaled or number < 2 or ratio < _SECOND:
            return one
        layer = [graph.module.get_parameter(f"{name}.{part}").detach() for part in ("weight", "bias")]
        slopes, rest = leading_slopes([weight, bias], layer, 2, number)
        slopes = slopes[slopes.norm(dim=1).argsort(descending=True)]
        if rest > ratio / 2:
            return one
        return cls(slopes, torch.linalg.lstsq(slopes.T, number * weight).solution, share)


@dataclass(frozen=True)
class _Searches:
    """The searches of one attack. tried: all that are over. ended: the best one for each tail. begun: the loss where
    each began, with the ReLUs of its end."""

    attack: TailMatching
    graph: Graph
    gradient: Gradient
    dominating: Dominating
    progress: Progress | None
    tried: list[Candidate] = field(default_factory=list)
    ended: list[Candidate] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)

    @property
    def history(self) -> History:
        """Of all searches, one after another."""
        begun = [sum(each.steps for each in self.tried[:place]) for place in range(len(self.tried))]
        parts = zip(begun, self.tried, strict=True)
        return tuple((before + step, loss) for before, each in parts for step, loss in each.history)

    @cached_property
    def signal(self) -> Tensor:
        """The gradient by the features, with a largest slope of 1."""
        weight = self.graph.module.get_parameter(f"{self.graph.head.target}.weight")
        slopes = self.dominating.slopes
        return (slopes / slopes.abs().max() @ weight).float()

    def images(self, public: Tensor, rng: Rng) -> Tensor:
        """Those of the dominating examples (K, C, H, W). public: images (N, C, H, W)."""
        tails = Tail.all(self.graph, self.gradient.tensors)
        shortest = tails[0]
        entered = self._values(shortest, public)
        self.ended.append(self._first(shortest, entered, rng))
        known = {shortest.cut: self.ended[-1].variables["value"]}
        found = [estimate(entered.flatten(1), public, each.flatten(), _FROM_VALUES) for each in known[shortest.cut]]
        images = torch.stack(found).clamp(0, 1)
        for before, tail in pairwise(tails):
            images = self._pictured(known, images, _SMOOTH)
            self.ended.append(self._value(tail, self._values(tail, images), (before.cut, known[before.cut])))
            known[tail.cut] = self.ended[-1].variables["value"]
        return self._pictured(known, images, _SMOOTH_AT_LAST)

    def _first(self, tail: Tail, entered: Tensor, rng: Rng) -> Candidate:
        """The best of the searches for what enters the first tail; one that has found it is the last."""
        for first in self._starts(tail, entered, rng):
            if self._value(tail, first, None).rank() < _FOUND:
                break
        return min(self.tried, key=Candidate.rank)

    def _values(self, tail: Tail, images: Tensor) -> Tensor:
        """What enters a tail for these images."""
        module = copy.deepcopy(self.graph.pieces([tail.cut])).float()
        with torch.no_grad():
            return torch.cat([module(part)[0] for part in images.split(_AT_ONCE)])

    def _starts(self, tail: Tail, entered: Tensor, rng: Rng) -> list[Tensor]:
        """Estimates of what entered the tail, with ever other penalties."""
        sketch = Sketch(tail, self.signal, rng.child("sketch").public())
        groups = torch.stack([entered, *(entered.roll(by, 0) for by in range(1, len(self.signal)))], 1)
        rows = sketch.of_values(groups)
        sent = [self.gradient.tensors[f"{each.name}.weight"].flatten(1)[None].float() for each in sketch.plain]
        query = sketch.of(sent, self.dominating.features[None].float())[0]
        penalties = _PENALTIES[: self.attack.starts]
        return [estimate(rows, groups, query, weight).clamp_min(_lowest(tail)) for weight in penalties]

    def _value(self, tail: Tail, first: Tensor, known: tuple[fx.Node, Tensor] | None) -> Candidate:
        """A search for what enters a tail. known: a value in it that was found before."""
        module = tail.softened(tail.features, *([] if known is None else [known[0]]))
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        names = tail.names
        constants: Tree = {
            "first": first,
            "weights": {name: tensors[name].detach() for name in names},
            "others": {name: each.detach() for name, each in tensors.items() if name not in names},
            "signal": self.signal,
            "directions": {name: directions(self.gradient.tensors[name].float()) for name in names},
            "goals": [self.dominating.features.float(), *([] if known is None else [known[1]])],
        }
        hot, cold = _FIRST if known is None else _LATER
        problem = TailProblem(
            settings=SearchSettings(
                iterations=self.attack.iterations * (_LONGER if known is None else 1), onednn=False
            ),
            rngs=(Rng(0),),
            constants=constants,
            keeps_best=False,
            module=module,
            hot=hot,
            cold=cold,
            pull=self.attack.pull,
            lowest=_lowest(tail),
        )
        optimizer = Adam(learning_rate=self.attack.learning_rate, decay="cosine")
        with torch.no_grad():
            self.begun.append(float(problem.loss({"value": first}, {}, constants)))
        found = optimizer.minimize(problem).best
        if self.progress is not None:
            before = sum(each.steps for each in self.tried)
            for step, loss in ((0, self.begun[-1]), *found.history):
                self.progress(before + step, loss, None)
        self.tried.append(found)
        return found

    def _pictured(self, known: Mapping[fx.Node, Tensor], first: Tensor, smooth: Sequence[float]) -> Tensor:
        """Images with the two values that were found last, sought from others."""
        nodes = list(known)[-2:]
        pieces = copy.deepcopy(self.graph.pieces(nodes)).float()
        stages = [(weight, _EVALUATIONS) for weight in smooth]
        return search(pieces, [False] * len(nodes), [known[node] for node in nodes], first, stages).clamp(0, 1)


def _lowest(tail: Tail) -> float:
    """Of an element of what enters a tail."""
    return 0.0 if tail.graph.is_relu(tail.cut) else -math.inf
