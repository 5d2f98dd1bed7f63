"""AdaDefense: clients send the step of an adaptive optimiser whose moments they keep private."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from leaktight.core.protocols import ClientFacts, Defense, Report
from leaktight.core.rng import Rng
from leaktight.core.types import Params, State, Update
from leaktight.defenses.perturbation import widened

MomentRule: TypeAlias = Literal["adam", "adagrad", "yogi"]

CODE_SCALE = 1e-3


@dataclass(frozen=True, kw_only=True)
class AdaDefense(Defense):
    """Sends a stand-in for the update: the step that Adam (or Adagrad, Yogi) makes of it with the client's own moments.

    form: "adam", "adagrad" or "yogi". beta1, beta2: decay of the moments; unused by adagrad. epsilon: in the
    denominator, sqrt(v) + epsilon. epsilon_inside: sqrt(v + epsilon) instead, as printed in the paper's equation 5.
    learning_rate: of the server along the mean stand-in, whose elements are of the order of 1. 1e-3 is the scale of the
    published code, which runs hundreds of rounds; 50 rounds with skewed clients need about 1e-2. It multiplies the
    aggregated stand-ins; set the learning rate of `fedsgd` to 1.
    variant: "paper", or "code" for the published code: every form has a first moment, and the client scales by
    1e-3 sqrt(1 - beta2^T) / (1 - beta1^T) in place of the server's learning_rate and of the correction of each moment,
    with T one round late (1, 1, 2, 3, ...).

    The gradient here is the undefended update as a pseudo-gradient: received minus local parameters, or the gradient
    itself. Moments and time belong to one client, never leave it, and advance in the rounds in which it takes part.
    Batch-norm statistics are sent unprotected, because the model cannot be used without them.

    Reference: Hu, Ren et al. (AdaDefense), equations 1 to 5; Kingma and Ba 2015, Duchi et al. 2011, Zaheer et al. 2018.
    Assumes: a server that does not know the moments. In a client's first round they are zero, and the stand-in is an
    invertible function of the gradient; signs are visible in every round.
    Differs from the paper: epsilon is outside the root by default, and the server has a learning rate, which the paper
    does not mention. The published code shares one set of moments between all clients, which no party of a federation
    could hold; here, in both variants, each client has its own.
    """

    form: MomentRule = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    epsilon_inside: bool = False
    learning_rate: float = 1e-3
    variant: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected {name} in [0, 1), got {getattr(self, name)}")
        for name in ("epsilon", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        if self.variant == "code" and self.epsilon_inside:
            raise ValueError('expected epsilon_inside = false with variant = "code", which has it outside the root')

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        return model, {"time": 0, "first": {}, "second": {}}

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        sign = -1.0 if update.kind == "delta" else 1.0
        # In half precision epsilon and most squares are zero, and moments would not change.
        gradient = {name: sign * widened(tensor) for name, tensor in update.tensors.items()}
        stand_in, state = self.stand_in(gradient, state)
        sent = {name: (sign * stand_in[name]).to(tensor.dtype) for name, tensor in update.tensors.items()}
        return replace(update, tensors=sent), state

    def on_aggregate(self, change: Params, num_clients: int, state: State) -> tuple[Params, State]:
        if self.variant == "code":
            return change, state
        return {name: self.learning_rate * tensor for name, tensor in change.items()}, state

    def stand_in(self, gradient: Params, state: State) -> tuple[dict[str, Tensor], State]:
        """The stand-in for a gradient, and the new state. Differentiable, for an adaptive attacker."""
        time = state["time"] + 1
        first = {name: self._first(state["first"].get(name), tensor) for name, tensor in gradient.items()}
        second = {
            name: _SECOND[self.form](state["second"].get(name, torch.zeros_like(tensor)), tensor.square(), self.beta2)
            for name, tensor in gradient.items()
        }
        result = {name: self._step(first[name], second[name], time) for name in gradient}
        return result, {
            "time": time,
            "first": {**state["first"], **first},
            "second": {**state["second"], **second},
        }

    def _first(self, moment: Tensor | None, gradient: Tensor) -> Tensor:
        if self.form == "adagrad" and self.variant == "paper":
            return gradient
        return (1 - self.beta1) * gradient + (0.0 if moment is None else self.beta1 * moment)

    def _step(self, first: Tensor, second: Tensor, time: int) -> Tensor:
        if self.variant == "code":
            late = max(time - 1, 1)
            scale = CODE_SCALE * math.sqrt(1 - self.beta2**late) / (1 - self.beta1**late)
            return scale * first / (second.sqrt() + self.epsilon)
        if self.form != "adagrad":
            first, second = first / (1 - self.beta1**time), second / (1 - self.beta2**time)
        if self.epsilon_inside:
            return first / (second + self.epsilon).sqrt()
        return first / (second.sqrt() + self.epsilon)


def _adam(moment: Tensor, square: Tensor, beta2: float) -> Tensor:
    return beta2 * moment + (1 - beta2) * square


def _adagrad(moment: Tensor, square: Tensor, beta2: float) -> Tensor:
    return moment + square


def _yogi(moment: Tensor, square: Tensor, beta2: float) -> Tensor:
    return moment - (1 - beta2) * torch.sign(moment - square) * square


_SECOND: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "adam": _adam,
    "adagrad": _adagrad,
    "yogi": _yogi,
}
