"""Which requests a client agrees to answer, and the check of every request against this.

The agreement is made before the first round, from the public plan. What a client has answered so far is part of its
state, so that neither a server that repeats round numbers nor a restart makes it answer twice.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from leaktight.core.errors import RefusedError, UsageError, require_above, require_at_least
from leaktight.core.protocols import MANY, Asked, Defense
from leaktight.core.tensors import buffers_of, digest, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Params, State
from leaktight.fl.messages import Ask, Evaluate, Request, Train
from leaktight.fl.plan import Setup
from leaktight.fl.state import BEFORE_ROUNDS, Conduct

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Consent:
    """A client's own limits beyond the plan; the table `[consent]` of a config.

    max_epsilon: the client's privacy budget, > 0; a round that would spend more is not answered, nor any later one. It
    needs a defense that counts epsilon. None: no limit.
    max_rounds: the most rounds that it trains in, >= 1. None: all rounds of the plan.
    max_repeats: the most rounds, >= 0, that it answers anew on Flower when the server goes back and asks something else
    than before. Each is one more look at its data: the noise is new, and the budget goes on. 0: it only sends again
    what it has sent.
    """

    max_epsilon: float | None = None
    max_rounds: int | None = None
    max_repeats: int = 0

    def __post_init__(self) -> None:
        require_above(0, max_epsilon=self.max_epsilon)
        require_at_least(1, max_rounds=self.max_rounds)
        require_at_least(0, max_repeats=self.max_repeats)

    @property
    def limited(self) -> bool:
        """Whether it limits what a client may spend."""
        return self.max_epsilon is not None or self.max_rounds is not None


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The plan of a federation as its clients agreed to it. Kinds of questions are listed by the methods themselves.

    rounds, clients: their numbers. share: the part of the clients that is drawn in a round.
    learning_rates, loss_scales: the smallest and the largest that a server may ask for.
    scores_on: the examples on which a client scores a model, once a round; None: it scores none.
    """

    rounds: int = MANY
    clients: int = MANY
    share: float = 1.0
    learning_rates: tuple[float, float] = (0.0, math.inf)
    loss_scales: tuple[float, float] = (0.0, math.inf)
    scores_on: Literal["validation", "test"] | None = None
    consent: Consent = Consent()

    def admit(self, request: Request, conduct: Conduct, setup: Setup) -> Conduct:
        """The record of answered requests including this one, or `RefusedError`."""
        aggregator = setup.aggregator
        if isinstance(request, Train):
            if request.kind != aggregator.update_kind:
                raise RefusedError(f"asked for a {request.kind!s:.40}, agreed on a {aggregator.update_kind}")
            _require_alike(request.broadcast, setup.trainer.model)
            return self._admit_training(request, conduct)
        if isinstance(request, Evaluate):
            _require_alike(request.broadcast, setup.trainer.model)
            return self._admit_scoring(request, conduct)
        if not isinstance(request, Ask) or request.to not in ("aggregator", "defense"):
            raise RefusedError("sent something that is not a request of the protocol")
        listed = aggregator.questions if request.to == "aggregator" else setup.defense.questions
        return self._admit_question(request, conduct, listed)

    def _admit_training(self, request: Train, conduct: Conduct) -> Conduct:
        _require_within("learning rate", request.learning_rate, self.learning_rates)
        _require_within("loss scale", request.loss_scale, self.loss_scales)
        number = _round(request.broadcast)
        if number <= conduct.round:
            raise RefusedError(f"asked for round {number + 1} after round {conduct.round + 1}")
        if number >= self.rounds:
            raise RefusedError(f"asked for round {number + 1} of {self.rounds}")
        most = self.consent.max_rounds
        if most is not None and conduct.rounds >= most:
            raise RefusedError(f"{most} rounds were answered already, and no more were agreed to")
        return replace(conduct, round=number, rounds=conduct.rounds + 1)

    def _admit_scoring(self, request: Evaluate, conduct: Conduct) -> Conduct:
        if request.on != self.scores_on:
            raise RefusedError(f"asked to score a model on {request.on!s:.40} examples, which was not agreed on")
        number = _round(request.broadcast)
        if not conduct.scored < number <= self.rounds:
            raise RefusedError(f"asked for the score of round {number} after that of round {conduct.scored}")
        return replace(conduct, scored=number)

    def _admit_question(self, request: Ask, conduct: Conduct, listed: Mapping[str, Asked]) -> Conduct:
        kind, _, number = request.question.kind.partition("/")
        if kind not in listed:
            raise RefusedError(f"asked {kind!r:.80}, which was not agreed on")
        place = BEFORE_ROUNDS
        if listed[kind].each_round:
            place = conduct.round
            if number != str(place) or place == BEFORE_ROUNDS:
                raise RefusedError(f"asked {kind!r} of another round than the one just trained in")
        key = f"{request.to} {kind}"
        if key in conduct.asked and conduct.asked[key] >= place:
            raise RefusedError(f"asked {kind!r} a second time")
        return replace(conduct, asked={**conduct.asked, key: place})

    def check_budget(self, defense: Defense, state: State) -> None:
        """Raise `RefusedError` if the coming release of the defense would exceed the client's budget."""
        most = self.consent.max_epsilon
        if most is None:
            return
        spent = defense.spent(state)
        if spent is None:
            raise UsageError(
                f"consent.max_epsilon needs a defense that counts epsilon, got {type(defense).__name__}; "
                "choose dp_sgd, fed_cdp or client_dp with noise"
            )
        if not spent.epsilon <= most:
            raise RefusedError(f"this round would spend epsilon {spent.epsilon:.4g} of a budget of {most:g}")


def agreed_rates(local: LocalTraining, rounds: int) -> tuple[float, float]:
    """The smallest and the largest learning rate of all rounds."""
    factors = [local.schedule.factor(each, rounds) for each in range(rounds)]
    return local.learning_rate * min(factors), local.learning_rate * max(factors)


def request_digest(params: Params, buffers: Params, learning_rate: float, loss_scale: float, brings: str) -> str:
    """A hash of all inputs of a round's training. Noise depends on it, so that other inputs get other noise.

    params, buffers: as the server sent them. brings: see `Client.brings`.
    """
    total = hashlib.sha256(digest({**params, **buffers}).encode())
    total.update(f"|{float(learning_rate)!r}|{float(loss_scale)!r}|{brings}".encode())
    return total.hexdigest()


def _require_within(name: str, value: Any, limits: tuple[float, float]) -> None:
    low, high = limits
    fits = type(value) in (float, int) and 0 < value <= sys.float_info.max
    if not fits or not low * (1 - _ROUNDING) <= value <= high * (1 + _ROUNDING):
        raise RefusedError(f"asked for a {name} of {value!r:.40}, agreed on {low:g} to {high:g}")


def _round(broadcast: Broadcast) -> int:
    if type(broadcast.round) is not int or broadcast.round < 0:
        raise RefusedError(f"asked for round {broadcast.round!r:.40}, which is not a round number")
    return broadcast.round


def _require_alike(broadcast: Broadcast, model: nn.Module) -> None:
    """Raise `RefusedError` if names, shapes or types differ from the agreed model's.

    A network that a server hands out within one process is checked by the guard instead.
    """
    if isinstance(broadcast.model, nn.Module):
        return
    for sent, agreed in ((broadcast.params, parameters_of(model)), (broadcast.buffers, buffers_of(model))):
        if broadcast.model is not None or sent.keys() != agreed.keys():
            raise RefusedError("sent a model with other tensors than the agreed network's")
        for name, tensor in agreed.items():
            if sent[name].shape != tensor.shape or sent[name].dtype != tensor.dtype:
                raise RefusedError(f"sent {name!r} in another shape or type than agreed on")
