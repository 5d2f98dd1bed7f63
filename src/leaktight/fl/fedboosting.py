"""FedBoosting: clients validate each other's models, and weights depend on the validation losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from leaktight.core.errors import RefusedError, RoundFailedError, UsageError, require_at_least
from leaktight.core.protocols import Asked, Conversation, Member, Question
from leaktight.core.rng import Rng
from leaktight.core.secret import released
from leaktight.core.tensors import add, squared_norm
from leaktight.core.types import Broadcast, Params, State, Update
from leaktight.crypto.cipher import integer_weights
from leaktight.fl.aggregators import Combined, Linear, weighted_mean
from leaktight.fl.fusion import Fusion

TRAINING_LOSS = "training_loss"
_LEAST_LOSS = 1e-12


@dataclass(frozen=True, kw_only=True)
class FedBoosting(Linear):
    """Weights clients by their training loss and by how well their models do on the other clients' validation data.

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
        question = Question(
            f"cross_validate/{broadcast.round}",
            {
                "params": broadcast.params,
                "buffers": broadcast.buffers,
                "candidates": self._candidates(clients, combined, rng=rng.child("fusion")),
            },
        )
        answers = yield dict.fromkeys(clients, question)
        training = {client: _loss(client, updates[client].metrics, TRAINING_LOSS) for client in clients}
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
            model: member.mean_loss(*changed(broadcast, candidate["changes"], member), "validation")
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


def _loss(client: str, losses: Any, name: str) -> float:
    value = losses.get(name) if isinstance(losses, Mapping) else None
    if not isinstance(value, float | int) or not 0 <= value < math.inf:
        raise RoundFailedError(f"{client} reports a loss of {value!r:.40} for {name}; expected a finite number >= 0")
    return float(value)
