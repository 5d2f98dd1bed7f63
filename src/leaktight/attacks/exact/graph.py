"""A network as a graph of values, some of which are known, as far as an attack in closed form can follow it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from leaktight.attacks.exact.analytic import precise
from leaktight.core.errors import ModelError
from leaktight.core.types import Observation
from leaktight.models.surgery import copied

_LINEAR_LAYERS = (nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.ZeroPad2d)
_LINEAR_FUNCTIONS = {
    *(operator.add, operator.iadd, operator.sub, operator.getitem, torch.add, torch.sub, torch.cat, torch.flatten),
    *(torch.mean, F.pad, F.avg_pool2d, F.adaptive_avg_pool2d),
}
_LINEAR_METHODS = {"add", "add_", "mean", "flatten", "view", "reshape", "contiguous", "size"}

Known = Mapping[fx.Node, Tensor]
"""Values of nodes that were found, (N, ...)."""


@dataclass(frozen=True)
class Convolution:
    """node: its output. name: of its parameters. entered: the node that it reads."""

    node: fx.Node
    name: str
    layer: nn.Conv2d

    @property
    def entered(self) -> fx.Node:
        return _read(self.node)


@dataclass(frozen=True)
class Values:
    """The values of all nodes for some images, and a way back."""

    of: Mapping[fx.Node, Tensor]

    def back(self, wanted: Sequence[fx.Node], source: fx.Node, signal: Tensor) -> list[Tensor]:
        """The gradient by the nodes `wanted` of the sum of `signal` times the node `source`."""
        starts = [self.of[node] for node in wanted]
        found = torch.autograd.grad(self.of[source], starts, signal, allow_unused=True, retain_graph=True)
        return [torch.zeros_like(start) if each is None else each for start, each in zip(starts, found, strict=True)]


class Graph:
    """The network that was sent, in float64 and evaluation mode, traced into nodes."""

    def __init__(self, seen: Observation) -> None:
        model = copied(seen.model).double().eval()
        model.load_state_dict(precise(seen), strict=False)
        try:
            self.module = fx.symbolic_trace(model.requires_grad_(False))
        except Exception as error:  # tracing fails in as many ways as a network can be written
            raise ModelError(f"expected a network without branches that depend on values, got: {error}") from error
        self._simplify()
        self.shape = seen.inputs.shape
        self.nodes = [node for node in self.module.graph.nodes if node.op not in ("get_attr", "output")]

    def _simplify(self) -> None:
        """Leave out nodes that change nothing. Every ReLU is one function; no activation writes to what it reads."""
        for node in list(self.module.graph.nodes):
            if isinstance(self.layer(node), nn.Identity | nn.Dropout):
                node.replace_all_uses_with(_read(node))
                self.module.graph.erase_node(node)
            elif _stands_for_relu(node, self.layer(node)):
                read = _read(node)
                node.op, node.target, node.args, node.kwargs = "call_function", torch.relu, (read,), {}
            else:
                _keep_input(node, self.layer(node))
        self.module.recompile()

    @cached_property
    def convolutions(self) -> list[Convolution]:
        """In the order in which they run."""
        found = [
            Convolution(node, str(node.target), layer)
            for node in self.nodes
            if isinstance(layer := self.layer(node), nn.Conv2d)
        ]
        if len({each.name for each in found}) < len(found):
            raise ModelError("expected every convolution to run once, got one that runs twice; use a search")
        return found

    @cached_property
    def cuts(self) -> list[fx.Node]:
        """The nodes that everything after them hangs on alone, in the order in which they run."""
        place = {node: at for at, node in enumerate(self.nodes)}
        last = {node: max((place.get(user, len(place)) for user in node.users), default=-1) for node in self.nodes}
        result: list[fx.Node] = []
        furthest = -1
        for node in self.nodes:
            if furthest <= place[node]:
                result.append(node)
            furthest = max(furthest, last[node])
        return result

    def layer(self, node: fx.Node) -> nn.Module | None:
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def is_relu(self, node: fx.Node) -> bool:
        return node.target is torch.relu

    def is_linear(self, node: fx.Node) -> bool:
        """Whether the derivative of a node does not depend on what it reads, as far as is known."""
        if node.op == "call_module":
            return isinstance(self.layer(node), _LINEAR_LAYERS)
        return node.target in (_LINEAR_METHODS if node.op == "call_method" else _LINEAR_FUNCTIONS)

    @cached_property
    def head(self) -> fx.Node:
        """The last linear layer, which all outputs hang on."""
        linear = [node for node in self.nodes if isinstance(self.layer(node), nn.Linear)]
        if not linear or linear[-1] not in self.cuts:
            raise ModelError("expected a network that ends in a linear layer, got another; use a search")
        head: fx.Node = linear[-1]
        return head

    def gated(self, node: fx.Node) -> fx.Node | None:
        """What a ReLU reads; None for other nodes."""
        return _read(node) if self.is_relu(node) else None

    def norm_behind(self, convolution: Convolution) -> nn.BatchNorm2d | None:
        """The batch norm that alone reads a convolution."""
        users = list(convolution.node.users)
        layer = self.layer(users[0]) if len(users) == 1 else None
        return layer if isinstance(layer, nn.BatchNorm2d) else None

    def after(self, node: fx.Node) -> set[fx.Node]:
        """All nodes that depend on a node."""
        found, left = set[fx.Node](), [node]
        while left:
            new = [user for user in left.pop().users if user not in found]
            found.update(new)
            left += new
        return found

    def follows(self, node: fx.Node, known: set[fx.Node]) -> bool:
        """Whether a node can be computed from known ones."""
        return node in known or (
            node.op != "placeholder" and all(self.follows(each, known) for each in node.all_input_nodes)
        )

    def block_after(self, node: fx.Node) -> set[fx.Node]:
        """The nodes that depend on a node, up to the first ReLU that all else hangs on."""
        after = self.after(node)
        end = next((cut for cut in self.cuts if cut in after and self.is_relu(cut)), None)
        return after if end is None else after - self.after(end)

    def run(self, images: Tensor, known: Known | None = None) -> Values:
        """The values of all nodes. A known value takes the place of that computed; derivatives pass through it.

        The derivative of a ReLU is that at its known value. So derivatives of the outputs are right by every node from
        which only known ReLUs are passed, whatever the images are.
        """
        with torch.enable_grad():
            interpreter = _Substituting(self, known or {})
            interpreter.run(images.detach().double().requires_grad_())
        return Values(interpreter.values)

    def pieces(self, wanted: Sequence[fx.Node], start: fx.Node | None = None) -> fx.GraphModule:
        """A function from images to the values of some nodes, which runs no more than it needs.

        start: a cut, the value of which is given in place of images.
        """
        goals = set(wanted)
        behind = {start, *self.after(start)} if start is not None else set(self.nodes)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.module.graph.nodes:
            needed = node.op == "get_attr" or node in behind
            if node.op == "output" or not needed or not (node in goals or self.after(node) & goals):
                continue
            copies[node] = graph.placeholder("value") if node is start else graph.node_copy(node, copies.__getitem__)
        graph.output([copies[node] for node in wanted])
        return fx.GraphModule(self.module, graph)


class _Substituting(fx.Interpreter):
    """Runs a graph with known values in their places, and keeps all values."""

    def __init__(self, graph: Graph, known: Known) -> None:
        super().__init__(graph.module, garbage_collect_values=False)
        self.graph_of, self.known = graph, known
        self.values: dict[fx.Node, Tensor] = {}

    def run_node(self, node: fx.Node) -> object:
        result = super().run_node(node)
        if node in self.known and isinstance(result, Tensor):
            value = self.known[node]
            before = result if not self.graph_of.is_relu(node) else self.values[_read(node)] * (value > 0)
            result = value + (before - before.detach())
        if isinstance(result, Tensor):
            self.values[node] = result
        return result


def _stands_for_relu(node: fx.Node, layer: nn.Module | None) -> bool:
    """Whether a node is a ReLU in any of the ways in which one is written."""
    return (
        isinstance(layer, nn.ReLU)
        or (node.op == "call_function" and node.target in (F.relu, torch.relu, torch.relu_))
        or (node.op == "call_method" and node.target in ("relu", "relu_"))
    )


def _keep_input(node: fx.Node, layer: nn.Module | None) -> None:
    """Make an activation that writes to what it reads return a new tensor."""
    if layer is not None and getattr(layer, "inplace", False):
        setattr(layer, "inplace", False)  # noqa: B010 (not every layer has it)
    elif node.kwargs.get("inplace"):
        node.kwargs = {**node.kwargs, "inplace": False}


def _read(node: fx.Node) -> fx.Node:
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        raise ModelError(f"expected {node} to be given its input by position, got {dict(node.kwargs)}; use a search")
    return first
