"""FedBoosting: clients validate each other's models, and weights depend on the validation losses.

With a fusion, clients validate mixtures of updates, so that they do not see each other's models.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from leaktight.core.errors import (
    RefusedError,
    RoundFailedError,
    UnusableError,
    UsageError,
    require_above,
    require_at_least,
)
from leaktight.core.protocols import Asked, Conversation, Member, Question
from leaktight.core.rng import Rng
from leaktight.core.secret import released
from leaktight.core.tensors import add, squared_norm, weighted_mean
from leaktight.core.types import Broadcast, Params, State, Update
from leaktight.crypto.cipher import integer_weights
from leaktight.fl.aggregators import Combined, Linear

TRAINING_LOSS = "training_loss"
_LEAST_LOSS = 1e-12
LARGEST_LOSS = 1e30
"""Of a model, also of one whose loss is not finite; sums and products of such losses are."""


@dataclass(frozen=True, kw_only=True)
class FedBoosting(Linear):
    """Weights clients by their training loss and by the loss of their models on the other clients' validation data.

    variant: "paper": softmax(softmax(T) * sum of V), with T the training losses and V the validation losses of a model
    at all clients. As the thesis prints it, a larger loss gives a larger weight. "code", as published:
    proportional to 1 / (mean V * T), so that a smaller loss does.
    scale: weights are rounded to integers with this sum, with and without encryption, >= 10.
    fusion: how updates are mixed before other clients see them; None: not at all.

    Reference: Ren, thesis 2023, chapter 4, Eqn. (4.1) to (4.3).
    Assumes: clients report true losses. False losses change the weights.
    Differs from the paper: integer weights sum to the scale (in the published code they may not); batch statistics are
    weighted like parameters.
    """

    variant: Literal["paper", "code"] = "paper"
    scale: int = 1000
    fusion: Fusion | None = None

    def __post_init__(self) -> None:
        require_at_least(10, scale=self.scale)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({TRAINING_LOSS})

    @property
    def questions(self) -> Mapping[str, Asked]:
        return {
            "cross_validate": Asked(
                "how well the others' models do on the client's validation examples, by which they are weighed",
                ("losses",),
                each_round=True,
                exact=True,
            )
        }

    def on_update(
        self, update: Update, state: State, member: Member, *, broadcast: Broadcast, rng: Rng
    ) -> tuple[Update, State]:
        """Clip the update if the fusion adds noise, and report the training loss of the resulting model."""
        if self.fusion is not None and self.fusion.clip_norm is not None:
            if float_changes(update.buffers or {}, broadcast.buffers):
                raise UsageError(
                    "noise on fusions is calibrated for parameters, and this model also sends batch statistics; "
                    "choose a model without batch normalisation, or another fusion"
                )
            norm = float(squared_norm(update.tensors.values())) ** 0.5
            factor = min(1.0, self.fusion.clip_norm / max(norm, _LEAST_LOSS))
            update = replace(update, tensors={name: factor * tensor for name, tensor in update.tensors.items()})
        loss = member.mean_loss(*changed(broadcast, changes_of(update, broadcast), member), "train")
        return replace(update, metrics={**update.metrics, TRAINING_LOSS: loss}), state

    def aggregate(
        self, updates: Mapping[str, Update], state: State, *, broadcast: Broadcast, rng: Rng
    ) -> Conversation[tuple[Params, State]]:
        plain = PlainCombined({client: changes_of(update, broadcast) for client, update in updates.items()})
        weights = yield from self.weigh(updates, plain, broadcast=broadcast, rng=rng)
        return weighted_mean(plain.changes, weights), state

    def weigh(
        self, updates: Mapping[str, Update], combined: Combined, *, broadcast: Broadcast, rng: Rng
    ) -> Conversation[dict[str, float]]:
        clients = sorted(updates)
        training = _training_losses(updates)
        question = Question(
            f"cross_validate/{broadcast.round}",
            {
                "params": broadcast.params,
                "buffers": broadcast.buffers,
                "candidates": self._candidates(clients, combined, rng=rng.child("fusion")),
            },
        )
        answers = yield dict.fromkeys(clients, question)
        validation = {
            model: {judge: _loss(judge, answers[judge]["losses"], model) for judge in clients} for model in clients
        }
        whole = integer_weights(self.shares(training, validation), self.scale)
        return {client: float(weight) for client, weight in whole.items()}

    def shares(self, training: Mapping[str, float], validation: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """The weight of each client. validation: losses by model, then by the client that evaluated it."""
        clients = list(training)
        fit = torch.tensor([training[client] for client in clients], dtype=torch.float64)
        sums = torch.tensor([math.fsum(validation[client].values()) for client in clients], dtype=torch.float64)
        if self.variant == "paper":
            shares = torch.softmax(torch.softmax(fit, 0) * sums, 0)
        else:
            inverse = 1 / (fit.clamp(min=_LEAST_LOSS) * sums.clamp(min=_LEAST_LOSS))
            shares = inverse / inverse.sum()
        return dict(zip(clients, shares.tolist(), strict=True))

    def answer(self, question: Question, state: State, member: Member, *, rng: Rng) -> tuple[State, State]:
        if question.kind.partition("/")[0] != "cross_validate":
            return super().answer(question, state, member, rng=rng)
        sent = question.payload
        if len(sent["candidates"]) > member.peers:
            raise RefusedError(f"asked to evaluate {len(sent['candidates'])} models of {member.peers} clients")
        broadcast = Broadcast(sent["params"], sent["buffers"], 0)
        losses = {
            model: _told(member.mean_loss(*changed(broadcast, candidate["changes"], member), "validation"))
            for model, candidate in sent["candidates"].items()
        }
        return {"losses": losses}, state

    def _candidates(self, clients: list[str], combined: Combined, *, rng: Rng) -> dict[str, State]:
        if self.fusion is None:
            return {client: combined({client: 1}, rng=rng.child(client)) for client in clients}
        shares = self.fusion.shares(clients, rng=rng.child("shares"))
        noise_std = self.fusion.noise_std(shares)
        return {
            client: combined(shares[client], noise_std=noise_std, rng=rng.child("noise", client)) for client in clients
        }


@dataclass(frozen=True)
class PlainCombined:
    """Computes weighted means of plain updates. changes: of parameters and statistics, by client."""

    changes: Mapping[str, Params]

    def __call__(self, weights: Mapping[str, int], *, noise_std: float = 0.0, rng: Rng) -> State:
        mean = weighted_mean({client: self.changes[client] for client in weights}, weights)
        if noise_std:
            mean = released(mean, noise_std, rng.secret())
        return {"changes": mean}


def float_changes(tensors: Params, received: Params) -> dict[str, Tensor]:
    """The changes of floating-point tensors; counters are left out."""
    return {name: tensor - received[name] for name, tensor in tensors.items() if tensor.is_floating_point()}


def changes_of(update: Update, broadcast: Broadcast) -> dict[str, Tensor]:
    """The changes of parameters and batch statistics, by name."""
    return {**update.tensors, **float_changes(update.buffers or {}, broadcast.buffers)}


def changed(broadcast: Broadcast, changes: Params, member: Member) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers of the model after the server applies only these changes."""
    change = member.applied({name: tensor for name, tensor in changes.items() if name in broadcast.params})
    return add(broadcast.params, change), add(broadcast.buffers, changes)


def _told(loss: float) -> float:
    """The loss that a judge reports: one client's overflowing model must not make the others' answers useless."""
    return min(loss, LARGEST_LOSS) if math.isfinite(loss) else LARGEST_LOSS


def _why_no_loss(value: Any, name: str) -> str | None:
    if isinstance(value, float | int) and 0 <= value <= LARGEST_LOSS:
        return None
    return f"reports a loss of {value!r:.40} for {name}; expected a number from 0 to {LARGEST_LOSS:g}"


def _training_losses(updates: Mapping[str, Update]) -> dict[str, float]:
    """By client, sorted; `UnusableError` with all clients that sent none."""
    sent = {client: updates[client].metrics.get(TRAINING_LOSS) for client in sorted(updates)}
    reasons = {client: _why_no_loss(value, TRAINING_LOSS) for client, value in sent.items()}
    unusable = {client: reason for client, reason in reasons.items() if reason is not None}
    if unusable:
        raise UnusableError(unusable)
    return {client: float(value) for client, value in sent.items() if value is not None}


def _loss(client: str, losses: Any, name: str) -> float:
    value = losses.get(name) if isinstance(losses, Mapping) else None
    reason = _why_no_loss(value, name)
    if reason is not None:
        raise RoundFailedError(f"{client} {reason}")
    return float(value)  # type: ignore[arg-type]


MixtureWeights = Mapping[str, Mapping[str, int]]
"""For each client's mixture the integer weight of every client's update; all mixtures have the same sum."""

_ROUNDING = 2**-22  # of float32: no clipped update may be longer than the norm that noise is calibrated for


@dataclass(frozen=True, kw_only=True)
class Fusion(ABC):
    """How the server mixes updates. scale: the sum of the integer weights of a mixture, >= 10."""

    scale: int = 1000

    def __post_init__(self) -> None:
        require_at_least(10, scale=self.scale)

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of an update that noise is calibrated for; None if there is no noise."""
        return None

    @abstractmethod
    def shares(self, clients: Sequence[str], *, rng: Rng) -> MixtureWeights:
        """The weights of one round."""

    def noise_std(self, shares: MixtureWeights) -> float:
        """The standard deviation of the noise on every value of every mixture."""
        return 0.0

    def noise_range(self, clients: int) -> tuple[float, float]:
        """The smallest and largest possible `noise_std` in rounds of 2 to this many clients."""
        return 0.0, 0.0


@dataclass(frozen=True, kw_only=True)
class FixedFusion(Fusion):
    """Every mixture is 0.9 of one update, the rest in equal parts of the others; every client can undo it.

    own: the fraction of the client's own update in its mixture, in (0, 1).
    Reference: Ren, thesis 2023, Eqn. (4.5), "DP fusion"; the share 0.9 is that of its published code.
    Differs from the paper: the thesis says that the server "randomly generates" the weights; its code has them fixed,
    as here. There is no noise, hence no differential privacy: whoever knows `own` can solve N linear equations for the
    updates (`leaktight docs fedboosting`).
    """

    own: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.own < 1:
            raise ValueError(f"expected own in (0, 1), got {self.own}")

    def shares(self, clients: Sequence[str], *, rng: Rng) -> MixtureWeights:
        rest = (1 - self.own) / max(len(clients) - 1, 1)
        return {
            model: integer_weights({name: self.own if name == model else rest for name in clients}, self.scale)
            for model in clients
        }


@dataclass(frozen=True, kw_only=True)
class NoisyFusion(Fusion):
    """Mixtures with secret weights, drawn by the server in every round, and Gaussian noise on every value.

    own: the least and the largest fraction of the client's own update in its mixture, in (0.5, 1); it is drawn
    uniformly, and the rest is divided among the other updates at random. update_norm: clients clip updates to this
    norm, > 0. noise_multiplier: the noise's standard deviation in units of the sensitivity: how far all mixtures of a
    round together can move when one client's update is replaced, > 0.

    Assumes: no client colludes with the server, which knows weights and noise. Secret weights alone are no protection,
    as a mixture is close to its update. The noise gives `epsilon` for the mixtures only: the aggregate, which everybody
    gets, has no noise. A model with batch statistics is refused, because these are not clipped.
    """

    own: tuple[float, float] = (0.6, 0.9)
    update_norm: float = 1.0
    noise_multiplier: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 < self.own[0] <= self.own[1] < 1:
            raise ValueError(f"expected own as two shares in (0.5, 1), the smaller first, got {self.own}")
        require_above(0, update_norm=self.update_norm, noise_multiplier=self.noise_multiplier)

    @property
    def clip_norm(self) -> float | None:
        return self.update_norm * (1 - _ROUNDING)

    def shares(self, clients: Sequence[str], *, rng: Rng) -> MixtureWeights:
        stream, (least, most) = rng.secret(), self.own
        result = {}
        for model in clients:
            own = least + (most - least) * float(stream.uniform(1)[0]) if len(clients) > 1 else 1.0
            others = [name for name in clients if name != model]
            parts = stream.exponential(len(others))  # divided by their sum: uniform on the simplex
            dealt = (1 - own) * parts / parts.sum()
            result[model] = integer_weights(dict(zip([model, *others], [own, *dealt], strict=True)), self.scale)
        return result

    def noise_std(self, shares: MixtureWeights) -> float:
        """The multiplier times the distance that all mixtures move together when a client's update changes its sign."""
        clients = next(iter(shares.values()))
        columns = [math.hypot(*(row[name] / self.scale for row in shares.values())) for name in clients]
        return self.noise_multiplier * 2 * self.update_norm * max(columns)

    def noise_range(self, clients: int) -> tuple[float, float]:
        """From a client in its own mixture only, to one that has all of the rest of every other mixture."""
        rounding = 1 / self.scale
        other = min(1.0, 1 - self.own[0] + rounding)
        largest = math.hypot(1.0, other * math.sqrt(clients - 1))
        moved = self.noise_multiplier * 2 * self.update_norm
        return moved * (self.own[0] - rounding), moved * largest

    def epsilon(self, rounds: int, delta: float) -> float:
        """Epsilon of the (epsilon, delta) differential privacy of all mixtures of these rounds, one client replaced.

        Zero-concentrated: rho = 1 / (2 multiplier^2) a round; epsilon = rho + 2 sqrt(rho ln(1 / delta)) for their sum
        (Bun and Steinke 2016, propositions 1.6 and 1.3).
        """
        rho = rounds / (2 * self.noise_multiplier**2)
        return rho + 2 * math.sqrt(rho * math.log(1 / delta))
