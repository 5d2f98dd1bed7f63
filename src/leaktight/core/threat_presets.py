"""Named threat models: who the attacker is, in a sentence, and the facts that this stands for. Imports nothing slow.

The letters are those of Carletti et al., "SoK: Gradient Inversion Attacks in Federated Learning", USENIX Security 2025;
docs/threat-models.md explains how presets and letters compare.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

FACTS: Mapping[str, str] = {
    "labels": "the labels",
    "batch_size": "the number of examples",
    "local_training": "the local training",
    "buffers": "the batch statistics",
    "defense": "the defense",
    "public_data": "public data",
}
"""What an attacker may know, in words."""

_RUNS_IT = ("batch_size", "buffers", "local_training")
"""What a server knows that runs the federation."""


@dataclass(frozen=True, kw_only=True)
class ThreatPreset:
    """A named threat model.

    sentence: who the attacker is. letter: the threat model of Carletti et al. that comes nearest. beyond: how it
    differs from that one; empty if it does not. server, sees, knows: as in `ThreatModel`; knows is sorted.
    """

    sentence: str
    letter: Literal["A", "B", "C", "D", "E", "F", "G", "H"]
    beyond: str = ""
    server: Literal["curious", "malicious"] = "curious"
    sees: Literal["client", "aggregate"] = "client"
    knows: tuple[str, ...] = _RUNS_IT


PRESETS: Mapping[str, ThreatPreset] = {
    "diagnostic": ThreatPreset(
        sentence="The worst case for one update: a curious server that is also told the labels of the examples.",
        letter="C",
        beyond="labels are told",
        knows=tuple(sorted((*_RUNS_IT, "labels"))),
    ),
    "curious_server": ThreatPreset(
        sentence="A server that follows the protocol and reads each client's update; it knows the local training and "
        "the number of examples, but no labels.",
        letter="C",
    ),
    "informed_server": ThreatPreset(
        sentence="A curious server that also knows the clients' defense and its settings, but none of its secrets.",
        letter="C",
        beyond="the defense is known",
        knows=tuple(sorted((*_RUNS_IT, "defense"))),
    ),
    "server_with_public_data": ThreatPreset(
        sentence="A curious server that also holds public data of the same kind as the clients'.",
        letter="D",
        knows=tuple(sorted((*_RUNS_IT, "public_data"))),
    ),
    "eavesdropper": ThreatPreset(
        sentence="Somebody who reads the model and one client's update on their way, and knows nothing else.",
        letter="A",
        knows=(),
    ),
    "aggregate_observer": ThreatPreset(
        sentence="A curious server that sees only the sum of all updates of a round, as with secure aggregation.",
        letter="C",
        beyond="only the sum of a round is seen",
        sees="aggregate",
    ),
    "malicious_server": ThreatPreset(
        sentence="A server that may also change the model that it sends to clients, and ask again.",
        letter="F",
        server="malicious",
    ),
    "malicious_server_with_public_data": ThreatPreset(
        sentence="A malicious server that also holds public data of the same kind as the clients'.",
        letter="G",
        server="malicious",
        knows=tuple(sorted((*_RUNS_IT, "public_data"))),
    ),
    "malicious_aggregate_observer": ThreatPreset(
        sentence="A server that may change the model that it sends, but sees only the sum of all updates of a round.",
        letter="F",
        beyond="only the sum of a round is seen",
        server="malicious",
        sees="aggregate",
    ),
}
"""All presets by name."""


@dataclass(frozen=True)
class Placed:
    """A threat model beside the presets. preset: the nearest one's name. also, without: the facts that differ."""

    preset: str
    also: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not self.also and not self.without

    @property
    def sentence(self) -> str:
        """Who the attacker is, with the facts in which it differs from the preset."""
        more = [f"It also knows {_listed(self.also)}."] if self.also else []
        less = [f"It does not know {_listed(self.without)}."] if self.without else []
        return " ".join([PRESETS[self.preset].sentence, *more, *less])


def placed(server: str, sees: str, knows: Collection[str]) -> Placed:
    """The preset with this server and view whose facts differ the least; among several, the one that knows more.

    >>> placed("curious", "client", ["batch_size", "local_training", "buffers"])
    Placed(preset='curious_server', also=(), without=())
    >>> placed("curious", "client", ["batch_size", "local_training", "buffers", "labels", "defense"])
    Placed(preset='diagnostic', also=('defense',), without=())
    """
    facts = set(knows)
    alike = {name: each for name, each in PRESETS.items() if each.sees == sees and each.server == server}
    nearest = min(alike, key=lambda name: (len(facts ^ {*alike[name].knows}), -len(alike[name].knows)))
    own = set(alike[nearest].knows)
    return Placed(nearest, tuple(sorted(facts - own)), tuple(sorted(own - facts)))


def _listed(facts: Collection[str]) -> str:
    words = [FACTS.get(fact, fact) for fact in facts]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
