"""Builds an audit's experiment from a configuration: default attacks and defenses, and facts for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from leaktight.adaptive.auto import LARGE, Auto, Budget
from leaktight.adaptive.knowing import Case
from leaktight.adaptive.table import adapt, unable
from leaktight.attacks.controls import Control, MeanImage, PriorOnly, PublicImage
from leaktight.attacks.labels.rules import Inferred
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.presets.preset import Preset
from leaktight.audits.plan import AttackEntry, Entry, Experiment, named
from leaktight.audits.requirements import check_requirements
from leaktight.audits.settings import AuditSettings
from leaktight.config.catalogue import ATTACKS, DEFENSES
from leaktight.config.fields import require_names
from leaktight.config.growth import joined
from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import Config
from leaktight.config.tables import PRODUCTION, Table, as_list
from leaktight.config.toml import kind_of, settings_of
from leaktight.core.errors import ConfigError, UsageError
from leaktight.core.protocols import Attack, Defense
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.training import LocalTraining
from leaktight.data.dataset import Dataset, data_root
from leaktight.data.partition import Partition
from leaktight.defenses.compression import GradientCompression
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.outpost import Outpost
from leaktight.fl.federation import Federation
from leaktight.report.words import defense_words, listed

CONTROLS = (Control,)
_NONE = {"kind": "none"}


def complete(
    config: Config,
    *,
    trials: int | Literal["auto"] | None = None,
    confidence: float | None = None,
    effort: Budget | None = None,
    defenses_named: bool,
    onto: Table | None = None,
) -> Config:
    """The config with defaults for an audit: attacks, controls, "none" as the first defense, settings.

    trials, confidence: override the settings unless None. effort: the budget of the attack `auto`. defenses_named: the
    caller chose the defenses; add no defaults. A production track has the defenses that its config names.
    onto: the tables of a run that grows; its attacks and defenses stay.
    """
    if onto is not None:
        config, defenses_named = _onto(config, onto), True
    said = {name: value for name, value in (("trials", trials), ("confidence", confidence)) if value is not None}
    production = config.production and _completed(config.production, said, defenses_named=True)
    completed = replace(_completed(config, said, defenses_named=defenses_named), production=production)
    return completed if effort is None else _trying(completed, effort)


def _onto(config: Config, held: Table) -> Config:
    """The config with the attacks and defenses of a run beside its own, in both tracks."""
    own, track = held.get(PRODUCTION), config.production
    fitting = tuple(_fitting(each, config.threat) for each in config.attacks)
    defended = [each for each in config.defenses if type(each) is not Defense]
    return replace(
        config,
        attacks=joined(ATTACKS, held.get("attack", []), fitting, last=CONTROLS),
        defenses=joined(DEFENSES, [each for each in as_list(held.get("defense", [])) if each != _NONE], defended),
        production=_onto(track, own) if track and isinstance(own, Mapping) else track,
    )


def _trying(config: Config, effort: Budget) -> Config:
    """The config with this budget for the attack `auto`, in both tracks; an error if it has no such attack."""
    tracks = [config] if config.production is None else [config, config.production]
    if not any(isinstance(each, Auto) for track in tracks for each in track.attacks):
        names = listed(_names([each for each in config.attacks if not isinstance(each, CONTROLS)]))
        raise UsageError(f"expected the attack auto for the budget {effort!r}, got {names}; add auto, or give minutes")
    own, *others = [
        replace(
            track,
            attacks=tuple(replace(each, budget=effort) if isinstance(each, Auto) else each for each in track.attacks),
        )
        for track in tracks
    ]
    return replace(own, production=others[0] if others else None)


def _completed(config: Config, said: Mapping[str, Any], *, defenses_named: bool) -> Config:
    defenses = tuple(each for each in config.defenses if type(each) is not Defense)
    if not defenses and not defenses_named:
        defenses = (Outpost(), GradientCompression(), AdditiveNoise())
    attacks = config.attacks
    if all(isinstance(each, CONTROLS) for each in attacks):
        attacks = (Auto(), *attacks)
    if not any(isinstance(each, CONTROLS) for each in attacks):
        attacks = (*attacks, PriorOnly(), MeanImage(), PublicImage())
    try:
        audit = replace(config.audit or AuditSettings(), **said)
    except ValueError as error:
        raise UsageError(str(error)) from error
    fitting = tuple(_fitting(each, config.threat) for each in attacks)
    return replace(config, defenses=(Defense(), *defenses), attacks=fitting, audit=audit)


def _fitting(attack: Attack, threat: ThreatModel) -> Attack:
    """An attack that can do without what the attacker is not told, if its settings leave that open.

    It infers labels where it names no strategy for them, and matches one step where the local training is unknown.
    """
    if isinstance(attack, Auto):
        return attack if Knowledge.LABELS in threat.knows else replace(attack, labels="inferred")
    if not isinstance(attack, Preset):
        return attack
    simulates = Knowledge.LOCAL_TRAINING in threat.knows
    if attack.labels is None and attack.wants_labels and Knowledge.LABELS not in threat.knows:
        attack = replace(attack, labels=Inferred())
    return attack if simulates else replace(attack, local="one_batch")


def must_read(attack: Attack) -> bool:
    """Whether labels that are not disclosed have to be read for an attack: it needs them, and has no setting for it."""
    return Knowledge.LABELS in attack.requires and not isinstance(attack, Preset | Matching | Control)


def build_tracks(config: Config, *, adaptive: bool) -> tuple[Experiment, Experiment | None]:
    """The experiments of a complete config: the diagnostic one, and that of the production track if there is one.

    adaptive: also attack each defense with knowledge of it. An attack of the production track is also tried on
    undefended diagnostic updates, to show that it works; with other settings than there, it has another name.
    """
    data = load_data(config)
    experiment = build_experiment(config, *data, adaptive=adaptive)
    own = config.production
    if own is None:
        return experiment, None
    if own.audit and own.audit.confidence != experiment.settings.confidence:
        raise ConfigError(
            f"[production.audit] expected confidence {experiment.settings.confidence}, the same for both tracks, got "
            f"{own.audit.confidence}; set it in [audit]"
        )
    same = (own.data, own.data_root, own.partition) == (config.data, config.data_root, config.partition)
    production = build_experiment(own, *(data if same else load_data(own)), adaptive=adaptive)
    production = replace(production, attacks=_told_apart(production.attacks, experiment.attacks))
    known = {each.name for each in experiment.attacks}
    missing = [each for each in production.attacks if not each.adaptive and each.name not in known]
    controls = [replace(each, undefended=True) for each in missing if each.role == "attack"]
    experiment = replace(experiment, attacks=(*experiment.attacks, *controls))
    return experiment, replace(production, track="production")


def build_experiment(config: Config, dataset: Dataset, partition: Partition, *, adaptive: bool) -> Experiment:
    """The experiment of a complete config. adaptive: also attack each defense with knowledge of it."""
    federation = build_federation(replace(config, defenses=(Defense(),)), dataset, partition)
    # Otherwise timed iterations would choose between kernels whose results differ in the last bits.
    onednn = not is_small(federation.trainer.model)  # small networks are faster without it
    attacks = [each.pinned(onednn=onednn) for each in config.attacks]
    defenses = _entries(config.defenses)
    entries = [
        AttackEntry(
            name,
            settings_of(each),
            each,
            "control" if isinstance(each, CONTROLS) else "attack",
            reads_labels=Knowledge.LABELS not in config.threat.knows and must_read(each),
        )
        for name, each in zip(_names(attacks), attacks, strict=True)
    ]
    adaptable = _adaptable(entries, (config.audit or AuditSettings()).adapted) if adaptive else []
    settings, attacked = config.audit or AuditSettings(), config.attacked or config.local
    case = _case(federation, attacked, settings, config.threat)
    reasons = {each.name: unable(each.value, case) for each in defenses[1:]} if adaptive else {}
    helpless = {name: reason for name, reason in reasons.items() if reason is not None}
    knowing = [made for each in defenses if each.name not in helpless for made in adapted(adaptable, each)]
    experiment = Experiment(
        seed=config.seed,
        federation=federation,
        source=config.model.source,
        init=config.model.init,
        attacked=attacked,
        threat=config.threat,
        defenses=defenses,
        attacks=(*entries, *knowing),
        settings=settings,
        data_root=data_root(config.data_root),
        helpless=helpless,
    )
    check_requirements(experiment)
    experiment.attacked_federation(Defense(), 0)  # fails here, not in a worker, if settings do not fit the data
    return experiment


def _case(federation: Federation, attacked: LocalTraining, settings: AuditSettings, threat: ThreatModel) -> Case:
    """The update of the largest client."""
    largest = max(federation.sizes.values())
    number = largest if attacked.samples is None else min(attacked.samples, largest)
    members = federation.plan.per_round or len(federation.shares)
    return Case(
        model=federation.trainer.model,
        num_examples=number,
        num_steps=attacked.num_steps(largest),
        round=settings.rounds(federation.plan.rounds)[-1],
        mode=federation.trainer.mode,
        watched=settings.watched,
        clients=1 if threat.sees == "client" else members,
    )


def _told_apart(attacks: Sequence[AttackEntry], others: Sequence[AttackEntry]) -> list[AttackEntry]:
    """The attacks; one that has the name of another track's attack, but other settings, also has these in its name."""
    theirs = {each.name: each.settings for each in others if each.role == "attack" and not each.adaptive}
    names = {
        each.name: named([each.name] * 2, [each.settings, theirs[each.name]])[0]
        for each in attacks
        if each.name in theirs and not each.adaptive and each.settings != theirs[each.name]
    }
    return [replace(each, name=names.get(each.name, each.name)) for each in attacks]


def is_small(model: nn.Module) -> bool:
    """Whether a network has fewer than 200,000 parameters."""
    return sum(tensor.numel() for tensor in model.parameters()) < LARGE


def _adaptable(entries: Sequence[AttackEntry], kinds: Sequence[str]) -> list[AttackEntry]:
    """The attacks of these kinds; all attacks if there are none."""
    require_names("attacks", kinds, "audit.adapted")
    attacks = [entry for entry in entries if entry.role == "attack"]
    return [entry for entry in attacks if kind_of(entry.value) in kinds] or attacks


def adapted(entries: Sequence[AttackEntry], defense: Entry[Defense]) -> list[AttackEntry]:
    """The adaptive attacks on a defense."""
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
    """Facts about the scenario, for readers of the results."""
    federation = experiment.federation
    return {
        **federation_facts(config, federation),
        "attacked update": _local_words(experiment.attacked, federation),
        "local": _local_words(federation.trainer.local, federation),
        "attacked rounds": ", ".join(str(each) for each in experiment.rounds),
        "victims": _victims(experiment.settings),
    }


def federation_facts(config: Config, federation: Federation) -> dict[str, Any]:
    """Facts about data, network and clients, for readers."""
    parameters = sum(tensor.numel() for tensor in federation.trainer.model.parameters())
    return {
        "data": f"{federation.dataset.name}: {len(federation.examples)} training examples, "
        f"{' x '.join(map(str, federation.dataset.inputs.shape))}, {federation.dataset.num_classes} classes"
        + (f"; {federation.dataset.note}" if federation.dataset.note else ""),
        "model": f"{kind_of(config.model.source) or 'own model'}, {parameters} parameters, "
        f"weights: {config.model.init}, {config.model.mode} mode",
        "clients": f"{len(federation.shares)} ({kind_of(config.partition)}), "
        f"{federation.plan.per_round or len(federation.shares)} in a round, {kind_of(config.aggregator)}",
    }


def production_fact(config: Config, experiment: Experiment) -> str:
    """The production track in a sentence, for readers of the results."""
    rounds = ", ".join(str(each) for each in experiment.rounds)
    attacks = listed(each.name for each in experiment.attacks if each.role == "attack" and not each.adaptive)
    defenses = listed(defense_words(each.name, each.settings) for each in experiment.defenses)
    return (
        f"{kind_of(config.model.source) or 'own model'}, weights: {config.model.init}, {config.model.mode} mode; "
        f"{_local_words(experiment.attacked, experiment.federation)}; attacked rounds: {rounds}; by {attacks} on "
        f"{defenses}; victims: {_victims(experiment.settings)}"
    )


def _victims(settings: AuditSettings) -> str:
    first, *more = settings.looks
    return f"{first}, and {more[0]} where they do not decide" if more else str(first)


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
