"""Labels of trained networks, whose confidences are those of images and not of noise: from public images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leaktight.attacks.labels.counts import mean_gradient, round_to_total
from leaktight.attacks.labels.last_layer import HeadGradient, LabelStrategy, check_count, head_gradient, labels_of
from leaktight.attacks.matching.batch_norm import sent_statistics, statistics_of
from leaktight.core.errors import UsageError, require_at_least
from leaktight.core.rng import Rng, global_seed
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Batch, Observation, Params
from leaktight.models.surgery import batch_statistics, layer_inputs, mode_of

_PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class PublicImages(LabelStrategy):
    """Counts of labels, repeats allowed: K (p_c - gradient of bias c), with p from public images.

    What an update says of its examples are sums over them: the gradient p - y of the last bias and, if batch norm ran
    in training mode and its buffers are sent, the mean and the mean square of every channel. A ridge regression on
    single public images predicts p from these, in the network as it ran on the client: with its batch statistics,
    solved from the buffers. In that network each sum is exactly the sum of what its examples leave alone. The
    regression is repeated with public images weighted by the shares of labels found. After several steps the
    statistics are a mean over the steps, and the network is taken half-way.
    layers: how many of the last batch-norm layers are used, >= 0; the last one says nearly all that earlier ones say.
    most: public images used, >= 2; the more, the smaller the error. rounds: repetitions of the regression, >= 1.
    Assumes: public images with labels, distributed as the client's in each class. For a model change, SGD.
    Cannot: count examples whose p - y is zero in float32, unless batch statistics are sent. A network of high
    confidence in evaluation mode has many. Sums blur what sure examples say: on a trained ResNet-20 they leave about
    a quarter of the variance of a count open.
    Reference: after Geng et al. 2021, and Ma et al., Instance-wise Batch Label Restoration via Gradients in Federated
    Learning, ICLR 2023, with confidences and features from images instead of noise or of the update alone.
    """

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.PUBLIC_DATA})

    layers: int = 6
    most: int = 4096
    rounds: int = 2

    def __post_init__(self) -> None:
        require_at_least(0, layers=self.layers)
        require_at_least(1, rounds=self.rounds)
        require_at_least(2, most=self.most)

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        check_count(num_examples)
        require(seen, *self.requires)
        head = head_gradient(seen)
        public = _first(seen.public_data, self.most)
        part = "weight" if head.layer.bias is None else "bias"
        slope = mean_gradient(seen, head, part, num_examples)
        sent = sent_moments(seen, num_examples) if self.layers else None
        with global_seed(rng.child("dropout")):
            traces = Traces.of(seen, head, public, sent, num_examples)
        right = F.one_hot(public.targets.cpu(), seen.num_classes).double()
        error = traces.probabilities - right
        if part == "weight":  # the row sums of the gradient, in units of the mean sum of the features
            unit = traces.totals.mean()
            error, slope = error * (traces.totals / unit)[:, None], slope.sum(1) / unit
        columns, observed = [error], [slope]
        for name, moments in list(traces.moments.items())[-self.layers :]:
            columns.append(moments)
            observed.append(sent[name] if sent else moments.mean(0))
        shares = right.mean(0)
        for _ in range(self.rounds):
            weights = (right @ (shares / right.mean(0).clamp(min=1e-9))).clamp(min=_LEAST)
            found = _predicted(columns, observed, right + error, weights) - slope
            shares = found.clamp(min=0) / found.clamp(min=0).sum().clamp(min=1e-9)
        return labels_of(round_to_total(shares * num_examples, num_examples))


_LEAST = 0.1  # of the weight of a public image: a label that seems absent may be there


def _predicted(columns: list[Tensor], observed: list[Tensor], goals: Tensor, weights: Tensor) -> Tensor:
    """The mean goals (C,) at these observations, by ridge regression over public images (N, ...)."""
    from sklearn.linear_model import RidgeCV  # slow to import

    rows, places = [], []
    for block, here in zip(columns, observed, strict=True):
        mean = (weights[:, None] * block).sum(0) / weights.sum()
        scale = block.std(0).clamp(min=1e-12) * len(mean) ** 0.5
        rows.append((block - mean) / scale)
        places.append((here - mean) / scale)
    fitted = RidgeCV(alphas=_PENALTIES).fit(torch.cat(rows, 1).numpy(), goals.numpy(), sample_weight=weights.numpy())
    return torch.from_numpy(fitted.predict(torch.cat(places)[None].numpy())[0])


class Traces(NamedTuple):
    """What public images leave behind in a network, in float64.

    probabilities (N, C); totals (N,): the sums of the features; moments: of the inputs of batch-norm layers, by name,
    mean and mean square of every channel (N, 2 channels).
    """

    probabilities: Tensor
    totals: Tensor
    moments: dict[str, Tensor]

    @classmethod
    def of(cls, seen: Observation, head: HeadGradient, public: Batch, sent: Params | None, num_examples: int) -> Traces:
        """Run the images through the network as the client ran it."""
        params = halfway(seen, num_examples)
        buffers = seen.broadcast.buffers if sent is None else {**seen.broadcast.buffers, **_as_buffers(sent)}
        mode = "eval" if sent is not None else seen.mode or "train"
        model = seen.model if mode == "eval" else batch_statistics(seen.model)
        weight, bias = params[head.name_of("weight")], params.get(head.name_of("bias"))
        size = _step_size(seen, num_examples)
        size = size if mode == "train" and size > 1 else 256
        probabilities, totals, moments = [], [], []
        with torch.no_grad(), mode_of(model, mode):
            for images in public.inputs.to(weight).split(size):
                entered = layer_inputs(model, params, buffers, images, (nn.Linear, _BatchNorm))
                features = next(values for name, values in reversed(entered) if name == head.name)
                totals.append(features.flatten(1).sum(1))
                probabilities.append(F.linear(features, weight, bias).softmax(1))
                moments.append({name: _moments(values) for name, values in entered if sent and name in sent})
        return cls(
            torch.cat(probabilities).to("cpu", torch.float64),
            torch.cat(totals).to("cpu", torch.float64),
            {name: torch.cat([part[name] for part in moments]).to("cpu", torch.float64) for name in moments[0]},
        )


def _step_size(seen: Observation, num_examples: int) -> int:
    """The number of examples of one local step."""
    return num_examples if seen.local_training is None else min(seen.local_training.batch_size, num_examples)


def halfway(seen: Observation, num_examples: int) -> dict[str, Tensor]:
    """The parameters in the middle of the local steps."""
    params = dict(seen.broadcast.params)
    if seen.update.kind == "gradient" or seen.local_training is None:
        return params
    steps = seen.local_training.num_steps(num_examples)
    share = (steps - 1) / (2 * steps)
    return {name: value + share * seen.update.tensors[name].to(value) for name, value in params.items()}


def _moments(values: Tensor) -> Tensor:
    """Mean and mean square of every channel of the inputs (N, C, ...), (N, 2 C)."""
    pixels = values.flatten(2) if values.ndim > 2 else values[..., None]
    return torch.cat([pixels.mean(2), pixels.square().mean(2)], 1)


def sent_moments(seen: Observation, num_examples: int) -> dict[str, Tensor] | None:
    """Mean and mean square of the channels that enter each batch-norm layer (2 channels,), by its name, in float64.

    Solved from the buffers that the client sends; None if it sends none, or they did not change. Their variance is the
    unbiased one; that of the mean square is not.
    """
    sent, old = seen.update.buffers or {}, seen.broadcast.buffers
    solved = sent_statistics(seen)
    if not solved:
        return None
    found: dict[str, Tensor] = {}
    for layer, values in _values_entering(seen).items():
        mean, variance = statistics_of(layer)
        if mean not in solved or variance not in solved:
            continue
        if torch.equal(sent[mean], old[mean]):
            return None
        total = values * _step_size(seen, num_examples)
        biased = solved[variance].clamp(min=0) * (total - 1) / total
        found[layer] = torch.cat([solved[mean], biased + solved[mean].square()]).cpu()
    return found or None


def _values_entering(seen: Observation) -> dict[str, int]:
    """How many values of a channel one example has in each batch-norm layer, by its name."""
    params, buffers = seen.broadcast.params, seen.broadcast.buffers
    blank = seen.inputs.blank(1, next(iter(params.values())))
    with torch.no_grad(), mode_of(seen.model, "eval"):
        entered = layer_inputs(seen.model, params, buffers, blank, (_BatchNorm,))
    return {name: values[0, 0].numel() for name, values in entered}


def _as_buffers(sent: Params) -> dict[str, Tensor]:
    """Solved statistics as running statistics."""
    buffers: dict[str, Tensor] = {}
    for name, moments in sent.items():
        mean, square = moments.chunk(2)
        buffers[f"{name}.running_mean"] = mean.float()
        buffers[f"{name}.running_var"] = (square - mean.square()).float()
    return buffers


def _first(public: Batch | None, most: int) -> Batch:
    if public is None or len(public) < 2:
        raise UsageError(f"expected public images, at least 2, got {0 if public is None else len(public)}")
    return Batch(public.inputs[:most], public.targets[:most])
