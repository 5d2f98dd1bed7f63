"""GRNN: its generator, its loss, its optimiser, and that it finds more than it began with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import wasserstein_distance
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed

from leaktight.attacks.controls import PriorOnly
from leaktight.attacks.generative.grnn import Grnn, UntrainedGenerator
from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.objectives import Objective, Sum
from leaktight.attacks.matching.spread import choose
from leaktight.attacks.matching.view import Evidence
from leaktight.attacks.optimizers.descent import RmsProp
from leaktight.config.catalogue import MODELS
from leaktight.core.errors import ModelError
from leaktight.core.inputs import Images
from leaktight.core.types import Batch, Observation
from leaktight.data.embedded import Digits, Photos
from leaktight.metrics import psnr
from leaktight.models.generators import GrnnGenerator, resolution
from leaktight.models.initialise import build_model

QUICK = Grnn(iterations=3, latent=8, parallel="none", backend="eager", onednn=False)


def seen_photo(model: str = "lenet_zhu", count: int = 1) -> tuple[Observation, Batch]:
    photos = Photos().load(Path())
    network = build_model(MODELS[model](), photos.inputs, photos.num_classes, init="wide", rng=replayed(3))
    batch = draw(photos, count, seed=3)
    return observe(network, batch, photos.num_classes), batch


@pytest.mark.parametrize(("size", "doublings"), [(28, 3), (32, 3), (64, 4), (128, 5), (256, 6)])
def test_the_generator_grows_with_the_resolution(size: int, doublings: int) -> None:
    generator = GrnnGenerator(4, Images(3, size, size))
    images = generator(torch.randn(1, 4, generator=replayed(0).public())).detach()
    assert images.shape == (1, 3, size, size)
    assert 0 < float(images.min()) < float(images.max()) < 1
    assert len(generator.blocks) == doublings
    widths = [weight.shape[:2] for name, weight in generator.named_parameters() if weight.ndim == 4][1:]
    assert widths == [(after, after) for after in [32 << step for step in range(1, doublings)][::-1]] + [(6, 32)]


def test_other_sizes_are_cut_from_the_middle() -> None:
    noise = torch.randn(2, 4, generator=replayed(0).public())
    whole, cut = GrnnGenerator(4, Images(1, 32, 32)), GrnnGenerator(4, Images(1, 28, 20))
    cut.load_state_dict(whole.state_dict())
    torch.testing.assert_close(cut(noise), whole(noise)[:, :, 2:30, 6:26])
    assert [resolution(Images(1, side, 8)) for side in (8, 32, 33, 100, 256)] == [32, 32, 64, 128, 256]
    with pytest.raises(ModelError, match="at most 256x256 pixels for GRNN, got 257"):
        resolution(Images(1, 4, 257))


def terms_of(attack: Grnn, guess: torch.Tensor, target: torch.Tensor) -> list[float]:
    """Each weighted term of the attack's objective, for updates of one linear layer."""
    objective = attack.matching().objective
    assert isinstance(objective, Sum)
    model = torch.nn.Linear(target.shape[1], target.shape[0], bias=False)

    def value(term: Objective) -> float:
        return float(term.loss({"weight": guess}, term.prepare({"weight": target}, model, (1, 1, 1))))

    return [weight * value(term) for weight, term in objective.terms]


def test_the_loss_is_that_of_the_paper_or_of_the_code() -> None:
    guess, target = torch.randn(2, 6, 5, generator=replayed(1).public(), dtype=torch.float64)
    squared = float((guess - target).square().sum())
    sorted_distance = wasserstein_distance(guess.flatten().numpy(), target.flatten().numpy())
    assert terms_of(Grnn(), guess, target) == pytest.approx([squared, sorted_distance])
    assert terms_of(Grnn(variant="code"), guess, target) == pytest.approx([squared, squared**0.5])
    assert terms_of(Grnn(squared=0, wasserstein=2), guess, target) == pytest.approx([2 * sorted_distance])
    cosine = 1 - float((guess * target).sum() / (guess.norm() * target.norm()))
    assert terms_of(Grnn(wasserstein=0, cosine=1), guess, target) == pytest.approx([squared, cosine])


def test_total_variation_can_be_left_out() -> None:
    assert len(Grnn().matching().priors) == 1
    assert Grnn(total_variation=0).matching().priors == ()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"squared": 0.0, "wasserstein": 0.0}, "nothing would be matched"),
        ({"total_variation": -1.0}, "expected total_variation >= 0"),
        ({"variant": "thesis"}, "expected variant"),
        ({"latent": 0}, "expected latent >= 1"),
        ({"momentum": 1.0}, "expected momentum >= 0 and < 1"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Grnn(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop_is_that_of_pytorch(momentum: float) -> None:
    start = torch.randn(7, generator=replayed(2).public(), dtype=torch.float64)
    parameter = start.clone().requires_grad_()
    reference = torch.optim.RMSprop([parameter], lr=1e-2, momentum=momentum)
    ours = RmsProp(learning_rate=1e-2, momentum=momentum)
    point, memory = {"x": start}, ours.memory({"x": start})
    for iteration in range(8):
        parameter.grad = 4 * parameter.detach() ** 3 + 1
        reference.step()
        rates = torch.tensor(ours.rates(iteration, 8), dtype=torch.float64)
        point, memory = ours.step(point, {"x": 4 * point["x"] ** 3 + 1}, memory, rates)
    torch.testing.assert_close(point["x"], parameter.detach(), rtol=1e-12, atol=1e-12)


def test_noise_stays_and_weights_are_drawn_anew() -> None:
    evidence = Evidence([], None, 5, (1, 28, 28), 10)
    space = UntrainedGenerator(latent=6).space(evidence, replayed(0), torch.float64)
    one, two = space.draw(replayed(1)), space.draw(replayed(2))
    assert space.constants["noise"].shape == (5, 6)
    assert all(weight.dtype == torch.float64 for weight in one.values())
    images = space.images(one, space.constants)
    assert images.shape == (5, 1, 28, 28)
    assert not torch.equal(images, space.images(two, space.constants))
    assert torch.equal(images, space.images(space.draw(replayed(1)), space.constants))


def test_the_same_seed_gives_the_same_bytes() -> None:
    seen, _ = seen_photo(count=2)
    one, two, other = (QUICK.reconstruct([seen], rng=replayed(seed)) for seed in (5, 5, 6))
    assert torch.equal(one.guess.inputs, two.guess.inputs)
    assert torch.equal(one.guess.targets, two.guess.targets)
    assert not torch.equal(one.guess.inputs, other.guess.inputs)


def test_restarts_abreast_come_out_as_in_turn() -> None:
    seen, _ = seen_photo()
    attack = replace(QUICK, precision="float64", restarts=2)
    in_turn, abreast = (
        replace(attack, parallel=way).reconstruct([seen], rng=replayed(7)).guess.inputs for way in ("none", "vmap")
    )
    torch.testing.assert_close(in_turn, abreast, rtol=1e-5, atol=1e-6)


def test_restarts_go_in_turn_unless_told_otherwise() -> None:
    seen, _ = seen_photo()
    attack = Grnn(restarts=4).matching()
    evidence = attack.evidence([seen], rng=replayed(0))
    assert choose(attack.workload, evidence, "auto", workers=1) == ("none", 1)
    assert choose(attack.workload, evidence, "vmap", workers=1) == ("vmap", 1)


def test_known_labels_need_no_label_branch() -> None:
    seen, batch = seen_photo()
    known = replace(seen, labels=batch.targets)
    found = replace(QUICK, labels=Given()).reconstruct([known], rng=replayed(0))
    assert torch.equal(found.guess.targets, batch.targets)


def test_a_batch_of_256() -> None:
    digits = Digits().load(Path())
    network = build_model(MODELS["grnn_lenet"](), digits.inputs, digits.num_classes, init="wide", rng=replayed(0))
    batch = draw(digits, 256, seed=0)
    attack = replace(QUICK, iterations=1, latent=128, variant="code")
    found = attack.reconstruct([observe(network, batch, digits.num_classes)], rng=replayed(0))
    assert found.guess.inputs.shape == batch.inputs.shape
    assert len(found.guess.inputs.flatten(1).unique(dim=0)) == 256, "every example has a guess of its own"


def test_it_finds_more_than_no_look_at_the_update() -> None:
    seen, batch = seen_photo()
    attack = Grnn(iterations=300, latent=16, learning_rate=3e-4, variant="code", decay="constant")
    first = replace(attack, iterations=1).reconstruct([seen], rng=replayed(0))
    found = attack.reconstruct([seen], rng=replayed(0))
    blind = PriorOnly(iterations=20).reconstruct([seen], rng=replayed(0))
    assert found.loss < 0.5 * first.loss
    assert torch.equal(found.guess.targets, batch.targets)
    control = max(float(psnr(each.guess.inputs, batch.inputs)) for each in (first, blind))
    assert float(psnr(found.guess.inputs, batch.inputs)) > control + 1


def test_without_softening_max_pooling_stays_hard() -> None:
    hard = replace(QUICK, softening=0.0)
    assert type(hard.matching().matched) is type(hard.shared().matched)
    seen, _ = seen_photo("grnn_lenet")
    found = hard.reconstruct([seen], rng=replayed(1))
    assert found.loss < (found.first_loss or 0.0)
