"""The guard: limits for the signs, findings with reasons, and its state between rounds."""

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
    """The guard's result for a model. signs: all measured values, by code."""

    findings: tuple[Finding, ...]
    signs: dict[str, float]

    @property
    def suspicious(self) -> bool:
        return bool(self.findings)

    def because(self) -> str:
        return "; ".join(finding.text for finding in self.findings)


@dataclass(frozen=True, kw_only=True)
class BroadcastGuard:
    """Checks the model that a server sends before training on it: architecture, parallel rows, outliers, jumps.

    action: "refuse" sends nothing in a suspicious round, "warn" trains with a warning.
    The others are limits > 0; a model above any of them is suspicious.
    alike: the share of the rows or columns of a matrix, before the last layer, along one direction. row, bias: of the
    last layer, the longest row over the median row, and the largest distance of a bias from the median bias. jump: the
    change since the model was last received, over the client's own last update times the rounds since. constant: the
    share of the units of an activation that are constant on the client's images, dead or saturated.

    The guard keeps a copy of the last model. It sends nothing, and uses only what its client has.
    Reference: none; these are signs of Robbing the Fed and Fishing (docs/guard.md lists attacks without them).
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
        # A gradient does not determine the size of the server's step.
        known = update.kind == "delta" and not update.sealed
        return {**state, "own": {name: tensor.clone() for name, tensor in update.tensors.items()} if known else None}

    def judge(self, broadcast: Broadcast, model: nn.Module, inputs: Tensor | None, state: State) -> Judgement:
        """All signs of a model. model: the network that was agreed on. inputs: some of the client's images, or None."""
        if (changed := signs.architecture_change(broadcast, model)) is not None:
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
        """The code of each sign with its value and message."""
        # The last layer is left out: its honest rows are parallel to the mean of the features, unless that is zero.
        where, alike = signs.likeness(signs.groups(model, broadcast.params)["rest"])
        yield "alike", (alike, f"rows of {where!r} point along one line ({{value:.2f}} of them, limit {{limit:g}})")
        for code, value in signs.head_outliers(model, broadcast.params).items():
            yield code, (value, f"a {code} of the last layer stands out ({{value:.3g}}, limit {{limit:g}})")
        if (jump := self._jump(broadcast, model, state)) is not None:
            part, value = jump
            yield (
                "jump",
                (value, f"{part} changed {{value:.3g}} times as much as own training explains, limit {{limit:g}}"),
            )
        if inputs is not None:
            still = signs.constant_units(model, broadcast.params, broadcast.buffers, inputs)
            yield "constant", (still, "units are constant on all images ({value:.2f} of a layer, limit {limit:g})")

    def _jump(self, broadcast: Broadcast, model: nn.Module, state: State) -> tuple[str, float] | None:
        """The part of the network with the largest change relative to the client's own update, and the ratio."""
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
