"""Finished trials in a run that grew: they keep their results, and take the names of the new plan.

A second defense of a kind gives both another name, such as "noise(noise_std=0.1)". Nothing random depends on it.
An attack draws its first guesses by its name, so it cannot get another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from leaktight.audits.plan import Experiment, TrialSpec
from leaktight.audits.states import training_folder
from leaktight.audits.trial import picture_paths
from leaktight.core.errors import UsageError
from leaktight.core.files import write_atomically
from leaktight.report.words import counted
from leaktight.results.lines import canonical
from leaktight.results.schema import Trial
from leaktight.results.store import TrialStore, read_file, read_trials

REMEDY = "resume it with its own settings, or choose another --out for a new run"


def require_room(experiments: Sequence[Experiment], folder: Path) -> None:
    """Raise UsageError if the plan of these experiments leaves out finished trials of the run in `folder`."""
    renamed(experiments, read_trials(folder), folder)


def renamed(
    experiments: Sequence[Experiment], trials: Mapping[str, Trial], folder: Path
) -> dict[str, tuple[Experiment, TrialSpec]]:
    """The trials whose names the plan changes, by their present id. Raises UsageError for one that it leaves out."""
    planned = {spec.id: (each, spec) for each in experiments for spec in each.trials}
    strange = [trial for trial in trials.values() if trial.id not in planned]
    if not strange:
        return {}
    by_method = {_key(each, spec): (each, spec) for each in experiments for spec in each.trials}
    found = {trial.id: by_method.get(_key_of(trial)) for trial in strange}
    lost = [trial for trial in strange if found[trial.id] is None]
    if lost:
        known = sum(trial.adaptive for trial in lost)
        kind = f", {known} of them by attackers who know the defense (--no-adaptive leaves these out)" if known else ""
        raise UsageError(
            f"{folder} has {counted(len(lost), 'finished trial')} that these settings leave out, the first "
            f"{lost[0].id}{kind}; {REMEDY}"
        )
    moved = {name: place for name, place in found.items() if place is not None}
    for trial in strange:
        name = moved[trial.id][1].attack.name
        if name != trial.attack:
            raise UsageError(
                f"{folder}: beside another attack of its kind, {trial.attack} would be {name} and draw other first "
                f"guesses than in its finished trials; {REMEDY}"
            )
    return moved


def adopt(experiments: Sequence[Experiment], store: TrialStore, folder: Path) -> None:
    """Give finished trials, their pictures and the training of their defense the names of the plan.

    Interrupted, it is done again: trials are renamed all at once, after their pictures were copied and the training was
    moved.
    """
    moved = renamed(experiments, store.trials, folder)
    if not moved:
        return
    trials = list(store.trials.values())
    for place, trial in enumerate(trials):
        if trial.id in moved:
            experiment, spec = moved[trial.id]
            _move(experiment, trial.defense, spec.defense.name, folder)
            trials[place] = _as(spec, trial, folder)
    store.replace_all(trials)
    for name in moved:
        for picture in picture_paths(name):
            (folder / picture).unlink(missing_ok=True)


def _as(spec: TrialSpec, trial: Trial, folder: Path) -> Trial:
    """The trial under the id and names of `spec`, with copies of its pictures."""
    update: dict[str, object] = {"id": spec.id, "defense": spec.defense.name}
    if trial.images is not None:
        truth, guess = picture_paths(spec.id)
        for old, new in ((trial.images.truth, truth), (trial.images.guess, guess)):
            if old is not None and (content := read_file(folder / old)) is not None:
                write_atomically(folder / new, content)
        update["images"] = trial.images.model_copy(update={"truth": truth, "guess": guess})
    return trial.model_copy(update=update)


def _move(experiment: Experiment, before: str, after: str, folder: Path) -> None:
    """Move the training of a defense to the folder of its new name."""
    old, new = (training_folder(experiment, folder, name) for name in (before, after))
    if old.exists() and not new.exists():
        old.rename(new)


def _key(experiment: Experiment, spec: TrialSpec) -> tuple[object, ...]:
    methods = (spec.attack.name, spec.attack.settings, spec.defense.name, spec.defense.settings)
    return experiment.track, spec.trial, spec.round, spec.attack.adaptive, *_told(*methods)


def _key_of(trial: Trial) -> tuple[object, ...]:
    methods = (trial.attack, trial.attack_settings, trial.defense, trial.defense_settings)
    return trial.track, trial.trial, trial.round, trial.adaptive, *_told(*methods)


def _told(
    attack: str, attack_settings: Mapping[str, object], defense: str, defense_settings: Mapping[str, object]
) -> tuple[object, ...]:
    """The kinds and settings of two methods; a kind is the name up to its settings."""
    kinds = (name.partition("(")[0] for name in (attack, defense))
    return *kinds, canonical(dict(attack_settings)), canonical(dict(defense_settings))
