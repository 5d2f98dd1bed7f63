from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from PIL import Image
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import nn

from leaktight.attacks.controls import PriorOnly
from leaktight.attacks.film import Recorder
from leaktight.attacks.labels.rules import Given, Idlg, Joint
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.objectives import Cosine, SquaredError
from leaktight.attacks.matching.priors import TotalVariation
from leaktight.attacks.matching.view import Matched, OneBatch, Simulation
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.optimizers.lbfgs import Lbfgs
from leaktight.attacks.presets.agic import Agic, ExampleIndex, match_epochs
from leaktight.attacks.presets.cpl import Cpl
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.gradinversion import GradInversion
from leaktight.attacks.presets.idlg import IdlgAttack
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.attacks.presets.preset import Preset
from leaktight.config.catalogue import MODELS
from leaktight.core.errors import ModelError, NotDisclosedError, UsageError
from leaktight.core.inputs import Images
from leaktight.core.tensors import digest
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.metrics import psnr
from leaktight.models.initialise import build_model

QUICK = Matching(iterations=6, restarts=2, labels=Given(), priors=((1e-3, TotalVariation()),), onednn=True)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits().load(Path())


def victim(digits: Dataset, kind: str = "lenet_zhu", init: str = "wide") -> nn.Module:
    return build_model(MODELS[kind](), digits.inputs, digits.num_classes, init=init, rng=replayed(0))


def seen(digits: Dataset, count: int = 1, kind: str = "lenet_zhu", **options: Any) -> tuple[Observation, Batch]:
    batch = draw(digits, count, seed=3)
    observation = observe(victim(digits, kind), batch, digits.num_classes, **options)
    return replace(observation, labels=batch.targets.sort().values), batch


LOCALS = {
    "plain": LocalTraining(epochs=2, batch_size=2, learning_rate=0.1),
    "momentum": LocalTraining(
        epochs=2, batch_size=2, learning_rate=0.05, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "adam": LocalTraining(batch_size=2, learning_rate=0.01, optimizer="adam"),
}


@pytest.mark.parametrize("name", LOCALS)
def test_the_truth_explains_the_simulated_update(digits: Dataset, name: str) -> None:
    """With the client's own batches the simulated change is the observed one: momentum, decay and all."""
    local = replace(LOCALS[name], epochs=1)
    observation, batch = seen(digits, 4, local=local)
    view = Simulation().view(observation, 4, torch.float32, needs_scale=True)
    order = _client_order(local)
    images, labels = batch.inputs[order], batch.targets[order]
    guess = view.guess(images, labels, view.params, view.buffers)
    for key, tensor in view.target.items():
        torch.testing.assert_close(guess[key], tensor, rtol=1e-4, atol=1e-6)


def _client_order(local: LocalTraining) -> list[int]:
    from leaktight.fl.local import plan_batches

    _, steps = plan_batches(4, local, rng=replayed(0).child("steps"))
    return [int(place) for place in torch.cat(steps)]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", ["lenet_zhu", "resnet20"])
def test_the_truth_explains_a_gradient(digits: Dataset, kind: str, mode: Literal["train", "eval"]) -> None:
    observation, batch = seen(digits, 3, kind, mode=mode)
    view = Simulation().view(observation, 3, torch.float64, needs_scale=True)
    guess = view.guess(batch.inputs.double(), batch.targets, view.params, view.buffers)
    for key, tensor in view.target.items():
        torch.testing.assert_close(guess[key], tensor, rtol=1e-3, atol=1e-4)


def test_one_batch_is_exact_for_one_step_and_scaled_for_more(digits: Dataset) -> None:
    observation, batch = seen(digits, 4, local=LocalTraining(batch_size=4, learning_rate=0.1))
    view = OneBatch().view(observation, 4, torch.float32, needs_scale=True)
    guess = view.guess(batch.inputs, batch.targets, view.params, view.buffers)
    for key, tensor in view.target.items():
        torch.testing.assert_close(guess[key], tensor, rtol=1e-3, atol=1e-5)
    several, _ = seen(digits, 4, local=LocalTraining(batch_size=2, learning_rate=0.1))
    mean = OneBatch().view(several, 4, torch.float32, needs_scale=True).target
    total = OneBatch(scale="sum").view(several, 4, torch.float32, needs_scale=True).target
    for key in mean:
        torch.testing.assert_close(2 * mean[key], total[key])


def test_without_local_training_only_the_direction_is_used(digits: Dataset) -> None:
    known, _ = seen(digits, 2, local=LocalTraining(batch_size=2, learning_rate=0.1))
    blind = replace(known, local_training=None, mode=None)
    with pytest.raises(NotDisclosedError, match="local_training"):
        QUICK.reconstruct([blind], rng=replayed(0))
    with pytest.raises(NotDisclosedError, match="size of the gradient"):
        replace(QUICK, matched=OneBatch(), objective=SquaredError()).reconstruct([blind], rng=replayed(0))
    found = replace(QUICK, matched=OneBatch()).reconstruct([blind], rng=replayed(0))
    assert found.notes["assumed"] == [
        "batch normalisation in training mode",
        "learning rate and number of steps unknown: direction only",
        "one local step on one batch of all examples",
    ]


@pytest.mark.parametrize("matched", [Simulation(), OneBatch()], ids=["simulation", "one_batch"])
@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_backends_take_the_same_steps(digits: Dataset, backend: Literal["fx", "inductor"], matched: Matched) -> None:
    """A few plain steps on a smooth network, in float64: Adam's first steps magnify the rounding of small slopes."""
    observation, _ = seen(digits, 4, local=LOCALS["momentum"])
    steps = replace(QUICK, matched=matched, optimizer=Adam(learning_rate=0.01), iterations=3, keep="last")
    attack = replace(steps, precision="float64")
    reference = replace(attack, backend="eager").reconstruct([observation], rng=replayed(1))
    found = replace(attack, backend=backend).reconstruct([observation], rng=replayed(1))
    assert found.notes["backend"] == backend
    torch.testing.assert_close(found.guess.inputs, reference.guess.inputs, rtol=0, atol=1e-6)
    assert found.loss == pytest.approx(reference.loss, abs=1e-9)


@pytest.mark.parametrize("kind", ["resnet20", "vit"])
def test_tracing_agrees_on_networks_with_batch_norm_and_attention(digits: Dataset, kind: str) -> None:
    observation, _ = seen(digits, 2, kind)
    attack = replace(QUICK, iterations=2, restarts=1, precision="float64", optimizer=Adam(learning_rate=0.01))
    eager = replace(attack, backend="eager").reconstruct([observation], rng=replayed(1))
    traced = attack.reconstruct([observation], rng=replayed(1))
    assert traced.notes["backend"] == "fx"
    torch.testing.assert_close(traced.guess.inputs, eager.guess.inputs, rtol=0, atol=1e-6)


def test_restarts_side_by_side_are_those_one_by_one(digits: Dataset) -> None:
    observation, _ = seen(digits, 2)
    attack = replace(QUICK, precision="float64", restarts=3)
    together = attack.reconstruct([observation], rng=replayed(2))
    losses = together.notes["losses"]
    assert len(losses) == 3
    assert together.loss == min(losses)
    alone = replace(attack, restarts=1).reconstruct([observation], rng=replayed(2))
    assert alone.loss == pytest.approx(losses[0], rel=1e-9)


ATTACKS: dict[str, Preset] = {
    "dlg": Dlg(iterations=1, restarts=1),
    "idlg": IdlgAttack(iterations=1, restarts=1),
    "cpl": Cpl(iterations=1, restarts=1),
    "csdlg": CsDlg(iterations=1),
    "inverting_gradients": InvertingGradients(iterations=3, onednn=True),
    "gradinversion": GradInversion(iterations=3, batch_norm=0.0, onednn=True),
    "agic": Agic(iterations=3, onednn=True),
    "prior_only": PriorOnly(iterations=3, onednn=True),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_the_same_seed_gives_the_same_bytes_and_nothing_is_touched(digits: Dataset, name: str) -> None:
    observation, _ = seen(digits)
    attack = replace(ATTACKS[name], onednn=True)
    before = digest({**observation.update.tensors, **{f"m.{k}": v for k, v in observation.model.state_dict().items()}})
    generator = torch.get_rng_state()
    first = attack.reconstruct([observation], rng=replayed(5))
    again = attack.reconstruct([observation], rng=replayed(5))
    other = attack.reconstruct([observation], rng=replayed(6))
    assert torch.equal(first.guess.inputs, again.guess.inputs)
    assert not torch.equal(first.guess.inputs, other.guess.inputs)
    after = digest({**observation.update.tensors, **{f"m.{k}": v for k, v in observation.model.state_dict().items()}})
    assert after == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert first.guess.inputs.shape == (1, *digits.inputs.shape)
    assert first.guess.inputs.dtype == torch.float32


def test_dlg_and_its_kin_recover_a_digit(digits: Dataset) -> None:
    """The effect itself, on the embedded data: the image and the label come back."""
    observation, batch = seen(digits)
    for attack in (CsDlg(iterations=40), IdlgAttack(iterations=60, restarts=2, box=True)):
        found = attack.reconstruct([observation], rng=replayed(0))
        assert found.guess.targets.tolist() == batch.targets.tolist()
        assert float(psnr(found.guess.inputs, batch.inputs)) > 30, attack
    control = PriorOnly(iterations=200).reconstruct([observation], rng=replayed(0))
    assert float(psnr(control.guess.inputs, batch.inputs)) < 15


def test_joint_search_returns_labels(digits: Dataset) -> None:
    observation, batch = seen(digits)
    found = Dlg(iterations=60, restarts=2, box=False).reconstruct([observation], rng=replayed(0))
    assert found.guess.targets.tolist() == batch.targets.tolist()


def test_the_control_does_not_look_at_the_update(digits: Dataset) -> None:
    observation, _ = seen(digits)
    other = replace(
        observation,
        update=replace(observation.update, tensors={k: 2 * v for k, v in observation.update.tensors.items()}),
    )
    control = PriorOnly(iterations=5, onednn=True)
    left, right = (control.reconstruct([each], rng=replayed(0)).guess.inputs for each in (observation, other))
    assert torch.equal(left, right)


def test_progress_is_reported_and_saved_as_a_film(digits: Dataset, tmp_path: Path) -> None:
    observation, _ = seen(digits, 2)
    recorder = Recorder()
    replace(QUICK, iterations=20, progress_every=5).reconstruct([observation], rng=replayed(0), progress=recorder)
    assert [iteration for iteration, _ in recorder.losses] == [5, 10, 15, 20]
    assert recorder.losses[-1][1] < recorder.losses[0][1]
    recorder.save(tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as film:
        assert getattr(film, "n_frames", 1) == 4
        assert film.size == (2 * 32 * 4, 32 * 4)
    with pytest.raises(UsageError, match="expected reported guesses"):
        Recorder().save(tmp_path / "none.gif")


@pytest.mark.parametrize(
    "optimizer",
    [Adam(learning_rate=0.05), Lbfgs(line_search="wolfe"), Lbfgs(line_search="none")],
    ids=["adam", "wolfe", "plain"],
)
def test_watching_changes_no_result(digits: Dataset, optimizer: Adam | Lbfgs) -> None:
    """A search that may stop early stops at the same place, whoever looks on and however often."""
    observation, _ = seen(digits)
    attack = replace(QUICK, optimizer=optimizer, iterations=30, restarts=2, patience=40, stop_below=0.5, check_every=7)
    told: list[int] = []
    alone = attack.reconstruct([observation], rng=replayed(0))
    watched = [
        replace(attack, progress_every=every).reconstruct(
            [observation], rng=replayed(0), progress=lambda iteration, loss, guess: told.append(iteration)
        )
        for every in (1, 10)
    ]
    assert told
    for each in watched:
        assert torch.equal(each.guess.inputs, alone.guess.inputs)
        assert (each.loss, each.notes) == (alone.loss, alone.notes)


def test_patience_ends_a_search_that_stands_still(digits: Dataset) -> None:
    observation, _ = seen(digits)
    attack = replace(QUICK, iterations=400, check_every=10, patience=30, optimizer=Adam(learning_rate=1e-9), restarts=1)
    assert attack.reconstruct([observation], rng=replayed(0)).notes["iterations"] < 100


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda o: replace(o, batch_size=None), NotDisclosedError, "batch_size"),
        (lambda o: replace(o, labels=None), NotDisclosedError, "labels"),
        (
            lambda o: replace(
                o, update=replace(o.update, tensors={k: v * torch.nan for k, v in o.update.tensors.items()})
            ),
            UsageError,
            "finite update",
        ),
        (
            lambda o: replace(o, update=replace(o.update, tensors={k: v[:1] for k, v in o.update.tensors.items()})),
            UsageError,
            "expected an update of the model",
        ),
        (
            lambda o: replace(o, update=replace(o.update, tensors={f"x.{k}": v for k, v in o.update.tensors.items()})),
            UsageError,
            "no such parameter",
        ),
    ],
)
def test_bad_observations_are_named(digits: Dataset, change: Any, error: type[Exception], message: str) -> None:
    observation, _ = seen(digits)
    with pytest.raises(error, match=message):
        QUICK.reconstruct([change(observation)], rng=replayed(0))


def test_label_rules_need_a_linear_head(digits: Dataset) -> None:
    model = nn.Sequential(nn.Conv2d(1, 10, 32), nn.Flatten())
    observation = observe(model, draw(digits, 1, seed=0), digits.num_classes)
    with pytest.raises(ModelError, match="linear"):
        replace(QUICK, labels=Idlg()).reconstruct([observation], rng=replayed(0))


def test_no_observation_and_unequal_ones_are_refused(digits: Dataset) -> None:
    with pytest.raises(UsageError, match="at least one observation"):
        QUICK.reconstruct([], rng=replayed(0))
    one, _ = seen(digits)
    two, _ = seen(digits, 2)
    with pytest.raises(UsageError, match="equally many examples"):
        QUICK.reconstruct([one, two], rng=replayed(0))


def test_several_updates_of_the_same_examples_are_matched_together(digits: Dataset) -> None:
    first, batch = seen(digits)
    second = replace(observe(victim(digits, init="default"), batch, digits.num_classes), labels=first.labels)
    attack = replace(QUICK, objective=Cosine(), labels=Joint())
    found = attack.reconstruct([first, second], rng=replayed(0))
    assert found.guess.inputs.shape == (1, *digits.inputs.shape)


def shown(*images: float, labels: list[int]) -> Batch:
    return Batch(torch.stack([torch.full((1, 4, 4), value) for value in images]), torch.tensor(labels))


def test_epochs_are_matched_greedily_one_to_one_within_labels() -> None:
    first = [shown(0.1, labels=[0]), shown(0.5, labels=[1]), shown(0.52, labels=[0])]
    second = [shown(0.51, labels=[0]), shown(0.9, labels=[0]), shown(0.3, labels=[1])]
    chains = match_epochs([first, second])
    assert chains == [
        (ExampleIndex(0, 0), ExampleIndex(1, 0)),
        (ExampleIndex(1, 0), ExampleIndex(2, 0)),
        (ExampleIndex(2, 0), ExampleIndex(0, 0)),
    ]
    third = [second[2], second[0], second[1]]
    assert match_epochs([first, second, third])[2] == (ExampleIndex(2, 0), ExampleIndex(0, 0), ExampleIndex(1, 0))
    with pytest.raises(UsageError, match="equally many examples"):
        match_epochs([first, second[:2]])


def test_dlg_with_adam_lowers_the_squared_distance_of_tiny_changes(digits: Dataset) -> None:
    """The squared change of two steps at 1e-4 is far below Adam's usual epsilon."""
    model = build_model(MODELS["lenet_zhu"](), Images(1, 32, 32), 10, init="wide", rng=replayed(0))
    batch = draw(digits, 2, seed=7)
    local = LocalTraining(batch_size=1, learning_rate=1e-4)
    seen = replace(observe(model, batch, 10, local=local), labels=batch.targets.sort().values)
    attack = Dlg(optimizer="adam", iterations=40, restarts=1, labels=Given(), onednn=True, backend="eager")
    found = attack.reconstruct([seen], rng=replayed(0))
    assert found.first_loss is not None
    assert found.loss < 0.5 * found.first_loss


def test_agic_over_epochs_gives_the_first_epochs_examples(digits: Dataset) -> None:
    batches = [draw(digits, 2, seed=7), draw(digits, 2, seed=8)]
    updates = []
    for epoch, order in enumerate(([0, 1], [1, 0])):
        model = build_model(MODELS["lenet_zhu"](), Images(1, 32, 32), 10, init="wide", rng=replayed(epoch))
        for place, which in enumerate(order):
            observation = observe(model, batches[which], 10)
            broadcast = replace(observation.broadcast, round=10 * epoch + place)
            updates.append(replace(observation, labels=batches[which].targets.sort().values, broadcast=broadcast))
    attack = Agic(iterations=4, pre_iterations=4, epochs=2, onednn=True)
    found = attack.reconstruct(updates, rng=replayed(0))
    assert found.guess.inputs.shape == (4, 1, 32, 32)
    assert found.guess.targets.tolist() == [
        *batches[0].targets.sort().values.tolist(),
        *batches[1].targets.sort().values.tolist(),
    ]
    with pytest.raises(UsageError, match="equally many updates"):
        attack.reconstruct(updates[:3], rng=replayed(0))
    begun = replace(attack, iterations=1).reconstruct(updates, rng=replayed(0))
    assert begun.first_loss == pytest.approx(begun.loss), "both are those of the joint searches"
    assert found.first_loss == pytest.approx(begun.first_loss)
