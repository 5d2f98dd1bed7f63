"""Are the true examples behind the captured update? If they do not explain it, what would?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from leaktight.attacks.labels.rules import rule_for
from leaktight.attacks.matching.view import OneBatch, Simulation
from leaktight.core.errors import LeaktightError
from leaktight.core.rng import Rng, global_seed
from leaktight.core.types import Batch, Mode, Observation
from leaktight.inspections.captured import Captured, normalising
from leaktight.inspections.checks import flag
from leaktight.inspections.copies import copies_of
from leaktight.inspections.dropout import dropouts, with_masks
from leaktight.models.surgery import has_batch_norm
from leaktight.report.words import listed
from leaktight.results.schema import Flag

EXPLAINED = 0.95
"""The least cosine between the captured update and that of the true examples if they explain it."""
VERIFIED = 1e-3
"""The largest residual (1 - cosine) of true examples that are certainly behind an update, as a share of their copies'.

Right examples had at most 2e-6, other images of the same class at least 0.03 (docs/results/first-hour.md).
"""
_COMPARED = 20
_DRAWS = 8
_MOST_LABELS = 100
_SHOWN = 3
_MORE = 0.02

NORMALISATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "none": ((), ()),
    "to [-1, 1]": ((0.5,), (0.5,)),
    "MNIST": ((0.1307,), (0.3081,)),
    "CIFAR-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR-100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Mean and std by name, tried when the true images do not explain an update."""


@dataclass(frozen=True)
class Examined:
    """What the true examples have to do with the update.

    seen: the update, with dropout's masks if it shows them; None if the examples do not explain it. dropout: how
    dropout explains the difference, or None. flag: if nothing of what was stated does.
    """

    truth: Batch
    seen: Observation | None
    dropout: str | None = None
    flag: Flag | None = None

    @cached_property
    def verified(self) -> bool:
        """Whether the examples explain the update a thousand times better than copies of them do."""
        if self.seen is None:
            return False
        copies = copies_of(self.truth.inputs)
        some = copies[:: max(1, len(copies) // _COMPARED)]
        others = min(1 - explained(self.seen, Batch(each, self.truth.targets)) for each in some)
        return 1 - explained(self.seen, self.truth) <= VERIFIED * others


def examine(captured: Captured, truth: Batch, *, defended: bool = False) -> Examined | None:
    """Train on the true examples as stated, and compare; None if the order of examples matters and is not known.

    The masks of dropout are no setting, so they are tried first. defended: whether a defense was stated.
    """
    seen = captured.seen
    if captured.num_steps != 1 and captured.settings.num_examples != 1:
        return None
    cosine = explained(seen, truth)
    random = captured.settings.mode == "train" and bool(dropouts(captured.bare))
    masked = with_masks(seen) if random else None
    if masked is not None and (own := explained(masked, truth)) >= max(EXPLAINED, cosine):
        words = f"with these the true images explain it: cosine {own:.3f}, with other masks {cosine:.3f}"
        return Examined(truth, masked, words)
    if cosine >= EXPLAINED:
        return Examined(truth, None if random else seen)
    if random and (words := _as_usual(seen, truth)):
        return Examined(truth, None, words)
    return Examined(truth, None, None, _unexplained(captured, truth, cosine, defended=defended))


def label_read(seen: Observation) -> Tensor | None:
    """The label (1,) of the only example, as the update shows it; None if there are more or it does not."""
    if seen.batch_size != 1:
        return None
    blind = replace(seen, labels=None)
    rule = rule_for(blind)
    try:
        return None if rule is None else rule.infer(blind, 1, rng=Rng(0).child("label"))
    except LeaktightError:
        return None


def explained(seen: Observation, truth: Batch) -> float:
    """The cosine between the observed update and the one that these examples would cause."""
    made, wanted = _made(seen, truth)
    return _cosine(made, wanted)


def _made(seen: Observation, truth: Batch, draw: int = 0) -> tuple[Tensor, Tensor]:
    """The update that these examples would cause, and the observed one. draw: of the network's random numbers."""
    matched = OneBatch() if seen.update.kind == "delta" and seen.local_training is None else Simulation()
    view = matched.view(seen, len(truth), torch.float64, needs_scale=False)
    with global_seed(Rng(0).child("examine", draw)):
        guess = view.guess(truth.inputs.double(), truth.targets, view.params, view.buffers)
    made, wanted = (torch.cat([each[name].detach().flatten() for name in view.target]) for each in (guess, view.target))
    return made, wanted


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(cosine_similarity(one, other, dim=0))


def _as_usual(seen: Observation, truth: Batch) -> str:
    """Words if the update differs from those of the true examples no more than these do from each other, else ""."""
    draws = [_made(seen, truth, draw) for draw in range(_DRAWS)]
    wanted = draws[0][1]
    own = mean(_cosine(made, wanted) for made, _ in draws)
    between = {pair: _cosine(draws[pair[0]][0], draws[pair[1]][0]) for pair in combinations(range(_DRAWS), 2)}
    usual = [mean(each for pair, each in between.items() if draw in pair) for draw in range(_DRAWS)]
    if own < min(usual):
        return ""
    return (
        f"training twice on the true images gives updates with a cosine of {mean(usual):.2f}, and theirs to the "
        f"captured one is {own:.2f}"
    )


def _unexplained(captured: Captured, truth: Batch, cosine: float, *, defended: bool) -> Flag:
    """The flag, with the likeliest causes first: the settings that would explain most."""
    causes = sorted(_alternatives(captured, truth), key=lambda pair: pair[1], reverse=True)
    better = [(words, own) for words, own in causes if own > cosine + _MORE]
    detail = f"cosine {cosine:.3f} between the two"
    if better and better[0][1] >= EXPLAINED:
        detail += f"; with {better[0][0]} it is {better[0][1]:.3f}"
        advice = f"state this: {better[0][0]}"
    else:
        found = listed([f"{words} ({own:.3f})" for words, own in better[:_SHOWN]])
        tried = f"more would be explained by {found}, but not all" if better else "no usual setting explains more"
        reason = "the stated defense" if defended else "a defense (--defense) or other local training (--local)"
        advice = f"{tried}; the likeliest reason is {reason}"
    return flag(
        "truth-does-not-explain",
        f"the true images, trained on as stated, cause an update whose cosine to the captured one is below {EXPLAINED}",
        advice,
        detail,
    )


def _alternatives(captured: Captured, truth: Batch) -> Iterator[tuple[str, float]]:
    """Other settings in words, each with the cosine that it would give."""
    modes: Sequence[Mode] = ("train", "eval") if _depends_on_mode(captured.bare) else (captured.settings.mode,)
    for name, (mean_, std) in NORMALISATIONS.items():
        if len(mean_) > 1 and captured.settings.inputs.channels != len(mean_):
            continue
        for mode in modes:
            seen = replace(captured.seen, model=normalising(captured.bare, mean_, std), mode=mode)
            numbers = f" (--mean {_joined(mean_)} --std {_joined(std)})" if mean_ else ""
            words = f"normalisation {name}{numbers}" + (f" and --mode {mode}" if len(modes) > 1 else "")
            yield words, explained(seen, truth)
    if len(truth) == 1:
        for label in range(min(captured.seen.num_classes, _MOST_LABELS)):
            if label != int(truth.targets[0]):
                yield f"the label {label}", explained(captured.seen, Batch(truth.inputs, torch.tensor([label])))


def _joined(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _depends_on_mode(model: nn.Module) -> bool:
    return has_batch_norm(model) or bool(dropouts(model))
