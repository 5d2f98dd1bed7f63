"""The memory that a search takes: what automatic differentiation keeps of a gradient of a gradient."""

from __future__ import annotations

import sys
from contextlib import suppress

import torch
from torch import Tensor
from torch.func import functional_call

from leaktight.adaptive.auto import ENSEMBLES, Auto, KnowingAuto
from leaktight.attacks.matching.attack import Matching
from leaktight.audits.plan import Experiment
from leaktight.audits.rehearsal import attacked_load, matching_of, simulates
from leaktight.core.protocols import Attack
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tasks import example_losses
from leaktight.core.tensors import buffers_of, cloned, parameters_of, squared_norm
from leaktight.fl.federation import Federation
from leaktight.models.surgery import mode_of

_FLOAT64 = 2


def resident_bytes() -> int:
    """The most memory that this process has had."""
    with suppress(ImportError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return 0


def kept_bytes(federation: Federation, examples: int) -> int:
    """What is kept for the gradient, by the examples, of the squared norm of a gradient by the parameters."""
    trainer, batch = federation.trainer, federation.dataset.train.batch(slice(0, examples))
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


def search_bytes(experiment: Experiment, attack: Attack) -> int:
    """What an attack keeps while it searches; 0 for one that does not."""
    if isinstance(attack, Auto | KnowingAuto):
        auto = attack if isinstance(attack, Auto) else attack.auto
        return max(search_bytes(experiment, each) for each in ENSEMBLES[auto.budget].values())
    matching = matching_of(attack)
    if matching is None or matching.objective is None:
        return 0
    few, more = (kept_bytes(experiment.federation, number) for number in (2, 4))
    each, load = (more - few) / 2, attacked_load(experiment)
    fixed = max(0.0, few - 2 * each)
    simulated = simulates(attack, load.steps)
    uses, steps = (load.passes, load.steps) if simulated else (load.examples, 1)
    return round((steps * fixed + uses * each) * _lanes(matching))


def _lanes(matching: Matching) -> int:
    """How many times what one restart in single precision keeps."""
    lanes = matching.restarts if matching.workload.abreast else 1
    return lanes * (_FLOAT64 if matching.precision == "float64" else 1)
