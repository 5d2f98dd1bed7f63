"""The plan of an audit: every attack on every defense, each on the same victims. Nothing runs here.

The randomness of a trial depends on its number alone. So the victim, its examples, an untrained network and an attack's
first guess are the same for every defense, and scores of two defenses can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from leaktight.audits.settings import AuditSettings
from leaktight.audits.watching import check_watched, watched_training
from leaktight.core.errors import UsageError, suggestion
from leaktight.core.files import slug
from leaktight.core.inputs import require_inputs
from leaktight.core.protocols import ActiveAttack, Attack, Defense, LabelSource
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.training import LocalTraining
from leaktight.fl.federation import Federation
from leaktight.metrics import metric_spec
from leaktight.models.initialise import build_model
from leaktight.models.source import ModelSource
from leaktight.results.schema import UNDEFENDED, Role, Track

T = TypeVar("T")

RANDOM_INITS = ("default", "wide", "kaiming")
LABELS_FOUND = ("inferred", "searched")
"""Values of `Attack.labels_from` for which labels are scored: the attack was not given them."""
CONTROLS_KNOW = frozenset({Knowledge.LABELS, Knowledge.BATCH_SIZE, Knowledge.PUBLIC_DATA})
"""What a control is told besides what the attacker is told."""
GIVEN = "given"
"""The weights of a network that a Python caller gives."""


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A defense or attack with its name in the results. settings: its fields as TOML has them."""

    name: str
    settings: Mapping[str, Any]
    value: T


@dataclass(frozen=True)
class AttackEntry(Entry[Attack]):
    """role: "attack", or "control", which is given no update. against: the defense it is adapted to; None for all.

    undefended: only tried without a defense, as the positive control of the same attack in production.
    reads_labels: it needs labels that are not disclosed and has no rule of its own, so one reads them for it.
    """

    role: Role = "attack"
    against: str | None = None
    undefended: bool = False
    reads_labels: bool = False

    @property
    def adaptive(self) -> bool:
        return self.against is not None

    @property
    def labels_from(self) -> LabelSource:
        """How the labels of its guess are come by."""
        return "inferred" if self.reads_labels else self.value.labels_from

    def meets(self, defense: str) -> bool:
        """Whether the attack is tried on this defense."""
        return defense == UNDEFENDED if self.undefended else self.against in (None, defense)

    def threat(self, base: ThreatModel) -> ThreatModel:
        """The threat model of this attack: an adaptive one also knows the defense; a control also labels, their number
        and public data.

        An attack that finds labels by itself is not told them, so what it reads it has read. The server is curious
        unless the attack changes the model.
        """
        extra = {Knowledge.DEFENSE} if self.adaptive else CONTROLS_KNOW if self.role == "control" else frozenset()
        hidden = {Knowledge.LABELS} if self.role == "attack" and self.labels_from in LABELS_FOUND else set()
        server = base.server if isinstance(self.value, ActiveAttack) else "curious"
        return replace(base, server=server, knows=(base.knows | extra) - hidden)


@dataclass(frozen=True)
class TrialSpec:
    """One attack on one victim with one defense in one round. id: the same in all runs of the same settings."""

    id: str
    defense: Entry[Defense]
    attack: AttackEntry
    trial: int
    round: int


@dataclass(frozen=True)
class Experiment:
    """A scenario, and the defenses and attacks to try in it.

    federation: without a defense, with the network that training starts from.
    source, init: the network and its initial weights, so that every trial of an untrained one can make its own.
    attacked: the local training of the attacked round; `federation` has that of all other rounds.
    track: whether updates are easy to attack (diagnostic), or those of the federation's own training (production).
    helpless: by defense, why there is no attacker who knows it here.
    """

    seed: int
    federation: Federation
    source: ModelSource
    init: str
    attacked: LocalTraining
    threat: ThreatModel
    defenses: Sequence[Entry[Defense]]
    attacks: Sequence[AttackEntry]
    settings: AuditSettings
    data_root: Path
    track: Track = "diagnostic"
    helpless: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        played = self.federation.plan.rounds
        if self.rounds[-1] >= played:
            raise UsageError(
                f"expected attacked rounds below federation.rounds, got round {self.rounds[-1]} of {played}; "
                "rounds count from 0"
            )
        attacks = ((entry.name, entry.value) for entry in self.attacks)
        check_watched(self.settings, attacks, last=self.rounds[-1], played=played)
        for name in self.settings.targets:
            if name not in self.federation.shares:
                raise UsageError(f"audit.targets: no client {name!r}; {suggestion(name, self.federation.shares)}")
        if self.defenses[0].name != UNDEFENDED:
            raise UsageError(
                f"expected the defense 'none' first, got {self.defenses[0].name!r}; verdicts compare with it"
            )
        takes = [
            *((entry.name, entry.value.takes) for entry in self.defenses),
            *((entry.name, entry.value.takes) for entry in self.attacks),
            *((name, metric_spec(name).takes) for name in self.settings.image_metrics),
        ]
        for name, kinds in takes:
            require_inputs(name, kinds, self.federation.dataset.inputs)

    @property
    def rounds(self) -> tuple[int, ...]:
        return self.settings.rounds(self.federation.plan.rounds)

    @property
    def trains(self) -> bool:
        """Whether there are rounds before the attacked ones."""
        return self.rounds != (0,)

    @cached_property
    def trials(self) -> tuple[TrialSpec, ...]:
        """All trials that the run may need, by number, so that an interrupted run has equally many of each defense."""
        return tuple(
            TrialSpec(self._identity(defense, attack, trial, round_index), defense, attack, trial, round_index)
            for trial in range(self.settings.looks[-1])
            for round_index in self.rounds
            for defense in self.defenses
            for attack in self.attacks
            if attack.meets(defense.name)
        )

    def _identity(self, defense: Entry[Defense], attack: AttackEntry, trial: int, round_index: int) -> str:
        kind = f"{slug(attack.name)}.adaptive" if attack.adaptive else slug(attack.name)
        first = "production." if self.track == "production" else ""
        return f"{first}{slug(defense.name)}.{kind}.t{trial:03d}.r{round_index:03d}"

    @cached_property
    def by_id(self) -> dict[str, TrialSpec]:
        return {spec.id: spec for spec in self.trials}

    def victims_of(self, attack: AttackEntry, defense: Entry[Defense]) -> int:
        """The most trials that the run may need of an attack on the network that a defense leaves or makes."""
        alike = [each for each in self.defenses if attack.meets(each.name) and not _has_own_network(each.value)]
        own = _has_own_network(defense.value)
        return self.settings.looks[-1] * len(self.rounds) * (1 if own else len(alike))

    def keyed(self, key: bytes) -> Experiment:
        """The experiment with this key for all secret randomness of clients."""
        return replace(self, federation=self.federation.keyed(key))

    def rng(self, trial: int) -> Rng:
        """The random streams of a trial; clients draw their secrets from the federation's key."""
        return Rng(self.seed, key=self.federation.rng.key).child("trial", trial)

    def victim(self, trial: int) -> str:
        """The client that a trial attacks: the next of the targets, or of all clients in a random order."""
        if self.settings.targets:
            return self.settings.targets[trial % len(self.settings.targets)]
        names = sorted(self.federation.shares)
        order = torch.randperm(len(names), generator=Rng(self.seed).child("victims").public())
        return names[int(order[trial % len(names)])]

    def trained(self, defense: Entry[Defense]) -> Federation:
        """The federation of the rounds before the attacked ones."""
        return self.federation.with_defense(defense.value)

    def attacked_federation(self, defense: Defense, trial: int) -> Federation:
        """The federation of an attacked round: the victim alone, or those whose sum the attacker sees."""
        rng = self.rng(trial).child("federation")
        base = self.federation
        model = base.trainer.model
        if not self.trains and self.init in RANDOM_INITS:
            inputs, classes = base.dataset.inputs, base.dataset.num_classes
            model = build_model(self.source, inputs, classes, init=self.init, rng=self.rng(trial).child("model"))
        drawn = (self.victim(trial),) if self.threat.sees == "client" else self.members(trial)
        alone = replace(base, plan=replace(base.plan, min_clients=None), rng=rng, drawn=drawn)
        local = watched_training(self.settings, self.attacked)
        return alone.with_trainer(model=model, local=local).with_defense(defense)

    def members(self, trial: int) -> tuple[str, ...]:
        """The clients of the victim's rounds: the victim, and others drawn at random."""
        victim = self.victim(trial)
        others = [name for name in sorted(self.federation.shares) if name != victim]
        order = torch.randperm(len(others), generator=self.rng(trial).child("members").public()).tolist()
        number = self.federation.plan.per_round or len(self.federation.shares)
        return (victim, *(others[place] for place in order[: number - 1]))


def named(kinds: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A distinct name for each method: its kind, and the settings in which it differs from others of its kind.

    >>> named(["noise", "noise", "lrp"], [{"std": 0.1, "law": "normal"}, {"std": 0.2, "law": "normal"}, {}])
    ['noise(std=0.1)', 'noise(std=0.2)', 'lrp']
    """
    names = []
    for kind, own in zip(kinds, settings, strict=True):
        kin = [other for name, other in zip(kinds, settings, strict=True) if name == kind]
        differing = [key for key in own if any(other.get(key) != own[key] for other in kin)]
        names.append(f"{kind}({', '.join(f'{key}={own[key]}' for key in differing)})" if differing else kind)
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise UsageError(f"{repeated!r} is listed twice with the same settings; leave one out")
    return names


def _has_own_network(defense: Defense) -> bool:
    return type(defense).prepare is not Defense.prepare
