"""What is wrong with a plan: attacks that cannot run, work that does not end, memory that is not there; what to change.

Changes are made one after another, those that change the least of what is found out first, until the plan takes an hour
at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from leaktight.adaptive.auto import MOST_SIMULATED
from leaktight.attacks.presets.preset import Preset
from leaktight.audits.forecast import Item, Measured
from leaktight.report.words import counted, listed
from leaktight.results.forecast import Change, Problem

LONG = 8 * 3600.0
"""Seconds from which on a plan is said not to end in reasonable time."""
GOOD = 3600.0
"""Seconds that a plan takes after the suggested changes, where that is possible."""
FEW_EXAMPLES, FEW_VICTIMS, FEWEST_ITERATIONS = 8, 5, 20
GIGABYTE = 2**30


class Changed(NamedTuple):
    """A change of a setting, and the plan with it."""

    setting: str
    value: str
    plan: Measured


def duration(seconds: float) -> str:
    """A time in words, with one unit.

    >>> duration(40), duration(4000), duration(4e5), duration(1e9)
    ('40 seconds', '1.1 hours', '4.6 days', '32 years')
    """
    sizes = (("year", 365.25 * 86400), ("day", 86400.0), ("hour", 3600.0), ("minute", 60.0))
    unit, size = next(((unit, size) for unit, size in sizes if seconds >= size), ("second", 1.0))
    value = f"{seconds / size:.1f}" if unit != "second" and seconds / size < 10 else f"{seconds / size:.0f}"
    value = value.removesuffix(".0")
    return f"{value} {unit}" if value == "1" else f"{value} {unit}s"


def problems_of(measured: Measured, *, budget: float | None = None) -> list[Problem]:
    """The problems of a plan. budget: minutes after which no trial starts; such a plan ends in any case."""
    endless = () if budget is not None and not measured.trainings else _too_long(measured)
    return [*_failing(measured.items), *endless, *_too_large(measured)]


def _failing(items: Sequence[Item]) -> Iterator[Problem]:
    reasons: dict[str, list[str]] = {}
    for item in items:
        if item.cost.error is not None:
            name = f"{item.entry.name} knowing {item.entry.against}" if item.entry.adaptive else item.entry.name
            reasons.setdefault(item.cost.error, []).append(name)
    for reason, names in reasons.items():
        yield Problem(what=f"{listed(dict.fromkeys(names))} cannot run here: {reason}")


def _too_long(measured: Measured) -> Iterator[Problem]:
    seconds = measured.total(least=True)
    if seconds > LONG:
        ways = (_one_batch, _fewer_examples, _fewer_victims, _fewer_iterations, _fewer_rounds)
        what = f"the plan does not end in reasonable time: about {duration(seconds)}; {_reasons(measured)}"
        yield Problem(what=what, changes=tuple(_changes(measured, ways)))


def _too_large(measured: Measured) -> Iterator[Problem]:
    memory = measured.memory
    if memory.machine is None or memory.total <= memory.machine:
        return
    fitting = (memory.machine - measured.base) // max(1, memory.process)
    changes = list(_changes(measured, (_one_batch, _fewer_examples), enough=0.0))
    if fitting >= 1 and measured.processes > 1:
        slower = replace(measured, processes=fitting).total(least=True)
        changes = [Change(setting="--workers", value=str(fitting), seconds=slower)]
    sizes = [f"{size / GIGABYTE:.1f} GB" for size in (memory.total, memory.machine)]
    yield Problem(what=f"the plan needs about {sizes[0]} of memory, the machine has {sizes[1]}", changes=tuple(changes))


def _changes(
    measured: Measured, ways: Sequence[Callable[[Measured], Changed | None]], enough: float = GOOD
) -> Iterator[Change]:
    """The changes of a plan, each on top of the ones before, until it takes no more than `enough` seconds."""
    for way in ways:
        if measured.total(least=True) <= enough or (changed := way(measured)) is None:
            continue
        measured = changed.plan
        yield Change(setting=changed.setting, value=changed.value, seconds=measured.total(least=True))


def _reasons(measured: Measured) -> str:
    """What makes a plan long, in words."""
    parts = []
    training = sum(work.rounds * work.clients * work.seconds for work in measured.trainings)
    trials = sum(item.least * item.cost.seconds for item in measured.items)
    if training > trials / 3:
        rounds, clients = sum(work.rounds for work in measured.trainings), measured.trainings[0].clients
        each = duration(max(work.seconds for work in measured.trainings))
        parts.append(f"{counted(rounds, 'training round')} of {counted(clients, 'client')}, {each} each")
    if measured.items and trials > training / 3:
        worst = _heaviest(measured)
        load = worst.load
        steps = f" in {counted(load.steps, 'local step')}" if load.steps > 1 else ""
        how = ", which are simulated" if worst.simulated and load.steps > 1 else ""
        parts.append(f"{counted(load.examples, 'example')} behind an update{steps}{how}")
        number = counted(sum(item.least for item in measured.items), "trial")
        parts.append(f"{number}, of which one of {worst.entry.name} takes {duration(worst.cost.seconds)}")
    return "; ".join(parts)


def _heaviest(measured: Measured) -> Item:
    return max(measured.items, key=lambda item: item.least * item.cost.seconds)


def _with_costs(measured: Measured, share: Callable[[Item], tuple[float, float]]) -> Measured:
    """The plan with other costs. share: of an item, for its attack, and for the round and the judge."""
    items = []
    for item in measured.items:
        search, rest = share(item)
        cost = replace(
            item.cost, attack=item.cost.attack * search, play=item.cost.play * rest, judge=item.cost.judge * rest
        )
        items.append(replace(item, cost=cost))
    return replace(measured, items=items)


def _one_batch(measured: Measured) -> Changed | None:
    """Match many local steps as one."""
    many = [
        item
        for item in measured.items
        if item.simulated and item.load.steps > MOST_SIMULATED and _preset(item) is not None
    ]
    if not many:
        return None
    names = {item.entry.name for item in many}

    def share(item: Item) -> tuple[float, float]:
        load = item.load
        return (load.examples / load.passes if item.entry.name in names else 1.0), 1.0

    kinds = sorted({_kind(item) for item in many})
    setting = " and ".join(f"attack.{kind}.local" for kind in kinds)
    return Changed(setting, "one_batch", _with_costs(measured, share))


def _fewer_examples(measured: Measured) -> Changed | None:
    if not measured.items:
        return None
    worst = _heaviest(measured)
    if worst.load.examples <= FEW_EXAMPLES or worst.batch is None:
        return None
    table = "production.local" if worst.track == "production" else "audit.local"
    setting = f"{table}.samples = {FEW_EXAMPLES} and {table}.batch_size"
    fewer = FEW_EXAMPLES / worst.load.examples

    def share(item: Item) -> tuple[float, float]:
        return (fewer, fewer) if item.track == worst.track else (1.0, 1.0)

    return Changed(setting, str(min(FEW_EXAMPLES, worst.batch)), _with_costs(measured, share))


def _fewer_victims(measured: Measured) -> Changed | None:
    victims = max((item.victims for item in measured.items), default=0)
    if victims <= FEW_VICTIMS:
        return None
    items = [replace(item, least=max(1, item.least * FEW_VICTIMS // victims)) for item in measured.items]
    return Changed("audit.trials", str(FEW_VICTIMS), replace(measured, items=items))


def _fewer_iterations(measured: Measured) -> Changed | None:
    if not measured.items or (preset := _preset(worst := _heaviest(measured))) is None:
        return None
    value = max(FEWEST_ITERATIONS, round(preset.iterations * GOOD / measured.total(least=True)))
    if value >= preset.iterations:
        return None

    def share(item: Item) -> tuple[float, float]:
        return (value / preset.iterations if item.entry.name == worst.entry.name else 1.0), 1.0

    return Changed(f"attack.{_kind(worst)}.iterations", str(value), _with_costs(measured, share))


def _fewer_rounds(measured: Measured) -> Changed | None:
    rounds = max((work.rounds for work in measured.trainings), default=0)
    value = max(1, int(rounds * GOOD / measured.total(least=True)))
    if value >= rounds:
        return None
    works = [work.model_copy(update={"rounds": max(1, work.rounds * value // rounds)}) for work in measured.trainings]
    return Changed("federation.rounds", str(value), replace(measured, trainings=works))


def _preset(item: Item) -> Preset | None:
    """The attack, or the one that was adapted, if it has a number of iterations and a way to match steps."""
    attack = getattr(item.entry.value, "attack", item.entry.value)
    return attack if isinstance(attack, Preset) else None


def _kind(item: Item) -> str:
    """The kind of an attack, without the settings in its name."""
    return item.entry.name.partition("(")[0]
