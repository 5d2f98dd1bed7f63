from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.attacks.optimizers.test_compile import graph_of
from tests.seeds import replayed
from torch import Tensor, fx
from torch.func import grad, vmap

from leaktight.attacks.optimizers.compile import Function, make_runnable
from leaktight.attacks.optimizers.unfold import unfolded

SHAPES = [
    (3, 12, 32, 5, 2, 2),
    (4, 6, 9, 3, 2, 1),
    (4, 6, 8, 1, 2, 0),
    (4, 6, 8, 3, 1, 1),
    (5, 4, 11, 4, 3, 1),
    (2, 3, 12, 2, 3, 0),
    (2, 3, 8, 2, 1, 3),
]
"""Channels in and out, size of the image, of the kernel, stride and padding."""


def convolutions(graph: fx.GraphModule) -> int:
    return sum("convolution" in str(node.target) for node in graph.graph.nodes)


def doubly(stride: int, padding: int, groups: int) -> Function:
    """The value of a convolution, and the gradient, as in an attack, of a norm of its gradients."""

    def norm(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        def inner(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.conv2d(images, weight, bias, stride, padding, groups=groups).sigmoid().square().sum()

        first: tuple[Tensor, ...] = grad(inner, argnums=(0, 1, 2))(images, weight, bias)
        return torch.stack([each.square().sum() for each in first]).sum()

    def function(images: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        value = F.conv2d(images, weight, bias, stride, padding, groups=groups)
        return value, grad(norm)(images, weight, bias)

    return function


def drawn(inputs: int, outputs: int, size: int, kernel: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = replayed(0).public()
    shapes = (2, inputs * groups, size, size + 1), (outputs * groups, inputs, kernel, kernel), (outputs * groups,)
    images, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return images, weight, bias


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("inputs", "outputs", "size", "kernel", "stride", "padding"), SHAPES)
def test_products_give_what_convolutions_and_their_gradients_give(
    inputs: int, outputs: int, size: int, kernel: int, stride: int, padding: int, groups: int
) -> None:
    given = drawn(inputs, outputs, size, kernel, groups)
    graph = graph_of(doubly(stride, padding, groups), *given)
    products = unfolded(graph)
    assert convolutions(graph) > 0
    assert convolutions(products) == 0
    for found, wanted in zip(products(*given), graph(*given), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("size", "kernel", "padding"), [(8, 3, 1), (8, 3, 0), (4, 3, 2), (4, 3, 3), (5, 1, 0), (7, 2, 1)]
)
def test_large_weights_on_small_images_are_used_as_they_lie(size: int, kernel: int, padding: int) -> None:
    channels = 264 if kernel == 1 else 132
    given = drawn(channels, channels, size, kernel, 1)
    graph = graph_of(doubly(1, padding, 1), *given)
    products = unfolded(graph)
    assert convolutions(graph) > 0
    assert convolutions(products) == 0
    assert not any("flip" in str(node.target) for node in products.graph.nodes)
    for found, wanted in zip(products(*given), graph(*given), strict=True):
        torch.testing.assert_close(found, wanted)


def test_lanes_under_vmap_are_products_too() -> None:
    images, weight, bias = drawn(3, 4, 8, 3, 1)
    lanes = torch.stack([images, 2 * images, -images])
    function: Function = vmap(doubly(2, 1, 1), in_dims=(0, None, None))
    graph = graph_of(function, lanes, weight, bias)
    products = unfolded(graph)
    assert convolutions(products) == 0
    for found, wanted in zip(products(lanes, weight, bias), function(lanes, weight, bias), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_same_image_and_gradient_are_not_taken_for_those_of_another_node() -> None:
    """Two backwards of the same shapes; in the first, gradient and image are one tensor."""

    def backward(gradient: Tensor, images: Tensor, weight: Tensor) -> Tensor:
        ones, padding = [1, 1], [1, 1]
        _, found, _ = torch.ops.aten.convolution_backward(
            gradient, images, weight, None, ones, padding, ones, False, [0, 0], 1, [False, True, False]
        )
        result: Tensor = found
        return result

    def function(images: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return backward(images, images, weight), backward(images, other, weight)

    images, weight, _ = drawn(3, 3, 6, 3, 1)
    given = images, images.flip(0), weight
    products = unfolded(graph_of(function, *given))
    assert convolutions(products) == 0
    for found, wanted in zip(products(*given), function(*given), strict=True):
        torch.testing.assert_close(found, wanted)


def test_patches_are_gathered_once_for_a_convolution_and_the_gradient_of_its_weights() -> None:
    def function(images: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return F.conv2d(images, weight), grad(lambda w: F.conv2d(images, w).square().sum())(weight)

    images, weight, _ = drawn(3, 4, 8, 3, 1)
    products = unfolded(graph_of(function, images, weight))
    gathered = [node for node in products.graph.nodes if "as_strided" in str(node.target)]
    assert len(gathered) == 2  # the windows, and these as rows


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: (F.conv2d(x, w, dilation=2),), ((1, 2, 9, 9), (3, 2, 3, 3))),
        (lambda x, w: (F.conv1d(x, w),), ((1, 2, 9), (3, 2, 3))),
        (lambda x, w: (F.conv2d(x, w),), ((1, 2, 256, 256), (3, 2, 3, 3))),
        (lambda x, w: (F.conv2d(x, w),), ((1, 256, 9, 9), (256, 256, 3, 3))),
        (lambda x, w: (F.conv2d(x, w, stride=2),), ((1, 256, 4, 4), (256, 256, 3, 3))),
        (lambda x, w: (F.conv2d(x, w, groups=2),), ((1, 256, 4, 4), (256, 128, 3, 3))),
    ],
    ids=[
        "gaps in the kernel",
        "not images",
        "large images",
        "large weights, large images",
        "large weights, double steps",
        "large weights in groups",
    ],
)
def test_other_convolutions_stay(function: Function, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    images, weight = (torch.rand(shape, generator=replayed(1).public()) for shape in shapes)
    graph = unfolded(graph_of(function, images, weight))
    assert convolutions(graph) == 1
    assert torch.equal(graph(images, weight)[0], function(images, weight)[0])


def in_turns(images: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """More convolutions than a graph of few has."""
    for _ in range(33):
        images = F.conv2d(images, weight) / len(weight)
    return (images,)


def test_a_graph_of_many_convolutions_stays() -> None:
    images, weight, _ = drawn(3, 3, 4, 1, 1)
    graph = graph_of(in_turns, images, weight)
    assert unfolded(graph) is graph


def test_large_weights_on_small_images_become_products_in_a_graph_of_many_convolutions() -> None:
    images, weight, _ = drawn(264, 264, 4, 1, 1)
    products = unfolded(graph_of(in_turns, images, weight))
    assert convolutions(products) == 0
    torch.testing.assert_close(products(images, weight)[0], in_turns(images, weight)[0])


def network(images: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """Three layers with the strides of LeNet."""
    for stride, weight in zip((2, 2, 1), weights, strict=True):
        images = F.conv2d(images, weight, None, stride, 2).sigmoid()
    return images


def matching(images: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The gradient of how far the gradients of these weights are from one."""

    def distance(images: Tensor) -> Tensor:
        found = grad(lambda each: network(images, each).square().sum())(weights)
        return torch.stack([(each - 1).square().sum() for each in found]).sum()

    return (grad(distance)(images),)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_compiled_double_backward_gives_the_gradient_of_an_eager_one(lanes: int) -> None:
    """Steps of signs would hide a wrong gradient, so the gradient itself is compared, in float64."""
    generator = replayed(2).public()
    shapes = (lanes, 2, 3, 16, 16), (6, 3, 5, 5), (6, 6, 5, 5), (6, 6, 5, 5)
    images, *weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    function: Function = matching if lanes == 1 else vmap(matching, in_dims=(0, None, None, None))
    given = (images[0] if lanes == 1 else images, *weights)
    compiled = make_runnable(function, given, "inductor", onednn=True)
    assert compiled.backend == "inductor"
    torch.testing.assert_close(compiled(*given)[0], function(*given)[0])
