"""The cost of an inspection: its attacks, each run for a moment on the captured update itself."""

from __future__ import annotations

from collections.abc import Sequence

from leaktight.audits.footprint import bytes_of, search_bytes
from leaktight.audits.forecast import LIMIT, Item, Measured, crude_attack, rehearsing
from leaktight.audits.plan import AttackEntry
from leaktight.audits.rehearsal import Load, Rehearsed, load_of, seconds_of_example, steps_of, timed
from leaktight.audits.trial import reason_of
from leaktight.core.faults import raise_fault
from leaktight.core.rng import Rng
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch
from leaktight.fl.local import Trainer
from leaktight.inspections.inspection import Inspection

MOST_STEP = 1.0
"""Seconds of one evaluation of a search from which on it is not run, but computed from one gradient."""


def measure_inspection(inspection: Inspection, *, processes: int, preload: Sequence[str]) -> Measured:
    """Rehearse the attacks on a captured update. preload: modules that a worker imports."""
    load = captured_load(inspection)
    trainer, batch = _probe(inspection)
    with rehearsing(processes, preload) as notes:
        step = seconds_of_example(trainer, batch)
        notes.items = [
            Item("diagnostic", entry, load, None, 1, 1, 1, _cost(inspection, entry, load, step))
            for entry in inspection.attacks
        ]
        costs = bytes_of(trainer, batch)
        notes.peak = max(search_bytes(item.entry.value, load, costs) for item in notes.items)
    return notes.measured()


def crude_seconds(inspection: Inspection) -> float:
    """A quick guess of the seconds of all attacks, from one gradient."""
    load, step = captured_load(inspection), seconds_of_example(*_probe(inspection))
    return sum(crude_attack(entry.value, load, step) for entry in inspection.attacks)


def _probe(inspection: Inspection) -> tuple[Trainer, Batch]:
    """The network, and four blank examples."""
    seen = inspection.captured.seen
    targets = seen.task.blind_targets(4, seen.num_classes, Rng(0).public())
    batch = Batch(seen.inputs.blank(4, next(iter(seen.broadcast.params.values()))), targets)
    return Trainer(seen.model, LocalTraining(), seen.task, mode=seen.mode or "train"), batch


def captured_load(inspection: Inspection) -> Load:
    """The work behind the captured update, as far as it was stated."""
    settings = inspection.captured.settings
    number, local = settings.num_examples, inspection.captured.seen.local_training
    return Load(number, 1, number) if local is None else load_of(local, number)


def _cost(inspection: Inspection, entry: AttackEntry, load: Load, step: float) -> Rehearsed:
    """The cost of an attack. step: the seconds of a gradient of one example."""
    crude = crude_attack(entry.value, load, step)
    if crude > MOST_STEP * steps_of(entry.value) > MOST_STEP:
        return Rehearsed(0.0, crude, 0.0, None, False)
    rng = Rng(inspection.seed).child("inspect", entry.name).detached()
    try:
        seconds, _, whole = timed(entry.value, [inspection.shown(entry)], rng=rng, limit=LIMIT)
    except Exception as error:  # as in a trial, the attack is to blame
        raise_fault(error)
        return Rehearsed(0.0, 0.0, 0.0, reason_of(error))
    return Rehearsed(0.0, seconds, 0.0, None, whole)
