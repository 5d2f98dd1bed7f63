from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.protocols import Aggregator
from leaktight.core.tensors import weighted_mean
from leaktight.core.types import State, Update
from leaktight.fl.aggregators import FedAvg, FedSgd, ServerAdam, ServerMomentum


def updates(**values: tuple[float, int | None]) -> dict[str, Update]:
    return {name: Update({"w": torch.tensor([value])}, "delta", size) for name, (value, size) in values.items()}


def change(aggregator: Aggregator, sent: dict[str, Update], state: State | None = None) -> tuple[float, State]:
    start = aggregator.start({"w": torch.zeros(1)}) if state is None else state
    result, after = aggregator.combine(sent, start)
    return float(result["w"]), after


def test_scheme_two_weights_by_examples() -> None:
    assert change(FedAvg(), updates(a=(1.0, 10), b=(4.0, 30)))[0] == pytest.approx((10 * 1 + 30 * 4) / 40)


def test_scheme_one_weights_equally_and_scales_the_loss() -> None:
    aggregator = FedAvg(scheme="I")
    assert change(aggregator, updates(a=(1.0, 10), b=(4.0, 30)))[0] == pytest.approx(2.5)
    sizes = [10, 30, 20]
    scales = [aggregator.loss_scale(size, sizes) for size in sizes]
    assert scales == pytest.approx([3 * 10 / 60, 3 * 30 / 60, 3 * 20 / 60])
    assert sum(scales) / 3 == pytest.approx(1.0)


def test_scheme_one_needs_no_sizes_and_scheme_two_says_so() -> None:
    assert change(FedAvg(scheme="I"), updates(a=(1.0, None), b=(3.0, None)))[0] == pytest.approx(2.0)
    with pytest.raises(UsageError, match="the number of examples of b, got none"):
        change(FedAvg(), updates(a=(1.0, 5), b=(3.0, None)))


def test_fedsgd_steps_against_the_mean_gradient() -> None:
    sent = {name: Update(u.tensors, "gradient", u.num_examples) for name, u in updates(a=(1.0, 1), b=(4.0, 2)).items()}
    assert change(FedSgd(learning_rate=0.5), sent)[0] == pytest.approx(-0.5 * 3.0)


def test_server_momentum_by_hand() -> None:
    aggregator = ServerMomentum(learning_rate=0.5, momentum=0.9)
    first, state = change(aggregator, updates(a=(1.0, 1)))
    second, _ = change(aggregator, updates(a=(2.0, 1)), state)
    assert (first, second) == pytest.approx((0.5 * 1.0, 0.5 * (0.9 * 1.0 + 2.0)))


def test_server_adam_by_hand() -> None:
    aggregator = ServerAdam(learning_rate=0.1, beta1=0.9, beta2=0.99, epsilon=1e-3)
    first, state = change(aggregator, updates(a=(2.0, 1)))
    assert first == pytest.approx(0.1 * 0.2 / ((0.01 * 4) ** 0.5 + 1e-3))
    second, _ = change(aggregator, updates(a=(1.0, 1)), state)
    assert second == pytest.approx(0.1 * (0.9 * 0.2 + 0.1) / ((0.99 * 0.04 + 0.01) ** 0.5 + 1e-3))


@pytest.mark.parametrize(
    "aggregator", [FedAvg(), FedSgd(), ServerMomentum(), ServerAdam()], ids=lambda a: type(a).__name__
)
def test_a_name_that_some_withhold_is_averaged_over_the_others(aggregator: Aggregator) -> None:
    both = {"w": torch.ones(1), "v": torch.ones(1)}
    sent = {
        "a": Update({"w": torch.tensor([1.0]), "v": torch.tensor([3.0])}, "delta", 1),
        "b": Update({"w": torch.tensor([1.0])}, "delta", 1),
    }
    alone = {"a": sent["a"]}
    together, _ = aggregator.combine(sent, aggregator.start(both))
    expected, _ = aggregator.combine(alone, aggregator.start(both))
    torch.testing.assert_close(together["v"], expected["v"])


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 50)), min_size=1, max_size=6))
def test_the_mean_does_not_depend_on_the_order_of_arrival(sent: list[tuple[float, int]]) -> None:
    values = {f"c{place}": {"w": torch.tensor([value])} for place, (value, _) in enumerate(sent)}
    weights = {f"c{place}": float(weight) for place, (_, weight) in enumerate(sent)}
    forward = weighted_mean(values, weights)["w"]
    backward = weighted_mean(dict(reversed(values.items())), weights)["w"]
    assert torch.equal(forward, backward)
    low, high = min(value for value, _ in sent), max(value for value, _ in sent)
    assert low - 1e-4 <= float(forward) <= high + 1e-4


def test_counters_stay_whole_numbers() -> None:
    mean: Tensor = weighted_mean({"a": {"n": torch.tensor(3)}, "b": {"n": torch.tensor(4)}}, {"a": 1, "b": 3})["n"]
    assert mean.dtype == torch.int64
    assert int(mean) == 4
