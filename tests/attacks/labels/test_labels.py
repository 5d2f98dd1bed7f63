"""Labels from updates: exact cases, accuracy on real images, and what cannot work is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.attacks.labels.counts import round_to_total, step_effects
from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import (
    BiasCorrected,
    Geng,
    Given,
    Idlg,
    Joint,
    Wainakh,
    Yin,
)
from leaktight.core.errors import LeaktightError, ModelError, NotDisclosedError, UsageError
from leaktight.core.inputs import Images
from leaktight.core.tasks import WordRecognition
from leaktight.core.tensors import cloned, digest
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation, Update
from leaktight.data.cifar import Cifar10
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.metrics.labels import label_accuracy
from leaktight.models.initialise import build_model
from leaktight.models.resnet import ResNet20
from leaktight.models.small import LeNetZhu, Mlp
from leaktight.models.source import Network

RULES: dict[str, LabelStrategy] = {
    "idlg": Idlg(),
    "yin": Yin(),
    "bias_corrected": BiasCorrected(),
    "wainakh": Wainakh(),
    "geng": Geng(),
}


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits().load(Path())


def accuracy(
    rule: LabelStrategy, source: Network, data: Dataset, count: int, trials: int, init: str = "default", **scene: Any
) -> float:
    """The mean accuracy over batches, each on a freshly drawn network."""
    local = scene.pop("local", None)
    scores = []
    for seed in range(trials):
        model = build_model(source, data.inputs, data.num_classes, init=init, rng=replayed(seed).child("model"))
        batch = draw(data, count, seed, **scene)
        seen = observe(model, batch, data.num_classes, local=local, seed=seed)
        scores.append(label_accuracy(rule.infer(seen, count, rng=replayed(seed).child("labels")), batch.targets))
    return sum(scores) / trials


@pytest.mark.parametrize("source", [LeNetZhu(), LeNetZhu(activation="relu"), Mlp()], ids=repr)
@pytest.mark.parametrize("init", ["default", "wide"])
def test_idlg_is_always_right_on_one_example(digits: Dataset, source: Network, init: str) -> None:
    assert accuracy(Idlg(), source, digits, 1, trials=20, init=init) == 1


@pytest.mark.parametrize("source", [LeNetZhu(), LeNetZhu(activation="relu"), Mlp()], ids=repr)
def test_yin_finds_labels_that_occur_once(digits: Dataset, source: Network) -> None:
    assert accuracy(Yin(), source, digits, 8, trials=15, unique=True) >= 0.97


@pytest.mark.parametrize(("rule", "least"), [(BiasCorrected(), 0.85), (Wainakh(), 0.85), (Geng(), 0.97)])
@pytest.mark.parametrize("classes", [None, 3])
def test_batches_with_repeats(digits: Dataset, rule: LabelStrategy, least: float, classes: int | None) -> None:
    assert accuracy(rule, LeNetZhu(), digits, 8, trials=15, classes=classes) >= least


@pytest.mark.parametrize("source", [LeNetZhu(), LeNetZhu(activation="relu")], ids=repr)
def test_geng_counts_sixteen_labels(digits: Dataset, source: Network) -> None:
    assert accuracy(Geng(), source, digits, 16, trials=10) >= 0.97
    assert accuracy(Geng(), source, digits, 16, trials=10, classes=3) >= 0.97


LOCAL = {
    "minibatches": LocalTraining(epochs=2, batch_size=4, learning_rate=0.004),
    "momentum": LocalTraining(epochs=2, batch_size=4, learning_rate=0.002, momentum=0.9, weight_decay=5e-4),
    "nesterov": LocalTraining(epochs=2, batch_size=4, learning_rate=0.002, momentum=0.9, nesterov=True),
    "large_decay": LocalTraining(steps=4, batch_size=16, learning_rate=0.004, weight_decay=0.5),
}


@pytest.mark.parametrize("name", LOCAL)
def test_geng_on_several_local_steps(digits: Dataset, name: str) -> None:
    assert accuracy(Geng(), LeNetZhu(), digits, 16, trials=8, local=LOCAL[name]) >= 0.95
    assert accuracy(Geng(), LeNetZhu(), digits, 16, trials=8, local=LOCAL[name], classes=3) >= 0.9


@pytest.mark.parametrize("name", ["cifar_gradient", "cifar_delta", "cifar_resnet"])
def test_real_photographs(real_data: Path, name: str) -> None:
    data = Cifar10().load(real_data)
    if name == "cifar_gradient":
        assert accuracy(Idlg(), LeNetZhu(), data, 1, trials=10, init="wide") == 1
        assert accuracy(Yin(), LeNetZhu(), data, 8, trials=10, unique=True) >= 0.95
        assert accuracy(Geng(), LeNetZhu(), data, 16, trials=10) >= 0.97
    elif name == "cifar_delta":
        assert accuracy(Geng(), LeNetZhu(), data, 16, trials=8, local=LOCAL["minibatches"]) >= 0.95
    else:
        assert accuracy(Idlg(), ResNet20(), data, 1, trials=3) == 1
        assert accuracy(Geng(), ResNet20(), data, 4, trials=3) >= 0.8


def test_bias_corrected_by_hand() -> None:
    """Four examples, labels 2, 2, 2, 0, probabilities 0.25 throughout."""
    seen = head_observation(bias=torch.tensor([0.25 - 0.25, 0.25, 0.25 - 0.75, 0.25]))
    # Only class 2 is negative; a share is 0.5 / 4: it goes to -0.375, -0.25, -0.125 and is taken each time.
    assert BiasCorrected().infer(seen, 4, rng=replayed(0)).tolist() == [2, 2, 2, 2]
    seen = head_observation(bias=torch.tensor([-0.2, 0.25, -0.3, 0.25]))
    assert BiasCorrected().infer(seen, 4, rng=replayed(0)).tolist() == [0, 0, 2, 2]


def test_wainakh_takes_its_share_off_the_class_that_it_chose() -> None:
    """Row sums -4, -1 for C = 4, N = 5: a share is 5 / 5 * 1.25. First 0 and 1; then 0 at -2.75, at -1.5, at -0.25."""
    weight = torch.zeros(4, 3)
    weight[0, 0], weight[1, 1] = -4, -1
    assert Wainakh().infer(head_observation(weight=weight), 5, rng=replayed(0)).tolist() == [0, 0, 0, 0, 1]
    weight[1, 1] = -3  # shares of 1.75: 0 and 1, then 0 at -2.25, 1 at -1.25, 0 at -0.5
    assert Wainakh().infer(head_observation(weight=weight), 5, rng=replayed(0)).tolist() == [0, 0, 0, 1, 1]


def test_more_negative_classes_than_examples_keeps_the_lowest() -> None:
    seen = head_observation(bias=torch.tensor([-0.1, -0.5, -0.3, 0.9]))
    assert BiasCorrected().infer(seen, 2, rng=replayed(0)).tolist() == [1, 2]


@pytest.mark.parametrize("name", RULES)
def test_rules_are_deterministic_sorted_and_change_nothing(digits: Dataset, name: str) -> None:
    count = 1 if name == "idlg" else 6
    model = build_model(ResNet20(), digits.inputs, 10, rng=replayed(0)).train()
    seen = observe(model, draw(digits, count, 0, unique=True), 10)
    before = digest({**seen.update.tensors, **model.state_dict(), **{f"b.{k}": v for k, v in state_of(seen).items()}})
    state = torch.random.get_rng_state()
    one, two = (RULES[name].infer(seen, count, rng=replayed(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(one, one.sort().values)
    assert one.dtype is torch.long
    assert one.shape == (count,)
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    after = digest({**seen.update.tensors, **model.state_dict(), **{f"b.{k}": v for k, v in state_of(seen).items()}})
    assert before == after


@pytest.mark.parametrize("name", ["idlg", "yin", "bias_corrected", "wainakh"])
def test_a_delta_of_one_step_gives_the_same_labels_as_the_gradient(digits: Dataset, name: str) -> None:
    count = 1 if name == "idlg" else 6
    model = build_model(LeNetZhu(), digits.inputs, 10, rng=replayed(0))
    batch = draw(digits, count, 1)
    gradient = observe(model, batch, 10)
    delta = observe(model, batch, 10, local=LocalTraining(batch_size=count, learning_rate=0.01))
    delta = replace(delta, local_training=None)  # these rules need no scale
    rule = RULES[name]
    assert torch.equal(rule.infer(gradient, count, rng=replayed(0)), rule.infer(delta, count, rng=replayed(0)))


def test_given_needs_the_labels_and_their_number(digits: Dataset) -> None:
    model = build_model(LeNetZhu(), digits.inputs, 10, rng=replayed(0))
    seen = observe(model, draw(digits, 2, 0), 10)
    with pytest.raises(NotDisclosedError, match="labels"):
        Given().infer(seen, 2, rng=replayed(0))
    known = replace(seen, labels=torch.tensor([3, 7]))
    assert Given().infer(known, 2, rng=replayed(0)).tolist() == [3, 7]
    with pytest.raises(UsageError, match="labels of 3 examples, got 2"):
        Given().infer(known, 3, rng=replayed(0))


def test_geng_needs_local_training_with_sgd_for_a_delta(digits: Dataset) -> None:
    model = build_model(LeNetZhu(), digits.inputs, 10, rng=replayed(0))
    seen = observe(model, draw(digits, 4, 0), 10, local=LocalTraining(batch_size=2))
    with pytest.raises(NotDisclosedError, match="local_training"):
        Geng().infer(replace(seen, local_training=None), 4, rng=replayed(0))
    with pytest.raises(UsageError, match="adam"):
        Geng().infer(replace(seen, local_training=LocalTraining(batch_size=2, optimizer="adam")), 4, rng=replayed(0))


def test_joint_starts_from_random_logits() -> None:
    logits = Joint().draw(3, 5, replayed(0).public())
    assert logits.shape == (3, 5)
    assert torch.equal(logits, Joint().draw(3, 5, replayed(0).public()))
    assert not isinstance(Joint(), LabelStrategy)


class Convolutional(nn.Module):
    """A network without a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.conv(inputs).mean((2, 3))
        return outputs


def head_observation(weight: Tensor | None = None, bias: Tensor | None = None, **changes: Any) -> Observation:
    """A gradient of a single linear layer with 3 inputs and 4 classes, of which a part may be missing."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 4))
    batch = Batch(torch.rand(2, 1, 1, 3, generator=replayed(0).public()), torch.tensor([0, 1]))
    seen = observe(model, batch, 4)
    parts = {"1.weight": weight, "1.bias": bias}
    tensors = {name: tensor for name, tensor in parts.items() if tensor is not None}
    return replace(seen, update=Update(tensors, "gradient"), **changes)


def without_linear(name: str) -> Observation:
    batch = Batch(torch.rand(1, 1, 5, 5, generator=replayed(0).public()), torch.tensor([0]))
    return observe(Convolutional(), batch, 4)


WRONG: dict[str, tuple[Callable[[str], Observation], type[LeaktightError], str]] = {
    "no_linear_layer": (without_linear, ModelError, "ends in a linear layer, got Convolutional"),
    "other_number_of_classes": (
        lambda name: head_observation(torch.zeros(4, 3), torch.zeros(4), num_classes=7),
        ModelError,
        "7 outputs, got Sequential with 4 in '1'",
    ),
    "withheld": (lambda name: head_observation(), UsageError, "withheld"),
    "nan": (
        lambda name: head_observation(torch.full((4, 3), float("nan")), torch.zeros(4)),
        UsageError,
        "NaN or infinity in '1.weight'",
    ),
    "shape": (
        lambda name: head_observation(torch.zeros(4, 2), torch.zeros(3)),
        UsageError,
        "the update is of another model",
    ),
    "words": (
        lambda name: head_observation(torch.zeros(4, 3), torch.zeros(4), task=WordRecognition()),
        UsageError,
        "classification for label rules, got WordRecognition",
    ),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_work_is_named(name: str, wrong: str) -> None:
    make, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        RULES[name].infer(make(name), 1, rng=replayed(0))


def test_a_last_layer_without_bias_has_no_bias_rule() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 4, bias=False))
    batch = Batch(torch.rand(2, 1, 1, 3, generator=replayed(0).public()), torch.tensor([0, 1]))
    with pytest.raises(ModelError, match="bias in the last layer '1'"):
        BiasCorrected().infer(observe(model, batch, 4), 2, rng=replayed(0))


def test_the_model_may_be_the_layer_itself() -> None:
    class Bare(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs.flatten(1))

    batch = Batch(torch.rand(1, 1, 1, 3, generator=replayed(0).public()), torch.tensor([2]))
    seen = observe(Bare(3, 4), batch, 4)
    assert seen.inputs == Images(1, 1, 3)
    for name in ("idlg", "yin", "bias_corrected", "wainakh"):
        assert RULES[name].infer(seen, 1, rng=replayed(0)).tolist() == [2]
    assert Geng().infer(seen, 1, rng=replayed(0)).tolist() == [2]


@pytest.mark.parametrize(
    ("rule", "count", "message"),
    [
        (Idlg(), 2, "1 example for idlg, got 2"),
        (Yin(), 5, "at most 4 examples for yin, got 5"),
        (Yin(), 0, "at least 1"),
        (BiasCorrected(), 0, "at least 1"),
        (Wainakh(), 0, "at least 1"),
        (Geng(), 0, "at least 1"),
    ],
)
def test_numbers_of_examples_that_a_rule_cannot_take(rule: LabelStrategy, count: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rule.infer(head_observation(torch.zeros(4, 3), torch.zeros(4)), count, rng=replayed(0))


def test_geng_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="num_dummies"):
        Geng(num_dummies=1)
    with pytest.raises(ValueError, match="mode"):
        Geng(mode="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counts", "total", "expected"),
    [
        ([1.6, -0.4, 2.8], 4, [1, 0, 3]),
        ([0.0, 0.0], 3, [2, 1]),
        ([-1.0, -2.0, -3.0], 3, [1, 1, 1]),
        ([2.0, 1.0, 0.0], 3, [2, 1, 0]),
        ([0.9, 0.9, 0.9, 0.3], 3, [1, 1, 1, 0]),
    ],
)
def test_rounding_by_largest_remainders(counts: list[float], total: int, expected: list[int]) -> None:
    assert round_to_total(torch.tensor(counts, dtype=torch.float64), total).tolist() == expected


@pytest.mark.parametrize("local", [LocalTraining(), LOCAL["momentum"], LOCAL["nesterov"]], ids=repr)
def test_step_effects_are_those_of_the_optimiser(local: LocalTraining) -> None:
    """Feed a gradient that is 1 in one step and 0 in the others, and look at the final change."""
    from leaktight.fl.local import make_optimizer

    plain = replace(local, weight_decay=0.0)
    for pulse, effect in enumerate(step_effects(plain, 5)):
        optimizer = make_optimizer(plain)
        params = {"w": torch.zeros((), dtype=torch.float64)}
        for step in range(5):
            params = optimizer(params, {"w": torch.tensor(float(step == pulse), dtype=torch.float64)}, 1.0)
        assert float(params["w"]) == pytest.approx(-effect)


def state_of(seen: Observation) -> dict[str, Tensor]:
    return cloned({**seen.broadcast.params, **seen.broadcast.buffers})
