"""Rules in place of the mean that a minority of hostile clients cannot move at will. The server reads every update."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from leaktight.core.errors import RoundFailedError, require_above, require_at_least
from leaktight.core.protocols import Aggregator, Conversation
from leaktight.core.rng import Rng
from leaktight.core.tensors import squared_norm
from leaktight.core.types import Broadcast, Params, State, Update, UpdateKind
from leaktight.fl.aggregators import FedAvg, Linear

Changes: TypeAlias = Mapping[str, Sequence[Tensor]]
"""Of each tensor the changes that the clients sent, in the order of their names; zeros from one that left it out."""

_PIECE = 2**14  # values of each client that are worked on at once, so that updates are not copied as a whole
_SLACK = 1e-9  # for products such as 0.29 * 100, which is less than 29


@dataclass(frozen=True, kw_only=True)
class Robust(Aggregator, ABC):
    """A robust rule, then the step of another aggregator.

    of: the aggregator whose step follows (a learning rate, momentum, Adam) and whose kind of update clients send.

    Every client counts the same: it states its own number of examples, so no rule weighs by it, and it is not sent.
    Batch statistics and counters go through the rule as parameters do. A tensor that a client leaves out counts as no
    change. Boolean buffers keep the server's values. A single update, of a client that is asked alone as in an audit,
    is taken as it is; a federation with too few clients is refused before its first round.
    """

    of: Linear = FedAvg()

    def __post_init__(self) -> None:
        if not isinstance(self.of, Linear) or self.of.questions:
            raise ValueError(
                "expected of to be a plain step (fedavg, fedsgd, server_momentum, server_adam), got "
                f"{type(self.of).__name__}: {type(self).__name__} reads every update and sets its own weights"
            )

    @property
    def why_plain(self) -> str:
        """Why it cannot work on encrypted updates."""
        return f"{type(self).__name__} compares single updates, and the server cannot read encrypted ones"

    @abstractmethod
    def combined(self, changes: Changes, broadcast: Broadcast) -> dict[str, Tensor]:
        """The change of every tensor, by the rule."""

    @property
    def update_kind(self) -> UpdateKind:
        return self.of.update_kind

    def loss_scale(self, num_examples: int, all_examples: Sequence[int]) -> float:
        return self.of.loss_scale(num_examples, all_examples)

    def start(self, params: Params) -> State:
        return self.of.start(params)

    def aggregate(
        self, updates: Mapping[str, Update], state: State, *, broadcast: Broadcast, rng: Rng
    ) -> Conversation[tuple[Params, State]]:
        yield from ()
        reason = self.why_too_few(len(updates)) if len(updates) > 1 else None
        if reason is not None:
            raise RoundFailedError(reason)
        combined = self.combined(changes_by_name(updates, broadcast), broadcast)
        change, state = self.of.step({name: combined[name] for name in combined if name in broadcast.params}, state)
        statistics = {name: combined[name].to(each) for name, each in broadcast.buffers.items() if name in combined}
        return {**change, **statistics}, state

    def combine_buffers(self, updates: Mapping[str, Update]) -> Params:
        return {}  # all are in the change that `aggregate` returns


@dataclass(frozen=True, kw_only=True)
class Trimming(Robust):
    """The mean of each value over the clients, without the largest and the smallest."""

    @abstractmethod
    def cut(self, clients: int) -> int:
        """How many of the largest values, and of the smallest, are left out."""

    def combined(self, changes: Changes, broadcast: Broadcast) -> dict[str, Tensor]:
        return {name: _trimmed(tensors, self.cut(len(tensors))) for name, tensors in changes.items()}


@dataclass(frozen=True, kw_only=True)
class Median(Trimming):
    """The median of each value over the clients; fewer than half of them cannot move it beyond the others' values.

    of: the aggregator whose step follows.

    Reference: Yin et al. 2018, definition 1.
    Assumes: more than half of a round's clients are honest. At least 3 clients in a round.
    Cannot: see changes that stay among the honest values ("a little is enough", Baruch et al. 2019). Where fewer than
    half of the clients move a value, as with skewed labels or after pruning, it does not move.
    """

    def cut(self, clients: int) -> int:
        return (clients - 1) // 2

    def why_too_few(self, clients: int) -> str | None:
        if clients >= 3:
            return None
        return f"Median expected at least 3 clients in a round, got {clients}: the median of 2 is their mean"


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Trimming):
    """The mean of each value over the clients, without a share of the largest and the same share of the smallest.

    trim: that share, in (0, 1/2); floor(trim n) of n values are left out at each end.
    of: the aggregator whose step follows.

    Reference: Yin et al. 2018, definition 2.
    Assumes: at most floor(trim n) of a round's clients are hostile.
    Cannot: see changes that stay among the honest values (Baruch et al. 2019).
    """

    trim: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.trim < 0.5:
            raise ValueError(f"expected trim in (0, 1/2), got {self.trim}; for the median choose the kind median")

    def cut(self, clients: int) -> int:
        return math.floor(self.trim * clients + _SLACK)

    def why_too_few(self, clients: int) -> str | None:
        if self.cut(clients) >= 1:
            return None
        needed = math.ceil(1 / self.trim - _SLACK)
        return (
            f"TrimmedMean with trim = {self.trim:g} expected at least {needed} clients in a round, got {clients}: it "
            "would leave none out; raise trim, or the number of clients"
        )


@dataclass(frozen=True, kw_only=True)
class Krum(Robust):
    """Takes the update that is nearest to its neighbours, or the mean of several such (Krum, multi-Krum).

    hostile: f, the largest number of hostile clients in a round, >= 1. An update's score is the sum of its squared
    distances to the n - f - 2 nearest others; n >= 2 f + 3.
    keep: m, the number of updates with the lowest scores that are averaged, at most n - f. 1 is Krum, n - f multi-Krum.
    of: the aggregator whose step follows.

    Distances are over parameters and batch statistics together, without counters.
    Reference: Blanchard et al. 2017; multi-Krum with m = n - f, as in its experiments.
    Assumes: at most f of a round's clients are hostile.
    Cannot: see updates that are near the honest ones (Baruch et al. 2019). With keep = 1 a round learns from one client
    only, which costs accuracy where clients hold different classes.
    """

    hostile: int = 1
    keep: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, hostile=self.hostile, keep=self.keep)

    def why_too_few(self, clients: int) -> str | None:
        if clients < 2 * self.hostile + 3:
            return (
                f"Krum with hostile = {self.hostile} expected at least 2 * {self.hostile} + 3 = {2 * self.hostile + 3} "
                f"clients in a round, got {clients}; lower hostile, or raise the number of clients"
            )
        if self.keep > clients - self.hostile:
            return (
                f"Krum expected keep <= clients in a round - hostile = {clients - self.hostile}, got {self.keep}: it "
                "would average hostile updates too; lower keep"
            )
        return None

    def combined(self, changes: Changes, broadcast: Broadcast) -> dict[str, Tensor]:
        chosen = self.chosen([tensors for tensors in changes.values() if tensors[0].is_floating_point()])
        return {name: _trimmed([tensors[place] for place in chosen], 0) for name, tensors in changes.items()}

    def chosen(self, changes: Sequence[Sequence[Tensor]]) -> list[int]:
        """The places of the clients with the lowest scores; of equal scores the first."""
        clients = len(changes[0]) if changes else 1
        if clients == 1:
            return [0]
        distances = np.zeros((clients, clients))
        for piece in (piece for tensors in changes for piece in _pieces(tensors)):
            distances += _squared_distances(piece)
        nearest = np.sort(distances, axis=1)[:, 1 : clients - self.hostile - 1]  # the first is that to itself
        best = np.argsort(nearest.sum(axis=1), kind="stable")[: self.keep]
        return sorted(int(place) for place in best)


@dataclass(frozen=True, kw_only=True)
class NormBound(Robust):
    """The mean of the updates, each scaled down to a norm of at most a bound.

    bound: > 0; None: the median of the norms of the round.
    of: the aggregator whose step follows.

    Batch statistics are scaled by themselves, to the median of their norms in either case, as their size has nothing to
    do with that of parameters; of counters it takes the median.
    Reference: Sun et al. 2019, "norm thresholding". Differs from the paper: equal weights; the median as a bound.
    Assumes: with bound = None, more than half of a round's clients are honest and there are at least 3.
    Cannot: stop hostile clients, only limit each to bound / n of the change; a steady push in one direction goes on.
    """

    bound: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_above(0, bound=self.bound)

    @property
    def why_plain(self) -> str:
        return (
            "NormBound has to measure single updates, and the server cannot read encrypted ones; clients could clip "
            'their own (defense = {kind = "client_dp", noise_multiplier = 0}), which binds honest clients only'
        )

    def why_too_few(self, clients: int) -> str | None:
        if clients >= 3 or self.bound is not None:
            return None
        return (
            f"NormBound without a bound expected at least 3 clients in a round, got {clients}: the median of 2 norms "
            "is their mean; set bound"
        )

    def combined(self, changes: Changes, broadcast: Broadcast) -> dict[str, Tensor]:
        counters = {name for name, tensors in changes.items() if not tensors[0].is_floating_point()}
        params = {name: changes[name] for name in changes if name in broadcast.params}
        statistics = {name: changes[name] for name in changes if name not in params and name not in counters}
        middle = {name: _trimmed(changes[name], (len(changes[name]) - 1) // 2) for name in counters}
        return {**_bounded(params, self.bound), **_bounded(statistics, None), **middle}


def changes_by_name(updates: Mapping[str, Update], broadcast: Broadcast) -> dict[str, list[Tensor]]:
    """The changes of parameters and buffers that clients sent; see `Changes`."""
    senders = [updates[client] for client in sorted(updates)]
    changes = {}
    for name, known in {**broadcast.params, **broadcast.buffers}.items():
        if known.dtype == torch.bool:
            continue
        sent = [_change(name, update, broadcast) for update in senders]
        if any(tensor is not None for tensor in sent):
            none = torch.zeros((), dtype=_wide(known).dtype, device=known.device).expand(known.shape)
            changes[name] = [none if tensor is None else tensor for tensor in sent]
    return changes


def _change(name: str, update: Update, broadcast: Broadcast) -> Tensor | None:
    if name in broadcast.params:
        return update.tensors.get(name)
    tensor = (update.buffers or {}).get(name)
    return None if tensor is None else _wide(tensor) - _wide(broadcast.buffers[name])


def _wide(tensor: Tensor) -> Tensor:
    """Counters as signed numbers: a difference of unsigned ones cannot be negative."""
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.to(torch.int64)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The values of all clients, (clients, at most _PIECE), piece by piece."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, len(flat[0]), _PIECE):
        yield torch.stack([values[start : start + _PIECE] for values in flat])


def _by_piece(tensors: Sequence[Tensor], rule: Callable[[Tensor], Tensor]) -> Tensor:
    """One tensor of the clients', by a rule that makes (values,) of (clients, values); integers are rounded."""
    like = tensors[0]
    result = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    for place, piece in enumerate(_pieces(tensors)):
        values = rule(piece)
        kept = values if like.is_floating_point() else values.round()
        result[place * _PIECE : (place + 1) * _PIECE] = kept.to(like.dtype)
    return result.view(like.shape)


def _trimmed(tensors: Sequence[Tensor], cut: int) -> Tensor:
    """The mean of each value without the `cut` largest and the `cut` smallest."""

    def rule(piece: Tensor) -> Tensor:
        middle = _sorted(piece)[cut : len(piece) - cut] if cut else piece
        return middle.to(torch.float64).mean(0)

    return _by_piece(tensors, rule)


def _sorted(piece: Tensor) -> Tensor:
    """Every column in order. NumPy sorts three times as fast as PyTorch, but not half precision."""
    values = piece.float() if piece.dtype in (torch.float16, torch.bfloat16) else piece
    return torch.from_numpy(np.sort(values.cpu().numpy(), axis=0)).to(piece.device)


def _squared_distances(piece: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Between the rows, (clients, clients)."""
    from scipy.spatial.distance import pdist, squareform  # slow to import

    return np.asarray(squareform(pdist(piece.to("cpu", torch.float64).numpy(), "sqeuclidean")))


def _bounded(changes: Changes, bound: float | None) -> dict[str, Tensor]:
    """The mean of the changes, each client's scaled down to the bound; None: to the median of the norms."""
    if not changes:
        return {}
    norms = [math.sqrt(float(squared_norm(each))) for each in zip(*changes.values(), strict=True)]
    most = statistics.median(norms) if bound is None else bound
    factors = torch.tensor([min(1.0, most / norm) if norm else 1.0 for norm in norms], dtype=torch.float64)[:, None]
    return {name: _by_piece(tensors, lambda piece: (factors * piece).mean(0)) for name, tensors in changes.items()}
