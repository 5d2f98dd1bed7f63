"""Convolutions of a traced graph as products of matrices, for the compiler.

The patches under a kernel become the rows of a matrix, so that a convolution and its two gradients are each one
product. What PyTorch's own kernels do inside is then visible: patches that a forward pass, the gradient of its weights
and the double backward share are gathered once, in loops that the compiler vectorises, and the operations around them
join in. The results differ from those of the kernels in the last bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

Pair: TypeAlias = tuple[int, int]
"""Of rows and of columns."""

_MOST_PATCHES, _MOST_WEIGHTS = 1 << 19, 1 << 16
"""Numbers in the patches of a batch and in the weights up to which products are used (docs/results/speed.md)."""
_MOST_CONVOLUTIONS = 32
"""Of a graph. ResNet-20 (113) became 1.7 times as much code to compile, and no gain was shown."""
_SMALL_MAP = 20480
"""Numbers in the images of a batch up to which PyTorch does without oneDNN in one thread, if a kernel takes single
steps. With large weights products are then faster in any graph."""


@dataclass(frozen=True)
class _Sliding:
    """How a kernel moves over images. groups: of channels that are convolved separately."""

    kernel: Pair
    stride: Pair
    padding: Pair
    groups: int

    def steps(self, size: Pair) -> Pair:
        """How many places it has on images of this size."""
        rows, columns = (
            (size[axis] + 2 * self.padding[axis] - self.kernel[axis]) // self.stride[axis] + 1 for axis in (0, 1)
        )
        return rows, columns

    def reach(self, axis: int) -> Pair:
        """The first and the last output that an input pixel takes part in.

        Pixel stride i + r takes part in output i + d with the weight at r + padding - stride d, if there is one.
        """
        stride, padding = self.stride[axis], self.padding[axis]
        return -((self.kernel[axis] - 1 - padding) // stride), (stride - 1 + padding) // stride


def unfolded(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph, traced on fake tensors, with its convolutions of images as products of matrices.

    In a graph with many convolutions, only those of small images with large weights.
    """
    few = sum(node.target in _REPLACEMENTS for node in graph.graph.nodes) <= _MOST_CONVOLUTIONS
    if not any(_replaced(node, few) for node in graph.graph.nodes):
        return graph
    from torch._functorch.compile_utils import fx_graph_cse  # here because it is slow to import

    result = fx.Graph()
    placed: dict[fx.Node, Any] = {}
    pieces: dict[object, fx.Graph] = {}
    for node in graph.graph.nodes:
        if node.target is operator.getitem and not isinstance(placed[node.args[0]], fx.Node):
            placed[node] = placed[node.args[0]][node.args[1]]  # one of the gradients
            continue
        piece = _piece(node, pieces, few)
        if piece is None:
            placed[node] = result.node_copy(node, placed.__getitem__)
            continue
        inputs = (inner for inner in piece.nodes if inner.op == "placeholder")
        values = {inner: placed[outer] for inner, outer in zip(inputs, _tensors(node), strict=True)}
        placed[node] = result.graph_copy(piece, values)
    for node in result.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # products have other memory layouts than convolutions
    shared = fx.GraphModule(graph, fx_graph_cse(result))
    shared.graph.eliminate_dead_code()
    shared.recompile()
    return shared


def _piece(node: fx.Node, pieces: dict[object, fx.Graph], few: bool) -> fx.Graph | None:
    """The graph that replaces a convolution, from those there are or traced; None where it stays as it is.

    few: whether the graph has few convolutions.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # here because it is slow to import

    if not _replaced(node, few):
        return None
    examples = [each.meta["val"] for each in _tensors(node)]
    kinds = tuple((each.shape, each.stride(), each.dtype) for each in examples)
    key = node.target, kinds, repr([None if isinstance(each, fx.Node) else each for each in node.args])
    if key not in pieces:

        def function(*tensors: Tensor) -> object:
            given = iter(tensors)
            arguments = (next(given) if isinstance(each, fx.Node) else each for each in node.args)
            return _REPLACEMENTS[node.target](*arguments)

        # Tensors of its own, as tracing takes an argument that is given twice for one.
        own = [each.new_empty_strided(each.shape, each.stride()) for each in examples]
        pieces[key] = make_fx(function, tracing_mode="fake")(*own).graph
    return pieces[key]


def _replaced(node: fx.Node, few: bool) -> bool:
    """Whether a node is a convolution of images, or its backward, with a kernel without gaps and of a size that gains.

    Larger patches do not stay in the processor's cache. Large weights are used as they lie, which the gradient of
    images allows if the kernel takes single steps.
    """
    if node.target not in _REPLACEMENTS:
        return False
    backward = node.target is torch.ops.aten.convolution_backward.default
    maps: list[torch.Size] = [each.meta["val"].shape for each in _tensors(node)]
    weight = maps.pop(2 if backward else 1)
    stride, _, dilation, transposed = cast("Sequence[Any]", node.args[4:8] if backward else node.args[3:7])
    if len(weight) != 4 or dilation != [1, 1] or (backward and transposed):
        return False
    most: int = max(map(math.prod, maps))
    if weight.numel() > _MOST_WEIGHTS:
        return most <= _SMALL_MAP and _single_steps(stride, node.args[-2 if backward else -1])
    return few and most * math.prod(weight[2:]) // math.prod(stride) <= _MOST_PATCHES


def _single_steps(stride: Sequence[int], groups: object) -> bool:
    return tuple(stride) == (1, 1) and groups == 1


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The arguments of a node that are tensors, also those that are the same."""
    return [each for each in node.args if isinstance(each, fx.Node)]


def _convolution(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """`aten.convolution`."""
    how = _sliding(weight, stride, padding, groups)
    if transposed:
        rows, columns = (
            (images.shape[2 + axis] - 1) * stride[axis] - 2 * padding[axis] + how.kernel[axis] + output_padding[axis]
            for axis in (0, 1)
        )
        result = _input_gradient(images, weight, (rows, columns), how)
    else:
        result = _forward(images, weight, how)
    return result if bias is None else result + bias[:, None, None]


def _backward(
    gradient: Tensor,
    images: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`aten.convolution_backward`."""
    how = _sliding(weight, stride, padding, groups)
    return (
        _input_gradient(gradient, weight, (images.shape[2], images.shape[3]), how) if wanted[0] else None,
        _weight_gradient(gradient, images, how) if wanted[1] else None,
        gradient.sum((0, 2, 3)) if wanted[2] else None,
    )


def _sliding(weight: Tensor, stride: list[int], padding: list[int], groups: int) -> _Sliding:
    kernel, moves, around = ((pair[0], pair[1]) for pair in (weight.shape[2:], stride, padding))
    return _Sliding(kernel, moves, around, groups)


def _forward(images: Tensor, weight: Tensor, how: _Sliding) -> Tensor:
    """images: (N, groups x C, H, W). weight: (groups x O, C, rows, columns). The result is (N, groups x O, h, w)."""
    steps = how.steps((images.shape[2], images.shape[3]))
    matrix = _split(weight, 0, how.groups, -1).permute(0, 3, 4, 2, 1).flatten(1, 3)
    return _ungrouped(_product(_windows(images, steps, how), matrix), len(images), steps)


def _weight_gradient(gradient: Tensor, images: Tensor, how: _Sliding) -> Tensor:
    """gradient: of the output, (N, groups x O, h, w). The result is (groups x O, C, rows, columns)."""
    steps = gradient.shape[2], gradient.shape[3]
    outputs = _grouped(gradient, how.groups).reshape(how.groups, -1, gradient.shape[1] // how.groups)
    slopes = _product(outputs.transpose(1, 2), _windows(images, steps, how))
    return slopes.reshape(gradient.shape[1], *how.kernel, -1).permute(0, 3, 1, 2)


def _input_gradient(gradient: Tensor, weight: Tensor, size: Pair, how: _Sliding) -> Tensor:
    """The gradient of images of this size, from that of the output: a convolution that makes a block of pixels, one
    for each step of the kernel, at a time. Large weights stay as they lie: see `_folded`."""
    if weight.numel() > _MOST_WEIGHTS and _single_steps(how.stride, how.groups):
        return _folded(gradient, weight, size, how)
    reach = how.reach(0), how.reach(1)
    blocks = -(-size[0] // how.stride[0]), -(-size[1] // how.stride[1])
    before = [-first for first, _ in reach]
    after = [blocks[axis] + reach[axis][1] - gradient.shape[2 + axis] for axis in (0, 1)]
    seen = reach[0][1] - reach[0][0] + 1, reach[1][1] - reach[1][0] + 1
    padded = F.pad(_grouped(gradient, how.groups), (0, 0, before[1], after[1], before[0], after[0]))
    patches = _split(_patches(padded, seen, (1, 1), blocks), 0, how.groups, -1)
    blended = _product(patches, _transposed(weight, how))
    pixels = blended.reshape(how.groups, len(gradient), *blocks, *how.stride, -1)
    images = pixels.permute(1, 0, 6, 2, 4, 3, 5).flatten(1, 2).flatten(4, 5).flatten(2, 3)
    return images[:, :, : size[0], : size[1]]


def _folded(gradient: Tensor, weight: Tensor, size: Pair, how: _Sliding) -> Tensor:
    """The same for a kernel of single steps: what each output sends to the pixels under the kernel, added up there."""
    steps = gradient.shape[2], gradient.shape[3]
    outputs = _grouped(gradient, 1).flatten(0, 2)
    sent = _split(outputs @ weight.permute(0, 2, 3, 1).flatten(1), 0, -1, *steps)
    sent = _split(sent, 3, *how.kernel, -1)  # (N, h, w, rows, columns, C)
    last = how.kernel[0] - 1, how.kernel[1] - 1
    rows, columns = last[0] - how.padding[0], last[1] - how.padding[1]
    padded = F.pad(sent, (0, 0, 0, 0, 0, 0, columns, columns, rows, rows))
    parts = [
        padded[:, last[0] - row :, last[1] - column :, row, column][:, : size[0], : size[1]]
        for row, column in product(range(how.kernel[0]), range(how.kernel[1]))
    ]
    return sum(parts[1:], parts[0]).permute(0, 3, 1, 2)


def _transposed(weight: Tensor, how: _Sliding) -> Tensor:
    """The matrix of `_input_gradient`: (groups, rows x columns x O seen, stride x stride x C), zero where no weight
    leads from an output to a pixel."""
    for axis in (1, 0):
        first, last = how.reach(axis)
        stride, kernel = how.stride[axis], how.kernel[axis]
        lowest = how.padding[axis] - stride * last
        number = stride * (last - first + 1)
        around = [0, 0] * (weight.ndim - 3 - axis) + [-lowest, lowest + number - kernel]
        weight = _split(F.pad(weight, around), 2 + axis, -1, stride).flip(2 + axis)
    grouped = _split(weight, 0, how.groups, -1)  # (groups, O, C, rows, stride, columns, stride)
    return grouped.permute(0, 3, 5, 1, 4, 6, 2).flatten(4, 6).flatten(1, 3)


def _windows(images: Tensor, steps: Pair, how: _Sliding) -> Tensor:
    """What the kernel sees at each of its places: (groups, N x h x w, rows x columns x C)."""
    rows, columns = how.padding
    padded = F.pad(_grouped(images, how.groups), (0, 0, columns, columns, rows, rows))
    return _split(_patches(padded, how.kernel, how.stride, steps), 0, how.groups, -1)


def _patches(images: Tensor, size: Pair, stride: Pair, steps: Pair) -> Tensor:
    """(B, H, W, C) to (B x h x w, rows x columns x C).

    The strided view of a copy makes the compiler write that copy as it stands, here with rows of a patch that are
    contiguous in both; as one shape it would compute every index by divisions.
    """
    copied = images.clone(memory_format=torch.contiguous_format)
    batch, height, width, channels = copied.shape
    row = width * channels
    shape = batch, *steps, size[0], size[1] * channels
    gathered = copied.as_strided(shape, (height * row, stride[0] * row, stride[1] * channels, row, 1))
    flat = batch * math.prod(steps), math.prod(size) * channels
    return gathered.clone(memory_format=torch.contiguous_format).as_strided(flat, (flat[1], 1))


def _grouped(images: Tensor, groups: int) -> Tensor:
    """(N, groups x C, H, W) to (groups x N, H, W, C)."""
    return _split(images, 1, groups, -1).permute(1, 0, 3, 4, 2).flatten(0, 1)


def _ungrouped(rows: Tensor, number: int, steps: Pair) -> Tensor:
    """(groups, N x h x w, O) to (N, groups x O, h, w)."""
    return _split(rows, 1, number, *steps).permute(1, 0, 4, 2, 3).flatten(1, 2)


def _split(tensor: Tensor, axis: int, *sizes: int) -> Tensor:
    """One axis as several of these sizes; -1 is what is left."""
    result: Tensor = tensor.unflatten(axis, sizes)
    return result


def _product(first: Tensor, second: Tensor) -> Tensor:
    """The products of matrices (groups, M, K) and (groups, K, N)."""
    return (first[0] @ second[0])[None] if len(first) == 1 else torch.bmm(first, second)


_REPLACEMENTS: Mapping[object, Callable[..., object]] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _backward,
}
