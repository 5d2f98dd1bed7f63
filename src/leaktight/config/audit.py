"""From a configuration to an experiment: what is tried where a config does not say, and the scenario in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from leaktight.adaptive.table import ADAPTIVE
from leaktight.attacks.controls import MeanImage, NearestPublicImage, PriorOnly
from leaktight.attacks.labels.rules import BiasCorrected, Geng, Given
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.audit.plan import AttackEntry, Entry, Experiment, named
from leaktight.audit.settings import AuditSettings
from leaktight.config.catalogue import ATTACKS
from leaktight.config.scenario import build_federation
from leaktight.config.settings import Config
from leaktight.config.toml import kind_of, settings_of
from leaktight.core.errors import ConfigError, suggestion
from leaktight.core.protocols import Attack, Defense
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.training import LocalTraining
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Partition
from leaktight.data.sources import data_root
from leaktight.defenses.compression import GradientCompression
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.outpost import Outpost
from leaktight.fl.federation import Federation

OWN_SCENARIO = """
[partition]
kind = "iid"
clients = 20
[model]
kind = "lenet_zhu"
init = "wide"
activation = "sigmoid"
[local]
learning_rate = 0.2
[federation]
rounds = 20
[threat]
knows = ["batch_size", "buffers", "labels", "local_training"]
[audit]
trials = 5
adapted = ["csdlg"]
[audit.local]
epochs = 1
samples = 1
batch_size = 1
"""
"""What is attacked without a config: updates of one example in one step, labels known, weights that leak well.

No real update is easier, so this is an upper bound. With a model or data of a Python caller, attacks have their own
strength.
"""

AUDIT_SCENARIO = (
    OWN_SCENARIO
    + """
[[attack]]
kind = "csdlg"
iterations = 8
[[attack]]
kind = "dlg"
iterations = 15
restarts = 1
[[attack]]
kind = "inverting_gradients"
iterations = 400
learning_rate = 0.1
"""
)
"""The same with attacks that are quick on the built-in data and network."""

CONTROLS = (PriorOnly, MeanImage, NearestPublicImage)
SMALL_NETWORK = 200_000


def complete(config: Config, *, trials: int | None, defenses_named: bool) -> Config:
    """The config with all that an audit needs: attacks and controls, the undefended federation first, settings.

    defenses_named: whether the command named them, so that "none" alone is meant.
    """
    defenses = tuple(each for each in config.defenses if type(each) is not Defense)
    if not defenses and not defenses_named:
        defenses = (Outpost(), GradientCompression(), AdditiveNoise(noise_std=0.01))
    attacks = config.attacks
    if all(isinstance(each, CONTROLS) for each in attacks):
        attacks = (*_default_attacks(config.threat), *attacks)
    if not any(isinstance(each, CONTROLS) for each in attacks):
        attacks = (*attacks, PriorOnly(iterations=200, labels=_blind_labels(config.threat)), MeanImage())
    audit = config.audit or AuditSettings()
    return replace(
        config,
        defenses=(Defense(), *defenses),
        attacks=attacks,
        audit=audit if trials is None else replace(audit, trials=trials),
    )


def _default_attacks(threat: ThreatModel) -> tuple[Attack, ...]:
    """Three published attacks at their full strength; labels are inferred where the attacker does not know them."""
    labels = None if Knowledge.LABELS in threat.knows else Geng()
    return CsDlg(labels=labels), Dlg(), InvertingGradients(labels=labels)


def _blind_labels(threat: ThreatModel) -> Given | BiasCorrected:
    return Given() if Knowledge.LABELS in threat.knows else BiasCorrected()


def build_experiment(config: Config, dataset: Dataset, partition: Partition, *, adaptive: bool) -> Experiment:
    """The experiment of a complete config. adaptive: also attack each defense with the attackers who know it."""
    federation = build_federation(replace(config, defenses=(Defense(),)), dataset, partition)
    small = sum(tensor.numel() for tensor in federation.trainer.model.parameters()) < SMALL_NETWORK
    attacks = [reproducible(each, small=small) for each in config.attacks]
    defenses = _entries(config.defenses)
    entries = [
        AttackEntry(name, settings_of(each), each, "control" if isinstance(each, CONTROLS) else "attack")
        for name, each in zip(_names(attacks), attacks, strict=True)
    ]
    adaptable = _adaptable(entries, (config.audit or AuditSettings()).adapted) if adaptive else []
    knowing = [made for defense in defenses for made in _adapted(adaptable, defense)]
    experiment = Experiment(
        seed=config.seed,
        federation=federation,
        source=config.model.source,
        init=config.model.init,
        attacked=config.attacked or config.local,
        threat=config.threat,
        defenses=defenses,
        attacks=(*entries, *knowing),
        settings=config.audit or AuditSettings(),
        data_root=data_root(config.data_root),
    )
    experiment.attacked_federation(Defense(), 0)  # settings that do not fit the data fail here, not in a worker
    return experiment


def reproducible(attack: Attack, *, small: bool) -> Attack:
    """The attack with everything fixed that would otherwise depend on the machine's mood, and watched from its start.

    Left open, a few timed iterations choose between two kernels that differ in the last bits. Small networks are faster
    without oneDNN.
    """
    settings = {field.name: getattr(attack, field.name) for field in fields(attack)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    if "onednn" in settings and settings["onednn"] is None:
        changes["onednn"] = not small
    if "progress_every" in settings:
        changes["progress_every"] = 1
    return replace(attack, **changes) if changes else attack  # type: ignore[type-var]


def _adaptable(entries: Sequence[AttackEntry], kinds: Sequence[str]) -> list[AttackEntry]:
    """The attacks of these kinds; all where none of them is tried, or none is named."""
    for kind in kinds:
        if kind not in ATTACKS:
            raise ConfigError(f"audit.adapted: unknown attack {kind!r}; {suggestion(kind, ATTACKS)}")
    attacks = [entry for entry in entries if entry.role == "attack"]
    return [entry for entry in attacks if kind_of(entry.value) in kinds] or attacks


def _adapted(entries: Sequence[AttackEntry], defense: Entry[Defense]) -> list[AttackEntry]:
    """The attacks made for a defense."""
    adapt = ADAPTIVE.get(type(defense.value))
    if adapt is None:
        return []
    made = [(entry, adapt(entry.value, defense.value)) for entry in entries]
    return [
        AttackEntry(entry.name, settings_of(attack), attack, against=defense.name)
        for entry, attack in made
        if attack is not None
    ]


def _entries(defenses: Sequence[Defense]) -> list[Entry[Defense]]:
    return [Entry(name, settings_of(each), each) for name, each in zip(_names(defenses), defenses, strict=True)]


def _names(methods: Sequence[Any]) -> list[str]:
    kinds = [kind_of(each) or type(each).__name__ for each in methods]
    return named(kinds, [settings_of(each) for each in methods])


def scenario_facts(config: Config, experiment: Experiment) -> dict[str, Any]:
    """The scenario in plain words."""
    federation = experiment.federation
    shape = federation.dataset.shape
    parameters = sum(tensor.numel() for tensor in federation.trainer.model.parameters())
    return {
        "data": f"{federation.dataset.name}: {len(federation.dataset.train)} training examples, "
        f"{shape.channels} x {shape.height} x {shape.width}, {federation.dataset.num_classes} classes",
        "model": f"{kind_of(config.model.source) or 'own model'}, {parameters} parameters, "
        f"weights: {config.model.init}, {config.model.mode} mode",
        "clients": f"{len(federation.shares)} ({kind_of(config.partition)}), "
        f"{federation.plan.per_round or len(federation.shares)} in a round, {kind_of(config.aggregator)}",
        "attacked update": _local_words(experiment.attacked, federation),
        "local": _local_words(federation.trainer.local, federation),
        "attacked rounds": ", ".join(str(each) for each in experiment.rounds),
        "trials": experiment.settings.trials,
    }


def _local_words(local: LocalTraining, federation: Federation) -> str:
    sizes = federation.sizes.values()
    used = [min(local.samples or size, size) for size in (min(sizes), max(sizes))]
    steps = [local.num_steps(size) for size in (min(sizes), max(sizes))]
    return (
        f"{_span(used, 'example')}, {_span(steps, f'{local.optimizer} step')} of {local.batch_size} at learning rate "
        f"{local.learning_rate:g}"
    )


def _span(ends: Sequence[int], noun: str) -> str:
    """
    >>> _span([1, 1], "step"), _span([3, 5], "step")
    ('1 step', '3 to 5 steps')
    """
    number = str(ends[0]) if ends[0] == ends[-1] else f"{ends[0]} to {ends[-1]}"
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"
