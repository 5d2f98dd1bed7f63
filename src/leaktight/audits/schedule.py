"""Which trials a run needs, by a fixed rule: a pure function of the plan and of the finished trials.

With a number of trials all of them are needed. `trials = "auto"` has two looks:

1. Every attack on every defense has 5 victims.
2. A defense is decided if one attack reconstructed at least half of its valid victims, which are at least 3. On the
   others, the attack that reconstructed most goes on to 20 victims, or to as many as `confidence` needs; where none
   did beyond chance, all attacks that reconstruct or identify without the defense, and their adaptive forms. So do
   the same attacks without it, and the controls.

The second look depends on the trials of the first alone, so an interrupted run goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from leaktight.audits.judge.cells import CellKey, CellTrials, gather
from leaktight.audits.judge.verdict import MOST, Panel
from leaktight.audits.plan import Experiment, TrialSpec
from leaktight.results.schema import Track, Trial, training_name

LEAST_VALID = 3
"""Valid victims that a defense needs to be decided at the first look."""

Place = tuple[Track, str]
"""A track and a defense."""


@dataclass(frozen=True)
class Wanted:
    """The trials that a run needs, as far as its finished trials tell.

    ids: of all of them, finished ones included. decided: the defenses that the first look decided. further: those that
    get more victims. Both are empty until all trials of the first look are done. looks: the victims at each look.
    names: of these defenses, for readers.
    """

    ids: tuple[str, ...]
    looks: tuple[int, ...]
    decided: tuple[Place, ...] = ()
    further: tuple[Place, ...] = ()
    names: Mapping[Place, str] = field(default_factory=dict)


def wanted(experiments: Sequence[Experiment], trials: Mapping[str, Trial]) -> Wanted:
    """The trials that these experiments need, one experiment for each track. trials: the finished ones by id."""
    specs = {each.id: (experiment, each) for experiment in experiments for each in experiment.trials}
    ordered = sorted(specs, key=lambda name: specs[name][1].trial)  # stable: tracks and defenses take turns
    first = [name for name in ordered if specs[name][1].trial < specs[name][0].settings.looks[0]]
    twice = {each.track: each.settings.looks for each in experiments if len(each.settings.looks) > 1}
    looks = next(iter(twice.values()), experiments[0].settings.looks)
    if not twice or any(name not in trials for name in first):
        return Wanted(tuple(first), looks)
    panel = Panel(gather([trials[name] for name in first]), experiments[0].settings.confidence, num_looks(experiments))
    groups: dict[Place, list[CellTrials]] = {}
    for cell in panel.attacks:
        if cell.track in twice:
            groups.setdefault((cell.track, cell.defense), []).append(cell)
    decided = [place for place, cells in groups.items() if _decided(panel, cells)]
    chosen = {place: _chosen(panel, cells) for place, cells in groups.items() if place not in decided}
    keys = {cell.key for cells in chosen.values() for cell in cells}
    keys |= {control.key for key in keys if (control := panel.positive_control(panel.cell(key))) is not None}
    places = {(key.track, key.defense) for key in keys}

    def more(experiment: Experiment, spec: TrialSpec) -> bool:
        if spec.attack.role == "control":
            return (experiment.track, spec.defense.name) in places
        return CellKey(experiment.track, spec.defense.name, spec.attack.name, spec.attack.adaptive) in keys

    early = set(first)
    return Wanted(
        tuple(name for name in ordered if name in early or more(*specs[name])),
        looks,
        tuple(decided),
        tuple(place for place, cells in chosen.items() if cells),
        {place: training_name(place[0], cells[0].named_defense) for place, cells in groups.items()},
    )


def num_looks(experiments: Sequence[Experiment]) -> int:
    """How often the rule looks at the results; tests are corrected for it."""
    return max(len(experiment.settings.looks) for experiment in experiments)


def fewest(experiments: Sequence[Experiment]) -> int:
    """The number of trials that are run in any case."""
    return len(wanted(experiments, {}).ids)


def _decided(panel: Panel, cells: Sequence[CellTrials]) -> bool:
    return any(
        panel.level(cell) == "reconstructed" and (cell.success_rate or 0) >= MOST and len(cell.victims) >= LEAST_VALID
        for cell in cells
    )


def _chosen(panel: Panel, cells: Sequence[CellTrials]) -> list[CellTrials]:
    """The attacks on a defense that go on: the best one if it reconstructed victims, else all that may still do so."""
    valid = [cell for cell in cells if cell.valid]
    leaking = [cell for cell in valid if panel.level(cell) == "reconstructed"]
    if leaking:
        return [max(leaking, key=lambda cell: (len(cell.reconstructed), cell.adaptive))]
    return [cell for cell in valid if cell.reconstructed or _promising(panel, panel.positive_control(cell) or cell)]


def _promising(panel: Panel, control: CellTrials) -> bool:
    """Whether more victims may show that an attack works without a defense."""
    return panel.level(control) in ("reconstructed", "identified")
