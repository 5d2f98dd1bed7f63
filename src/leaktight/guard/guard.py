"""The guard: limits for the signs, findings with reasons, and its state between rounds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from torch import nn

from leaktight.core.errors import RefusedError
from leaktight.core.protocols import Report, Sight
from leaktight.core.tensors import add, cloned, first_non_finite
from leaktight.core.types import Broadcast, State, Update
from leaktight.guard import behaviour, rounds, signs
from leaktight.guard.layout import architecture_change

ACTIONS = ("refuse", "warn")

Sign: TypeAlias = tuple[str, tuple[float, str]]
"""The code of a sign with its value and its message."""


@dataclass(frozen=True)
class Finding:
    """A sign beyond its limit. code: architecture, not-finite, round, or the name of a limit of the guard."""

    code: str
    value: float
    limit: float
    text: str


@dataclass(frozen=True)
class Judgement:
    """The guard's result for a model. signs: all measured values, by code.

    leak: the share of the client's examples that an update of this model would give away, each alone in the gradient of
    some unit; None if it was not estimated.
    """

    findings: tuple[Finding, ...]
    signs: dict[str, float]
    leak: float | None = None

    @property
    def suspicious(self) -> bool:
        return bool(self.findings)

    def because(self) -> str:
        return "; ".join(finding.text for finding in self.findings)


@dataclass(frozen=True, kw_only=True)
class BroadcastGuard:
    """Checks the model that a server sends before training on it: what it would give away, and how it was changed.

    action: "refuse" sends nothing in a suspicious round, "warn" trains with a warning.
    The others are limits > 0; a model above any of them is suspicious.
    By the client's examples, or by made-up ones beside a defense with differential privacy: leak: the share of the
    examples that the update would give away alone, but for one, above that of the agreed network as the client has it.
    twins: the share of a layer's units that get the same as another from the examples that reach both, above that of
    the agreed network. rare: the share of a layer's units that few examples reach. quiet: how much less often its units
    are reached, on average, than in the agreed network. hushed: the share of the examples whose error the last layer
    keeps from the network.
    By the weights: alike: the share of the rows or columns of a matrix, before the last layer, along one direction.
    mirrored: the share of a matrix's rows with a parallel or opposite one beside them. row, bias: of the last layer,
    the longest row over the median row, and the largest distance of a bias from the median bias in lengths of rows.
    By the rounds before: jump: the change since the model was last received, over the client's own updates times the
    rounds since.

    The guard keeps a copy of the last model. It sends nothing, and uses only what its client has. A round number that
    does not follow from the client's own rounds is a finding.
    Reference: none; `leaktight docs guard` has what each sign catches, and the attacks that pass.
    """

    action: Literal["refuse", "warn"] = "refuse"
    leak: float = 0.4
    twins: float = 0.3
    rare: float = 0.3
    quiet: float = 0.2
    hushed: float = 0.5
    alike: float = 0.97
    mirrored: float = 0.15
    row: float = 10.0
    bias: float = 3.0
    jump: float = 10.0

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"expected action to be one of {', '.join(ACTIONS)}, got {self.action!r}")
        for limit in fields(self)[1:]:
            if not getattr(self, limit.name) > 0:
                raise ValueError(f"expected {limit.name} > 0, got {getattr(self, limit.name)}")

    def admit(
        self, broadcast: Broadcast, model: nn.Module, sight: Sight | None, state: State, *, report: Report
    ) -> State:
        judged = self.judge(broadcast, model, sight, state)
        report("guard_suspicious", float(judged.suspicious))
        if judged.leak is not None and sight is not None and sight.examples is not None:
            report("guard_leak", judged.leak)
        if judged.suspicious and self.action == "refuse":
            raise RefusedError(f"refused the model of round {broadcast.round + 1}: {judged.because()}")
        if judged.suspicious:
            warnings.warn(f"suspicious model in round {broadcast.round + 1}: {judged.because()}", stacklevel=2)
        return {
            **state,
            "received": cloned(broadcast.params),
            "round": max(broadcast.round, _last(state)),
            "seen": _seen(state) + 1,
        }

    def after(self, update: Update, broadcast: Broadcast, state: State) -> State:
        # A gradient does not determine the size of the server's step.
        if update.kind != "delta" or update.sealed:
            return {**state, "sizes": None}
        shared = {name: tensor for name, tensor in update.tensors.items() if name in broadcast.params}
        sizes, before = signs.norms(shared), state.get("sizes") or {}
        return {**state, "sizes": {name: max(size, before.get(name, 0.0)) for name, size in sizes.items()}}

    def judge(self, broadcast: Broadcast, model: nn.Module, sight: Sight | None, state: State) -> Judgement:
        """All signs of a model. model: the network that was agreed on. sight: None for the signs in the weights."""
        if (changed := architecture_change(broadcast, model)) is not None:
            return _certain("architecture", f"another architecture: {changed}")
        if (broken := first_non_finite({**broadcast.params, **broadcast.buffers})) is not None:
            return _certain("not-finite", f"{broken!r} is not finite")
        measured = dict(self._in_weights(broadcast, model))
        leak = None
        if sight is not None:
            if (fault := rounds.fault(broadcast.round, _last(state), _seen(state), sight.share)) is not None:
                return _certain("round", fault)
            measured.update(_jump(broadcast, model, state, sight.share))
            seen = behaviour.look(broadcast, model, sight)
            leak = None if seen is None else seen.leak
            measured.update({} if seen is None else seen.signs())
        findings = tuple(
            Finding(code, value, getattr(self, code), text.format(value=value, limit=getattr(self, code)))
            for code, (value, text) in measured.items()
            if value > getattr(self, code)
        )
        return Judgement(findings, {code: value for code, (value, _) in measured.items()}, leak)

    @staticmethod
    def _in_weights(broadcast: Broadcast, model: nn.Module) -> Iterator[Sign]:
        # The last layer is left out: its honest rows are parallel to the mean of the features, unless that is zero.
        rest = signs.groups(model, broadcast.params)["rest"]
        where, alike = signs.likeness(rest)
        yield "alike", (alike, f"rows of {where!r} point along one line ({{value:.2f}} of them, limit {{limit:g}})")
        where, pairs = signs.mirrored(rest)
        yield "mirrored", (pairs, f"rows of {where!r} mirror others ({{value:.2f}} of them, limit {{limit:g}})")
        for code, value in signs.head_outliers(model, broadcast.params).items():
            yield code, (value, f"a {code} of the last layer stands out ({{value:.3g}}, limit {{limit:g}})")


def _certain(code: str, text: str) -> Judgement:
    return Judgement((Finding(code, 1.0, 0.0, text),), {code: 1.0})


def _last(state: State) -> int:
    return int(state.get("round", -1))


def _seen(state: State) -> int:
    """How many models this client has trained on; states of before have no number."""
    return int(state.get("seen", "received" in state))


def _jump(broadcast: Broadcast, model: nn.Module, state: State, share: float) -> Iterator[Sign]:
    """The change of the part of the network that changed most, relative to the client's own updates."""
    own, last = state.get("sizes"), state.get("received")
    if not own or last is None:
        return
    passed = rounds.elapsed(broadcast.round, _last(state), share)
    moved = signs.group_norms(model, signs.norms(add(broadcast.params, last, scale=-1.0)))
    expected, sizes = signs.group_norms(model, own), signs.group_norms(model, signs.norms(last))
    ratios = {part: moved[part] / (passed * expected[part] + 1e-2 * sizes[part] + 1e-12) for part in moved}
    worst = max(ratios, key=ratios.__getitem__)
    part = {"head": "the last layer", "rest": "the network before the last layer"}[worst]
    text = f"{part} changed {{value:.3g}} times as much as own training explains, limit {{limit:g}}"
    yield "jump", (ratios[worst] if math.isfinite(ratios[worst]) else math.inf, text)
