from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.defenses.steps import batch, defended, flat, network, step_of
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import LeaktightError
from leaktight.core.rng import global_seed
from leaktight.core.types import Batch
from leaktight.defenses.graddefense import GradDefense, denoised, sensitivities, slice_bounds


def noised_slices(bounds: list[int], noise: torch.Tensor) -> list[int]:
    """Which slices differ; every element of a slice must, or none."""
    found = []
    for place, (start, stop) in enumerate(pairwise(bounds)):
        share = float((noise[start:stop] != 0).double().mean())
        assert share in (0, 1), "noise is on whole slices"
        if share:
            found.append(place)
    return found


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1e3)), min_size=1, max_size=12),
    st.integers(1, 12),
    st.integers(1, 5),
)
@example([(1, 1.0), (1, 0.0)], 2, 1)
@example([(1, 1.0), (1, 2.2250738585e-313)], 2, 1)
def test_slices_cover_every_coordinate_exactly_once(
    layers: list[tuple[int, float]], num_slices: int, factor: int
) -> None:
    sizes = [factor * size for size, _ in layers]
    bounds = slice_bounds(sizes, [sensitivity for _, sensitivity in layers], num_slices)
    assert bounds[0] == 0
    assert bounds[-1] == sum(sizes)
    assert all(start < stop for start, stop in pairwise(bounds)), "no slice is empty, none overlap"
    assert len(bounds) - 1 <= num_slices
    assert all(bound % math.gcd(*sizes) == 0 for bound in bounds)


def test_slices_are_equally_sensitive() -> None:
    sizes, sensitivity = [1001, 4000, 500], [5.0, 1.0, 4.0]
    bounds = slice_bounds(sizes, sensitivity, 10)
    density = torch.cat([torch.full((size,), each / size) for size, each in zip(sizes, sensitivity, strict=True)])
    held = [float(density[start:stop].sum()) for start, stop in pairwise(bounds)]
    densest = 4 / 500
    assert len(held) == 10
    assert all(1 - densest < each <= 1 + 1e-5 for each in held[:-1]), "one more element would be too much"
    assert held[-1] == pytest.approx(1, abs=10 * densest), "the last takes what is left"


def test_where_nothing_is_sensitive_slices_are_equally_long() -> None:
    assert slice_bounds([50, 50], [0.0, 0.0], 5) == [0, 50, 100]
    assert slice_bounds([50, 49], [0.0, 0.0], 3) == [0, 33, 66, 99]


def test_the_sensitivity_is_the_mean_norm_of_the_second_derivative() -> None:
    """By differences: d(sum of a layer's gradient) / dx for each example alone."""
    model, examples = network(), batch(3)
    step = step_of(model, examples)
    found = sensitivities(step, 2)
    expected = dict.fromkeys(step.gradient, 0.0)
    for row in range(2):
        squares = dict.fromkeys(step.gradient, 0.0)
        for place in range(36):
            ends = []
            for sign in (1, -1):
                moved = examples.inputs[[row]].clone()
                moved.view(-1)[place] += sign * 1e-5
                gradient = step_of(model, Batch(moved, examples.targets[[row]])).gradient
                ends.append({name: float(tensor.sum()) for name, tensor in gradient.items()})
            for name in squares:
                squares[name] += ((ends[0][name] - ends[1][name]) / 2e-5) ** 2
        for name, square in squares.items():
            expected[name] += math.sqrt(square) / 2
    assert found == pytest.approx(list(expected.values()), rel=1e-5, abs=1e-8)


def test_a_layer_under_a_softmax_counts_nothing_and_lies_in_the_last_slice() -> None:
    """The sum over all classes of its gradient is always zero, so it does not move with the input."""
    step = step_of(network(), batch(4))
    assert sensitivities(step, 4)[2:] == pytest.approx([0, 0], abs=1e-12)
    bounds = defended(GradDefense(), step).state["bounds"]
    assert bounds[-2] < 40 < bounds[-1] == 235  # the convolution has 40 elements


def test_noise_of_the_given_deviation_is_on_exactly_the_chosen_number_of_slices() -> None:
    step = step_of(network(), batch(4))
    defense = GradDefense(noise_std=0.5, num_slices=6, num_perturbed=2)
    collected, chosen = [], set()
    for seed in range(60):
        outcome = defended(defense, step, seed=seed)
        noise = flat(outcome.tensors) - flat(step.gradient)
        bounds = outcome.state["bounds"]
        assert len(bounds) == 7
        slices = noised_slices(bounds, noise)
        assert len(slices) == 2
        chosen.add(tuple(slices))
        collected.append(noise[noise != 0])
        noised = sum(bounds[place + 1] - bounds[place] for place in slices)
        assert outcome.figures["fraction_noised"] == pytest.approx(noised / 235)
    drawn = torch.cat(collected)
    assert float(drawn.std()) == pytest.approx(0.5, rel=5 / math.sqrt(2 * len(drawn)))
    assert len(chosen) > 10, "which slices is drawn anew"


def test_chosen_slices_of_each_example_are_clipped_before_the_mean() -> None:
    step = step_of(network(), batch(4))
    sigma = 1e-3
    plain = GradDefense(noise_std=sigma, num_slices=4, num_perturbed=2)
    unclipped, clipped = defended(plain, step), defended(replace(plain, clip=True), step)
    bounds = clipped.state["bounds"]
    noise = flat(unclipped.tensors) - flat(step.gradient)  # the same draws, since the stream is the same
    each = torch.cat([rows.flatten(1) for rows in step.per_example().values()], 1)
    expected = flat(step.gradient).clone()
    rates = []
    for place in noised_slices(bounds, noise):
        part = slice(bounds[place], bounds[place + 1])
        norms = each[:, part].norm(dim=1)
        rates.append(float((norms > sigma).double().mean()))
        expected[part] = sum(row * min(1.0, sigma / float(row.norm())) for row in each[:, part]) / 4
    torch.testing.assert_close(flat(clipped.tensors) - noise, expected)
    assert clipped.figures["clip_rate"] == pytest.approx(sum(rates) / len(rates))
    assert clipped.figures["clip_rate"] > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_parameter_without_dimensions_is_clipped_with_the_rest(dtype: torch.dtype) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.scale * inputs

    model = nn.Sequential(*network().children(), Scaled()).to(dtype)
    examples = batch(4)
    step = step_of(model, Batch(examples.inputs.to(dtype), examples.targets))
    outcome = defended(GradDefense(noise_std=1e-3, num_slices=2, num_perturbed=2, clip=True), step)
    assert outcome.figures["fraction_noised"] == 1
    assert outcome.tensors["4.scale"].shape == ()
    assert {tensor.dtype for tensor in outcome.tensors.values()} == {dtype}
    assert float(flat(outcome.tensors).double().norm()) < 1e-3 * (2 + 2 * math.sqrt(236))


def test_slices_are_cut_once_a_round_or_at_every_step() -> None:
    with global_seed(replayed(1)):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(36, 9), nn.Sigmoid(), nn.Linear(9, 7), nn.Sigmoid(), nn.Linear(7, 3)
        )
    model = model.double()
    first = defended(GradDefense(), step_of(model, batch(4)))
    later = replace(step_of(model, batch(4, seed=7)), index=1)
    assert defended(GradDefense(), later, state=first.state).state == first.state
    assert defended(GradDefense(refresh="step"), later, state=first.state).state != first.state
    assert defended(GradDefense(), replace(later, index=0), state=first.state).state != first.state


def test_batch_norm_in_training_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double()
    step = step_of(model, batch(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome = defended(GradDefense(), step)
    assert outcome.figures["fraction_noised"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def low_rank(rows: int, columns: int) -> torch.Tensor:
    generator = replayed(3).public()
    left = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    return (left @ torch.randn(2, columns, generator=generator, dtype=torch.float64)).reshape(-1)


@pytest.mark.parametrize("num_clients", [1, 10])
def test_compensation_removes_noise_from_a_signal_of_low_rank(num_clients: int) -> None:
    signal = low_rank(240, 40)  # sqrt(6 * 9600) = 240
    defense = GradDefense(noise_std=0.5, num_slices=10, num_perturbed=5, compensation_scale=0.1)
    left = 0.1 * 0.5 * math.sqrt(0.5 / num_clients)
    noise = left * torch.randn(9600, generator=replayed(4).public(), dtype=torch.float64)
    change = {"a": (signal + noise)[:9000].reshape(90, 100), "b": (signal + noise)[9000:]}
    compensated, _ = defense.on_aggregate(change, num_clients, {})
    error = float((flat(compensated) - signal).norm() / noise.norm())
    # Two directions of 40 stay; what theory puts outside of the interval stays too.
    assert error < 0.4
    assert compensated["a"].shape == (90, 100)


def test_the_published_compensation_takes_the_noise_for_stronger_than_it_is() -> None:
    signal = low_rank(240, 40)
    left = 0.5 * math.sqrt(0.5 / 10)
    noise = left * torch.randn(9600, generator=replayed(4).public(), dtype=torch.float64)
    defense = GradDefense(noise_std=0.5, compensation_scale=1.0)
    ours, _ = defense.on_aggregate({"a": signal + noise}, 10, {})
    theirs, _ = replace(defense, variant="code").on_aggregate({"a": signal + noise}, 10, {})
    assert float((ours["a"] - signal).norm()) < 0.4 * float(noise.norm())
    assert float((theirs["a"] - signal).norm()) > 0.9 * float(noise.norm()), "the interval misses the noise"


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("size", [1, 2, 97, 1000])
def test_pure_noise_goes_and_strong_signals_stay_at_any_size(size: int, published: bool) -> None:
    noise = torch.randn(size, generator=replayed(5).public(), dtype=torch.float64)
    assert denoised(noise, 1e-12, published=published).shape == (size,)
    torch.testing.assert_close(denoised(noise, 1e-12, published=published), noise)
    if size == 1000 and not published:
        assert float(denoised(noise, 1.0).norm()) < 0.5 * float(noise.norm())


def test_without_a_scale_or_without_noise_the_change_is_left_alone() -> None:
    change = {"a": torch.randn(50)}
    for defense in (GradDefense(), GradDefense(noise_std=0, compensation_scale=1.0)):
        assert defense.on_aggregate(change, 3, {})[0] is change


def test_no_noise_is_the_identity() -> None:
    step = step_of(network(), batch(2))
    outcome = defended(GradDefense(noise_std=0, clip=True), step)
    assert all(outcome.tensors[name] is tensor for name, tensor in step.gradient.items())


def test_what_is_not_finite_is_an_error() -> None:
    step = step_of(network(), batch(2))
    broken = {**step.gradient, "0.bias": torch.full_like(step.gradient["0.bias"], math.inf)}
    with pytest.raises(LeaktightError, match=r"'0\.bias' is not finite"):
        defended(GradDefense(), replace(step, gradient=broken))
    with pytest.raises(LeaktightError, match="sensitivity"):
        slice_bounds([3, 4], [1.0, math.nan], 2)


def test_a_step_without_a_loss_says_so() -> None:
    step = step_of(network(), batch(2))
    bare = {field: getattr(step, field) for field in step.__dataclass_fields__ if field != "loss"}
    with pytest.raises(LeaktightError, match="without a loss function"):
        defended(GradDefense(), type(step)(**bare))


@pytest.mark.parametrize(
    "settings_",
    [
        {"noise_std": -1},
        {"noise_std": math.nan},
        {"num_slices": 0},
        {"num_perturbed": 0},
        {"num_perturbed": 11},
        {"root_samples": 0},
        {"refresh": "epoch"},
        {"variant": "plato"},
        {"compensation_scale": -1},
    ],
)
def test_impossible_settings_are_refused(settings_: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        GradDefense(**settings_)
