"""Against LRP and ada-LRP: a scale-free distance, and a search for the learning rate of every local step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from leaktight.adaptive.knowing import Adaptation, mimicking, scale_free
from leaktight.adaptive.stages import until_explained
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import Unknown, View
from leaktight.core.errors import require_at_least
from leaktight.core.protocols import Defense, Report, RoundPlan
from leaktight.core.rng import Rng
from leaktight.core.types import Observation, State

_RATES = "lrp.log_rates"
_SPREAD = 0.2  # of the logarithms of the rates, at the start of a search


@dataclass(frozen=True)
class _UnknownRates(Defense):
    """Multiplies the learning rates of the plan by e^u, with u unknown."""

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        factors = state[_RATES].exp()
        # Tensors, where a client has numbers; local training takes both.
        rates: Any = tuple(rate * factor for rate, factor in zip(plan.learning_rates, factors.unbind(), strict=True))
        return replace(plan, learning_rates=rates), state


@dataclass(frozen=True, kw_only=True)
class KnowsRates(Adaptation):
    """LRP and ada-LRP: cosine; with several local steps, one unknown factor for each of them.

    starts: with several steps, how often the search begins again, with other rates, while its loss is above what
    rounding explains, >= 1.

    Assumes: the number of local steps and of examples. With one step the update is a positive multiple of the gradient,
    and nothing is lost.
    Cannot: find the order of the client's batches, which is unknown without the defense too. A common factor of all
    rates changes the direction of the update in second order only, so that it is found inexactly.
    """

    starts: int = 4

    def __post_init__(self) -> None:
        require_at_least(1, starts=self.starts)

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        attack = replace(attack, objective=scale_free(attack.objective))
        several = any((each.num_steps or 1) > 1 for each in seen)
        return until_explained(attack, seen, self.starts) if several else attack, list(seen)

    def view(self, view: View, seen: Observation) -> View:
        if len(view.steps) < 2:
            return view
        start = torch.zeros(len(view.steps), dtype=next(iter(view.params.values())).dtype)
        view = replace(
            view,
            unknowns={**view.unknowns, _RATES: Unknown(start, _SPREAD)},
            notes=(*view.notes, "the learning rate of every step is unknown"),
        )
        return mimicking(view, _UnknownRates())
