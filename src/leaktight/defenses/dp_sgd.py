"""DP-SGD: the gradient of each example is clipped, and their mean gets noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leaktight.core.devices import for_float64
from leaktight.core.privacy import Spent, gaussian_epsilon
from leaktight.core.protocols import ClientFacts, Defense, Report, RoundPlan, Step
from leaktight.core.rng import Rng
from leaktight.core.secret import released
from leaktight.core.types import Params, State, Update
from leaktight.defenses.accounting import (
    Accountant,
    check_privacy_settings,
    counted,
    report_budget,
    require_opacus,
    sampled_epsilon,
    uses_of_an_example,
)
from leaktight.defenses.perturbation import example_rows, widened

_STABILITY = 1e-6  # Opacus adds the same to every norm


@dataclass(frozen=True, kw_only=True)
class DpSgd(Defense):
    """Clips the gradient of each example, adds Gaussian noise to the mean, and accounts for it: (epsilon, delta)-DP.

    clip_norm: the largest norm of one example's gradient; inf (only with noise_multiplier 0) is no clipping.
    noise_multiplier: standard deviation of the noise on the sum, as a multiple of clip_norm; the mean of a batch of B
    gets noise_multiplier * clip_norm / B. 0 is clipping alone, which is not DP and reports no epsilon.
    delta: the probability that epsilon does not hold; choose it well below 1 / number of the client's examples.
    accountant: Opacus' "rdp", "prv" (tightest, slow) or "gdp" (an approximation that can be too low).

    Reported every round, for all rounds so far, of the client with the largest: `epsilon`, which is proven, and
    `epsilon_if_poisson` by the accountant; only finite values.

    `epsilon` needs no assumption on how batches were drawn: within an epoch an example is used in one step, so k epochs
    are k Gaussian mechanisms, even if the order of the batches is known. Without steps_per_epoch (in your own training
    loop), every step may have used the same example, and all of them count.
    **`epsilon_if_poisson` assumes Poisson sampling**, as users of Opacus usually do: every example in every batch
    independently, with probability batch size / examples of the client. Local training here shuffles and goes through
    all examples instead: this value is for comparison with the literature, and is not guaranteed here.

    Neighbouring data sets differ in one example of one client, which is present or contributes zero; replacing an
    example costs as much as noise_multiplier / 2. Nothing else about the data is sent: aggregators that need a loss are
    refused. The number of examples counts as public.

    Reference: Abadi et al. 2016; Mironov 2017 (rdp), Gopi et al. 2021 (prv), Bu et al. 2020 (gdp).
    Assumes: examples that interact only in the mean, so batch normalisation in training mode is an error; a secret
    client key. `leaktight docs defenses` explains the effect of floating-point numbers.
    Differs from the paper: batches of shuffled epochs, see above; the noise of an incomplete batch is divided by its
    size; the sampling rate of each step is that of its batch.
    """

    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    delta: float = 1e-5
    accountant: Accountant = "rdp"

    def __post_init__(self) -> None:
        check_privacy_settings(clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier, delta=self.delta)

    @property
    def private(self) -> bool:
        return self.noise_multiplier > 0

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """The parameters that are clipped together."""
        return [list(names)]

    def clip_norm_in(self, round_index: int) -> float:
        """The clipping norm of a round."""
        return self.clip_norm

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        if self.noise_multiplier:
            require_opacus()
        return model, {
            "num_examples": facts.num_examples,
            "batches": {},
            "steps_per_epoch": None,
            "groups": 1,
            "history": [],
            "uses": 0,
        }

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        return plan, {**state, "steps_per_epoch": plan.steps_per_epoch}

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        each = step.per_example()
        groups = self.groups(list(each))
        clip_norm, size = self.clip_norm_in(step.round), len(step.batch)
        mean, factors = clipped_mean(each, groups, clip_norm)
        report("clip_rate", float((factors < 1).to(torch.float64).mean()))
        if self.noise_multiplier:
            mean = released(mean, self.noise_multiplier * clip_norm / size, rng.secret())
        batches = {**state.get("batches", {})}
        batches[str(size)] = batches.get(str(size), 0) + 1
        gradient = {name: tensor.to(each[name].dtype) for name, tensor in mean.items()}
        return gradient, {**state, "batches": batches, "groups": len(groups)}

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        batches = {int(size): steps for size, steps in state["batches"].items()}
        rates = [(size / state["num_examples"], steps) for size, steps in batches.items()]
        state = {
            **state,
            "batches": {},
            "history": counted(state["history"], rates),
            "uses": state["uses"] + uses_of_an_example(sum(batches.values()), state["steps_per_epoch"]),
        }
        self._report(state, report)
        return replace(update, metrics={}), state

    def spent(self, state: State) -> Spent:
        if not self.noise_multiplier:
            return Spent(math.inf, self.delta)
        return Spent(gaussian_epsilon(math.sqrt(state["uses"]) / self._multiplier(state), self.delta), self.delta)

    def _multiplier(self, state: State) -> float:
        """Noise over sensitivity: each group can change by clip_norm, so all together by sqrt(groups) times it."""
        return self.noise_multiplier / math.sqrt(state["groups"])

    def _report(self, state: State, report: Report) -> None:
        if not self.noise_multiplier:
            return
        figures = {
            "epsilon": self.spent(state).epsilon,
            "epsilon_if_poisson": sampled_epsilon(
                state["history"],
                noise_multiplier=self._multiplier(state),
                delta=self.delta,
                accountant=self.accountant,
            ),
        }
        report_budget(figures, self.delta, report)


def clipped_mean(each: Params, groups: Sequence[Sequence[str]], clip_norm: float) -> tuple[dict[str, Tensor], Tensor]:
    """The mean over examples of gradients (N, *shape), each group of names scaled to norm `clip_norm` at most.

    Returns also the factors (groups, N). An example whose gradient is not finite counts as zero, because a refusal
    would reveal that the client has it. Computed in float32 at least: rounding to half precision could exceed the norm.
    Differentiable, for an attacker who simulates the clipping.
    """
    means: dict[str, Tensor] = {}
    factors = []
    for names in groups:
        rows = {name: example_rows(each[name]) for name in names}
        # In float64: one float32 sum over millions of elements is off by 2e-4.
        norms = [torch.linalg.vector_norm(for_float64(row), dim=1, dtype=torch.float64) for row in rows.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        finite = norm.isfinite()
        factor = (clip_norm / (norm.where(finite, 1) + _STABILITY)).clamp(max=1)
        for name, row in rows.items():
            wide = widened(row).where(finite[:, None].to(row.device), 0)
            means[name] = (factor.to(wide) @ wide / len(wide)).reshape(each[name].shape[1:])
        factors.append(factor)
    return {name: means[name] for name in each}, torch.stack(factors)
