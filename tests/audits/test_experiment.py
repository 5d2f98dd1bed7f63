"""One trial, run in this process."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.audits.scenes import small_experiment

from leaktight.attacks.controls import MeanImage
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.idlg import IdlgAttack
from leaktight.audits.experiment import TrialRunner
from leaktight.audits.plan import AttackEntry, Experiment
from leaktight.audits.trial import judge, picture_paths
from leaktight.core.protocols import ActiveAttack, Attack, Defense, Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Broadcast, Observation, Reconstruction
from leaktight.metrics import METRICS, Resources, build_metrics, psnr, ssim
from leaktight.results.schema import Ledger, MetricNote, Pictures, Trial, TrialOutcome


@dataclass(frozen=True, kw_only=True)
class Told(Attack):
    """An attack that says what it was shown, and answers with grey."""

    error: Exception | None = None

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        if self.error is not None:
            raise self.error
        shown = {name: getattr(seen[0], name) is not None for name in ("labels", "defense", "public_data")}
        sent = seen[0].broadcast.params
        number = seen[0].batch_size or 0
        guess = Batch(torch.full((number, *seen[0].inputs.shape), 0.5), torch.zeros(number, dtype=torch.long))
        return Reconstruction(
            guess, float("inf"), {"assumed": [str(shown), f"{float(next(iter(sent.values())).sum())}"]}
        )


@dataclass(frozen=True, kw_only=True)
class Zeroing(Told, ActiveAttack):
    """A malicious server's attack: the model that it sends is zero."""

    def tamper(self, broadcast: Broadcast, seen: Sequence[Observation], *, rng: Rng) -> Broadcast | None:
        if seen:
            return None
        return replace(broadcast, params={name: torch.zeros_like(each) for name, each in broadcast.params.items()})


def with_attack(experiment: Experiment, attack: Any, **changes: Any) -> Experiment:
    return replace(experiment, attacks=(AttackEntry("told", {}, attack, **changes),))


def first_trial(experiment: Experiment, defense: str = "none", attack: str | None = None, **site: Any) -> Trial:
    spec = next(
        spec for spec in experiment.trials if spec.defense.name == defense and attack in (None, spec.attack.name)
    )
    return TrialRunner(experiment, **site)(spec.id, print).trial


def test_a_trial_is_scored_illustrated_and_explained(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "attack.0.iterations=8")
    trial, pictures = TrialRunner(experiment)("none.csdlg.t000.r000", print)
    assert trial.status == "done"
    paths = picture_paths(trial.id)
    truth, guess = (
        torch.from_numpy(np.array(Image.open(io.BytesIO(pictures[path]))) / 255)[None, None] for path in paths
    )
    assert trial.images == Pictures(truth=paths[0], guess=paths[1], size=(8, 8), count=1)
    assert truth.shape == (1, 1, 8, 8)
    assert trial.scores["ssim"] == pytest.approx(ssim(guess, truth).tolist(), abs=0.01)
    assert min(trial.score("psnr") or 0.0, 55) == pytest.approx(min(psnr(guess, truth).item(), 55), abs=0.5)
    assert (trial.score("ssim") or 0.0) > 0.9, "one example in one step is laid open"
    assert trial.loss is not None
    assert trial.first_loss is not None
    assert trial.loss < trial.first_loss
    assert trial.update_changed is False
    assert trial.metrics == {name: MetricNote(leaks_when=METRICS[name].leaks_when) for name in trial.scores}
    assert trial.ledger == Ledger(
        labels="given",
        batch_size=1,
        num_examples=1,
        local_steps=1,
        learning_rate=0.2,
        mode="train",
        batch_norm=False,
        buffers_known=True,
        init="wide",
        stage="untrained",
        defense_known=False,
        assumed=(),
        server="curious",
        queries=1,
    )


def test_a_defense_changes_the_update(tmp_path: Path) -> None:
    assert first_trial(small_experiment(tmp_path), "noise", "mean_image").update_changed is True
    still = small_experiment(tmp_path, "defense={kind='noise', noise_std=0.0}")
    assert first_trial(still, "noise", "mean_image").update_changed is False


@pytest.mark.parametrize("defense", ["precode", "fedkl", "adadefense"])
def test_defenses_that_change_the_network_or_remember_can_be_attacked_after_training(
    tmp_path: Path, defense: str
) -> None:
    from leaktight.audits.states import prepare_states

    experiment = small_experiment(
        tmp_path, f"defense={{kind='{defense}'}}", "audit.attack_round=1", "model.init=default"
    )
    states = prepare_states(experiment, tmp_path / "run", workers=1, after_round=lambda *_: None)
    line = first_trial(experiment, defense, "csdlg", states=states.packed, accuracy=states.accuracy)
    assert line.error is None
    assert line.update_changed is True
    assert line.ledger.stage == "after 1 round"
    assert line.model_accuracy == states.training[defense].rounds[0].accuracy


def test_what_is_not_disclosed_is_a_failed_trial_with_its_reason(tmp_path: Path) -> None:
    line = first_trial(small_experiment(tmp_path, "threat.knows=['batch_size', 'local_training']"))
    assert line.status == "failed"
    assert "needs 'labels'" in (line.error or "")
    assert line.scores == {}


def test_an_unexpected_error_fails_one_trial_only(tmp_path: Path) -> None:
    line = first_trial(with_attack(small_experiment(tmp_path), Told(error=RuntimeError("out of\nmemory"))))
    assert line.error == "RuntimeError: out of"


def test_a_failed_training_is_a_reason(tmp_path: Path) -> None:
    line = first_trial(small_experiment(tmp_path), "noise", failed={"noise": "not finite"})
    assert line.error == "training with noise failed: not finite"


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, {"labels": True, "defense": False, "public_data": False}),
        ({"against": "none"}, {"labels": True, "defense": True, "public_data": False}),
        ({"role": "control"}, {"labels": True, "defense": False, "public_data": True}),
    ],
    ids=["attack", "adaptive", "control"],
)
def test_each_sees_what_its_threat_model_says(tmp_path: Path, changes: dict[str, str], shown: dict[str, bool]) -> None:
    line = first_trial(with_attack(small_experiment(tmp_path), Told(), **changes))
    assert (line.ledger.assumed or "")[0] == str(shown)


def test_a_malicious_server_sends_another_model_and_a_curious_one_may_not(tmp_path: Path) -> None:
    malicious = with_attack(small_experiment(tmp_path, "threat.server='malicious'"), Zeroing())
    assert (first_trial(malicious).ledger.assumed or "")[1] == "0.0"
    curious = first_trial(with_attack(small_experiment(tmp_path), Zeroing()))
    assert 'threat.server = "malicious"' in (curious.error or "")


def test_the_sum_of_a_round_is_judged_against_all_its_examples(tmp_path: Path) -> None:
    line = first_trial(small_experiment(tmp_path, "threat.sees='aggregate'"), attack="mean_image")
    assert line.images is not None
    assert line.images.count == 2
    assert len(line.scores["ssim"] or ()) == 2


def test_a_guess_that_is_not_finite_scores_nothing() -> None:
    metrics = build_metrics(["psnr", "ssim"], Resources(root=Path()))
    truth = Batch(torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    guess = Batch(torch.stack([truth.inputs[1], torch.full((3, 8, 8), float("nan"))]), torch.tensor([1, 1]))
    judged = judge(guess, truth, metrics)
    assert TrialOutcome(scores=judged.scores).scores["psnr"] == (None, 100.0), "matched to the second truth"
    assert judged.label_accuracy == 0.5
    assert Image.open(io.BytesIO(judged.guess)).size == (16, 8)


def test_how_labels_are_known() -> None:
    found = [attack.labels_from for attack in (CsDlg(), Dlg(), IdlgAttack(), MeanImage())]
    assert found == ["given", "searched", "inferred", "not needed"]


def test_the_identity_defense_is_the_undefended_federation(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path)
    assert experiment.trained(experiment.defenses[0]).trainer.defense == Defense()


def test_a_chosen_client_is_compared_with_its_own_examples(tmp_path: Path) -> None:
    """Otherwise a guess without the update that happens to suit this client would look like a leak in every trial."""
    whole = small_experiment(tmp_path)
    name = sorted(whole.federation.shares)[1]
    runner = TrialRunner(small_experiment(tmp_path, f'audit.targets=["{name}"]'))
    share = whole.federation.shares[name]
    own = whole.federation.examples.part(share.start, share.validation)
    assert torch.equal(runner.decoys.examples.inputs, own.inputs)
    assert len(runner.labels.clients) == 1
    assert len(runner.labels.clients[0]) == len(own)
    assert len(TrialRunner(whole).labels.clients) == len(whole.federation.shares)
