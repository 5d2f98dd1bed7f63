"""Against PRECODE: the bottleneck is solved from its own gradients, or its noise is searched for."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leaktight.adaptive.knowing import Adaptation, Case, labels_from_bias, weighing, without
from leaktight.adaptive.precode_head import Head, Solution
from leaktight.attacks.labels.last_layer import LabelStrategy
from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.view import Unknown, View
from leaktight.core.devices import device_of, moved
from leaktight.core.errors import require_at_least
from leaktight.core.rng import Rng
from leaktight.core.tasks import Task
from leaktight.core.types import Observation, Params
from leaktight.defenses.precode import Precode
from leaktight.models.bottleneck import BottleneckedLinear, VariationalBottleneck

_SOLVED = 1e-3  # relative misfit; solved batches have 1e-5 and less, others 1e-2 and more
_NEARLY = 0.5  # after several steps


class GivenNoise(VariationalBottleneck):
    """A bottleneck whose noise is a buffer, (N, K) or (1, K), and not drawn."""

    noise: Tensor

    def __init__(self, drawn: VariationalBottleneck, noise: Tensor) -> None:
        nn.Module.__init__(self)
        self.encoder, self.decoder, self._divergence = drawn.encoder, drawn.decoder, None
        self.register_buffer("noise", noise)

    def draw(self, like: Tensor) -> Tensor:
        return self.noise.expand_as(like)


class _Nothing(VariationalBottleneck):
    """Features as they are, with no divergence."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._divergence = None

    def forward(self, features: Tensor) -> Tensor:
        self._divergence = features.new_zeros(len(features))
        return features


class KnownHead(BottleneckedLinear):
    """Stands for a solved bottleneck and its last layer: one number of each example, whose sum is the batch's loss.

    slopes (N, F): the gradient of the loss by the features. The gradient of the last layer's weight has the features of
    example i as row i.
    """

    slopes: Tensor
    rows: Tensor

    def __init__(self, linear: nn.Linear, slopes: Tensor) -> None:
        super().__init__(_Nothing(), linear)
        rows = torch.eye(len(slopes), linear.out_features).to(slopes)
        self.register_buffer("slopes", slopes - rows @ linear.weight.detach().to(slopes))
        self.register_buffer("rows", rows)

    def forward(self, features: Tensor) -> Tensor:
        features = self.bottleneck(features)
        outputs: Tensor = (self.slopes * features).sum(1) + (self.rows * self.linear(features)).sum(1)
        return outputs


@dataclass(frozen=True)
class _Summed(Task):
    """The loss is the sum of the outputs (N,), whatever the targets are."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs * len(outputs)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.zeros_like(outputs, dtype=torch.bool)

    def blind_targets(self, count: int, num_classes: int, generator: torch.Generator) -> Tensor:
        return torch.randint(num_classes, (count,), generator=generator)


@dataclass(frozen=True, kw_only=True)
class KnowsPrecode(Adaptation):
    """PRECODE: features and noise follow from the bottleneck's own gradients; images are searched for that have them.

    spread: standard deviation of the first noise where it has to be searched for, around zero, >= 0; the client's has
    1.

    The gradients of encoder, decoder and last layer give the features of every example and the gradient of the loss by
    them (`precode_head.Head`). What is left is a network whose last features are known, and the gradients of the layers
    before it. They count by the root of their size, since deeper layers have much smaller ones. Labels that would be
    searched for are read from the bias of the last layer.
    Where that fails (a misfit tells), the noise is searched for with the images, and the bottleneck's gradients are
    left out.
    Assumes: the bottleneck's weights, which are public; one step with fewer examples than classes, or one example.
    Cannot: solve larger batches; follow several steps on several examples, which then share one unknown noise vector.
    """

    spread: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, spread=self.spread)

    def unable(self, case: Case) -> str | None:
        if case.num_examples > 1 and case.num_steps > 1:
            return "the bottleneck is solved for one local step, or for one example"
        return None

    def prepare(self, attack: Matching, seen: Sequence[Observation]) -> tuple[Matching, list[Observation]]:
        attack = labels_from_bias(attack, seen[0])
        if not isinstance(attack.labels, LabelStrategy) or not seen[0].batch_size:
            return attack, list(seen)
        labels = attack.labels.infer(seen[0], seen[0].batch_size, rng=Rng(0))
        return replace(attack, labels=Given()), [replace(each, labels=labels) for each in seen]

    def view(self, view: View, seen: Observation) -> View:
        names = [name for name, module in view.trainer.model.named_modules() if isinstance(module, BottleneckedLinear)]
        solution = self._solution(seen, names[0]) if len(names) == 1 else None
        if solution is not None:
            return _solved(view, seen, names[0], solution)
        return self._searching(view, seen, [f"{name}.bottleneck" if name else "bottleneck" for name in names])

    def _solution(self, seen: Observation, name: str) -> Solution | None:
        """What the bottleneck's gradients tell; None if they do not fit together."""
        assert isinstance(self.defense, Precode)
        gradient, steps = _gradient(seen), seen.num_steps
        number = seen.batch_size or 0
        if gradient is None or steps is None or seen.labels is None:
            return None
        weights, gradients = (_parts(tensors, name) for tensors in (_midway(seen), gradient))
        if weights is None or gradients is None:
            return None
        head = Head(weights, gradients, self.defense.penalty_weight)
        if number > 1 and steps > 1:
            return None
        found = head.solve_one() if number == 1 else head.solve(seen.labels.cpu(), rng=Rng(0))
        fits = found is not None and found.misfit < (_SOLVED if steps == 1 else _NEARLY)
        return moved(found, device_of(seen.update.tensors)) if fits else None

    def _searching(self, view: View, seen: Observation, names: Sequence[str]) -> View:
        """The noise is unknown, and the bottleneck's gradients are not matched."""
        model = copy.deepcopy(view.trainer.model)
        like = next(iter(view.params.values()))
        rows = (seen.batch_size or 1) if len(view.steps) < 2 else 1
        buffers: dict[str, Tensor] = {}
        for name in names:
            drawn = model.get_submodule(name)
            assert isinstance(drawn, VariationalBottleneck)
            noise = like.new_zeros(rows, drawn.decoder.in_features)
            model.set_submodule(name, GivenNoise(drawn, noise))
            buffers[f"{name}.noise"] = noise
        view = replace(
            view,
            trainer=replace(view.trainer, model=model),
            buffers={**view.buffers, **buffers},
            unknowns={**view.unknowns, **{name: Unknown(start, self.spread) for name, start in buffers.items()}},
            notes=(*view.notes, "the bottleneck's noise is unknown"),
        )
        own = [name for name in view.target if any(name.startswith(f"{each}.") for each in names)]
        return without(view, own, "the bottleneck's gradients are not matched")


def _solved(view: View, seen: Observation, name: str, solution: Solution) -> View:
    """A view of the layers before the bottleneck, and of the features that enter it."""
    gradient = _gradient(seen)
    assert gradient is not None
    like = next(iter(view.params.values()))
    model = copy.deepcopy(view.trainer.model)
    layer = model.get_submodule(name)
    assert isinstance(layer, BottleneckedLinear)
    known = KnownHead(layer.linear, solution.slopes.to(like))
    if name:
        model.set_submodule(name, known)
    else:
        model = known
    weight = f"{name}.linear.weight" if name else "linear.weight"
    before = {
        each: tensor for each, tensor in gradient.items() if not each.startswith(weight.removesuffix("linear.weight"))
    }
    target = {each: tensor.to(like) for each, tensor in before.items()}
    target[weight] = (known.rows.T.double() @ solution.features).to(like)
    left = {each for each, _ in model.named_parameters()}
    view = replace(
        view,
        trainer=replace(view.trainer, model=model, task=_Summed()),
        params={each: tensor.to(like) for each, tensor in _midway(seen).items() if each in left},
        buffers={
            **view.buffers,
            **{each: tensor for each, tensor in model.named_buffers() if each not in view.buffers},
        },
        target=target,
        steps=(),
        notes=(*view.notes, "the bottleneck is solved: its features are known"),
    )
    sizes = {each: float(tensor.norm()) for each, tensor in view.target.items()}
    weights = {each: torch.full_like(view.target[each], size**-0.5) for each, size in sizes.items() if size}
    return weighing(view, weights, "layers count by the root of their size")


def _gradient(seen: Observation) -> dict[str, Tensor] | None:
    """The sum of the gradients of all local steps, in float64; None if it cannot be told from the update."""
    local = seen.local_training
    tensors = {name: tensor.detach().to("cpu", torch.float64) for name, tensor in seen.update.tensors.items()}
    if seen.update.kind == "gradient":
        return tensors
    if local is None or local.optimizer != "sgd" or (local.momentum and seen.num_steps != 1):
        return None
    decay = {name: local.weight_decay * seen.broadcast.params[name].to(tensor) for name, tensor in tensors.items()}
    return {name: -tensor / local.learning_rate - decay[name] for name, tensor in tensors.items()}


def _midway(seen: Observation) -> Params:
    """The weights halfway through a round of several steps; with one step those that were sent."""
    sent, share = seen.broadcast.params, 0.0 if seen.num_steps == 1 else 0.5
    return {name: tensor + share * seen.update.tensors[name] for name, tensor in sent.items()} if share else sent


def _parts(tensors: Params, name: str) -> dict[str, Tensor] | None:
    """The tensors of the bottleneck and the last layer by their short names; None if one is missing."""
    start = f"{name}." if name else ""
    names = {part: f"{start}bottleneck.{part}" for part in ("encoder.weight", "encoder.bias")}
    names |= {part: f"{start}bottleneck.{part}" for part in ("decoder.weight", "decoder.bias")}
    names |= {part: f"{start}{part}" for part in ("linear.weight", "linear.bias")}
    if not all(full in tensors for full in names.values()):
        return None
    return {part: tensors[full].detach().to("cpu", torch.float64) for part, full in names.items()}
