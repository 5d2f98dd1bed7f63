from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.defenses.dp_scenes import client_of, play, small_network
from tests.defenses.steps import Outcome, batch, defended, drawn_step, flat, network, step_of
from tests.seeds import replayed
from torch import Tensor

from leaktight.core.errors import LeaktightError
from leaktight.core.protocols import ClientFacts, RoundPlan, Step
from leaktight.core.training import LocalTraining
from leaktight.core.types import State, Update
from leaktight.defenses.outpost import Outpost, variances
from leaktight.fl.local import silent

ALWAYS = Outpost(decay=0)
SHAPES = ((12, 3, 5, 5), (12,), (10, 60), (10,), (1,))


def pruned(tensor: Tensor, share: float) -> Tensor:
    """The tensor without its smallest elements, by sorting."""
    gone = math.ceil(round(share * (tensor.numel() - 1), 9))
    result = tensor.clone().flatten()
    result[tensor.flatten().abs().argsort()[:gone]] = 0
    return result.view_as(tensor)


def columns_chosen(gradient: Tensor, share: float) -> Tensor:
    """The columns of the highest mean square, by sorting: a mask of the tensor's shape."""
    fisher = gradient.square().mean(0)
    count = fisher.numel() - math.ceil(round((1 - share) * (fisher.numel() - 1), 9))
    mask = torch.zeros(fisher.numel(), dtype=torch.bool)
    mask[fisher.flatten().argsort(descending=True)[:count]] = True
    return mask.view_as(fisher).expand_as(gradient)


def test_pruning_alone_is_exact_in_every_tensor() -> None:
    step = drawn_step(*SHAPES)
    outcome = defended(replace(ALWAYS, noise_scale=0), step)
    for name, tensor in step.gradient.items():
        assert torch.equal(outcome.tensors[name], pruned(tensor, 0.8)), name
    zeros = flat(outcome.tensors) == 0
    assert not bool(torch.signbit(flat(outcome.tensors)[zeros]).any()), "a zero does not tell the sign"


def test_noise_is_on_the_columns_of_the_highest_fisher_information_of_each_layer() -> None:
    step = drawn_step(*SHAPES)
    outcome = defended(ALWAYS, step)
    for name, tensor in step.gradient.items():
        noise = outcome.tensors[name] - pruned(tensor, 0.8)
        chosen = columns_chosen(tensor, 0.4) & (tensor.numel() > 1)
        assert torch.equal(noise != 0, chosen), name
    assert float((outcome.tensors["2"] - pruned(step.gradient["2"], 0.8) != 0).double().mean()) == pytest.approx(
        24 / 60
    )


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_the_noise_of_a_layer_has_variance_lambda_r_squared_with_r_at_most_one(scale: float) -> None:
    step = drawn_step((12, 3, 5, 5), (10, 60), seed=1)
    step = replace(step, params={name: scale * tensor for name, tensor in step.params.items()})
    noises: dict[str, list[Tensor]] = {"0": [], "1": []}
    for seed in range(30):
        tensors = defended(ALWAYS, step, seed=seed).tensors
        for name, found in noises.items():
            noise = tensors[name] - pruned(step.gradient[name], 0.8)
            found.append(noise[columns_chosen(step.gradient[name], 0.4)])
    for name, found in noises.items():
        expected = 0.8 * min(float(step.params[name].var()), 1)
        drawn = torch.cat(found).double().numpy()
        assert stats.kstest(drawn / expected, "norm").pvalue > 1e-3
        assert drawn.var() == pytest.approx(expected**2, rel=5 * math.sqrt(2 / len(drawn)))


def test_the_reported_deviation_is_the_mean_over_weights() -> None:
    step = drawn_step(*SHAPES)
    figures = defended(ALWAYS, step).figures
    stds = [0.8 * min(float(tensor.var()), 1) * tensor.numel() for tensor in list(step.params.values())[:-1]]
    assert figures["noise_std"] == pytest.approx(sum(stds) / sum(t.numel() for t in step.params.values()), rel=1e-5)
    assert figures["fraction_perturbed"] == 1


def test_weights_that_are_all_equal_get_no_noise() -> None:
    """As the weights of batch normalisation at the start."""
    step = drawn_step((64,), (8, 8))
    step = replace(step, params={**step.params, "0": torch.ones(64)})
    outcome = defended(ALWAYS, step)
    assert torch.equal(outcome.tensors["0"], pruned(step.gradient["0"], 0.8))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (3,), (64,), (1000,)])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 123.456])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_number_or_equal_numbers_have_no_variance(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> None:
    """Not 1e-8 either, which float32 squares leave of 0.1."""
    step = drawn_step(shape, (8, 8))
    step = replace(step, params={**step.params, "0": torch.full(shape, value, dtype=dtype)})
    outcome = defended(replace(ALWAYS, prune_share=0), step)
    assert torch.equal(outcome.tensors["0"], step.gradient["0"])
    assert not torch.equal(outcome.tensors["1"], step.gradient["1"])


@pytest.mark.parametrize("spread", [1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("middle", [0.0, 1.0, 30.0])
def test_the_variance_is_right_however_close_the_numbers_are(middle: float, spread: float) -> None:
    """As the weights of batch normalisation after a few steps."""
    numbers = (middle + spread * torch.randn(200, generator=replayed(0).public())).numpy()
    found = variances(numbers, [slice(0, 2), slice(2, 52), slice(52, 200)])
    expected = [numbers[place].astype(np.float64).var(ddof=1) for place in (slice(2), slice(2, 52), slice(52, 200))]
    assert found == pytest.approx(expected, rel=2e-3)


def test_by_elements_every_survivor_of_the_pruning_has_noise() -> None:
    step = drawn_step((40, 50))
    gradient = step.gradient["0"]
    noise = defended(replace(ALWAYS, fisher="element"), step).tensors["0"] - pruned(gradient, 0.8)
    chosen = torch.zeros(2000, dtype=torch.bool)
    chosen[gradient.flatten().abs().argsort(descending=True)[: 2000 - math.ceil(0.6 * 1999)]] = True
    assert torch.equal(noise != 0, chosen.view(40, 50))


def test_the_published_threshold_is_one_for_all_tensors() -> None:
    step = drawn_step((12, 3, 5, 5), (10, 60))
    step = replace(step, gradient={"0": step.gradient["0"], "1": 10 * step.gradient["1"]})
    outcome = defended(replace(ALWAYS, variant="code"), step)
    noised = {name: outcome.tensors[name] - pruned(tensor, 0.8) != 0 for name, tensor in step.gradient.items()}
    fishers = [tensor.square().mean(0).flatten() for tensor in step.gradient.values()]
    threshold = torch.cat(fishers).quantile(0.6)
    for name, fisher in zip(noised, fishers, strict=True):
        expected = (fisher >= threshold).view(step.gradient[name].shape[1:]).expand_as(noised[name])
        assert torch.equal(noised[name], expected)
    assert bool(noised["1"].any())
    assert not torch.equal(noised["1"], columns_chosen(step.gradient["1"], 0.4))


def after(steps: int) -> State:
    """The state of a client after so many steps."""
    return {**ALWAYS.start(network(), ClientFacts("a", 100, 3), rng=replayed(0))[1], "steps": steps}


def perturbed(outcome: Outcome) -> bool:
    return outcome.figures["fraction_perturbed"] == 1


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_the_first_step_is_always_perturbed_on_paper_and_not_in_the_code(variant: Any) -> None:
    step = drawn_step((3, 4))
    hits = [perturbed(defended(Outpost(decay=1e9, variant=variant), step, seed=seed)) for seed in range(20)]
    assert set(hits) == {variant == "paper"}


@pytest.mark.parametrize(("decay", "iteration"), [(0.1, 2), (0.1, 30), (0.5, 4)])
def test_a_step_is_perturbed_with_probability_one_over_one_plus_beta_i(decay: float, iteration: int) -> None:
    step, draws = drawn_step((2, 3)), 2000
    defense = Outpost(decay=decay)
    hits = sum(perturbed(defended(defense, step, state=after(iteration - 1), seed=seed)) for seed in range(draws))
    assert stats.binomtest(hits, draws, 1 / (1 + decay * iteration)).pvalue > 1e-3


def test_a_step_that_is_not_perturbed_passes_as_it_is() -> None:
    step = drawn_step((3, 4))
    outcome = defended(Outpost(decay=1e9), step, state=after(5))
    assert outcome.tensors["0"] is step.gradient["0"]
    assert outcome.state["steps"] == 6
    assert outcome.figures["fraction_perturbed"] == 0


def test_the_counter_goes_on_from_round_to_round() -> None:
    model = small_network().float()
    rounds = play(client_of(Outpost(), model), model, 3)  # 40 examples, batches of 12, 2 epochs: 8 steps
    assert [done.state.defense["steps"] for done in rounds] == [8, 16, 24]
    assert rounds[0].state.defense["steps_per_epoch"] == 4


@pytest.mark.parametrize(("count", "first"), [("all_rounds", 0.0), ("round", 1.0)])
def test_what_is_counted_decides_about_the_first_step_of_later_rounds(count: Any, first: float) -> None:
    """One step a round, and a probability that is nothing but for the step that is forced."""
    model, local = small_network().float(), LocalTraining(steps=1, batch_size=12)
    client = client_of(Outpost(decay=1e9, count=count), model, local=local)
    shares = [done.report["fraction_perturbed"] for done in play(client, model, 3)]
    assert shares == [1.0, first, first]


def test_the_published_counter_is_the_epoch_times_the_batch() -> None:
    code = Outpost(variant="code")
    assert [code.iteration(index, 99, 4) for index in range(8)] == [1, 2, 3, 4, 2, 4, 6, 8]
    assert code.iteration(6, 99, None) == 7, "where nobody counts epochs"
    plan, state = code.on_round(RoundPlan(0, (0.1,) * 8, 1.0, 4), after(3), rng=replayed(0), report=silent)
    assert (state["steps"], state["steps_per_epoch"]) == (3, 4)
    assert plan.learning_rates == (0.1,) * 8


def test_steps_of_a_round_are_chosen_one_by_one_and_their_noise_is_never_used_twice() -> None:
    """Both are drawn for several steps at once; a round of 40 steps needs several such draws of each."""
    step, state = drawn_step((50, 400)), after(0)
    model = replace(ALWAYS, prune_share=0, noise_share=1)
    noises = []
    for index in range(40):
        outcome = defended(model, replace(step, index=index), state=state, seed=index)
        noises.append((outcome.tensors["0"] - step.gradient["0"]).flatten())
        state = outcome.state
    together = torch.stack(noises)
    assert len(torch.unique(together)) > 0.99 * together.numel()
    assert float((torch.corrcoef(together) - torch.eye(40)).abs().max()) < 5 / math.sqrt(together.shape[1])
    _, state = model.on_update(Update(outcome.tensors, "delta", 1), state, rng=replayed(0), report=silent)
    assert state["noise"] is None, "no secret outlives its round"
    assert state["chosen"] == b""
    assert state["steps"] == 40


def test_choices_of_a_round_are_independent() -> None:
    """The number of perturbed steps of a round has the mean and the variance of independent draws."""
    step, counts = drawn_step((2, 3)), []
    chances = np.array([1 / (1 + 0.1 * i) for i in range(2, 41)])
    for seed in range(400):
        state, hits = after(0), list[bool]()
        for index in range(40):
            outcome = defended(Outpost(), replace(step, index=index), state=state, seed=1000 * seed + index)
            state, hits = outcome.state, [*hits, perturbed(outcome)]
        assert hits[0]
        counts.append(sum(hits) - 1)
    variance = float((chances * (1 - chances)).sum())
    assert np.mean(counts) == pytest.approx(chances.sum(), abs=4.5 * math.sqrt(variance / 400))
    assert np.var(counts) == pytest.approx(variance, rel=0.35)


def test_noise_is_fresh_at_every_call() -> None:
    step = drawn_step((50, 60))
    first, again, other = (defended(ALWAYS, step, seed=seed).tensors["0"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    chosen = columns_chosen(step.gradient["0"], 0.4)
    noises = torch.stack([(each - pruned(step.gradient["0"], 0.8))[chosen] for each in (first, other)])
    assert abs(float(torch.corrcoef(noises)[0, 1])) < 4.5 / math.sqrt(noises.shape[1])


@pytest.mark.parametrize("weakest", [{"noise_scale": 0}, {"noise_share": 0}])
def test_without_noise_and_pruning_every_number_stays(weakest: dict[str, float]) -> None:
    step = drawn_step(*SHAPES)
    outcome = defended(replace(ALWAYS, prune_share=0, **weakest), step)  # type: ignore[arg-type]
    assert all(torch.equal(outcome.tensors[name], tensor) for name, tensor in step.gradient.items())


def test_types_and_odd_shapes_stay() -> None:
    step = step_of(network(), batch(3))
    assert {tensor.dtype for tensor in defended(ALWAYS, step).tensors.values()} == {torch.float64}
    odd = drawn_step((), (0, 3), (4, 2))
    mixed: Step = replace(odd, gradient={**odd.gradient, "2": odd.gradient["2"].double()})
    outcome = defended(ALWAYS, mixed)
    assert list(outcome.tensors) == ["0", "1", "2"]
    for name, tensor in mixed.gradient.items():
        assert (outcome.tensors[name].shape, outcome.tensors[name].dtype) == (tensor.shape, tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_rounded_once(dtype: torch.dtype) -> None:
    step = drawn_step(*SHAPES)
    half, wide = (
        replace(
            step,
            gradient={name: tensor.to(dtype).to(last) for name, tensor in step.gradient.items()},
            params={name: tensor.to(dtype).to(last) for name, tensor in step.params.items()},
        )
        for last in (dtype, torch.float32)
    )
    found, expected = defended(ALWAYS, half), defended(ALWAYS, wide)
    assert found.figures == expected.figures
    assert all(torch.equal(found.tensors[name], tensor.to(dtype)) for name, tensor in expected.tensors.items())


def test_noise_on_double_precision_fills_all_its_digits() -> None:
    """What float32 noise leaves of a gradient's last digits, a server would read."""
    step = drawn_step((40, 50))
    zeros = {"0": torch.zeros(40, 50, dtype=torch.float64)}
    noise = defended(replace(ALWAYS, noise_share=1), replace(step, gradient=zeros)).tensors["0"]
    assert float((noise.float().double() == noise).double().mean()) < 0.01


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_named(bad: float) -> None:
    step = drawn_step(*SHAPES)
    step.gradient["2"][3, 5] = bad
    with pytest.raises(LeaktightError, match="'2' is not finite"):
        defended(ALWAYS, step)


def test_large_numbers_whose_squares_overflow_are_not_an_error() -> None:
    step = drawn_step((4, 5))
    outcome = defended(ALWAYS, replace(step, gradient={"0": 1e25 * step.gradient["0"]}))
    assert bool(outcome.tensors["0"].isfinite().all())


@pytest.mark.parametrize(
    "settings",
    [
        {"noise_scale": -1},
        {"noise_scale": math.inf},
        {"noise_share": 1.1},
        {"noise_share": 40},
        {"prune_share": -0.1},
        {"prune_share": math.nan},
        {"decay": -0.1},
        {"count": "epoch"},
        {"fisher": "row"},
        {"variant": "plato"},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Outpost(**settings)
