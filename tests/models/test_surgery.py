"""Looking inside networks."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from leaktight.core.errors import ModelError
from leaktight.core.inputs import Images
from leaktight.core.tensors import buffers_of, digest, parameters_of
from leaktight.core.types import Params
from leaktight.models.initialise import build_model
from leaktight.models.resnet import ResNet18, ResNet20
from leaktight.models.small import Cnn6, LeNetZhu, LogisticRegression
from leaktight.models.surgery import (
    batch_statistics,
    conv_bn_blocks,
    final_linear,
    has_batch_norm,
    mode_of,
    representation,
)
from leaktight.models.vit import Vit

SMALL = Images(3, 16, 16)


class Backwards(nn.Module):
    """Registered in the opposite of the order in which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 2)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 1)
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.norm(self.conv(inputs))).mean((2, 3))
        return self.last(self.first(hidden))  # type: ignore[no-any-return]


def images(count: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(count, *SMALL.shape, dtype=dtype, generator=replayed(4).public())


def test_final_linear() -> None:
    assert final_linear(LeNetZhu().build(SMALL, 5))[0] == "classifier"
    assert final_linear(ResNet18().build(SMALL, 5))[0] == "fc"
    assert final_linear(ResNet20().build(SMALL, 5))[0] == "linear"
    assert final_linear(Cnn6().build(SMALL, 2))[0] == "classifier.linear"
    name, layer = final_linear(Vit(depth=1).build(SMALL, 5))
    assert (name, layer.out_features) == ("heads.head", 5)
    with pytest.raises(ModelError, match="linear layer"):
        final_linear(nn.Conv2d(3, 3, 1))


def test_with_inputs_the_order_is_that_of_the_run() -> None:
    model = Backwards()
    before = digest(model.state_dict())
    assert final_linear(model)[0] == "first"
    assert final_linear(model, images(dtype=torch.float32))[0] == "last"
    assert conv_bn_blocks(model, images(dtype=torch.float32)) == (("conv", "norm"), ("second", None))
    assert digest(model.state_dict()) == before
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("source", [ResNet18(), ResNet20(), LeNetZhu()])
def test_registration_order_is_forward_order(source: ResNet18 | ResNet20 | LeNetZhu) -> None:
    model = source.build(SMALL, 5)
    assert conv_bn_blocks(model) == conv_bn_blocks(model, images(dtype=torch.float32))


def test_has_batch_norm() -> None:
    assert has_batch_norm(ResNet20().build(SMALL, 5))
    assert not has_batch_norm(LeNetZhu().build(SMALL, 5))


def test_batch_statistics_is_exactly_training_mode_without_its_side_effect() -> None:
    model = build_model(ResNet20(), SMALL, 5, rng=replayed(0))
    pure = batch_statistics(model)
    before = digest(pure.state_dict())
    inputs, labels = images(3, torch.float32), torch.tensor([0, 1, 2])
    results = []
    for candidate in (copy.deepcopy(model), pure):
        probe = inputs.clone().requires_grad_()
        outputs = candidate(probe)
        loss = nn.functional.cross_entropy(outputs, labels)
        results.append([outputs, *torch.autograd.grad(loss, (probe, *candidate.parameters()))])
    assert all(torch.equal(eager, ours) for eager, ours in zip(*results, strict=True))
    assert digest(pure.state_dict()) == before == digest(model.state_dict())
    assert model.training
    model(inputs)
    assert digest(model.state_dict()) != before


def test_batch_statistics_keeps_evaluation_mode_and_names() -> None:
    model = build_model(ResNet20(), SMALL, 5, rng=replayed(0))
    model(images(4, torch.float32))
    pure = batch_statistics(model)
    assert list(pure.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        assert torch.equal(pure.eval()(images(dtype=torch.float32)), model.eval()(images(dtype=torch.float32)))


@pytest.mark.parametrize("source", [ResNet20(mean=(0.4,), std=(0.3,)), Vit(depth=2, mean=(0.4,), std=(0.3,))])
def test_a_whole_attack_step_traces_and_maps(source: ResNet20 | Vit) -> None:
    model = batch_statistics(build_model(source, SMALL, 2, rng=replayed(0)).double())
    params, buffers = parameters_of(model), buffers_of(model)

    def leak(inputs: Tensor, params: Params, buffers: Params, labels: Tensor) -> Tensor:
        def loss(params: Params) -> Tensor:
            outputs = functional_call(model, (dict(params), dict(buffers)), (inputs,))
            return nn.functional.cross_entropy(outputs, labels)

        return torch.stack([g.square().sum() for g in grad(loss)(params).values()]).sum()

    step, labels = grad(leak), torch.tensor([0, 1])
    batches = torch.stack([images(), 1 - images()])
    traced = make_fx(step, tracing_mode="fake")(images(), params, buffers, labels)
    one_by_one = torch.stack([step(batch, params, buffers, labels) for batch in batches])
    repeated = torch.stack([traced(batch, params, buffers, labels) for batch in batches])
    mapped = vmap(step, in_dims=(0, None, None, None))(batches, params, buffers, labels)
    torch.testing.assert_close(repeated, one_by_one, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(mapped, one_by_one, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("source", [LeNetZhu(), ResNet20(), Vit(depth=1), Cnn6()])
def test_representation_enters_the_final_linear_layer(source: LeNetZhu | ResNet20 | Vit | Cnn6) -> None:
    model = build_model(source, SMALL, 2, rng=replayed(0)).double().eval()
    params, buffers = parameters_of(model), buffers_of(model)
    seen = representation(model, params, buffers, images())
    _, layer = final_linear(model)
    assert seen.shape == (2, layer.in_features)
    torch.testing.assert_close(layer(seen)[:, -1], model(images())[:, -1])
    other = representation(model, {name: tensor * 0.5 for name, tensor in params.items()}, buffers, images())
    assert not torch.equal(seen, other)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_representation_is_pure() -> None:
    model = build_model(ResNet20(), SMALL, 2, rng=replayed(0)).double()
    buffers = buffers_of(model)
    before = digest(buffers)
    representation(model, parameters_of(model), buffers, images())
    assert digest(buffers) == before == digest(buffers_of(model))


def test_representation_under_transforms() -> None:
    model = build_model(LeNetZhu(), SMALL, 2, rng=replayed(0)).double()
    params = parameters_of(model)

    def one(image: Tensor) -> Tensor:
        return representation(model, params, {}, image[None])[0, 3]

    mapped = vmap(grad(one))(images())
    probe = images().requires_grad_()
    (expected,) = torch.autograd.grad(model.get_submodule("features")(probe).flatten(1)[:, 3].sum(), probe)
    torch.testing.assert_close(mapped, expected)


def test_representation_of_a_linear_model_is_the_image() -> None:
    model = LogisticRegression().build(SMALL, 2).double()
    assert torch.equal(representation(model, parameters_of(model), {}, images()), images().flatten(1))
    with pytest.raises(ModelError, match="linear layer"):
        representation(nn.Conv2d(3, 1, 1).double(), {}, {}, images())


def test_mode_of_restores_each_layer_even_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()

    def fail() -> None:
        with mode_of(model, "eval"):
            assert not any(module.training for module in model.modules())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert [module.training for module in model.modules()] == [True, True, False]
