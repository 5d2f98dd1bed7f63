"""First and second derivatives of the networks."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor, nn
from torch.func import functional_call, grad

from leaktight.config.catalogue import MODELS
from leaktight.core.inputs import Images
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.types import Params
from leaktight.models.crnn import Crnn
from leaktight.models.initialise import build_model
from leaktight.models.resnet import ResNet18, ResNet20, ResNet50
from leaktight.models.small import LeNetZhu
from leaktight.models.source import Network
from leaktight.models.surgery import batch_statistics
from leaktight.models.vgg import Vgg16
from leaktight.models.vit import Vit

CIFAR = Images(3, 32, 32)
MNIST = Images(1, 28, 28)

SECOND_ORDER: list[tuple[str, Images]] = [
    ("lenet_zhu", CIFAR),
    ("grnn_lenet", CIFAR),
    ("glaus_cnn", MNIST),
    ("mlp", MNIST),
    ("logistic_regression", MNIST),
    ("shallow_cnn", Images(1, 12, 12)),
    ("resnet20", Images(3, 16, 16)),
    ("resnet32", Images(3, 8, 8)),
    ("resnet56", Images(3, 8, 8)),
    ("resnet20_4", Images(3, 8, 8)),
    ("vit", Images(3, 16, 16)),
    ("cnn6", CIFAR),
]


@pytest.mark.parametrize(("name", "shape"), SECOND_ORDER)
def test_gradient_of_a_gradient_under_torch_func_is_autograds(name: str, shape: Images) -> None:
    model = batch_statistics(build_model(MODELS[name](mean=(0.4,), std=(0.3,)), shape, 2, rng=replayed(1)).double())
    params, buffers = parameters_of(model), buffers_of(model)
    inputs = torch.rand(2, *shape.shape, dtype=torch.float64, generator=replayed(2).public())
    labels = torch.tensor([0, 1])

    def loss(params: Params, inputs: Tensor) -> Tensor:
        outputs = functional_call(model, (dict(params), buffers), (inputs,))
        return nn.functional.cross_entropy(outputs, labels)

    def leak(inputs: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in grad(loss)(params, inputs).values()]).sum()

    leaves = {key: value.clone().requires_grad_() for key, value in params.items()}
    probe = inputs.clone().requires_grad_()
    gradients = torch.autograd.grad(loss(leaves, probe), tuple(leaves.values()), create_graph=True)
    (expected,) = torch.autograd.grad(torch.stack([g.square().sum() for g in gradients]).sum(), probe)
    assert expected.abs().max() > 0
    torch.testing.assert_close(grad(leak)(inputs), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("source", [LeNetZhu(), Vit(depth=2), ResNet20(activation="sigmoid")])
def test_second_derivative_agrees_with_finite_differences(source: Network) -> None:
    shape = Images(3, 8, 8)
    model = batch_statistics(build_model(source, shape, 2, rng=replayed(1)).double())
    params, buffers = parameters_of(model), buffers_of(model)
    inputs = torch.rand(2, *shape.shape, dtype=torch.float64, generator=replayed(2).public())
    direction = torch.randn(inputs.shape, dtype=torch.float64, generator=replayed(3).public())

    def leak(inputs: Tensor) -> Tensor:
        def loss(params: Params) -> Tensor:
            outputs = functional_call(model, (dict(params), buffers), (inputs,))
            return nn.functional.cross_entropy(outputs, torch.tensor([0, 1]))

        return torch.stack([g.square().sum() for g in grad(loss)(params).values()]).sum()

    step = 1e-5
    numeric = (leak(inputs + step * direction) - leak(inputs - step * direction)) / (2 * step)
    torch.testing.assert_close((grad(leak)(inputs) * direction).sum(), numeric, rtol=1e-5, atol=1e-12)


def test_vgg_convolutions_and_pooling_have_second_derivatives() -> None:
    # The linear layers alone need a gigabyte in double precision: they stay on the meta device.
    with torch.device("meta"):
        whole = Vgg16(activation="sigmoid").build(CIFAR, 10)
    features = whole.get_submodule("features").to_empty(device="cpu").double()
    with torch.no_grad():
        for place, parameter in enumerate(features.parameters()):
            drawn = torch.randn(parameter.shape, generator=replayed(place).public(), dtype=torch.float64)
            parameter.copy_(drawn / parameter[0].numel() ** 0.5)
    inputs = torch.rand(1, *CIFAR.shape, dtype=torch.float64, generator=replayed(9).public())

    def pooled(inputs: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(features(inputs), 7).square().sum()

    def steepness(inputs: Tensor) -> Tensor:
        return torch.square(grad(pooled)(inputs)).sum()

    assert grad(steepness)(inputs).abs().max() > 0


class PlainNorm(nn.Module):
    """Batch norm from elementary operations."""

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, inputs: Tensor) -> Tensor:
        axes = [axis for axis in range(inputs.ndim) if axis != 1]
        mean, var = inputs.mean(axes, keepdim=True), inputs.var(axes, correction=0, keepdim=True)
        shape = (-1, *[1] * (inputs.ndim - 2))
        return (inputs - mean) / (var + self.eps).sqrt() * self.weight.view(shape) + self.bias.view(shape)


def with_plain_norms(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            plain.set_submodule(name, PlainNorm(module))
    return plain


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (Crnn(units=8), Images(3, 32, 24)),
        (Crnn(units=8), Images(1, 48, 16)),
        (ResNet20(), Images(3, 32, 32)),
        (ResNet20(activation="sigmoid"), Images(3, 9, 9)),
        (ResNet18(stem="imagenet"), Images(3, 64, 64)),
        (ResNet50(), Images(3, 9, 9)),
    ],
)
def test_gradients_are_those_of_elementary_operations(source: Network, shape: Images, count: int) -> None:
    """PyTorch's own batch norm has a wrong backward for some layouts of the gradient; no network may meet one."""
    model = build_model(source, shape, 4, rng=replayed(0)).double()
    inputs = torch.rand(count, *shape.shape, dtype=torch.float64, generator=replayed(1).public())
    gradients = []
    for candidate in (model, with_plain_norms(model)):
        outputs = candidate(inputs)
        weights = torch.arange(1.0, outputs.shape[-1] + 1, dtype=torch.float64).sin()
        gradients.append(torch.autograd.grad((outputs * weights).sum(), tuple(candidate.parameters())))
    scale = max(float(gradient.abs().max()) for gradient in gradients[1])
    for ours, plain in zip(*gradients, strict=True):
        # Relative to the largest: the gradient of a bias before a batch norm is zero up to rounding.
        torch.testing.assert_close(ours, plain, rtol=1e-7, atol=1e-9 * scale)
