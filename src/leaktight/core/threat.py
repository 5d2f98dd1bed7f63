"""Threat models. `ThreatModel.observe` is the only function that turns a round into what the attacker sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from leaktight.core.errors import NotDisclosedError, UsageError, suggestion
from leaktight.core.threat_presets import PRESETS
from leaktight.core.types import Observation, RoundTrace, Update


class Knowledge(Enum):
    """A fact that an attacker may or may not have."""

    LABELS = "labels"
    BATCH_SIZE = "batch_size"
    LOCAL_TRAINING = "local_training"
    BUFFERS = "buffers"
    DEFENSE = "defense"
    PUBLIC_DATA = "public_data"


@dataclass(frozen=True, kw_only=True)
class ThreatModel:
    """server: "curious" follows the protocol, "malicious" may also change the model that it sends.

    sees: one "client"'s update, or only the "aggregate" of the round (secure aggregation).
    knows: facts beside the model and the update. The attacker always has what clients send, such as the number of
    examples and the figures that the aggregator needs.
    In a config, `preset` names a threat model to start from.
    """

    server: Literal["curious", "malicious"] = "curious"
    sees: Literal["client", "aggregate"] = "client"
    knows: frozenset[Knowledge] = frozenset({Knowledge.BATCH_SIZE, Knowledge.LOCAL_TRAINING, Knowledge.BUFFERS})

    @classmethod
    def preset(cls, name: str) -> ThreatModel:
        """The named threat model.

        >>> ThreatModel.preset("curious_server") == ThreatModel()
        True
        """
        if name not in PRESETS:
            raise UsageError(f"unknown threat model {name!r}; {suggestion(name, PRESETS)}")
        named = PRESETS[name]
        return cls(server=named.server, sees=named.sees, knows=frozenset(Knowledge(fact) for fact in named.knows))

    def observe(self, trace: RoundTrace, target: str) -> Observation:
        """What this attacker sees of `target` in the round."""
        if target not in trace.clients:
            raise UsageError(f"client {target!r} took no part in the round; {suggestion(target, trace.clients)}")
        if self.sees == "client" and trace.clients[target].update.sealed is not None:
            raise NotDisclosedError(
                f"the update of {target!r} is encrypted; without the clients' key only the aggregate is visible; "
                'set threat.sees = "aggregate"'
            )
        members = [target] if self.sees == "client" else sorted(trace.clients)
        targets = torch.cat([trace.clients[name].truth.examples.targets for name in members])
        update = trace.clients[target].update if self.sees == "client" else _summed(trace)
        count = len(targets) if Knowledge.BATCH_SIZE in self.knows else update.num_examples
        return Observation(
            model=trace.model,
            task=trace.task,
            broadcast=trace.broadcast,
            update=update if Knowledge.BUFFERS in self.knows else replace(update, buffers=None),
            inputs=trace.inputs,
            num_classes=trace.num_classes,
            labels=_disclosed(targets, count) if Knowledge.LABELS in self.knows else None,
            batch_size=count,
            local_training=trace.local if Knowledge.LOCAL_TRAINING in self.knows else None,
            mode=trace.mode if Knowledge.LOCAL_TRAINING in self.knows else None,
            defense=trace.defense if Knowledge.DEFENSE in self.knows else None,
            public_data=trace.public_data if Knowledge.PUBLIC_DATA in self.knows else None,
        )


def _summed(trace: RoundTrace) -> Update:
    """The aggregate of the round, with the figures that clients sent beside it, by client and name."""
    figures = {
        f"{name}.{figure}": value
        for name, client in sorted(trace.clients.items())
        for figure, value in client.update.metrics.items()
    }
    return replace(trace.aggregate, metrics=figures)


def require(seen: Observation, *facts: Knowledge) -> None:
    """Raise `NotDisclosedError` unless the observation holds all these facts."""
    for fact in facts:
        value = seen.update.buffers if fact is Knowledge.BUFFERS else getattr(seen, fact.value)
        if value is None:
            raise NotDisclosedError(
                f"the attack needs {fact.value!r}, which the threat model does not disclose; "
                f"add it to knows, or choose an attack that infers it"
            )


def _disclosed(targets: Tensor, count: int | None) -> Tensor:
    """Sorted targets; if the count is unknown, each distinct one once."""
    if count is None:
        distinct: Tensor = targets.unique(dim=0)
        return distinct
    order = sorted(range(len(targets)), key=lambda row: targets[row].tolist())
    return targets[torch.tensor(order, dtype=torch.long)]
