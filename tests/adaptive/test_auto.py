"""The ensemble: what it runs, when it stops, and how it chooses without the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from tests.adaptive.scenes import play, score
from tests.seeds import replayed
from torch import Tensor

from leaktight.adaptive import auto as ensemble
from leaktight.adaptive.auto import ENOUGH, ENSEMBLES, Auto
from leaktight.adaptive.evidence import EXPLAINED, Candidate, choose, weigh
from leaktight.adaptive.table import adapt
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Attack, Defense, Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Certificate, Observation, Reconstruction
from leaktight.defenses.compression import GradientCompression

LABEL = torch.tensor([3])


@dataclass(frozen=True, kw_only=True)
class Made(Attack):
    """An attack with a fixed answer, or an error."""

    guess: Tensor
    certificate: Certificate | None = None
    error: str = ""

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        if self.error:
            raise UsageError(self.error)
        assert seen[0].labels is not None
        return Reconstruction(Batch(self.guess, seen[0].labels), 0.5, first_loss=1.0, certificate=self.certificate)


def candidate(residual: float, inputs: Tensor, **more: object) -> Candidate:
    return replace(Candidate("x", Reconstruction(Batch(inputs, LABEL), 0.0), residual, 15000), **more)  # type: ignore[arg-type]


def with_members(monkeypatch: pytest.MonkeyPatch, **members: Attack) -> Auto:
    monkeypatch.setattr(ensemble, "ENSEMBLES", {**ENSEMBLES, "quick": members})
    return Auto(budget="quick")


def test_a_smooth_image_wins_unless_a_rough_one_explains_more() -> None:
    smooth, rough = torch.full((1, 1, 16, 16), 0.5), torch.rand(1, 1, 16, 16, generator=replayed(0).public())
    noisy = [candidate(0.0125, rough), candidate(0.0126, smooth)]
    assert choose(noisy) is noisy[1], "noise alone explains the difference"
    exact = [candidate(1e-12, rough), candidate(1e-6, smooth)]
    assert choose(exact) is exact[0]


def test_a_proof_counts_more_than_all_and_knowing_the_defense_more_than_fit() -> None:
    grey = torch.full((1, 1, 8, 8), 0.5)
    naive, knowing = candidate(1e-3, grey), candidate(0.2, grey, knows=True)
    assert choose([naive, knowing]) is knowing
    proven = replace(naive, found=replace(naive.found, certificate=Certificate("signs", 1.0, 0.999)))
    assert choose([knowing, proven]) is proven
    failed = replace(naive, found=replace(naive.found, certificate=Certificate("signs", 0.99, 0.999)))
    assert choose([knowing, failed]) is knowing


def test_it_stops_at_a_proof_or_at_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = play(Defense())
    wrong, right = Made(guess=1 - scene.truth.inputs), Made(guess=scene.truth.inputs)
    never = Made(guess=wrong.guess, error="not reached")
    found = with_members(monkeypatch, a=wrong, b=right, c=never).reconstruct([scene.seen], rng=replayed(0))
    assert found.notes["chosen"] == "b"
    assert found.notes["left out"] == {}
    assert found.notes["residuals"]["b"] <= EXPLAINED < found.notes["residuals"]["a"]
    assert set(found.others) == {"a"}
    proven = replace(wrong, certificate=Certificate("signs", 1.0, 0.999))
    found = with_members(monkeypatch, a=proven, b=right).reconstruct([scene.seen], rng=replayed(0))
    assert found.notes["chosen"] == "a", "it stops at a proof"


def test_a_quick_one_stops_where_little_is_left_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = play(Defense())
    near, right = Made(guess=scene.truth.inputs + 1e-3), Made(guess=scene.truth.inputs)
    members = {"a": near, "b": right}
    monkeypatch.setattr(ensemble, "ENSEMBLES", {**ENSEMBLES, "quick": members, "standard": members})
    quick, standard = (Auto(budget=each).reconstruct([scene.seen], rng=replayed(0)) for each in ("quick", "standard"))
    assert EXPLAINED < quick.notes["residuals"]["a"] <= ENOUGH["quick"]
    assert list(quick.notes["residuals"]) == ["a"]
    assert list(standard.notes["residuals"]) == ["a", "b"]


def test_dlg_is_for_labels_that_are_not_known_or_for_more_time() -> None:
    seen = play(Defense()).seen

    def names(auto: Auto, given: Observation) -> list[str]:
        return [name for name, _ in auto.members(given, None)]

    assert seen.labels is not None
    assert "dlg" not in names(Auto(budget="quick"), seen)
    assert "dlg" in names(Auto(budget="quick"), replace(seen, labels=None))
    assert "dlg" in names(Auto(budget="standard"), seen)


def test_attacks_that_cannot_run_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = play(Defense())
    broken, other = Made(guess=scene.truth.inputs, error="expected a bias"), Made(guess=1 - scene.truth.inputs)
    found = with_members(monkeypatch, a=broken, b=other).reconstruct([scene.seen], rng=replayed(0))
    assert (found.notes["chosen"], found.notes["left out"]) == ("b", {"a": "expected a bias"})
    with pytest.raises(UsageError, match="a: expected a bias"):
        with_members(monkeypatch, a=broken).reconstruct([scene.seen], rng=replayed(0))
    with pytest.raises(UsageError, match=r"got none: a, b: expected a bias$"):
        with_members(monkeypatch, a=broken, b=broken).reconstruct([scene.seen], rng=replayed(0))


@dataclass(frozen=True, kw_only=True)
class Broken(Made):
    """An attack with a defect."""

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        raise TypeError("a defect")


def test_a_defect_in_one_attack_does_not_end_the_others_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = play(Defense())
    members = with_members(monkeypatch, a=Broken(guess=scene.truth.inputs), b=Made(guess=scene.truth.inputs))
    with pytest.warns(UserWarning, match="without a, which failed: TypeError: a defect"):
        found = members.reconstruct([scene.seen], rng=replayed(0))
    assert (found.notes["chosen"], found.notes["left out"]) == ("b", {"a": "TypeError: a defect"})


def test_guesses_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = play(Defense())
    truth = scene.truth.inputs
    members = with_members(monkeypatch, a=Made(guess=truth[:0]), b=Made(guess=truth[..., :4]), c=Made(guess=truth))
    with pytest.warns(UserWarning, match="without b"):
        found = members.reconstruct([scene.seen], rng=replayed(0))
    assert found.notes["chosen"] == "c"
    assert list(found.notes["left out"]) == ["a", "b"]


def test_guesses_are_compared_on_all_rounds_also_those_of_attacks_that_read_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, last = play(Defense()), play(Defense(), seed=4)
    members = with_members(monkeypatch, a=Made(guess=last.truth.inputs), b=Made(guess=first.truth.inputs))
    found = members.reconstruct([first.seen, last.seen], rng=replayed(0))
    assert min(found.notes["residuals"].values()) > EXPLAINED, "no guess explains both"
    assert set(found.notes["residuals"]) == {"a", "b"}


def test_of_too_many_guesses_those_are_weighed_that_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = play(Defense(), count=2)
    assert scene.seen.labels is not None
    surplus = replace(scene.seen, labels=scene.seen.labels.repeat(2))
    guess = Made(guess=torch.cat([torch.rand_like(scene.truth.inputs), scene.truth.inputs]))
    made = guess.reconstruct([surplus], rng=replayed(0))
    found = weigh("x", made, [scene.seen])
    assert len(found.found.guess) == 2
    assert (
        found.residual
        == weigh("x", replace(made, guess=Batch(guess.guess[:2], scene.seen.labels)), [scene.seen]).residual
    )


def test_a_guess_that_is_not_finite_is_no_proof_and_comes_last() -> None:
    grey = torch.full((1, 1, 8, 8), 0.5)
    naive = candidate(0.5, grey)
    broken = candidate(0.0, grey * torch.nan, knows=True)
    proven = replace(broken, found=replace(broken.found, certificate=Certificate("signs", 1.0, 0.999)))
    assert not proven.certified
    assert choose([proven, broken, naive]) is naive
    assert choose([candidate(float("inf"), grey, knows=True), naive]) is naive, "what fits is known of one only"


def test_inferred_labels_are_not_those_that_are_disclosed() -> None:
    scene = play(Defense())
    wrong = replace(scene.seen, labels=(scene.truth.targets + 1) % 10)
    found = Auto(budget="quick", labels="inferred", onednn=False).reconstruct([wrong], rng=replayed(0))
    assert found.guess.targets.tolist() == scene.truth.targets.tolist()
    assert found.notes["chosen"] == "csdlg", "the first search that is not told wrong labels ends it"


def test_labels_are_read_without_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = play(Defense())
    members = with_members(monkeypatch, a=Made(guess=scene.truth.inputs))
    wrong = replace(scene.seen, labels=(scene.truth.targets + 1) % 10)
    read = members.reconstruct([wrong], rng=replayed(0)).labels
    assert read is not None
    assert read.tolist() == scene.truth.targets.tolist()


def test_the_quick_ensemble_reconstructs_and_its_own_evidence_finds_the_best() -> None:
    scene = play(Defense())
    found = Auto(budget="quick", onednn=False).reconstruct([scene.seen], rng=replayed(0))
    assert score(found.guess.inputs, scene.truth) > 40
    best = max(score(each.inputs, scene.truth) for each in (found.guess, *found.others.values()))
    assert score(found.guess.inputs, scene.truth) == best


def test_an_attacker_who_knows_the_defense_runs_adapted_forms() -> None:
    scene = play(GradientCompression())
    attack = adapt(Auto(budget="quick", onednn=False), GradientCompression())
    assert attack is not None
    found = attack.reconstruct([scene.seen], rng=replayed(0))
    assert str(found.notes["chosen"]).endswith("(knowing the defense)")
    assert score(found.guess.inputs, scene.truth) > 40


def test_evidence_of_a_guess_that_is_not_finite_is_none() -> None:
    scene = play(Defense())
    guess = Reconstruction(Batch(scene.truth.inputs * torch.nan, scene.truth.targets), 0.0)
    assert weigh("x", guess, [scene.seen]).residual == float("inf")


def test_every_budget_has_the_attacks_of_the_smaller_one() -> None:
    quick, standard, thorough = (list(ENSEMBLES[each]) for each in ("quick", "standard", "thorough"))
    assert set(quick) < set(standard)
    assert [name for name in standard if name in quick and name != "rgap"] == [each for each in quick if each != "rgap"]
    assert quick.index("rgap") == quick.index("csdlg") + 1, "it takes longer than a short search"
    assert standard == thorough
    with pytest.raises(ValueError, match="budget"):
        Auto(budget="huge")  # type: ignore[arg-type]
