"""GLAUS: a gradient is estimated from many random samples of its entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from leaktight.attacks.exact.analytic import gradient_of
from leaktight.attacks.labels.last_layer import LabelStrategy, head_gradient
from leaktight.attacks.labels.rules import Idlg
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.presets.dlg import Dlg
from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.protocols import ActiveAttack, Progress, require_seen
from leaktight.core.rng import Rng
from leaktight.core.tensors import cloned, unflattened
from leaktight.core.threat import Knowledge, require
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Observation, Params, Reconstruction, Update
from leaktight.fl.local import Trainer, loss_and_gradient
from leaktight.models.source import require_choice
from leaktight.models.surgery import mode_of

Magnitudes = Literal["ranks", "odds", "values"]


@dataclass(frozen=True, kw_only=True)
class Glaus(Dlg, ActiveAttack):
    """GLAUS: repeated queries give random samples of one gradient, which is estimated from their entries; then DLG.

    The server sends the same model `queries` times; the client answers each time with another random sample of the
    gradient of the same examples. Entries that are sampled more often are larger, and a sampled entry shows its sign.
    Signs of entries that were never sampled are those of colluding clients, simulated with public images of the class.

    magnitudes: how the sizes of entries are estimated. "ranks": those of the colluding clients, in the order of how
    often entries were sampled, as published. "odds": |g| = (C p / (1 - p))^1/2, with p the frequency of an entry; only
    the scale is from the colluding clients. "values": the mean of the samples, for a server that sees the values of one
    client and not only positions and signs; the sample is unbiased. If all answers have the same entries nothing is
    sampled, and "values" is used.
    queries: >= 1. colluders: number of simulated clients, >= 1.

    Reference: Yang et al., Gradient Leakage Attacks under Unbiased Gradient Sampling (GLAUS), TKDE 2023.
    Assumes: one example (or several with known labels), the same in every query, one local step; a client that answers
    the same model again; public images of the victim's distribution.
    Differs from published code: signs are never from the victim's true gradient, only from samples; the sizes by rank
    are the mean of the colluders' sorted magnitudes; the label is read from the estimate.
    """

    queries: int = 1000
    colluders: int = 10
    magnitudes: Magnitudes = "ranks"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("magnitudes", self.magnitudes, get_args(Magnitudes))
        require_at_least(1, queries=self.queries, colluders=self.colluders)

    @property
    def requires(self) -> frozenset[Knowledge]:
        public = set() if self.magnitudes == "values" else {Knowledge.PUBLIC_DATA}
        return super().requires | public

    def own_labels(self) -> LabelStrategy:
        return Idlg()

    def tamper(self, broadcast: Broadcast, seen: Sequence[Observation], *, rng: Rng) -> Broadcast | None:
        if len(seen) >= self.queries:
            return None
        if not seen:
            return broadcast
        return replace(broadcast, params=seen[0].broadcast.params, buffers=seen[0].broadcast.buffers)

    def composition(self) -> Matching | None:
        return None

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        estimated = self.estimate(seen, rng=rng.child("colluders"))
        found = self.matching().reconstruct([estimated], rng=rng, progress=progress)
        notes = {"queries": len(seen), "assumed": [*found.notes["assumed"], *self._assumed(len(seen))]}
        return replace(found, notes={**found.notes, **notes})

    def _assumed(self, queries: int) -> list[str]:
        assumed = [f"the same examples behind all {queries} answers"]
        if self.magnitudes != "values":
            assumed.append(f"public images like the victim's, for {self.colluders} colluding clients")
        return assumed

    def estimate(self, seen: Sequence[Observation], *, rng: Rng) -> Observation:
        """One observation with the estimated gradient."""
        first = require_seen(self, seen)
        for each in seen:
            require(each, *self.requires)
            if not _same(each.broadcast.params, first.broadcast.params):
                raise UsageError("expected answers to the same model, got several models; attack them one at a time")
        samples = _Samples(seen)
        known = self.magnitudes == "values" or not samples.vary
        flat = samples.total / len(seen) if known else self._estimated(first, samples, rng)
        update = Update(unflattened(flat, samples.like), "gradient", first.update.num_examples)
        return replace(first, update=update)

    def _estimated(self, one: Observation, samples: _Samples, rng: Rng) -> Tensor:
        """The gradient from the frequencies and signs of entries and the gradients of colluding clients, (D,)."""
        own = [_flat(gradient, samples.like) for gradient in self._colluding(one, samples, rng)]
        sizes = torch.stack([gradient.abs().sort(descending=True).values for gradient in own]).mean(0)
        share = (samples.counts + 0.5) / (samples.number + 1)
        if self.magnitudes == "odds":
            odds = (share / (1 - share)).sqrt()
            magnitude = odds * sizes.norm() / odds.norm()
        else:
            magnitude = torch.empty_like(sizes)
            magnitude[samples.counts.argsort(descending=True, stable=True)] = sizes
        unseen = torch.stack(own).mean(0).sign()
        estimated: Tensor = magnitude * torch.where(samples.counts > 0, samples.signs.sign(), unseen)
        return estimated

    def _colluding(self, one: Observation, samples: _Samples, rng: Rng) -> list[Params]:
        """The gradients of public images, of the victim's class if that can be read and there are any."""
        public = one.public_data
        assert public is not None
        places = torch.arange(len(public.targets), device=public.targets.device)
        if one.batch_size == 1 and one.task.one_class:
            signs = Update(unflattened(samples.signs, samples.like), "gradient", 1)
            label = int(head_gradient(replace(one, update=signs)).row_sums().argmin())
            same = places[public.targets == label]
            places = same if len(same) else places
        size = one.batch_size or 1
        if len(places) < size:
            raise UsageError(f"expected at least {size} public images, got {len(places)}")
        mode = one.mode or "train"
        trainer = Trainer(one.model, one.local_training or LocalTraining(), one.task, mode=mode)
        gradients: list[Params] = []
        for number in range(self.colluders):
            chosen = places[torch.randperm(len(places), generator=rng.child(number).public())[:size]]
            batch = Batch(public.inputs[chosen], public.targets[chosen])
            with mode_of(one.model, mode):
                buffers = cloned(one.broadcast.buffers)
                gradients.append(loss_and_gradient(trainer, one.broadcast.params, buffers, batch)[1])
        return gradients


class _Samples:
    """Statistics of all answers, (D,): how often each entry was sampled, the sum of its signs and of its values."""

    def __init__(self, seen: Sequence[Observation]) -> None:
        tensors = seen[0].update.tensors
        self.number, self.like = len(seen), tensors
        self.counts = torch.zeros(sum(tensor.numel() for tensor in tensors.values()), dtype=torch.float64)
        self.signs, self.total = torch.zeros_like(self.counts), torch.zeros_like(self.counts)
        for each in seen:
            sent = _flat(gradient_of(each).tensors, tensors)
            self.counts += sent != 0
            self.signs += sent.sign()
            self.total += sent

    @property
    def vary(self) -> bool:
        """Whether some entry is in some answers and not in others."""
        return bool(((self.counts > 0) & (self.counts < self.number)).any())


def _flat(tensors: Params, names: Iterable[str]) -> Tensor:
    return torch.cat([tensors[name].detach().to("cpu", torch.float64).reshape(-1) for name in names])


def _same(one: Params, other: Params) -> bool:
    return one is other or all(torch.equal(one[name], tensor) for name, tensor in other.items())
