"""The memory that a search takes: what automatic differentiation keeps of a gradient of a gradient."""

from __future__ import annotations

import sys
from contextlib import suppress

import torch
from torch import Tensor
from torch.func import functional_call

from leaktight.adaptive.auto import ENSEMBLES, Auto, KnowingAuto
from leaktight.attacks.matching.attack import Matching
from leaktight.audits.rehearsal import Load, matching_of, simulates
from leaktight.core.protocols import Attack
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tasks import example_losses
from leaktight.core.tensors import buffers_of, cloned, parameters_of, squared_norm
from leaktight.core.types import Batch
from leaktight.fl.local import Trainer
from leaktight.models.surgery import mode_of

_FLOAT64 = 2


def resident_bytes() -> int:
    """The most memory that this process has had."""
    with suppress(ImportError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return 0


def kept_bytes(trainer: Trainer, batch: Batch) -> int:
    """What is kept for the gradient, by the examples, of the squared norm of a gradient by the parameters."""
    params = {name: each.detach().clone().requires_grad_() for name, each in parameters_of(trainer.model).items()}
    own = {each.data_ptr() for each in params.values()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with (
        mode_of(trainer.model, trainer.mode),
        global_seed(Rng(0)),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        buffers = cloned(buffers_of(trainer.model))
        outputs = functional_call(trainer.model, (params, buffers), (batch.inputs.clone().requires_grad_(),))
        loss = example_losses(trainer.task, outputs, batch.targets).mean()
        squared_norm(torch.autograd.grad(loss, list(params.values()), create_graph=True, allow_unused=True))
        return sum(size for size, _ in kept.values())


def bytes_of(trainer: Trainer, batch: Batch) -> tuple[float, float]:
    """What a step of a search keeps: in any case, and for each example. batch: of four examples."""
    few, more = kept_bytes(trainer, Batch(batch.inputs[:2], batch.targets[:2])), kept_bytes(trainer, batch)
    each = (more - few) / max(1, len(batch) - 2)
    return max(0.0, few - 2 * each), each


def search_bytes(attack: Attack, load: Load, costs: tuple[float, float]) -> int:
    """What an attack keeps while it searches; 0 for one that does not. costs: see `bytes_of`."""
    if isinstance(attack, Auto | KnowingAuto):
        auto = attack if isinstance(attack, Auto) else attack.auto
        return max(search_bytes(each, load, costs) for each in ENSEMBLES[auto.budget].values())
    matching = matching_of(attack)
    if matching is None or matching.objective is None:
        return 0
    uses, steps = (load.passes, load.steps) if simulates(attack, load.steps) else (load.examples, 1)
    return round((steps * costs[0] + uses * costs[1]) * _lanes(matching))


def _lanes(matching: Matching) -> int:
    """How many times what one restart in single precision keeps."""
    lanes = matching.restarts if matching.workload.abreast else 1
    return lanes * (_FLOAT64 if matching.precision == "float64" else 1)
