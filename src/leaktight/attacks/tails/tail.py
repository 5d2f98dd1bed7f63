"""The part of a network behind one of its values, and the search for that value by the gradients of its weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.func import functional_call, grad

from leaktight.attacks.exact.graph import Convolution, Graph
from leaktight.attacks.matching.soft import soft_relu
from leaktight.attacks.optimizers.optimizer import Problem, Tree
from leaktight.core.errors import ModelError
from leaktight.core.rng import Rng
from leaktight.core.types import Params

_LEAST_ADDED = 0.5  # numbers in the gradients that a tail adds, for each number of the value that enters it
_TINY = 1e-20  # of a squared length, so that a gradient of zero has a direction


@dataclass(frozen=True)
class Tail:
    """A network in float32 from the value of a cut on. convolutions: those in it, whose gradients were sent."""

    graph: Graph
    cut: fx.Node
    convolutions: Sequence[Convolution]

    @classmethod
    def all(cls, graph: Graph, sent: Params) -> list[Tail]:
        """One for each value that a convolution reads and everything behind it hangs on, the shortest first.

        They end where the gradients that a tail adds have too few numbers for the value that enters it.
        """
        sizes = {node: value.numel() for node, value in graph.run(torch.zeros(1, *graph.shape)).of.items()}
        read = {each.entered for each in graph.convolutions[1:]}
        found: list[Tail] = []
        known: set[Convolution] = set()
        for cut in reversed(graph.cuts):
            behind = graph.after(cut)
            inside = [each for each in graph.convolutions if each.node in behind and f"{each.name}.weight" in sent]
            added = sum(each.layer.weight.numel() for each in inside if each not in known)
            if cut not in read or not added:
                continue
            if found and added < _LEAST_ADDED * sizes[cut]:
                break
            found.append(cls(graph, cut, inside))
            known.update(inside)
        if not found:
            raise ModelError(
                "expected a value inside the network that all behind it hangs on and a convolution reads, got none; "
                "use an attack by search"
            )
        return found

    @property
    def features(self) -> fx.Node:
        """What the last linear layer reads."""
        read = self.graph.head.args[0]
        assert isinstance(read, fx.Node)
        return read

    @property
    def names(self) -> list[str]:
        """Of the weights of its convolutions."""
        return [f"{each.name}.weight" for each in self.convolutions]

    def module(self, *wanted: fx.Node) -> fx.GraphModule:
        """From the value of the cut (N, ...) to the values of these nodes."""
        return copy.deepcopy(self.graph.pieces(wanted, self.cut)).float()

    def softened(self, *wanted: fx.Node) -> fx.GraphModule:
        """The same with a softplus for every ReLU; its second argument is the temperature."""
        module = self.module(*wanted)
        value = next(node for node in module.graph.nodes if node.op == "placeholder")
        with module.graph.inserting_after(value):
            temperature = module.graph.placeholder("temperature")
        for node in module.graph.find_nodes(op="call_function", target=torch.relu):
            node.target, node.args = soft_relu, (node.args[0], temperature)
        module.recompile()
        return module


def directions(gradient: Tensor) -> Tensor:
    """The rows of a gradient, one for each channel, at length 1; those of zeros stay."""
    rows = gradient.flatten(1)
    return rows * (rows.square().sum(1, keepdim=True) + _TINY).rsqrt()


@dataclass(frozen=True, kw_only=True)
class TailProblem(Problem):
    """The value that enters a tail, by the gradients of the tail's weights.

    module: (value, temperature) -> the features, and the next value that is known if there is one. hot, cold: the
    temperature of its ReLUs at the start and at the end. pull: weight of the next value. lowest: of an element.
    constants: `first`, where the search starts; `weights` of convolutions and all `others`; `signal`, the gradient by
    the features; `directions` of the gradients by name; `goals`, what the module has to return.
    """

    module: fx.GraphModule
    hot: float
    cold: float
    pull: float
    lowest: float

    def start(self, rng: Rng) -> Tree:
        return {"value": self.constants["first"]}

    def loss(self, variables: Tree, group: Tree, constants: Tree, share: Tensor | None = None) -> Tensor:
        done = torch.ones(()) if share is None else share
        temperature = self.hot * (self.cold / self.hot) ** done

        def read(weights: Params) -> tuple[Tensor, list[Tensor]]:
            tensors = {**constants["others"], **weights}
            values: list[Tensor] = functional_call(self.module, tensors, (variables["value"], temperature))
            return (values[0] * constants["signal"]).sum(), values

        gradients, values = grad(read, has_aux=True)(constants["weights"])
        misfits = [_apart(gradients[name], goal) for name, goal in constants["directions"].items()]
        features, *following = map(_relative, values, constants["goals"])
        return torch.stack(misfits).mean() + features + self.pull * sum(following)

    def confined(self, variables: Tree) -> Tree:
        return {"value": variables["value"].clamp_min(self.lowest)}


def _apart(gradient: Tensor, goal: Tensor) -> Tensor:
    """The mean squared distance of directions, of channels whose gradient is not zero."""
    counted = goal.square().sum(1)
    return ((directions(gradient) - goal).square().sum(1) * counted).sum() / counted.sum().clamp_min(1e-9)


def _relative(value: Tensor, goal: Tensor) -> Tensor:
    return (value - goal).square().sum() / goal.square().sum().clamp_min(1e-12)
