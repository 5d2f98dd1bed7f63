"""Several rounds of one victim: what attacks are given, what they are scored against, and what it is worth to them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from tests.audits.scenes import small_experiment

from leaktight.adaptive.table import adapt
from leaktight.attacks.controls import MeanImage, PriorOnly
from leaktight.attacks.exact.linear_inversion import LinearInversion
from leaktight.attacks.presets.agic import Agic
from leaktight.attacks.presets.dlg import Dlg
from leaktight.audits.experiment import TrialRunner
from leaktight.audits.plan import AttackEntry, Experiment
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Attack, Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.defenses.adadefense import AdaDefense
from leaktight.defenses.noise import AdditiveNoise
from leaktight.results.schema import Trial


@dataclass(frozen=True, kw_only=True)
class Shown(Attack):
    """Keeps what it is given, and answers each list with as many grey images as were disclosed, and one too many."""

    joins: bool = True
    calls: list[list[Observation]] = field(default_factory=list)

    @property
    def joins_rounds(self) -> bool:
        return self.joins

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        self.calls.append(list(seen))
        number = (seen[0].batch_size or 0) + 1
        guess = Batch(torch.full((number, *seen[0].inputs.shape), 0.5), torch.zeros(number, dtype=torch.long))
        return Reconstruction(guess, float(len(self.calls)), {"assumed": ["grey"]}, first_loss=4.0)


def watched(
    folder: Path, *settings: str, joins: bool = True, defense: str = "none"
) -> tuple[Trial, list[list[Observation]]]:
    """The first trial of an audit of three rounds, and what its attack was given."""
    experiment = small_experiment(folder, "audit.watched=3", *settings)
    attack = Shown(joins=joins)
    experiment = replace(experiment, attacks=(AttackEntry("shown", {}, attack),))
    return only_trial(experiment, defense), attack.calls


def only_trial(experiment: Experiment, defense: str = "none") -> Trial:
    spec = next(spec for spec in experiment.trials if spec.defense.name == defense)
    trial = TrialRunner(experiment)(spec.id, print).trial
    assert trial.error is None
    return trial


def params(seen: Observation) -> torch.Tensor:
    return torch.cat([each.flatten() for each in seen.broadcast.params.values()])


def update(seen: Observation) -> torch.Tensor:
    return torch.cat([each.flatten() for each in seen.update.tensors.values()])


def test_an_attack_that_joins_rounds_sees_all_of_them_and_is_one_trial(tmp_path: Path) -> None:
    trial, calls = watched(tmp_path)
    (seen,) = calls
    assert [each.broadcast.round for each in seen] == [0, 1, 2]
    assert not torch.equal(params(seen[0]), params(seen[1])), "the model moves on between two rounds"
    assert len({str(each.labels) for each in seen}) == 1, "same examples"
    assert trial.ledger.queries == 3
    assert trial.ledger.stage == "untrained"
    assert len(trial.scores["psnr"] or ()) == 1, "the same example counts once"


def test_the_model_moves_by_the_updates_of_a_whole_round(tmp_path: Path) -> None:
    _, calls = watched(tmp_path)
    first, second, _ = calls[0]
    moved = params(second) - params(first)
    assert not torch.allclose(moved, update(first), atol=1e-6), "others train too"


def test_any_other_attack_sees_the_last_round(tmp_path: Path) -> None:
    trial, calls = watched(tmp_path, joins=False)
    ((seen,),) = calls
    assert seen.broadcast.round == 2
    assert trial.ledger.queries == 1
    assert trial.ledger.stage == "after 2 rounds"


def test_new_examples_are_attacked_round_by_round_and_all_count(tmp_path: Path) -> None:
    trial, calls = watched(tmp_path, "audit.watched_examples='new'")
    assert [[each.broadcast.round for each in seen] for seen in calls] == [[0], [1], [2]]
    assert trial.ledger.queries == 3
    assert len(trial.scores["psnr"] or ()) == 3, "the examples of all rounds are the truth"
    assert trial.images is not None
    assert trial.images.count == 3
    assert (trial.loss, trial.first_loss) == (2.0, 4.0), "the mean of the rounds"
    assert trial.ledger.assumed == ("grey",)


def test_the_first_watched_round_is_the_one_that_is_attacked_otherwise(tmp_path: Path) -> None:
    alone, one = watched(tmp_path, "audit.watched=1", "secret_seed='" + "ab" * 32 + "'")
    several, three = watched(tmp_path, "secret_seed='" + "ab" * 32 + "'")
    assert torch.equal(update(one[0][0]), update(three[0][0]))
    assert alone.scores == several.scores, "grey against the same example"


def test_noise_is_fresh_in_every_watched_round(tmp_path: Path) -> None:
    _, calls = watched(tmp_path, "defense.0.noise_std=100.0", defense="noise")
    one, two, three = (update(each) for each in calls[0])
    for left, right in ((one, two), (two, three), (one, three)):
        alike = torch.nn.functional.cosine_similarity(left, right, dim=0)
        assert abs(float(alike)) < 0.1, "noise outweighs everything, and has no direction in common"


def test_a_defense_keeps_its_memory_between_watched_rounds(tmp_path: Path) -> None:
    _, calls = watched(tmp_path, "defense={kind='adadefense'}", defense="adadefense")
    small = [float((update(each).abs() < 0.9).float().mean()) for each in calls[0]]
    assert small[2] > small[0] + 0.3, "with moments of zero most stand-ins have size 1, as in a first round"


def test_the_update_of_the_last_watched_round_is_compared_with_an_undefended_one(tmp_path: Path) -> None:
    silent = "defense.0.noise_std=0.0"
    assert watched(tmp_path, silent, defense="noise")[0].update_changed is False
    assert watched(tmp_path, defense="noise")[0].update_changed is True


def test_which_attacks_join_rounds() -> None:
    for attack in (Dlg(), Agic(), Agic(epochs=3), adapt(Dlg(), AdditiveNoise()), adapt(Dlg(), AdaDefense())):
        assert attack is not None
        assert attack.joins_rounds
    for attack in (MeanImage(), PriorOnly(), LinearInversion()):
        assert not attack.joins_rounds


@pytest.mark.parametrize("settings", [("audit.watched=2",), ("audit.watched=3", "audit.watched_examples='new'"), ()])
def test_epochs_that_are_not_watched_are_an_error_before_anything_runs(tmp_path: Path, settings: tuple[str]) -> None:
    with pytest.raises(UsageError, match=r"agic needs 3 updates .* set audit.watched = 3 and .* \"same\""):
        small_experiment(tmp_path, "attack.0={kind='agic', epochs=3, iterations=1}", *settings)


def test_more_rounds_than_there_are_cannot_be_watched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected audit.watched <= 2, .* got 3; raise federation.rounds"):
        small_experiment(tmp_path, "audit.watched=3", "audit.attack_round=1")


def test_agic_reconstructs_from_watched_epochs(tmp_path: Path) -> None:
    agic = "{kind='agic', epochs=2, iterations=150, pre_iterations=60, learning_rate=0.1, backend='eager'}"
    experiment = small_experiment(tmp_path, f"attack.0={agic}", "audit.watched=2")
    trial = only_trial(experiment)
    assert trial.attack == "agic"
    assert trial.ledger.queries == 2
    assert trial.ledger.num_examples == len(trial.scores["ssim"] or ()) == 1
    assert (trial.score("ssim") or 0.0) > 0.8


NOISY = (
    "secret_seed='" + "ab" * 32 + "'",
    "audit.local.redraw=false",
    "federation.rounds=4",
    "defense.0.noise_std=0.02",
    "audit.local.learning_rate=0.05",
    "attack.0={kind='csdlg', iterations=12, backend='eager'}",
)


def under_noise(folder: Path, rounds: int) -> list[float]:
    experiment = small_experiment(folder, *NOISY, f"audit.watched={rounds}", "audit.trials=3")
    specs = [each for each in experiment.trials if each.defense.name == "noise" and each.attack.role == "attack"]
    trials = [TrialRunner(experiment)(spec.id, print).trial for spec in specs]
    assert {trial.ledger.queries for trial in trials} == {rounds}
    return [trial.score("psnr") or 0.0 for trial in trials]


def test_four_noisy_rounds_show_more_of_the_same_victims_than_one(tmp_path: Path) -> None:
    one, four = under_noise(tmp_path, 1), under_noise(tmp_path, 4)
    assert all(joined > alone + 1 for joined, alone in zip(four, one, strict=True))
    assert mean(four) > mean(one) + 2


def test_a_watched_trial_is_the_same_again_and_in_another_process(tmp_path: Path) -> None:
    runner = TrialRunner(small_experiment(tmp_path, "audit.watched=3"))
    sent = pickle.loads(pickle.dumps(runner))
    here, there = (each("noise.csdlg.t000.r000", print).trial for each in (runner, sent))
    assert here.ledger.queries == 3
    assert (here.scores, here.loss) == (there.scores, there.loss)
