"""Negative controls: what they know, what they answer, and that they leave everything as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import Tensor

from leaktight.attacks.controls import MeanImage, PriorOnly, PublicImage
from leaktight.attacks.labels.rules import Geng
from leaktight.attacks.retrieval import NearestPublicImage
from leaktight.core.errors import NotDisclosedError, UsageError
from leaktight.core.protocols import Attack
from leaktight.core.tasks import WordRecognition
from leaktight.core.tensors import cloned, digest
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.models.initialise import build_model
from leaktight.models.resnet import ResNet20
from leaktight.models.small import LeNetZhu


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits(size=16).load(Path())


def observation(digits: Dataset, count: int = 3, **changes: Any) -> Observation:
    model = build_model(LeNetZhu(), digits.inputs, 10, rng=replayed(0))
    return replace(observe(model, draw(digits, count, 0), 10, local=changes.pop("local", None)), **changes)


@pytest.mark.parametrize("attack", [MeanImage(), NearestPublicImage()])
def test_they_are_attacks(attack: Attack) -> None:
    assert isinstance(attack, Attack)


def test_mean_image_is_grey_without_public_data(digits: Dataset) -> None:
    found = MeanImage().reconstruct([observation(digits)], rng=replayed(0))
    assert torch.equal(found.guess.inputs, torch.full((3, *digits.inputs.shape), 0.5))
    assert found.guess.targets.shape == (3,)
    assert math.isnan(found.loss)


def test_mean_image_of_public_data_and_known_labels(digits: Dataset) -> None:
    public = draw(digits, 50, 7)
    seen = observation(digits, public_data=public, labels=torch.tensor([1, 1, 4]))
    calls: list[tuple[int, float, Tensor | None]] = []
    found = MeanImage().reconstruct([seen], rng=replayed(0), progress=lambda *call: calls.append(call))
    means = [public.inputs[public.targets == label].mean(0) for label in (1, 1, 4)]
    torch.testing.assert_close(found.guess.inputs, torch.stack(means))
    assert found.guess.targets.tolist() == [1, 1, 4]
    assert len(calls) == 1


def test_mean_image_does_not_look_at_the_update(digits: Dataset) -> None:
    seen = observation(digits)
    other = replace(seen, update=observation(digits, local=LocalTraining(batch_size=1)).update)
    one, two = (MeanImage().reconstruct([each], rng=replayed(5)) for each in (seen, other))
    assert torch.equal(one.guess.inputs, two.guess.inputs)
    assert torch.equal(one.guess.targets, two.guess.targets)


def test_mean_image_of_all_where_the_class_is_unknown_or_absent(digits: Dataset) -> None:
    public = draw(digits, 50, 7)
    everything = public.inputs.mean(0)
    unknown = MeanImage().reconstruct([observation(digits, public_data=public)], rng=replayed(0))
    torch.testing.assert_close(unknown.guess.inputs, everything.expand(3, -1, -1, -1))
    lacking = Batch(public.inputs, torch.full_like(public.targets, 3))
    absent = observation(digits, public_data=lacking, labels=torch.tensor([3, 4, 5]))
    torch.testing.assert_close(
        MeanImage().reconstruct([absent], rng=replayed(0)).guess.inputs, everything.expand(3, -1, -1, -1)
    )


def test_one_image_for_each_disclosed_label_where_the_number_is_not(digits: Dataset) -> None:
    seen = observation(digits, public_data=draw(digits, 50, 7), labels=torch.tensor([1, 4]), batch_size=None)
    for control in (MeanImage(), PublicImage()):
        assert control.reconstruct([seen], rng=replayed(0)).guess.targets.tolist() == [1, 4]


def test_public_image_draws_images_of_the_class(digits: Dataset) -> None:
    public = draw(digits, 80, 7)
    seen = observation(digits, public_data=public, labels=torch.tensor([1, 1, 4]))
    drawn = [PublicImage().reconstruct([seen], rng=replayed(seed)).guess for seed in (0, 0, 1)]
    for guess in drawn:
        assert guess.targets.tolist() == [1, 1, 4]
        for image, label in zip(guess.inputs, (1, 1, 4), strict=True):
            assert label in public.targets[(public.inputs == image).flatten(1).all(1)].tolist()
    assert torch.equal(drawn[0].inputs, drawn[1].inputs)
    assert not torch.equal(drawn[0].inputs, drawn[2].inputs)
    with pytest.raises(NotDisclosedError, match="public_data"):
        PublicImage().reconstruct([observation(digits)], rng=replayed(0))
    with pytest.raises(ValueError, match="draws"):
        PublicImage(draws=0)


def test_prior_only_takes_the_labels_it_is_told_and_reads_none(digits: Dataset) -> None:
    quick = PriorOnly(iterations=1, backend="eager", onednn=False)
    told = quick.reconstruct([observation(digits, labels=torch.tensor([1, 1, 4]))], rng=replayed(0))
    assert told.guess.targets.tolist() == [1, 1, 4]
    seen = observation(digits)
    nothing = replace(seen.update, tensors={name: torch.zeros_like(each) for name, each in seen.update.tensors.items()})
    answers = [quick.reconstruct([each], rng=replayed(0)).guess for each in (seen, replace(seen, update=nothing))]
    assert torch.equal(answers[0].targets, answers[1].targets)
    assert torch.equal(answers[0].inputs, answers[1].inputs)
    with pytest.raises(ValueError, match="reads labels from the update"):
        PriorOnly(labels=Geng())


def test_controls_and_retrieval_minimise_nothing() -> None:
    assert not any(attack.searches for attack in (MeanImage(), PublicImage(), PriorOnly(), NearestPublicImage()))


def test_blind_labels_are_at_chance_and_words_are_empty(digits: Dataset) -> None:
    seen = observation(digits, batch_size=2000)
    labels = MeanImage().reconstruct([seen], rng=replayed(0)).guess.targets
    assert labels.bincount(minlength=10).min() > 120
    words = replace(seen, batch_size=None, task=WordRecognition())
    assert MeanImage().reconstruct([words], rng=replayed(0)).guess.targets.tolist() == [[-1]]


@pytest.mark.parametrize("local", [None, LocalTraining(batch_size=1, learning_rate=0.001)], ids=["gradient", "delta"])
def test_nearest_finds_the_private_image_where_it_is_public(digits: Dataset, local: LocalTraining | None) -> None:
    seen = observation(digits, count=1, local=local)
    truth = draw(digits, 1, 0)
    public = draw(digits, 40, 7)
    place = 11
    hidden = Batch(public.inputs.clone(), public.targets.clone())
    hidden.inputs[place], hidden.targets[place] = truth.inputs[0], truth.targets[0]
    found = NearestPublicImage().reconstruct([replace(seen, public_data=hidden)], rng=replayed(0))
    assert found.notes["places"] == [place]
    assert torch.equal(found.guess.inputs, truth.inputs)
    assert found.guess.targets.tolist() == truth.targets.tolist()
    assert found.loss == pytest.approx(0, abs=1e-4)


def test_nearest_prefers_images_of_the_true_class_and_takes_none_twice(digits: Dataset) -> None:
    public = draw(digits, 60, 7)
    seen = observation(digits, count=1, public_data=public)
    label = int(draw(digits, 1, 0).targets)
    found = NearestPublicImage().reconstruct([replace(seen, batch_size=4)], rng=replayed(0))
    assert found.guess.targets.tolist() == [label] * 4
    assert len(set(found.notes["places"])) == 4
    assert found.notes["distances"] == sorted(found.notes["distances"])


def test_nearest_goes_by_labels_where_they_are_known_or_inferred(digits: Dataset) -> None:
    public, truth = draw(digits, 80, 7), draw(digits, 6, 0)
    model = build_model(LeNetZhu(), digits.inputs, 10, rng=replayed(0))
    seen = replace(observe(model, truth, 10), public_data=public)
    labels = truth.targets.sort().values
    for attack, known in ((NearestPublicImage(), labels), (NearestPublicImage(labels=Geng()), None)):
        found = attack.reconstruct([replace(seen, labels=known)], rng=replayed(0))
        assert found.guess.targets.tolist() == labels.tolist()
        assert len(set(found.notes["places"])) == 6
    lacking = replace(seen, labels=labels, public_data=Batch(public.inputs, torch.full_like(public.targets, 3)))
    assert NearestPublicImage().reconstruct([lacking], rng=replayed(0)).guess.targets.tolist() == [3] * 6


def test_nearest_on_batch_norm_changes_nothing(digits: Dataset) -> None:
    model = build_model(ResNet20(), digits.inputs, 10, rng=replayed(0)).eval()
    seen = replace(observe(model, draw(digits, 2, 0), 10), public_data=draw(digits, 6, 7))
    everything = {**model.state_dict(), **{f"sent.{k}": v for k, v in seen.broadcast.buffers.items()}}
    before, state = digest(cloned(everything)), torch.random.get_rng_state()
    losses: list[float] = []
    attack = NearestPublicImage(candidates=3)
    found = attack.reconstruct([seen], rng=replayed(0), progress=lambda place, loss, image: losses.append(loss))
    assert found.guess.inputs.shape == (2, *digits.inputs.shape)
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert digest(everything) == before
    assert torch.equal(state, torch.random.get_rng_state())
    assert not model.training


def test_a_seed_decides_the_candidates(digits: Dataset) -> None:
    seen = observation(digits, public_data=draw(digits, 60, 7))
    attack = NearestPublicImage(candidates=4)
    places = [attack.reconstruct([seen], rng=replayed(seed)).notes["places"] for seed in (0, 0, 1)]
    assert places[0] == places[1] != places[2]


def test_what_cannot_work_is_named(digits: Dataset) -> None:
    with pytest.raises(NotDisclosedError, match="public_data"):
        NearestPublicImage().reconstruct([observation(digits)], rng=replayed(0))
    with pytest.raises(UsageError, match="at least 3 public images, got 2"):
        NearestPublicImage().reconstruct([observation(digits, public_data=draw(digits, 2, 1))], rng=replayed(0))
    for attack in (MeanImage(), NearestPublicImage()):
        with pytest.raises(UsageError, match="at least one observation"):
            attack.reconstruct([], rng=replayed(0))
    with pytest.raises(ValueError, match="candidates"):
        NearestPublicImage(candidates=0)
