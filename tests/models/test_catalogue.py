"""Every network of the catalogue: sizes, names, outputs, and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.config.catalogue import MODELS
from leaktight.core.errors import ModelError
from leaktight.core.inputs import Images
from leaktight.models.crnn import Crnn
from leaktight.models.initialise import build_model
from leaktight.models.resnet import PaddedShortcut, ResNet18, ResNet20, ResNet20x4, ResNet34, ResNet50, ResNet152
from leaktight.models.small import Cnn6, GlausCnn, GrnnLeNet, LeNetZhu, Mlp, ShallowCnn
from leaktight.models.source import Network, Normalize, check_fits
from leaktight.models.surgery import conv_bn_blocks, final_linear
from leaktight.models.vgg import Vgg16
from leaktight.models.vit import Vit

CIFAR = Images(3, 32, 32)
MNIST = Images(1, 28, 28)
PHOTO = Images(3, 224, 224)
WORD = Images(3, 32, 100)

NATURAL: dict[str, tuple[Images, int]] = {
    "lenet_zhu": (CIFAR, 100),
    "grnn_lenet": (CIFAR, 10),
    "glaus_cnn": (MNIST, 10),
    "mlp": (MNIST, 10),
    "logistic_regression": (MNIST, 10),
    "shallow_cnn": (MNIST, 10),
    "resnet20": (CIFAR, 10),
    "resnet32": (CIFAR, 10),
    "resnet56": (CIFAR, 10),
    "resnet20_4": (CIFAR, 10),
    "resnet18": (CIFAR, 10),
    "resnet34": (CIFAR, 10),
    "resnet50": (CIFAR, 10),
    "resnet152": (CIFAR, 10),
    "vgg16": (PHOTO, 1000),
    "vit": (CIFAR, 10),
    "cnn6": (CIFAR, 2),
    "crnn": (WORD, 36),
}


def on_meta(source: Network, shape: Images, num_classes: int) -> nn.Module:
    """The network without memory for its weights: enough to count and to follow shapes."""
    with torch.device("meta"):
        return source.build(shape, num_classes)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_key_has_a_natural_size_here() -> None:
    assert set(NATURAL) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_settings_are_frozen_keyword_only_and_described_in_one_line(name: str) -> None:
    settings = MODELS[name]
    first, *_ = (settings.__doc__ or "").splitlines()
    assert first.endswith(".")
    assert all(field.kw_only for field in fields(settings))
    with pytest.raises(FrozenInstanceError):
        settings().mean = (0.5,)  # type: ignore[misc]


@pytest.mark.parametrize("name", MODELS)
def test_output_shape_at_the_natural_size(name: str) -> None:
    shape, num_classes = NATURAL[name]
    outputs = on_meta(MODELS[name](), shape, num_classes)(torch.zeros(2, *shape.shape, device="meta"))
    assert outputs.shape == ((2, 25, 37) if name == "crnn" else (2, num_classes))


@pytest.mark.parametrize(
    ("source", "shape", "num_classes", "expected"),
    [
        (ResNet18(stem="imagenet"), PHOTO, 1000, 11_689_512),
        (ResNet34(stem="imagenet"), PHOTO, 1000, 21_797_672),
        (ResNet50(stem="imagenet"), PHOTO, 1000, 25_557_032),
        (ResNet152(stem="imagenet"), PHOTO, 1000, 60_192_808),
        (MODELS["resnet20"](), CIFAR, 10, 269_722),
        (MODELS["resnet32"](), CIFAR, 10, 464_154),
        (MODELS["resnet56"](), CIFAR, 10, 853_018),
        (Vgg16(), PHOTO, 1000, 138_357_544),
        (Vgg16(), CIFAR, 1000, 138_357_544),
        (Vit(patch_size=16, depth=12, width=768, heads=12, mlp_width=3072), PHOTO, 1000, 86_567_656),
        (Mlp(), MNIST, 10, 199_210),
        (ShallowCnn(), MNIST, 10, 1_663_370),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Network) else None,
)
def test_number_of_parameters_is_the_published_one(
    source: Network, shape: Images, num_classes: int, expected: int
) -> None:
    assert num_parameters(on_meta(source, shape, num_classes)) == expected


@pytest.mark.parametrize(
    ("source", "shape", "expected"),
    [
        (LeNetZhu(), CIFAR, 768),
        (LeNetZhu(), MNIST, 588),
        (LeNetZhu(convolutions=4), CIFAR, 768),
        (GlausCnn(), MNIST, 2560),
        (Cnn6(), CIFAR, 3200),
    ],
)
def test_size_of_the_representation_is_the_published_one(source: Network, shape: Images, expected: int) -> None:
    assert final_linear(source.build(shape, 2))[1].in_features == expected


def test_lenets_follow_their_specifications() -> None:
    grnn = [tuple(p.shape) for p in GrnnLeNet().build(CIFAR, 10).parameters() if p.ndim > 1]
    assert grnn == [(6, 3, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
    zhu = LeNetZhu(convolutions=4).build(CIFAR, 100)
    assert [c.stride[0] for c in zhu.modules() if isinstance(c, nn.Conv2d)] == [2, 2, 1, 1]
    assert list(dict(zhu.named_parameters())).index("classifier.weight") == 8  # as CPL and Soteria count


def test_resnet20_4_has_21_convolutions_each_with_its_norm() -> None:
    blocks = conv_bn_blocks(ResNet20x4().build(CIFAR, 10))
    assert len(blocks) == 21
    assert blocks[0] == ("conv1", "bn1")
    assert ("layer2.0.downsample.0", "layer2.0.downsample.1") in blocks
    assert all(block.norm is not None for block in blocks)


def test_names_of_the_wide_networks_are_those_of_published_weights() -> None:
    names = set(on_meta(ResNet50(stem="imagenet"), PHOTO, 1000).state_dict())
    assert {
        *("conv1.weight", "bn1.running_mean", "layer1.0.conv3.weight", "layer1.0.downsample.0.weight"),
        *("layer1.0.downsample.1.num_batches_tracked", "layer4.2.bn3.bias", "fc.weight", "fc.bias"),
    } <= names
    assert len(names) == 320
    assert "layer1.0.downsample.0.weight" not in on_meta(ResNet18(), CIFAR, 10).state_dict()
    vgg = on_meta(Vgg16(), PHOTO, 1000).state_dict()
    assert vgg["features.28.weight"].shape == (512, 512, 3, 3)
    assert vgg["classifier.0.weight"].shape == (4096, 25088)
    assert vgg["classifier.6.weight"].shape == (1000, 4096)
    vit = on_meta(Vit(), CIFAR, 10).state_dict()
    assert {"class_token", "conv_proj.weight", "encoder.pos_embedding", "heads.head.weight"} <= set(vit)
    assert vit["encoder.layers.encoder_layer_5.self_attention.in_proj_weight"].shape == (576, 192)


@pytest.mark.parametrize(
    ("stem", "kernel", "stride", "pooled"),
    [("cifar", 3, 1, False), ("grnn", 3, 1, False), ("fedkl", 7, 2, False), ("imagenet", 7, 2, True)],
)
def test_stems(stem: str, kernel: int, stride: int, pooled: bool) -> None:
    model = on_meta(ResNet18(stem=stem, activation="sigmoid"), PHOTO, 10)  # type: ignore[arg-type]
    conv = model.get_submodule("conv1")
    assert isinstance(conv, nn.Conv2d)
    assert (conv.kernel_size[0], conv.stride[0], conv.padding[0], conv.bias) == (kernel, stride, kernel // 2, None)
    assert any(isinstance(module, nn.MaxPool2d) for module in model.modules()) == pooled


@pytest.mark.parametrize("name", [name for name in MODELS if "activation" in {f.name for f in fields(MODELS[name])}])
@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_activation_replaces_all(name: str, activation: str) -> None:
    shape, num_classes = NATURAL[name]
    model = on_meta(MODELS[name](activation=activation), shape, num_classes)  # type: ignore[call-arg]
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.ReLU | nn.Sigmoid)}
    assert kinds == {{"relu": nn.ReLU, "sigmoid": nn.Sigmoid}[activation]}


def test_sigmoid_follows_the_residual_sum() -> None:
    model = ResNet20(activation="sigmoid").build(CIFAR, 10).eval()
    seen: list[Tensor] = []
    model.get_submodule("layer3.2").register_forward_hook(lambda module, args, output: seen.append(output))
    model(torch.rand(2, *CIFAR.shape, generator=replayed(0).public()))
    low, high = seen[0].detach().aminmax()
    assert 0 < float(low) <= float(high) < 1


def test_padded_shortcut_takes_every_second_pixel_and_centres_the_channels() -> None:
    inputs = torch.arange(2 * 4 * 4.0).view(1, 2, 4, 4)
    outputs = PaddedShortcut(2, 4, 2)(inputs)
    assert outputs.shape == (1, 4, 2, 2)
    assert torch.equal(outputs[:, 1:3], inputs[:, :, ::2, ::2])
    assert not outputs[:, [0, 3]].any()


def test_resnet20_4_starts_from_kaiming_normal_by_fan_out() -> None:
    model = build_model(ResNet20x4(), CIFAR, 10, rng=replayed(3))
    for name in ("layer1.0.conv1", "layer3.2.conv2", "layer3.0.downsample.0"):
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        expected = (2 / (conv.out_channels * conv.kernel_size[0] ** 2)) ** 0.5
        assert float(conv.weight.detach().std()) == pytest.approx(expected, rel=0.05)


def test_cnn6_gives_the_logistic_loss() -> None:
    model = build_model(Cnn6(), CIFAR, 2, rng=replayed(0))
    assert all("bias" not in name for name, _ in model.named_parameters())
    inputs = torch.rand(4, *CIFAR.shape, generator=replayed(1).public())
    outputs, labels = model(inputs), torch.tensor([0, 1, 1, 0])
    signs = 2.0 * labels - 1
    logistic = torch.log1p(torch.exp(-signs * outputs[:, 1]))
    torch.testing.assert_close(nn.functional.cross_entropy(outputs, labels, reduction="none"), logistic)
    with pytest.raises(ModelError, match='head="linear"'):
        Cnn6().build(CIFAR, 10)
    assert Cnn6(head="linear").build(CIFAR, 10)(inputs).shape == (4, 10)


def test_normalize_acts_per_channel_and_leaves_no_state() -> None:
    layer = Normalize((0.5, 0.25), (0.5, 2.0))
    inputs = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    assert layer(inputs).flatten().tolist() == [1.0, 0.375]
    assert not layer.state_dict()
    plain, normalised = LeNetZhu(), LeNetZhu(mean=(0.5,), std=(0.25,))
    image = torch.rand(1, *CIFAR.shape, generator=replayed(0).public())
    models = [build_model(source, CIFAR, 10, rng=replayed(5)) for source in (plain, normalised)]
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    torch.testing.assert_close(models[0]((image - 0.5) / 0.25), models[1](image))


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (LeNetZhu, {"activation": "relo"}, "did you mean 'relu'"),
        (LeNetZhu, {"convolutions": 5}, "3 or 4"),
        (LeNetZhu, {"mean": (0.5,)}, "got a mean alone; give a std too"),
        (LeNetZhu, {"std": (0.5,)}, "got a std alone; give a mean too"),
        (LeNetZhu, {"mean": (0.5,), "std": (0.5, 0.5)}, "as many numbers"),
        (LeNetZhu, {"mean": (0.5,), "std": (0.0,)}, "std > 0"),
        (ResNet18, {"stem": "cifra"}, "did you mean 'cifar'"),
        (Mlp, {"hidden": ()}, "logistic_regression"),
        (ShallowCnn, {"hidden": 0}, "hidden >= 1"),
        (ShallowCnn, {"channels": (32,)}, "2 numbers"),
        (Vit, {"width": 10, "heads": 3}, "multiple of heads"),
        (Vit, {"depth": 0}, "depth >= 1"),
        (Vgg16, {"dropout": 1.0}, "dropout"),
        (Cnn6, {"head": "softmax"}, "logistic, linear"),
        (Crnn, {"units": 0}, "units >= 1"),
    ],
)
def test_wrong_settings_are_refused(settings: Callable[..., Network], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)


@pytest.mark.parametrize(
    ("source", "shape", "message"),
    [
        (Vit(), Images(1, 30, 28), "patch_size"),
        (GrnnLeNet(), Images(1, 8, 8), "larger images"),
        (Vgg16(), MNIST, "larger images"),
        (Crnn(), MNIST, "height of 32"),
        (LeNetZhu(mean=(0.5, 0.5), std=(1.0, 1.0)), CIFAR, "one number per channel"),
    ],
)
def test_images_that_do_not_fit_are_refused(source: Network, shape: Images, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        source.build(shape, 10)


def test_check_fits_leaves_the_model_as_it_was() -> None:
    model = build_model(ResNet20(), CIFAR, 10, rng=replayed(0))
    model.get_submodule("bn1").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_fits(model, CIFAR, 10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert not model.get_submodule("bn1").training
    assert model.get_submodule("layer1.0.bn1").training
