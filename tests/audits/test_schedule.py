"""Trials by need: the fixed rule of two looks, the budget, and what interruptions do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.audits.scenes import small_config, small_experiment
from tests.results.made import CRASHED, made_trial, place_by

from leaktight.audits.plan import Experiment, TrialSpec
from leaktight.audits.run import Clock, Watcher, run_wanted, summarise
from leaktight.audits.schedule import Wanted, fewest, wanted
from leaktight.audits.settings import AuditSettings
from leaktight.audits.states import States
from leaktight.audits.trial import Finished
from leaktight.config.audit import build_tracks
from leaktight.core.errors import ConfigError
from leaktight.results.schema import Spending, Summary, Trial
from leaktight.results.store import TrialStore, open_store
from leaktight.runtime.executor import Inline, Tell

ATTACKS = "attack=[{kind='csdlg', iterations=1}, {kind='idlg', iterations=1}, {kind='mean_image'}]"
DEFENSES = "defense=[{kind='noise'}, {kind='clipping'}]"

IDENTIFYING = 0.55
"""SSIM of a guess that is no reconstruction, but closer to its victim than to all decoys."""

Score = Callable[[TrialSpec], float]
"""SSIM of a made-up trial."""


@dataclass(frozen=True)
class MadeUp:
    """Work that makes trials up. score: of an attack's trial; below 0.6 it tells nothing about its victim."""

    experiments: Sequence[Experiment]
    score: Score

    def __call__(self, job: str, tell: Tell[object]) -> Finished:
        experiment, spec = next((each, each.by_id[job]) for each in self.experiments if job in each.by_id)
        control = spec.attack.role == "control"
        score = 0.25 if control else self.score(spec)
        place = 1 if score == IDENTIFYING else place_by(score, spec.trial)
        changes: dict[str, Any] = CRASHED if score < 0 else {}
        made = made_trial(
            spec.defense.name,
            spec.attack.name,
            spec.trial,
            ssim=[score],
            role=spec.attack.role,
            round_index=spec.round,
            adaptive=spec.attack.adaptive,
            **{
                "place": None if control or changes else place,
                **changes,
            },
            id=job,
            track=experiment.track,
        )
        return Finished(made, {})


def auto(folder: Path, *overrides: str, adaptive: bool = False) -> Experiment:
    return small_experiment(folder, ATTACKS, DEFENSES, "audit.trials=auto", *overrides, adaptive=adaptive)


def played(experiments: Sequence[Experiment], score: Score) -> tuple[Wanted, dict[str, Trial]]:
    """What the rule asks for after the first look at made-up trials, and these."""
    work = MadeUp(experiments, score)
    trials = {name: work(name, print).trial for name in wanted(experiments, {}).ids}
    return wanted(experiments, trials), trials


def later(needed: Wanted) -> set[str]:
    """The attacks on defenses that got a twentieth victim."""
    return {name.rsplit(".t019", 1)[0] for name in needed.ids if ".t019." in name}


def stops(*defenses: str) -> Score:
    """Attacks reconstruct everybody, except behind these defenses."""
    return lambda spec: 0.3 if spec.defense.name in defenses else 0.9


def test_a_number_of_trials_is_one_look(tmp_path: Path) -> None:
    experiment = auto(tmp_path, "audit.trials=2")
    needed = wanted([experiment], {})
    assert set(needed.ids) == {spec.id for spec in experiment.trials}
    assert len(needed.ids) == fewest([experiment]) == 2 * 3 * 3
    assert played([experiment], stops())[0] == needed


def test_a_defense_that_everybody_gets_through_needs_five_victims(tmp_path: Path) -> None:
    needed, _ = played([auto(tmp_path)], stops())
    assert len(needed.ids) == 5 * 3 * 3
    assert needed.decided == tuple(("diagnostic", name) for name in ("none", "noise", "clipping"))
    assert needed.further == ()


def test_where_nothing_is_found_there_are_twenty_with_positive_and_negative_controls(tmp_path: Path) -> None:
    needed, _ = played([auto(tmp_path, adaptive=True)], stops("noise"))
    assert (needed.decided, needed.further) == (
        (("diagnostic", "none"), ("diagnostic", "clipping")),
        (("diagnostic", "noise"),),
    )
    names = {"csdlg", "idlg", "mean_image"}
    plain = {f"{defense}.{name}" for defense in ("none", "noise") for name in names}
    assert later(needed) == plain | {"noise.csdlg.adaptive", "noise.idlg.adaptive"}
    assert len([name for name in needed.ids if name.startswith("noise.csdlg.t")]) == 20


def test_an_attack_that_does_not_work_gets_no_more_victims(tmp_path: Path) -> None:
    def score(spec: TrialSpec) -> float:
        return 0.3 if spec.attack.name == "idlg" or spec.defense.name == "noise" else 0.9

    assert later(played([auto(tmp_path)], score)[0]) == {
        f"{defense}.{name}" for defense in ("none", "noise") for name in ("csdlg", "mean_image")
    }
    assert later(played([auto(tmp_path)], lambda spec: 0.3)[0]) == set()


@pytest.mark.parametrize(
    ("other", "names"), [(IDENTIFYING, {"idlg"}), (0.3, {"csdlg", "idlg"})], ids=["beyond chance", "by chance"]
)
def test_who_reconstructed_most_goes_on_alone(tmp_path: Path, other: float, names: set[str]) -> None:
    least = {"csdlg": 4, "idlg": 3}

    def score(spec: TrialSpec) -> float:
        if spec.defense.name != "noise":
            return 0.9
        if other == 0.3:  # one close guess of one attack
            return 0.9 if spec.attack.name == "idlg" and spec.trial == 2 else other
        return 0.9 if spec.trial >= least[spec.attack.name] else other

    needed, _ = played([auto(tmp_path)], score)
    assert needed.further == (("diagnostic", "noise"),)
    assert {name for name in later(needed) if "mean" not in name} == {
        f"{defense}.{name}" for defense in ("none", "noise") for name in names
    }


def test_two_valid_victims_decide_nothing_and_an_attack_without_any_goes_no_further(tmp_path: Path) -> None:
    def score(spec: TrialSpec) -> float:
        if spec.defense.name == "noise":
            return -1 if spec.attack.name == "csdlg" or spec.trial > 1 else 0.9
        return 0.9

    needed, _ = played([auto(tmp_path)], score)
    assert needed.further == (("diagnostic", "noise"),)
    assert "noise.idlg" in later(needed)
    assert "noise.csdlg" not in later(needed)


def test_the_second_look_depends_on_the_first_alone(tmp_path: Path) -> None:
    experiment = auto(tmp_path)
    needed, trials = played([experiment], stops("noise"))
    other = MadeUp([experiment], stops())
    for name in needed.ids:
        if name not in trials:
            trials[name] = other(name, print).trial
            assert wanted([experiment], trials) == needed


def test_more_is_asked_for_more_confidence() -> None:
    assert AuditSettings(confidence=0.05).looks == (5, 59)
    with pytest.raises(ValueError, match="expected confidence > 0 and < 1, got 1"):
        AuditSettings(confidence=1.0)


PRODUCTION = """
[production.local]
epochs = 2
[production.federation]
rounds = 2
[production.defense]
kind = "none"
[production.attack]
kind = "agic"
iterations = 1
"""


def tracks(folder: Path, *overrides: str) -> list[Experiment]:
    config = small_config(folder, ATTACKS, DEFENSES, "audit.trials=auto", *overrides, more=PRODUCTION)
    experiment, production = build_tracks(config, adaptive=False)
    assert production is not None
    return [experiment, production]


def test_nothing_found_in_production_needs_the_attack_on_diagnostic_updates(tmp_path: Path) -> None:
    both = tracks(tmp_path)
    assert both[1].track == "production"
    assert both[1].trials[0].id == "production.none.agic.t000.r001", "the last of two rounds"
    ids = [spec.id for each in both for spec in each.trials]
    assert len(set(ids)) == len(ids)
    assert {name.split(".t0")[0] for name in ids if "agic" in name} == {"none.agic", "production.none.agic"}

    def score(spec: TrialSpec) -> float:
        return 0.3 if spec.round == 1 else 0.9

    needed, _ = played(both, score)
    assert needed.further == (("production", "none"),)
    assert later(needed) == {
        f"{track}none.{name}"
        for track, names in (
            ("", ("agic", "mean_image")),
            ("production.", ("agic", "prior_only", "mean_image", "public_image")),
        )
        for name in names
    }
    weak, _ = played(both, lambda spec: 0.3 if spec.attack.name == "agic" else 0.9)
    assert later(weak) == set(), "an attack that does not work on easy updates proves nothing"


def test_both_tracks_claim_the_same(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[production\.audit\] expected confidence 0\.15"):
        tracks(tmp_path, "production.audit.confidence=0.1")


class Seen(Watcher):
    """Remembers what it is told, and interrupts after a number of trials."""

    def __init__(self, until: int | None = None) -> None:
        self.until, self.told, self.ran = until, list[tuple[int, int]](), list[str]()

    def trials_begin(self, done: int, total: int) -> None:
        self.told.append((done, total))

    def looked(self, needed: Wanted, done: int) -> None:
        self.told.append((done, len(needed.ids)))

    def trial_done(self, trial: Trial) -> None:
        self.ran.append(trial.id)
        if len(self.ran) == self.until:
            raise KeyboardInterrupt


def run(experiments: Sequence[Experiment], store: TrialStore, watcher: Watcher, clock: Clock | None = None) -> Summary:
    work = MadeUp(experiments, stops("noise"))
    needed = run_wanted(work, experiments, store, Inline(), watcher, clock or Clock())
    trials = [store.trials[name] for name in needed.ids if name in store.trials]
    cut = len(trials) < len(needed.ids)
    spending = Spending(trials=len(trials), planned=0, minutes=0.0, ended="budget" if cut else "decided")
    states = [States() for _ in experiments]
    path = Path("run")
    return summarise(experiments, trials, states, weigh=False, spending=spending, run=path, command="", scenario={})


@pytest.mark.parametrize("until", [1, 44, 45, 46, 80])
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path: Path, until: int) -> None:
    experiment = auto(tmp_path)
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole, seen = open_store(tmp_path / "whole"), Seen()
    expected = run([experiment], whole, seen)
    assert seen.told == [(0, 45), (45, 135)]
    verdicts = {each.defense: (each.verdict, each.victims) for each in expected.verdicts}
    assert verdicts == {"none": ("reconstructed", 20), "noise": ("nothing-found", 20), "clipping": ("reconstructed", 5)}
    with pytest.raises(KeyboardInterrupt):
        run([experiment], open_store(tmp_path / "cut"), Seen(until))
    again = Seen()
    assert run([experiment], open_store(tmp_path / "cut"), again) == expected
    assert len(again.ran) == 135 - until, "nothing is repeated"
    assert again.told[0] == (until, 45 if until < 45 else 135)


def test_after_the_budget_no_trial_starts_and_the_verdict_says_so(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Ending(Clock):
        """Spent as soon as there are this many trials."""

        store: TrialStore | None = None
        most: int = 0

        @property
        def spent(self) -> bool:
            return self.store is not None and len(self.store.trials) >= self.most

    experiment, seen = auto(tmp_path), Seen()
    store = open_store(tmp_path)
    summary = run([experiment], store, seen, Ending(store=store, most=60))
    assert len(seen.ran) == 60
    found = {each.defense: each for each in summary.verdicts}
    assert (found["none"].verdict, found["noise"].verdict) == ("reconstructed", "cannot-conclude")
    assert "when the budget was spent; 19 are needed" in found["noise"].because
    assert found["noise"].advice == "Raise --budget, and continue with --resume."
    assert {each.defense: each.verdict for each in run([experiment], open_store(tmp_path), Seen()).verdicts} == {
        "none": "reconstructed",
        "noise": "nothing-found",
        "clipping": "reconstructed",
    }
    assert Clock(budget=1e-9, began=0.0).spent
    assert not replace(Clock(), began=0.0).spent
