"""Peeling: images behind convolutions and ReLUs, solved layer by layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.attacks.exact.analytic import gradient_of
from leaktight.attacks.exact.descent import Solver
from leaktight.attacks.exact.equations import Equations, channels_first, let_through
from leaktight.attacks.exact.graph import Graph
from leaktight.attacks.exact.patches import unmixed
from leaktight.attacks.exact.peeling import Peeling, explained
from leaktight.core.errors import ModelError, UsageError
from leaktight.core.rng import global_seed
from leaktight.core.types import Batch, Observation, Update
from leaktight.data.embedded import Digits
from leaktight.metrics.match import match


class Chain(nn.Module):
    """Convolutions with biases, the last two wide, and no batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 48, 3, stride=2, padding=1)
        self.third = nn.Conv2d(48, 64, 3, padding=1)
        self.last = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.relu(self.second(F.relu(self.first(inputs))))
        outputs: Tensor = self.last(F.relu(self.third(hidden)).mean((2, 3)))
        return outputs


def chain() -> nn.Module:
    with global_seed(replayed(1)):
        return Chain()


def scene(number: int = 1, model: nn.Module | None = None) -> tuple[Observation, Batch]:
    batch = draw(Digits(size=8).load(Path()), number, seed=3, unique=True)
    return observe(model or chain(), batch, 10, mode="eval"), batch


def solver(number: int = 1) -> tuple[Solver, Batch]:
    seen, batch = scene(number)
    return Solver(Graph(seen), gradient_of(seen), number), batch


def furthest(guess: Tensor, truth: Tensor) -> float:
    """The largest error of a pixel of the guess, matched to the truth."""
    return float((guess[match(guess, truth)] - truth).abs().max())


@pytest.mark.parametrize("number", [1, 2])
def test_images_labels_and_a_proof_come_from_the_gradient_alone(number: int) -> None:
    seen, batch = scene(number)
    found = Peeling(iterations=10).reconstruct([seen], rng=replayed(1))
    assert furthest(found.guess.inputs, batch.inputs) < 1e-2
    assert found.guess.targets.sort().values.tolist() == batch.targets.sort().values.tolist()
    assert found.certificate is not None
    assert found.certificate.holds


def test_a_gradient_that_is_scaled_gives_the_same_image() -> None:
    seen, batch = scene()
    halved = {name: tensor / 2 for name, tensor in seen.update.tensors.items()}
    found = Peeling(iterations=10).reconstruct([replace(seen, update=Update(halved, "gradient", 1))], rng=replayed(1))
    assert furthest(found.guess.inputs, batch.inputs) < 1e-2


def test_noise_is_an_error_or_is_not_proven() -> None:
    seen, _ = scene()
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: tensor + 0.01 * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in seen.update.tensors.items()
    }
    try:
        found = Peeling(iterations=1).reconstruct([replace(seen, update=Update(noisy, "gradient", 1))], rng=replayed(1))
    except UsageError:
        return
    assert found.certificate is not None
    assert not found.certificate.holds


def test_batch_norm_in_training_mode_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    seen, _ = scene(2, model)
    with pytest.raises(UsageError, match="evaluation mode"):
        Peeling().reconstruct([replace(seen, mode="train")], rng=replayed(1))


def test_more_positions_than_channels_are_refused() -> None:
    seen, _ = scene(5)  # 5 x 4 x 4 positions, 64 channels
    with pytest.raises(UsageError, match="as many channels as positions"):
        Peeling().reconstruct([seen], rng=replayed(1))


def test_a_network_that_branches_on_values_is_refused() -> None:
    class Branching(Chain):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs if float(inputs.sum()) > 0 else -inputs)

    seen, _ = scene(1, Branching())
    with pytest.raises(ModelError, match="branches"):
        Peeling().reconstruct([seen], rng=replayed(1))


def test_patches_are_unmixed_from_a_random_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = (torch.rand(2, 24, 3, 4, generator=generator, dtype=torch.float64) - 0.6).clamp_min(0)
    signal = torch.randn(40, 2 * 12, generator=generator, dtype=torch.float64)
    patches = F.unfold(truth, 3, padding=1).transpose(1, 2).flatten(0, 1)
    found = unmixed((signal @ patches).reshape(40, 24, 3, 3), (3, 4), 2, generator)
    assert found is not None
    alike = F.normalize(found.flatten(1)) @ F.normalize(truth.flatten(1)).T
    assert torch.allclose(alike.max(0).values, torch.ones(2, dtype=torch.float64), atol=1e-9)


def test_known_values_give_the_gradients_behind_any_image() -> None:
    work, batch = solver()
    right = work.graph.run(batch.inputs)
    slopes = torch.randn(1, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nodes = [each.node for each in work.graph.convolutions]
    known = {node: right.of[node].detach() for node in work.graph.nodes if work.graph.is_relu(node)}
    wanted, found = (values.back(nodes, work.graph.head, slopes) for values in (right, work.run(known)))
    assert all(torch.allclose(one, other) for one, other in zip(wanted, found, strict=True))


def test_the_input_of_a_convolution_solves_its_equations() -> None:
    work, batch = solver(2)
    values = work.graph.run(batch.inputs)
    last = work.graph.convolutions[-1]
    signal = work.signals([last], values)
    truth = values.of[last.entered].detach()
    fit = Equations.of([last.layer], [work.slope(last)], signal, truth.shape[2:]).fit()
    assert fit is not None
    assert not len(fit.openings)
    assert fit.residual < 1e-5
    assert torch.allclose(channels_first(fit.flat, truth.shape), truth, atol=1e-4)


def test_a_wrong_sign_is_found_and_set_right() -> None:
    work, batch = solver()
    values = work.graph.run(batch.inputs)
    known = {node: values.of[node].detach().clone() for node in work.graph.nodes if work.graph.is_relu(node)}
    last = work.graph.convolutions[-1]
    gate = next(iter(last.node.users))
    known[gate].flatten()[known[gate].flatten().argmax()] = 0.0
    fit = work._fit(last.entered, [last], known)
    assert fit is not None
    assert fit.residual > 1e-3
    solved = work._consistent(last.entered, [last], known, {})
    assert solved is not None
    assert torch.allclose(solved[0][last.entered], values.of[last.entered].detach(), atol=1e-4)


def test_entries_are_open_above_the_gap_behind_the_errors() -> None:
    value = torch.tensor([-2e-6, 1e-6, 2.5e-6, 1e-4, 0.3], dtype=torch.float64)
    found, safe = let_through(value)
    assert (found > 0).tolist() == [False, False, False, True, True]
    assert safe[2:4].max() < safe[4]


def rear(pool: nn.Module | None = None, *, inplace: bool = False) -> list[nn.Module]:
    """The layers behind a first convolution to 16 channels of 4 x 4."""
    return [
        *(nn.ReLU(inplace=inplace), pool or nn.Identity()),
        *(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(inplace=inplace)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace=inplace)),
        *(nn.Flatten(), nn.Linear(1024, 10)),
    ]


def network(*layers: nn.Module) -> nn.Module:
    """These layers with new weights, the same each time."""
    with global_seed(replayed(2)):
        for layer in layers:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.reset_parameters()
    return nn.Sequential(*layers)


def test_a_relu_that_writes_to_its_input_is_followed() -> None:
    seen, batch = scene(1, network(nn.Conv2d(1, 16, 3, 2, 1), *rear(inplace=True)))
    found = Peeling(iterations=10).reconstruct([seen], rng=replayed(1))
    assert furthest(found.guess.inputs, batch.inputs) < 0.05


def test_pixels_that_no_layer_reads_are_not_proven() -> None:
    seen, batch = scene(1, network(nn.Conv2d(1, 16, 1, 2), *rear()))
    found = Peeling(iterations=5).reconstruct([seen], rng=replayed(1))
    assert furthest(found.guess.inputs, batch.inputs) > 0.2
    assert found.certificate is not None
    assert not found.certificate.holds


def test_max_pooling_before_the_first_known_value_is_searched_through() -> None:
    seen, batch = scene(1, network(nn.Conv2d(1, 16, 3, padding=1), *rear(nn.MaxPool2d(2))))
    found = Peeling(iterations=5).reconstruct([seen], rng=replayed(1))
    assert (found.guess.inputs - batch.inputs).square().mean() < (0.5 - batch.inputs).square().mean()
    assert not found.guess.inputs.requires_grad


@pytest.mark.parametrize("image", [torch.zeros(1, 1, 8, 8), torch.full((1, 1, 8, 8), 0.5)], ids=["black", "grey"])
def test_an_image_without_detail_ends(image: Tensor) -> None:
    model = network(nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 64, 3, 1, 1), nn.ReLU(), *rear()[-5:-2])
    seen = observe(
        nn.Sequential(model, nn.Flatten(), nn.Linear(4096, 10)), Batch(image, torch.tensor([3])), 10, mode="eval"
    )
    with pytest.raises(UsageError):
        Peeling(iterations=1).reconstruct([seen], rng=replayed(1))


def test_gradients_of_zero_are_refused() -> None:
    seen, _ = scene()
    nothing = {name: torch.zeros_like(tensor) for name, tensor in seen.update.tensors.items()}
    with pytest.raises(UsageError, match="told apart"):
        Peeling().reconstruct([replace(seen, update=Update(nothing, "gradient", 1))], rng=replayed(1))


def test_an_image_that_others_outweigh_is_not_proven_by_them() -> None:
    work, batch = solver(2)
    seen, _ = scene(2)
    values = work.graph.run(batch.inputs)
    strong = work.slopes(values).clone()
    strong[1] *= 1e-5
    loss = (seen.model.double()(batch.inputs.double()) * strong).sum()
    names = dict(seen.model.named_parameters())
    sent = dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))
    tilted = Solver(work.graph, gradient_of(replace(seen, update=Update(sent, "gradient", 2))), 2)
    wrong = torch.stack([batch.inputs[0], 1 - batch.inputs[1]])
    assert explained(tilted, batch.inputs)[1] < 1e-3
    assert explained(tilted, wrong)[1] > 0.1
