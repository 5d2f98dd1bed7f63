"""What a model would do with the client's examples: the signs that training on it would show, before it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from leaktight.core.inputs import Images
from leaktight.core.protocols import PROBED, Sight
from leaktight.core.tasks import Penalised
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.types import Batch, Broadcast
from leaktight.guard.signals import Signal, made_up, signals
from leaktight.guard.yields import given_away, hushed, rarity, twins
from leaktight.models.surgery import final_linear, mode_of


@dataclass(frozen=True)
class Behaviour:
    """leak: the share of the examples that some unit carries alone. usual: the same of the agreed network.

    one: the share of one example, by which the two may differ by chance.
    twins, rare, quiet, hushed: see `BroadcastGuard`.
    """

    leak: float
    usual: float
    one: float
    twins: float
    rare: float
    quiet: float
    hushed: float

    def signs(self) -> Iterator[tuple[str, tuple[float, str]]]:
        """The code of each sign with its value and message."""
        more = f"the update would give away {self.leak:.0%} of the examples one by one, {self.usual:.0%} is usual"
        yield "leak", (self.leak - self.usual - self.one, f"{more} (one and {{value:.2f}} more, limit {{limit:g}})")
        yield "twins", (self.twins, "units differ in thresholds alone ({value:.2f} of a layer, limit {limit:g})")
        yield "rare", (self.rare, "units answer to few examples ({value:.2f} of a layer, limit {limit:g})")
        yield "quiet", (self.quiet, "a layer's units answer {value:.0%} less often than usual, limit {limit:.0%}")
        yield "hushed", (self.hushed, "the last layer hides examples ({value:.2f} of them, limit {limit:g})")


def look(broadcast: Broadcast, model: nn.Module, sight: Sight) -> Behaviour | None:
    """How a model treats the examples, beside the agreed network as the client has it; None for fewer than two."""
    batch = _examples(model, sight)
    if batch is None or len(batch) < 2:
        return None
    sent = signals(model, broadcast.params, broadcast.buffers, batch, task=sight.task, mode=sight.mode)
    own = signals(model, parameters_of(model), buffers_of(model), batch, task=sight.task, mode=sight.mode)
    if not sent or not own:
        return None
    leak, usual = (float(given_away(each).double().mean()) for each in (sent, own))
    head = _head(model, sent)
    rare, quiet = rarity(sent, own)
    return Behaviour(leak, usual, 1 / len(batch), twins(sent, own), rare, quiet, 0.0 if head is None else hushed(head))


def _head(model: nn.Module, layers: list[Signal]) -> Signal | None:
    """The signal of the last layer, if that is linear and one vector for each example."""
    last = layers[-1]
    linear = isinstance(model.get_submodule(last.name), nn.Linear) and last.name == final_linear(model)[0]
    return last if linear and last.back.shape[2] == 1 else None


def _examples(model: nn.Module, sight: Sight) -> Batch | None:
    """Some of the client's examples, or as many made-up ones if nothing may depend on these."""
    if sight.examples is not None:
        return Batch(sight.examples.inputs[:PROBED], sight.examples.targets[:PROBED])
    if not isinstance(sight.inputs, Images):
        return None
    generator = torch.Generator().manual_seed(int.from_bytes(sight.rng.secret_bytes(8), "big") >> 1)
    images = made_up(sight.inputs, PROBED, generator)
    return Batch(images, sight.task.blind_targets(PROBED, output_size(model, images[:2]), generator))


def output_size(model: nn.Module, inputs: Tensor) -> int:
    """The number of outputs, such as classes, of a network."""
    with torch.no_grad(), mode_of(model, "eval"), torch.random.fork_rng(devices=[]):
        outputs = functional_call(model, ({**parameters_of(model)}, cloned(buffers_of(model))), (inputs,))
    return int((outputs.outputs if isinstance(outputs, Penalised) else outputs).shape[-1])
