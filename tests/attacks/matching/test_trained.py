"""What helps on trained networks: slopes from the last layer, statistics from buffers, registration of restarts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch
from tests.damage import undecomposed_once
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.batch_norm import sent_statistics
from leaktight.attacks.matching.objectives import Cosine
from leaktight.attacks.matching.priors import BatchNormStatistics
from leaktight.attacks.matching.registration import registered, shift_to
from leaktight.attacks.matching.slopes import Slopes, slopes_of
from leaktight.attacks.presets.gradinversion import GradInversion
from leaktight.core.inputs import Images
from leaktight.core.rng import global_seed
from leaktight.core.tasks import Classification
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Mode, Observation, Update
from leaktight.fl.local import Trainer, local_update
from leaktight.models.surgery import layer_inputs

SMALL = Images(3, 8, 8)


class _Net(nn.Module):
    """Convolution, batch norm, pooled features, logits."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12, momentum=momentum)
        self.linear = nn.Linear(12, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.relu(self.norm(self.conv(inputs))).mean((2, 3)))
        return logits


def observed(
    number: int, mode: Mode = "eval", momentum: float | None = 0.1, steps: int = 1
) -> tuple[Observation, Batch, nn.Module]:
    with global_seed(replayed(3)):
        model = _Net(momentum)
    model.linear.weight.data.mul_(8)  # some examples are learned, some are not
    buffers_of(model)["norm.running_mean"].fill_(0.3)
    generator = replayed(1).public()
    truth = Batch(torch.rand((number, *SMALL.shape), generator=generator), torch.arange(number))
    params, buffers = parameters_of(model), buffers_of(model)
    local = LocalTraining(batch_size=number, learning_rate=0.01, epochs=steps)
    trained = local_update(
        Trainer(model, local, mode=mode), params, buffers, [truth] * steps, learning_rates=[0.01] * steps
    )
    kind = "gradient" if steps == 1 else "delta"
    update = Update(trained.update(params, kind), kind, number, buffers=trained.buffers)  # type: ignore[arg-type]
    seen = Observation(
        model=model,
        task=Classification(),
        broadcast=Broadcast(params, buffers, 0),
        update=update,
        inputs=SMALL,
        num_classes=6,
        labels=truth.targets,
        batch_size=number,
        local_training=local,
        mode=mode,
    )
    return seen, truth, model


def last_layer(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [tensors[name].double() for name in ("linear.weight", "linear.bias")]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_last_layer_shows_the_slopes_of_every_example(number: int, mode: Mode) -> None:
    seen, truth, model = observed(number, mode)
    model.train(mode == "train")
    confidences = model(truth.inputs).detach().softmax(1)
    found = slopes_of(last_layer(dict(seen.update.tensors)), last_layer(dict(seen.broadcast.params)), truth.targets)
    assert found is not None
    torch.testing.assert_close(
        found.float(), confidences - nn.functional.one_hot(truth.targets, 6), atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize("number", [1, 3])
def test_a_last_layer_with_noise_shows_none(number: int) -> None:
    seen, truth, _ = observed(number)
    gradients = last_layer(dict(seen.update.tensors))
    noisy = [each + 0.1 * each.std() * torch.randn(each.shape, generator=replayed(2).public()) for each in gradients]
    assert slopes_of(noisy, last_layer(dict(seen.broadcast.params)), truth.targets) is None


def test_a_start_whose_decomposition_does_not_converge_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, truth, _ = observed(3)
    gradients, layer = (last_layer(dict(each)) for each in (seen.update.tensors, seen.broadcast.params))
    calls = undecomposed_once(monkeypatch)
    assert slopes_of(gradients, layer, truth.targets) is not None
    assert calls[0] > 1
    monkeypatch.setattr(scipy.optimize, "least_squares", lambda *args, **kwargs: np.linalg.svd([[math.nan]]))
    assert slopes_of(gradients, layer, truth.targets) is None


@pytest.mark.parametrize("slopes", ["observed", "guessed"])
def test_the_truth_has_no_distance_and_other_images_have_one(slopes: Slopes) -> None:
    seen, truth, _ = observed(3)
    attack = Matching(objective=Cosine(), slopes=slopes, labels=Given(), precision="float64")
    evidence = attack.evidence([seen], rng=replayed(0))
    assert (evidence.views[0][1].slopes is None) == (slopes == "guessed")
    problem = attack.problem(evidence, replayed(0), [0], together=False)
    own, others = (
        float(problem.loss({"images": images.double()}, {}, problem.constants))
        for images in (truth.inputs, truth.inputs.flip(3))
    )
    assert own == pytest.approx(0, abs=1e-7)
    assert others > 1e-3


@pytest.mark.parametrize("factor", [1e-7, 1.0, 1e3])
def test_the_repaired_distance_does_not_depend_on_the_length_of_the_update(factor: float) -> None:
    seen, _, _ = observed(2)
    scaled = {name: factor * tensor for name, tensor in seen.update.tensors.items()}
    attack = replace(GradInversion(labels=Given(), batch_norm=0.0).matching(), slopes="guessed", precision="float64")
    guess = torch.rand((2, *SMALL.shape), generator=replayed(5).public(), dtype=torch.float64)
    losses = []
    for each in (seen, replace(seen, update=replace(seen.update, tensors=scaled))):
        problem = attack.problem(attack.evidence([each], rng=replayed(0)), replayed(0), [0], together=False)
        group = problem.common([{"images": guess}], 0.0)
        losses.append(float(problem.loss({"images": guess}, group, problem.constants)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_the_buffers_of_one_step_disclose_the_statistics_of_the_batch(momentum: float | None) -> None:
    seen, truth, model = observed(4, "train", momentum)
    (_, entered), *_ = layer_inputs(
        model.eval(), seen.broadcast.params, seen.broadcast.buffers, truth.inputs, (nn.BatchNorm2d,)
    )
    found = sent_statistics(seen)
    torch.testing.assert_close(
        found["norm.running_mean"], entered.double().mean((0, 2, 3)).detach(), atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        found["norm.running_var"], entered.double().var((0, 2, 3)).detach(), atol=1e-5, rtol=1e-4
    )


def test_the_truth_has_the_sent_statistics_and_other_images_do_not() -> None:
    seen, truth, model = observed(4, "train")
    for prior in (BatchNormStatistics(), BatchNormStatistics(form="relative", estimated=False)):
        own, others = (
            float(prior.penalty(images, model, seen.broadcast.params, seen.broadcast.buffers, sent_statistics(seen)))
            for images in (truth.inputs, truth.inputs * 0.7)
        )
        assert own < 1e-3 * others


def test_no_statistics_are_read_in_evaluation_mode_or_where_none_are_sent() -> None:
    seen, truth, model = observed(2, "eval")
    assert sent_statistics(seen) == {}
    train, _, _ = observed(2, "train")
    assert sent_statistics(replace(train, update=replace(train.update, buffers=None))) == {}
    silent = BatchNormStatistics(estimated=False)
    assert float(silent.penalty(truth.inputs, model, seen.broadcast.params, seen.broadcast.buffers)) == 0


@pytest.mark.parametrize("shift", [(0, 0), (2, -1), (-2, 2)])
def test_registration_finds_a_known_shift(shift: tuple[int, int]) -> None:
    image = torch.rand((3, 8, 8), generator=replayed(4).public())
    moved = image.roll(shift, (-2, -1)) + 0.01 * torch.rand((3, 8, 8), generator=replayed(5).public())
    assert shift_to(moved, image) == (-shift[0], -shift[1])


def test_registered_restarts_have_a_sharper_mean() -> None:
    image = torch.rand((3, 16, 16), generator=replayed(4).public())
    restarts = torch.stack([image, image, image.roll((2, 1), (-2, -1))])[:, None]
    assert float((registered(restarts).mean(0)[0] - image).abs().max()) < 1e-6
    assert float((restarts.mean(0)[0] - image).abs().max()) > 0.1
