"""Tasks: the loss and the accuracy of a model's outputs, given the targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leaktight.core.inputs import number_kind
from leaktight.core.kernels import quick_kernels
from leaktight.core.scope import outside_outputs, outside_targets
from leaktight.core.text import sides

_LOG_ZERO = -1e30  # finite, so that no gradient becomes NaN


class Penalised(NamedTuple):
    """Outputs of a model that adds a term (such as a KL divergence) to the loss."""

    outputs: Tensor
    penalty: Tensor  # (N,), added to the loss of each example


class Task(ABC):
    """A task: the targets of a model, and how its outputs are compared with them.

    one_class: whether a target is one class index (N,). Only then can data be divided by class, and labels be inferred
    from the gradient of the last layer.
    """

    one_class: ClassVar[bool] = False

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example (N,), differentiable."""

    @abstractmethod
    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Which examples are right (N,)."""

    @abstractmethod
    def blind_targets(self, count: int, num_classes: int, generator: torch.Generator) -> Tensor:
        """Targets of `count` examples, guessed without any observation."""

    def output_shape(self, got: tuple[int, ...], num_classes: int) -> tuple[int, ...]:
        """The shape that outputs of shape `got` should have; sizes that the task leaves open are those of `got`."""
        return got

    def outside_outputs(self, shape: tuple[int, ...]) -> str | None:
        """Why outputs of this shape are those of a task that is not supported, as an error; None if they may fit."""
        return None

    def outside_targets(self, targets: Tensor) -> str | None:
        """Why these are the targets of a task that is not supported, as an error; None if they may fit."""
        return None

    def join(self, targets: Sequence[Tensor]) -> Tensor:
        """The targets of several data sets as one."""
        return torch.cat([*targets])

    def fault(self, targets: Tensor, num_classes: int) -> str | None:
        """The fault of the targets of a data set, as "X, got Y" where X was expected; None if there is none."""
        return None


@dataclass(frozen=True)
class Classification(Task):
    """Cross-entropy on logits (N, C). Targets are class indices (N,), or class probabilities (N, C) in attacks."""

    one_class = True

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(1) == targets

    def blind_targets(self, count: int, num_classes: int, generator: torch.Generator) -> Tensor:
        return torch.randint(num_classes, (count,), generator=generator).sort().values

    def output_shape(self, got: tuple[int, ...], num_classes: int) -> tuple[int, ...]:
        return *got[:1], num_classes

    def outside_outputs(self, shape: tuple[int, ...]) -> str | None:
        return outside_outputs(shape)

    def outside_targets(self, targets: Tensor) -> str | None:
        return outside_targets(targets.shape, number_kind(targets), len(targets))

    def fault(self, targets: Tensor, num_classes: int) -> str | None:
        if targets.ndim != 1:
            return f"labels of one class for each example, got {sides(targets.shape)}"
        low, high = int(targets.min()), int(targets.max())
        return None if 0 <= low <= high < num_classes else f"labels in 0..{num_classes - 1}, got {low}..{high}"


@dataclass(frozen=True)
class WordRecognition(Task):
    """CTC on log-probabilities (N, T, blank + 1). Targets are words (N, L) of symbol numbers, padded with -1.

    The sum over alignments is computed step by step, because PyTorch's CTC has no second derivative, which gradient
    matching needs; PyTorch's is used where the first is enough. A word that does not fit into T steps has loss 0.
    Reference: Graves et al., Connectionist Temporal Classification, ICML 2006.
    """

    blank: int = 36

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._by_kernel(outputs, targets) if quick_kernels() else self._step_by_step(outputs, targets)

    def _by_kernel(self, outputs: Tensor, targets: Tensor) -> Tensor:
        steps = torch.full((len(outputs),), outputs.shape[1], device=outputs.device)
        lengths = (targets >= 0).sum(1)
        words = targets.clamp(min=0)
        return F.ctc_loss(
            outputs.transpose(0, 1), words, steps, lengths, blank=self.blank, reduction="none", zero_infinity=True
        )

    def _step_by_step(self, outputs: Tensor, targets: Tensor) -> Tensor:
        lengths = (targets >= 0).sum(1)
        blanks = torch.full_like(targets, self.blank)
        states = torch.cat([blanks[:, :1], torch.stack([targets.clamp(min=0), blanks], 2).flatten(1)], 1)
        emitted = outputs.gather(2, states[:, None].expand(-1, outputs.shape[1], -1))
        # A blank may be skipped between two symbols that differ.
        may_skip = (states != self.blank) & (states != F.pad(states[:, :-2], (2, 0), value=self.blank))
        barred = torch.where(may_skip, 0.0, _LOG_ZERO).to(outputs.dtype)
        start = torch.arange(states.shape[1], device=states.device) < 2
        paths = torch.where(start, emitted[:, 0], _LOG_ZERO)
        for step in range(1, outputs.shape[1]):
            one = F.pad(paths[:, :-1], (1, 0), value=_LOG_ZERO)
            two = F.pad(paths[:, :-2], (2, 0), value=_LOG_ZERO) + barred
            paths = torch.stack([paths, one, two]).logsumexp(0) + emitted[:, step]
        last = 2 * lengths[:, None]
        ends = paths.gather(1, torch.cat([last, (last - 1).clamp(min=0)], 1))
        both = torch.where(lengths > 0, ends.logsumexp(1), ends[:, 0])
        return torch.where(both > _LOG_ZERO / 2, -both, 0.0)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = self.decode(outputs)
        width = max(found.shape[1], targets.shape[1])
        found, wanted = (F.pad(words, (0, width - words.shape[1]), value=-1) for words in (found, targets))
        return (found == wanted).all(1)

    def blind_targets(self, count: int, num_classes: int, generator: torch.Generator) -> Tensor:
        """Empty words."""
        return torch.full((count, 1), -1)

    def output_shape(self, got: tuple[int, ...], num_classes: int) -> tuple[int, ...]:
        return *got[:1], got[1] if len(got) == 3 else 1, self.blank + 1

    def join(self, targets: Sequence[Tensor]) -> Tensor:
        width = max(words.shape[1] for words in targets)
        return torch.cat([F.pad(words, (0, width - words.shape[1]), value=-1) for words in targets])

    def decode(self, outputs: Tensor) -> Tensor:
        """The most likely symbol of each step, with repeats merged and without blanks: words (N, T) padded with -1."""
        best = outputs.argmax(2)
        count, steps = best.shape
        kept = (best != self.blank) & (best != F.pad(best[:, :-1], (1, 0), value=self.blank))
        places = torch.where(kept, kept.long().cumsum(1) - 1, steps)
        words = torch.full((count, steps + 1), -1, device=best.device).scatter(1, places, best)
        return words[:, :steps]


def example_losses(task: Task, outputs: Tensor | Penalised, targets: Tensor) -> Tensor:
    """The loss of each example (N,), including the model's penalty."""
    if isinstance(outputs, Penalised):
        return task.loss(outputs.outputs, targets) + outputs.penalty
    return task.loss(outputs, targets)


def correct_examples(task: Task, outputs: Tensor | Penalised, targets: Tensor) -> Tensor:
    """Which examples are right (N,), as booleans."""
    plain = outputs.outputs if isinstance(outputs, Penalised) else outputs
    return task.correct(plain, targets).to(torch.bool)
