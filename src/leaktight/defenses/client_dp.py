"""Client-level differential privacy: the update is clipped and gets noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from leaktight.core.errors import ModelError, require_at_least
from leaktight.core.privacy import Spent, gaussian_epsilon
from leaktight.core.protocols import ClientFacts, Defense, Report, RoundPlan, Step
from leaktight.core.rng import Rng
from leaktight.core.secret import released
from leaktight.core.tensors import squared_norm
from leaktight.core.types import Params, State, Update
from leaktight.defenses.accounting import (
    Accountant,
    check_privacy_settings,
    report_budget,
    require_opacus,
    sampled_epsilon,
)
from leaktight.defenses.perturbation import widened
from leaktight.models.surgery import has_batch_norm


@dataclass(frozen=True, kw_only=True)
class ClientDp(Defense):
    """Clips a client's whole update and adds Gaussian noise to it, accounted over rounds: DP of clients.

    clip_norm: the largest norm of an update; inf (only with noise_multiplier 0) is no clipping.
    noise_multiplier: standard deviation of the noise, as a multiple of clip_norm; 0 is clipping without DP and without
    epsilon.
    noise_shares: 1: every update has the whole noise. K: every update has 1 / sqrt(K) of it, so that the sum of K
    updates has the whole; the number of examples is then not sent, and `fedavg` needs scheme = "I".
    sampling_rate: the probability with which a client takes part in a round, for `epsilon_if_poisson`.
    adjacency: "remove": neighbours differ in the client's update being there or zero. "replace": in the client having
    other data, which doubles the sensitivity; only with sampling_rate 1.
    delta, accountant: as in `dp_sgd`.

    Reported every round, for all rounds so far: `epsilon`, of the rounds that the client took part in, against a server
    that reads its updates and knows these rounds (exact, for Gaussian mechanisms). With noise_shares = K also
    `epsilon_of_sum`, against an observer of sums of at least K such updates of equal weight (secure aggregation).
    With sampling_rate < 1 also `epsilon_if_poisson` by the accountant: all rounds so far at this rate, against an
    observer who does not know which clients took part, if they were chosen by Poisson sampling.

    The noise is added at the client, because noise that a server adds does not protect against that server. The whole
    noise on every update costs far more accuracy than once on the sum; noise_shares gives the latter without a trusted
    server.

    Reference: McMahan et al. 2018 and Geyer et al. 2017 (clients as the unit of privacy); noise_shares = 1 is local DP.
    Assumes: a secret client key. Batch statistics would be sent without noise: none are sent, and batch normalisation
    in training mode is an error. Our server chooses a fixed number of clients per round, by a seed in the config.
    An update that is not finite counts as zero, because a refusal would reveal something about the data.
    Differs from the paper: there a trusted server adds the noise. Metrics are not sent; with noise_shares = 1 the
    number of examples is sent, and counts as public.
    """

    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    noise_shares: int = 1
    sampling_rate: float = 1.0
    adjacency: Literal["remove", "replace"] = "remove"
    delta: float = 1e-5
    accountant: Accountant = "rdp"

    def __post_init__(self) -> None:
        check_privacy_settings(clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier, delta=self.delta)
        require_at_least(1, noise_shares=self.noise_shares)
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(f"expected sampling_rate in (0, 1], got {self.sampling_rate}")
        if self.adjacency == "replace" and self.sampling_rate < 1:
            raise ValueError(
                f'expected sampling_rate = 1 with adjacency = "replace", got {self.sampling_rate}; '
                "the accountants of sampled clients support removal only"
            )

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        if self.noise_multiplier:
            require_opacus()
        return model, {"rounds": 0, "answered": 0}

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        rounds = state["rounds"] + 1 if self.sampling_rate == 1 else plan.round + 1
        return plan, {**state, "rounds": rounds, "answered": state["answered"] + 1}

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        if step.model.training and has_batch_norm(step.model):
            raise ModelError(
                "batch normalisation in training mode sends statistics of the data that no noise protects; "
                'use a model without it, or model.mode = "eval"'
            )
        return step.gradient, state

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        size = math.sqrt(float(squared_norm(update.tensors.values())))
        report("clip_rate", float(size > self.clip_norm))
        factor = min(1.0, self.clip_norm / size) if size else 1.0
        tensors = {name: factor * widened(tensor) for name, tensor in update.tensors.items()}
        if not math.isfinite(size):  # a refusal would reveal something about the data
            tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        if self.noise_multiplier:
            std = self.noise_multiplier * self.clip_norm / math.sqrt(self.noise_shares)
            tensors = released(tensors, std, rng.secret())
            self._report(state, report)
        num_examples = update.num_examples if self.noise_shares == 1 else None
        sent = {name: tensor.to(update.tensors[name].dtype) for name, tensor in tensors.items()}
        return replace(update, tensors=sent, num_examples=num_examples, metrics={}), state

    @property
    def needs_mean(self) -> str | None:
        if self.noise_shares == 1 or not self.noise_multiplier:
            return None
        return f"with noise_shares = {self.noise_shares} a single update, which that rule reads, has too little noise"

    @property
    def private(self) -> bool:
        return self.noise_multiplier > 0

    def spent(self, state: State) -> Spent:
        """The budget against a server that reads every update; with noise_shares each update has less noise."""
        if not self.noise_multiplier:
            return Spent(math.inf, self.delta)
        uses = state["answered"] * self.noise_shares
        return Spent(gaussian_epsilon(math.sqrt(uses) / self._multiplier, self.delta), self.delta)

    @property
    def _multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity."""
        return self.noise_multiplier / (2 if self.adjacency == "replace" else 1)

    def _report(self, state: State, report: Report) -> None:
        figures = {"epsilon": self.spent(state).epsilon}
        if self.noise_shares > 1:
            figures["epsilon_of_sum"] = gaussian_epsilon(math.sqrt(state["answered"]) / self._multiplier, self.delta)
        if self.sampling_rate < 1:
            figures["epsilon_if_poisson"] = sampled_epsilon(
                [[self.sampling_rate, state["rounds"]]],
                noise_multiplier=self._multiplier,
                delta=self.delta,
                accountant=self.accountant,
            )
        report_budget(figures, self.delta, report)
