"""The first linear layer of a network with its gradients, and the labels of inputs that were recovered from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize

from leaktight.attacks.exact.analytic import Entrance, Gradient, entered, entrance, precise
from leaktight.core.errors import LeaktightError, ModelError, UsageError
from leaktight.core.tensors import cloned
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Observation
from leaktight.fl.local import Trainer, loss_and_gradient
from leaktight.models.surgery import mode_of

_STRICT = 2.0  # a wrong scale of 5 % turned gradients of an MLP by 1.5e-3; rounding to float16 by 2e-4


@dataclass(frozen=True)
class FirstLayer:
    """The first linear layer. weight (m, n), bias (m,): as sent; their gradients likewise.

    pixels: how its input consists of pixels; None if layers come before it.
    """

    name: str
    layer: nn.Linear
    pixels: Entrance | None
    weight: Tensor
    bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor

    def gated(self, seen: Observation) -> bool:
        """Whether a unit has a gradient exactly where its output is positive, as before a ReLU; on random examples."""
        kept: list[Tensor] = []

        def cut(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            kept.append(output.detach().requires_grad_())
            return kept[-1]

        generator = torch.Generator().manual_seed(0)
        examples = torch.rand(8, *seen.inputs.shape, generator=generator, dtype=torch.float64)
        handle = self.layer.register_forward_hook(cut)
        try:
            with torch.enable_grad(), mode_of(seen.model, "eval"):
                outputs = functional_call(seen.model, precise(seen), (examples,))
        finally:
            handle.remove()
        if not isinstance(outputs, Tensor) or len(kept) != 1:
            return False
        back = torch.autograd.grad(outputs.square().sum(), kept[0])[0]
        return not bool(back[kept[0] <= 0].any()) and bool(back.any())


def first_linear(seen: Observation, gradient: Gradient) -> FirstLayer:
    """The first linear layer to run; an error unless it has a bias and sees each example as one vector."""
    ran = entered(seen, seen.inputs.blank(1, torch.zeros(1)))
    layers = {name: seen.model.get_submodule(name) for name in ran}
    name, layer = next(((name, each) for name, each in layers.items() if isinstance(each, nn.Linear)), ("", None))
    if not isinstance(layer, nn.Linear) or layer.bias is None or ran[name].numel() != layer.in_features:
        raise ModelError(f"expected a linear layer with a bias, on whole examples, got {name!r}; use a search")
    pixels = entrance(seen) if name == next(iter(layers)) else None
    parts = [f"{name}.{part}" if name else part for part in ("weight", "bias")]
    tensors = precise(seen)
    weight, bias = (gradient.needed(part) for part in parts)
    if not bool(weight.any()) or not bool(bias.any()):
        raise UsageError(f"expected a gradient of {name!r} other than zero, got zero; it says nothing")
    return FirstLayer(name, layer, pixels, tensors[parts[0]], tensors[parts[1]], weight, bias)


def confirmed(seen: Observation, gradient: Gradient, first: str, guess: Batch) -> float:
    """How well a guess explains the gradient of the first layer, but for its length: 1 is exactly, 0 not at all.

    What an exact attack solves leaves open whether weights and biases were sent at one scale, whether the number of
    examples is right, and what training did to the inputs. The gradient of the guess depends on the first two. It is 0
    if inputs reach the layer otherwise in training than in evaluation (dropout, noise, batch norm), or if the number is
    known to be another.
    """
    if seen.batch_size not in (None, len(guess)) or not _same_in_training(seen, first):
        return 0.0
    tensors = cloned(precise(seen))
    params = {name: tensors[name] for name in seen.broadcast.params}
    buffers = {name: tensors[name] for name in seen.broadcast.buffers}
    trainer = Trainer(seen.model, LocalTraining(), seen.task)
    try:
        with mode_of(seen.model, seen.mode or "train"), torch.random.fork_rng(devices=[]):
            own = loss_and_gradient(trainer, params, buffers, Batch(guess.inputs.double(), guess.targets))[1]
    except (LeaktightError, ValueError):  # batch norm takes no single example
        return 0.0
    names = [f"{first}.{part}" if first else part for part in ("weight", "bias")]
    mine, wanted = (
        normalize(torch.cat([each[name].flatten() for name in names]), dim=0) for each in (own, gradient.tensors)
    )
    return max(0.0, 1 - _STRICT * float((mine - wanted).norm()))


def _same_in_training(seen: Observation, name: str) -> bool:
    """Whether random examples enter a layer in training as in evaluation."""
    generator = torch.Generator().manual_seed(0)
    examples = torch.rand(8, *seen.inputs.shape, generator=generator, dtype=torch.float64)
    usual, training = (entered(seen, examples, mode)[name] for mode in ("eval", seen.mode or "train"))
    return torch.allclose(usual, training, rtol=0, atol=1e-6)


def labels_of_inputs(seen: Observation, gradient: Gradient, inputs: Tensor) -> Tensor:
    """The labels (N,) of examples that are known, from the gradient of the last linear layer; zeros if it is withheld.

    That gradient is the sum over examples of (probabilities - label) times features. So features give the factor of
    each example, which is negative for its label alone. Exact for at most as many examples as there are features.
    """
    layers = entered(seen, inputs)
    name = list(layers)[-1]
    weight = gradient.tensors.get(f"{name}.weight" if name else "weight")
    if weight is None:
        return torch.zeros(len(inputs), dtype=torch.long)
    factors: Tensor = weight @ torch.linalg.pinv(layers[name].flatten(1))
    return factors.argmin(0)
