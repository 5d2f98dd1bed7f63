"""One trial, run in this process."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.audits.scenes import small_experiment
from torch import nn

from leaktight.attacks.controls import MeanImage
from leaktight.attacks.matching import spread
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.idlg import IdlgAttack
from leaktight.audits.experiment import TrialRunner
from leaktight.audits.plan import AttackEntry, Experiment
from leaktight.audits.requirements import check_requirements
from leaktight.audits.trial import best_of, digest_of, extractor, judge, picture_paths
from leaktight.core.errors import UsageError
from leaktight.core.protocols import ActiveAttack, Attack, Defense, LabelSource, Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Broadcast, Observation, Reconstruction
from leaktight.engines import inprocess
from leaktight.metrics import METRICS, Resources, build_metrics, psnr, ssim
from leaktight.results.schema import Ledger, MetricNote, Pictures, Role, Trial, TrialOutcome


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
class Counting(Told):
    """An attack that notes among how many victims it runs."""

    kept: list[int]

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        self.kept.append(spread._VICTIMS.get())
        return super().reconstruct(seen, rng=rng)


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
    assert trial.backend == "eager"
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
    states = prepare_states(experiment, tmp_path / "run", workers=1, begin=lambda *_: None, after_round=lambda *_: None)
    line = first_trial(experiment, defense, "csdlg", states=states.packed, accuracy=states.accuracy)
    assert line.error is None
    assert line.update_changed is True
    assert line.ledger.stage == "after 1 round"
    assert line.model_accuracy == states.training[defense].rounds[0].accuracy


def test_what_is_not_disclosed_is_an_error_before_any_work(tmp_path: Path) -> None:
    told = "attack.0.labels={kind='given'}"
    with pytest.raises(UsageError, match="csdlg needs the labels, which the threat model does not disclose"):
        small_experiment(tmp_path, "threat.knows=['batch_size', 'local_training']", told)


def test_an_unexpected_error_fails_one_trial_only(tmp_path: Path) -> None:
    line = first_trial(with_attack(small_experiment(tmp_path), Told(error=RuntimeError("out of\nmemory"))))
    assert line.error == "RuntimeError: out of"


def test_a_failed_training_is_a_reason(tmp_path: Path) -> None:
    line = first_trial(small_experiment(tmp_path), "noise", failed={"noise": "not finite"})
    assert line.error == "training with noise (noise_std 0.1) failed: not finite"


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
    with pytest.raises(UsageError, match=r'set in \[threat\]: server = "malicious"'):
        check_requirements(with_attack(small_experiment(tmp_path), Zeroing()))


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


@pytest.mark.parametrize("control", ["mean_image", "public_image", "prior_only"])
def test_a_control_gives_the_same_guess_for_any_update(tmp_path: Path, control: str) -> None:
    settings = (
        "{kind='prior_only', iterations=2, backend='eager'}" if control == "prior_only" else f"{{kind='{control}'}}"
    )
    experiment = small_experiment(
        tmp_path,
        "threat.knows=['batch_size']",
        f"attack=[{{kind='csdlg', iterations=1}}, {settings}]",
        "audit.local={samples=3, batch_size=3}",
        "defense={kind='noise', noise_std=3.0}",
    )
    runner = TrialRunner(experiment)
    plain, noisy = (runner(f"{name}.{control}.t000.r000", print) for name in ("none", "noise"))
    assert plain.trial.error is None
    assert plain.trial.scores == noisy.trial.scores
    assert list(plain.pictures.values()) == list(noisy.pictures.values())
    assert noisy.trial.update_changed is True
    assert plain.trial.threat.knows == ("batch_size", "labels", "public_data")
    assert plain.trial.searches is False


@dataclass(frozen=True, kw_only=True)
class Shown(Attack):
    """An attack that keeps what it was shown."""

    kept: list[Observation]
    finds: LabelSource = "not needed"

    @property
    def labels_from(self) -> LabelSource:
        return self.finds

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        self.kept.append(seen[0])
        guess = Batch(torch.full((2, *seen[0].inputs.shape), 0.5), torch.zeros(2, dtype=torch.long))
        return Reconstruction(guess, 0.0)


def shown_to(experiment: Experiment, *, role: Role = "attack", finds: LabelSource = "not needed") -> Observation:
    kept: list[Observation] = []
    line = first_trial(with_attack(experiment, Shown(kept=kept, finds=finds), role=role))
    assert line.error is None
    return kept[0]


AVERAGED = "federation.aggregator={kind='fedavg', scheme='I'}"
BATCH = "audit.local={samples=12, batch_size=12}"


def test_a_control_is_shown_no_part_of_the_update(tmp_path: Path) -> None:
    seen = shown_to(small_experiment(tmp_path, BATCH), role="control")
    assert not any(bool(tensor.any()) for tensor in seen.update.tensors.values())
    assert (seen.update.buffers, seen.update.num_examples, seen.update.metrics) == (None, None, {})


@pytest.mark.parametrize("finds", ["inferred", "searched"])
def test_who_finds_labels_is_not_told_them(tmp_path: Path, finds: LabelSource) -> None:
    experiment = small_experiment(tmp_path, BATCH)
    assert shown_to(experiment).labels is not None
    assert shown_to(experiment, finds=finds).labels is None
    line = first_trial(with_attack(experiment, Shown(kept=[], finds=finds)))
    assert "labels" not in line.threat.knows
    assert line.label_accuracy is not None
    assert line.label_accuracy <= 2 / 12
    assert line.label_chance is not None
    assert line.label_chance > 0.01
    assert 0 < (line.blind_labels or 0.0) <= 2 / 12


def test_labels_that_were_given_are_not_scored(tmp_path: Path) -> None:
    line = first_trial(small_experiment(tmp_path))
    assert line.ledger.labels == "given"
    assert (line.label_accuracy, line.label_chance, line.blind_labels) == (None, None, None)


def test_labels_do_not_tell_how_many_examples_there_are(tmp_path: Path) -> None:
    attack = "attack={kind='mean_image'}"
    seen = shown_to(small_experiment(tmp_path, BATCH, "threat.knows=['labels']", AVERAGED, attack))
    assert seen.batch_size is None
    assert seen.update.num_examples is None
    assert seen.labels is not None
    assert len(seen.labels.unique()) == len(seen.labels) < 12


def test_the_training_loss_is_not_shown_unless_the_aggregator_needs_it(tmp_path: Path) -> None:
    assert not shown_to(small_experiment(tmp_path, BATCH)).update.metrics
    boosted = small_experiment(
        tmp_path, BATCH, "federation.aggregator={kind='fedboosting'}", "partition.validation=0.2"
    )
    assert set(shown_to(boosted).update.metrics) == {"training_loss"}


def test_features_of_the_attacked_model_are_compared(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "audit.metrics=['mse_r']", "attack.0.iterations=8")
    found, control = first_trial(experiment), first_trial(experiment, attack="mean_image")
    assert found.score("mse_r") is not None
    assert 0 <= (found.score("mse_r") or 0.0) < (control.score("mse_r") or 0.0)
    precode = small_experiment(tmp_path, "audit.metrics=['mse_r']", "defense={kind='precode'}")
    before = torch.get_rng_state()
    assert first_trial(precode, "precode").score("mse_r") is not None
    assert torch.equal(before, torch.get_rng_state())


def test_a_network_without_a_linear_layer_has_no_such_features() -> None:
    assert extractor(nn.Conv2d(1, 1, 3), {}, {}) is None


def test_victims_ranks_and_times_are_recorded(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "attack.0.iterations=8")
    runner = TrialRunner(experiment)
    trials = {spec.id: runner(spec.id, print).trial for spec in experiment.trials}
    one, noisy, other = (trials[f"{name}.r000"] for name in ("none.csdlg.t000", "noise.csdlg.t000", "none.csdlg.t001"))
    assert one.examples == noisy.examples != other.examples
    assert re.fullmatch("[0-9a-f]{16}", one.examples or "")
    assert one.rank is not None
    assert noisy.rank is not None
    assert one.rank.place == 1
    assert one.rank.decoys == noisy.rank.decoys > 50
    assert set(one.decoy_scores) == {"psnr", "ssim"}
    assert all((closest or 0.0) < (one.score("ssim") or 0.0) for closest in one.decoy_scores["ssim"])
    assert one.client_seconds is not None
    assert 0 < one.client_seconds < one.seconds
    assert one.searches is True
    assert trials["none.mean_image.t000.r000"].rank is None


@pytest.mark.parametrize(("changes", "victims"), [({}, 12), ({"against": "noise"}, 6), ({"undefended": True}, 6)])
def test_an_attack_is_told_how_many_victims_share_what_it_compiles(
    tmp_path: Path, changes: dict[str, Any], victims: int
) -> None:
    told: list[int] = []
    experiment = small_experiment(tmp_path, "audit.attack_round=[0, 1, 2]")
    experiment = with_attack(experiment, Counting(kept=told), **changes)
    spec = experiment.trials[0]
    assert sum(each.attack is spec.attack for each in experiment.trials) == victims
    TrialRunner(experiment)(spec.id, print)
    assert told == [victims]


def test_the_examples_of_a_sum_are_all_compared_with_decoys(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "threat.sees='aggregate'", BATCH)
    line = first_trial(with_attack(experiment, Shown(kept=[], finds="inferred")))
    assert line.error is None
    assert line.rank is not None
    assert len(line.decoy_scores["psnr"]) == 24
    assert line.label_chance is not None


def test_examples_are_known_in_any_order() -> None:
    batch = Batch(torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2]))
    turned = Batch(batch.inputs.flip(0), batch.targets.flip(0))
    assert digest_of(batch) == digest_of(turned) != digest_of(Batch(batch.inputs, batch.targets.flip(0)))


def test_the_best_draw_of_a_control_counts_for_each_example() -> None:
    metrics = build_metrics(["psnr", "mse"], Resources(root=Path()))
    truth = Batch(torch.stack([torch.zeros(1, 8, 8), torch.ones(1, 8, 8)]), torch.tensor([0, 1]))
    guesses = [torch.stack([torch.full((1, 8, 8), each) for each in pair]) for pair in ((0.0, 0.6), (0.3, 1.0))]
    best = best_of([judge(Batch(guess, truth.targets), truth, metrics) for guess in guesses])
    assert best.scores["psnr"] == (100.0, 100.0)
    assert best.scores["mse"] == (0.0, 0.0)
    assert torch.equal(best.aligned, truth.inputs)
    assert best.guess == best.truth, "the picture is that of the draw whose score is given"


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


# ------------------------------------------------------------------------------------------------- once a victim


def plain(trial: Trial) -> dict[str, Any]:
    """A trial without what is measured in seconds."""
    document = trial.document()
    return {name: value for name, value in document.items() if "seconds" not in name and name != "ledger"}


def test_the_rounds_of_a_victim_are_played_once_for_all_attacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = small_experiment(tmp_path)
    played: list[int] = []
    run = inprocess.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        played.append(1)
        return run(*args, **kwargs)

    monkeypatch.setattr(inprocess, "run", counted)
    together = TrialRunner(experiment)
    found = {each.id: together(each.id, print) for each in experiment.trials}
    assert len(found) == 8
    assert len(played) == 4, "two victims, with the defense and without"
    for number, each in enumerate(experiment.trials):
        alone = TrialRunner(experiment)(each.id, print)
        assert len(played) == 5 + number
        assert plain(alone.trial) == plain(found[each.id].trial)


def test_a_malicious_server_has_rounds_of_its_own(tmp_path: Path) -> None:
    attacks = {"honest": Told(), "zero": Zeroing(), "again": Told()}
    experiment = replace(
        small_experiment(tmp_path, "threat.server='malicious'"),
        attacks=tuple(AttackEntry(name, {}, attack) for name, attack in attacks.items()),
    )
    runner = TrialRunner(experiment)
    trials = [runner(each.id, print).trial for each in experiment.trials[:3]]
    assert [each.attack for each in trials] == list(attacks)
    sums = [(each.ledger.assumed or ("", ""))[1] for each in trials]
    assert sums[1] == "0.0"
    assert sums[0] == sums[2] != sums[1]
