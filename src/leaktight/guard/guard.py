"""The guard itself: limits for the signs, a judgement with reasons, and what it remembers from round to round."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from leaktight.core.errors import RefusedError
from leaktight.core.protocols import Report
from leaktight.core.tensors import add, cloned, first_non_finite
from leaktight.core.types import Broadcast, State, Update
from leaktight.guard import signs

ACTIONS = ("refuse", "warn")


@dataclass(frozen=True)
class Finding:
    """A sign beyond its limit. code: architecture, not-finite, alike, row, bias, jump or constant."""

    code: str
    value: float
    limit: float
    text: str


@dataclass(frozen=True)
class Judgement:
    """What the guard makes of a model. signs: all that was measured, by code."""

    findings: tuple[Finding, ...]
    signs: dict[str, float]

    @property
    def suspicious(self) -> bool:
        return bool(self.findings)

    def because(self) -> str:
        return "; ".join(finding.text for finding in self.findings)


@dataclass(frozen=True, kw_only=True)
class BroadcastGuard:
    """Looks at the model that a server sends before training on it: architecture, like rows, outliers, jumps.

    action: "refuse" sends nothing in a suspicious round, "warn" trains and says so.
    alike: the share of one matrix's rows or columns that one direction holds, before the last layer. row, bias: of the
    last layer, the longest row over the median one, and the distance of a bias from the median one. jump: the change
    since the model was last seen, over what the client's own last update explains for each round since. constant: the
    share of an activation's units that answer all of the client's images alike, dead or saturated. Each is a limit; a
    model beyond any of them is suspicious.

    The guard keeps one copy of the model last received. It sends nothing, and knows nothing but what its client has.
    Reference: none; the signs are those that Robbing the Fed and Fishing leave (docs/guard.md says which do not).
    """

    action: Literal["refuse", "warn"] = "refuse"
    alike: float = 0.97
    row: float = 10.0
    bias: float = 3.0
    jump: float = 10.0
    constant: float = 0.9

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"expected action to be one of {', '.join(ACTIONS)}, got {self.action!r}")
        for name in ("alike", "row", "bias", "jump", "constant"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")

    def admit(
        self, broadcast: Broadcast, model: nn.Module, inputs: Tensor | None, state: State, *, report: Report
    ) -> State:
        judged = self.judge(broadcast, model, inputs, state)
        report("guard_suspicious", float(judged.suspicious))
        if judged.suspicious and self.action == "refuse":
            raise RefusedError(f"refused the model of round {broadcast.round + 1}: {judged.because()}")
        if judged.suspicious:
            warnings.warn(f"suspicious model in round {broadcast.round + 1}: {judged.because()}", stacklevel=2)
        return {**state, "received": cloned(broadcast.params), "round": broadcast.round}

    def after(self, update: Update, broadcast: Broadcast, state: State) -> State:
        # A gradient says nothing about how far the server will go with it.
        known = update.kind == "delta" and not update.sealed
        return {**state, "own": {name: tensor.clone() for name, tensor in update.tensors.items()} if known else None}

    def judge(self, broadcast: Broadcast, model: nn.Module, inputs: Tensor | None, state: State) -> Judgement:
        """All signs of a model. model: the network agreed on. inputs: some of the client's images, or None."""
        if (changed := signs.drift(broadcast, model)) is not None:
            return Judgement(
                (Finding("architecture", 1.0, 0.0, f"another architecture: {changed}"),), {"architecture": 1.0}
            )
        if (broken := first_non_finite({**broadcast.params, **broadcast.buffers})) is not None:
            return Judgement((Finding("not-finite", 1.0, 0.0, f"{broken!r} is not finite"),), {"not-finite": 1.0})
        measured = dict(self._measure(broadcast, model, inputs, state))
        findings = tuple(
            Finding(code, value, getattr(self, code), text.format(value=value, limit=getattr(self, code)))
            for code, (value, text) in measured.items()
            if value > getattr(self, code)
        )
        return Judgement(findings, {code: value for code, (value, _) in measured.items()})

    def _measure(
        self, broadcast: Broadcast, model: nn.Module, inputs: Tensor | None, state: State
    ) -> Iterator[tuple[str, tuple[float, str]]]:
        """Each sign with its words."""
        # Honest rows of a last layer are alike: they all lie along the mean of the features, if that is not zero.
        where, alike = signs.likeness(signs.groups(model, broadcast.params)["rest"])
        yield "alike", (alike, f"rows of {where!r} point along one line ({{value:.2f}} of them, limit {{limit:g}})")
        for code, value in signs.head_outliers(model, broadcast.params).items():
            yield code, (value, f"a {code} of the last layer stands out ({{value:.3g}}, limit {{limit:g}})")
        if (jump := self._jump(broadcast, model, state)) is not None:
            part, value = jump
            yield (
                "jump",
                (value, f"{part} moved {{value:.3g}} times as far as own training explains, limit {{limit:g}}"),
            )
        if inputs is not None:
            still = signs.constant_units(model, broadcast.params, broadcast.buffers, inputs)
            yield "constant", (still, "units answer all images alike ({value:.2f} of a layer's, limit {limit:g})")

    def _jump(self, broadcast: Broadcast, model: nn.Module, state: State) -> tuple[str, float] | None:
        """The part that moved furthest beyond what one's own update explains, and by how much."""
        own, last = state.get("own"), state.get("received")
        if not own or last is None or broadcast.round <= state["round"]:
            return None
        elapsed = broadcast.round - state["round"]
        moved = signs.group_norms(model, add(broadcast.params, last, scale=-1.0))
        expected = signs.group_norms(model, own)
        sizes = signs.group_norms(model, last)
        ratios = {part: moved[part] / (elapsed * expected[part] + 1e-3 * sizes[part] + 1e-12) for part in moved}
        worst = max(ratios, key=ratios.__getitem__)
        words = {"head": "the last layer", "rest": "the network before the last layer"}
        return words[worst], ratios[worst] if math.isfinite(ratios[worst]) else math.inf
