"""Do the true examples, trained on as stated, cause the captured update? If not, which normalisation or mode would?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from leaktight.attacks.matching.view import OneBatch, Simulation
from leaktight.core.types import Batch, Mode, Observation
from leaktight.inspections.captured import Captured, normalising
from leaktight.inspections.checks import flag
from leaktight.models.surgery import has_batch_norm
from leaktight.results.schema import Flag

EXPLAINED = 0.95

NORMALISATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "none": ((), ()),
    "to [-1, 1]": ((0.5,), (0.5,)),
    "MNIST": ((0.1307,), (0.3081,)),
    "CIFAR-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR-100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Mean and std by name, tried when the true images do not explain an update."""


def check_truth(captured: Captured, truth: Batch) -> Flag | None:
    """A flag if the true examples, trained on as stated, cause another update than the captured one.

    Checked only for one step or one example, where the order of examples does not matter. The flag names a usual
    normalisation or the other mode if that explains the update.
    """
    if captured.num_steps != 1 and captured.settings.num_examples != 1:
        return None
    own = explained(captured.seen, truth)
    if own >= EXPLAINED:
        return None
    words, best = max(_alternatives(captured, truth), key=lambda pair: pair[1])
    detail = f"cosine {own:.3f} between the two"
    if best >= EXPLAINED:
        detail += f"; with {words} it is {best:.3f}"
    return flag(
        "truth-does-not-explain",
        f"the true images, trained on as stated, cause an update whose cosine to the captured one is below {EXPLAINED}",
        "correct the normalisation (--mean, --std), --mode, --labels or --local; or a defense has changed the update",
        detail,
    )


def explained(seen: Observation, truth: Batch) -> float:
    """The cosine between the observed update and the one that these examples would cause."""
    matched = OneBatch() if seen.update.kind == "delta" and seen.local_training is None else Simulation()
    view = matched.view(seen, len(truth), torch.float32, needs_scale=False)
    guess = view.guess(truth.inputs, truth.targets, view.params, view.buffers)
    made = torch.cat([guess[name].flatten() for name in view.target])
    wanted = torch.cat([tensor.flatten() for tensor in view.target.values()])
    return float(torch.nn.functional.cosine_similarity(made, wanted, dim=0))


def _alternatives(captured: Captured, truth: Batch) -> Iterator[tuple[str, float]]:
    modes: Sequence[Mode] = ("train", "eval") if _depends_on_mode(captured.bare) else (captured.settings.mode,)
    for name, (mean, std) in NORMALISATIONS.items():
        if len(mean) > 1 and captured.settings.inputs.channels != len(mean):
            continue
        for mode in modes:
            seen = replace(captured.seen, model=normalising(captured.bare, mean, std), mode=mode)
            numbers = f" (--mean {_joined(mean)} --std {_joined(std)})" if mean else ""
            words = f"normalisation {name}{numbers}" + (f" and --mode {mode}" if len(modes) > 1 else "")
            yield words, explained(seen, truth)


def _joined(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _depends_on_mode(model: nn.Module) -> bool:
    return has_batch_norm(model) or any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
