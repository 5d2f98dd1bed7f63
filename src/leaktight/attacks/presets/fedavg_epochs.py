"""An attack on several local epochs that does not depend on the order of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.orders import epochs_of
from leaktight.attacks.matching.priors import SameInEveryPart
from leaktight.attacks.matching.view import Evidence
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.core.errors import require_at_least
from leaktight.core.protocols import Progress
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, Observation, Reconstruction


@dataclass(frozen=True, kw_only=True)
class FedAvgEpochs(CsDlg):
    """csDLG with images of its own for every local epoch, which have the same mean in all epochs.

    The order of batches, new in every epoch, then need not be known: only the labels of a step are, in the most likely
    order. The images of the epochs are matched one to one within labels and averaged. With one epoch it is csDLG.
    same_epochs: weight of the squared distance between the mean images of the epochs, >= 0.
    Assumes: what csDLG assumes; one update.
    Reference: Dimitrov et al., Data Leakage in Federated Averaging, TMLR 2022.
    Differs from the paper: the cosine distance with L-BFGS; the order of labels is chosen by the loss.
    """

    same_epochs: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(0, same_epochs=self.same_epochs)

    @property
    def joins_rounds(self) -> bool:
        return False

    def composition(self) -> Matching | None:
        return None

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        attack = self.matching()
        evidence = attack.evidence(seen[:1], rng=rng)
        lengths = [len(epoch) for epoch in epochs_of(evidence.views[0][1].steps)]
        shared = attack.settled(evidence, rng=rng)
        spread = apart(shared, lengths)
        if spread.num_examples > shared.num_examples:
            prior = SameInEveryPart(parts=spread.num_examples // shared.num_examples)
            attack = replace(attack, priors=(*attack.priors, (self.same_epochs, prior)))
        answer = attack.answer(spread, attack.search(spread, rng=rng, progress=progress))
        return replace(answer, guess=merged(answer.guess, shared.num_examples))


def apart(evidence: Evidence, lengths: Sequence[int]) -> Evidence:
    """The evidence of one update, with examples of its own for each epoch, in the order in which they are used.

    lengths: the number of steps of each epoch.
    """
    ((weight, view, _),) = evidence.views
    number = evidence.num_examples
    if len(lengths) < 2 or evidence.labels is None:
        return evidence
    steps: list[tuple[tuple[int, ...], float]] = []
    labels = []
    left = iter(view.steps)
    for part, length in enumerate(lengths):
        epoch = list(islice(left, length))
        order = [place for places, _ in epoch for place in places]
        order += [place for place in range(number) if place not in order]
        labels.append(evidence.labels[order])
        slots = iter(range(part * number, (part + 1) * number))
        steps += [(tuple(next(slots) for _ in places), rate) for places, rate in epoch]
    total = number * len(lengths)
    views = [(weight, replace(view, steps=steps), tuple(range(total)))]
    return replace(evidence, views=views, labels=torch.cat(labels), num_examples=total)


def merged(guess: Batch, number: int) -> Batch:
    """The examples of all epochs as those of the first: matched one to one within labels, images averaged."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    first, *others = zip(guess.inputs.split(number), guess.targets.split(number), strict=True)
    images, labels = first
    found: list[Tensor] = [images]
    for later, targets in others:
        distance = torch.cdist(images.flatten(1).double(), later.flatten(1).double()).square()
        strangers = labels[:, None] != targets[None]
        _, places = linear_sum_assignment((distance + strangers * (1 + distance.max()) * number).cpu().numpy())
        found.append(later[torch.from_numpy(places)])
    return Batch(torch.stack(found).mean(0), labels)
