"""Malicious servers in an audit: their attacks run in ordinary rounds, and the record says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.audits.scenes import small_experiment
from tests.results.made import changed, made_trial, place_by

from leaktight.audits.experiment import TrialRunner
from leaktight.audits.judge.cells import gather
from leaktight.audits.judge.verdict import Panel
from leaktight.audits.plan import Experiment
from leaktight.results.schema import Threat, Trial

ROBBED = (
    "threat.server='malicious'",
    "threat.knows=['batch_size', 'local_training', 'public_data']",
    "audit.local.samples=6",
    "audit.local.batch_size=6",
    "attack=[{kind='robbing_the_fed', num_bins=128}, {kind='mean_image'}]",
)


def lines_of(experiment: Experiment, defense: str = "none") -> dict[str, Trial]:
    specs = [spec for spec in experiment.trials if spec.defense.name == defense and spec.trial == 0]
    return {spec.attack.name: TrialRunner(experiment)(spec.id, print).trial for spec in specs}


def test_the_record_says_who_sent_what(tmp_path: Path) -> None:
    lines = lines_of(small_experiment(tmp_path, *ROBBED))
    robbed, control = lines["robbing_the_fed"], lines["mean_image"]
    assert robbed.error is None
    assert robbed.ledger.server == "malicious"
    assert robbed.ledger.queries == 2, "an honest round, and one with the module"
    assert robbed.threat.server == "malicious"
    assert control.threat.server == "curious", "it needs no malicious server"
    scores = robbed.scores["psnr"] or ()
    assert len(scores) == 6
    assert sum((score or 0.0) > 40 for score in scores) >= 3
    assert robbed.update_changed is False, "the same module without a defense gives the same update"


def test_a_defense_meets_the_changed_network(tmp_path: Path) -> None:
    line = lines_of(small_experiment(tmp_path, *ROBBED, "defense={kind='noise', noise_std=1.0}"), "noise")
    assert line["robbing_the_fed"].update_changed is True
    assert max(score or 0.0 for score in line["robbing_the_fed"].scores["psnr"] or ()) < 40


@pytest.mark.parametrize("defense", ["precode", "fedkl", "adadefense"])
def test_defenses_with_parts_and_memories_of_their_own_run_on_it(tmp_path: Path, defense: str) -> None:
    line = lines_of(small_experiment(tmp_path, *ROBBED, f"defense={{kind='{defense}'}}"), defense)
    assert line["robbing_the_fed"].error is None


def test_fishing_asks_twice(tmp_path: Path) -> None:
    experiment = small_experiment(
        tmp_path,
        *ROBBED[:-1],
        "attack=[{kind='fishing', iterations=2, strategy='class', backend='eager'}, {kind='mean_image'}]",
    )
    line = lines_of(experiment)["fishing"]
    assert line.error is None
    assert line.ledger.queries == 2
    assert line.ledger.labels == "inferred"


def test_a_refusal_is_on_record(tmp_path: Path) -> None:
    lines = lines_of(small_experiment(tmp_path, *ROBBED, "guard.action='refuse'"))
    assert lines["robbing_the_fed"].status == "failed"
    assert "refused the model of round 2: another architecture" in str(lines["robbing_the_fed"].error)
    assert lines["mean_image"].status == "done"


def test_a_warning_is_on_record(tmp_path: Path) -> None:
    line = lines_of(small_experiment(tmp_path, *ROBBED, "guard.action='warn'"))["robbing_the_fed"]
    assert line.status == "done"
    assert any("suspicious model in round 2" in text for text in line.warnings)


def test_each_kind_of_server_has_a_verdict_of_its_own() -> None:
    curious = Threat(server="curious", sees="client", knows=("batch_size",))
    malicious = changed(curious, server="malicious")
    lines = [
        line
        for trial in range(20)
        for line in (
            made_trial("none", "csdlg", trial, ssim=[0.95], place=1, threat=curious),
            made_trial("none", "fishing", trial, ssim=[0.95], place=1, threat=malicious),
            made_trial("noise", "csdlg", trial, ssim=[0.2], place=place_by(0.2, trial), threat=curious),
            made_trial("noise", "fishing", trial, ssim=[0.9], place=1, threat=malicious),
            made_trial("none", "mean_image", trial, ssim=[0.2], role="control"),
            made_trial("noise", "mean_image", trial, ssim=[0.2], role="control"),
        )
    ]
    found = {each.defense: each for each in Panel(gather(lines), 0.15).verdicts()}["noise"]
    assert (found.verdict, found.worst_attack, found.threat) == ("reconstructed", "fishing", malicious)
    inside = {each.threat.server: each.verdict for each in found.attackers}
    assert inside == {"malicious": "reconstructed", "curious": "nothing-found"}
