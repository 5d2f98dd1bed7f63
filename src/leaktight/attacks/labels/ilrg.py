"""Instance-wise batch label restoration (iLRG): counts of labels from the update alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from leaktight.attacks.labels.counts import mean_gradient, round_to_total
from leaktight.attacks.labels.last_layer import LabelStrategy, check_count, head_gradient, labels_of
from leaktight.core.rng import Rng
from leaktight.core.types import Observation


@dataclass(frozen=True, kw_only=True)
class Ilrg(LabelStrategy):
    """Counts of labels, repeats allowed, from confidences of each class that are read from the update itself.

    The features of class c are row c of the last weight's gradient over that of bias c; the softmax of their logits
    stands for the confidences p_c of its examples. The counts solve, by least squares, for every class c: the sum over
    d of n_d p_d[c], less n_c, is K times the gradient of bias c.
    Assumes: a last layer with a bias; examples of a class that are alike, and not yet learned. For a model change, SGD.
    Cannot: count examples that the network is sure of, as their gradient vanishes; use public_images.
    Reference: Ma et al., Instance-wise Batch Label Restoration via Gradients in Federated Learning, ICLR 2023.
    """

    def infer(self, seen: Observation, num_examples: int, *, rng: Rng) -> Tensor:
        check_count(num_examples)
        head = head_gradient(seen)
        rows, slope = (mean_gradient(seen, head, part, num_examples) for part in ("weight", "bias"))
        features = rows / torch.where(slope == 0, torch.ones_like(slope), slope)[:, None]
        weight, bias = (seen.broadcast.params[head.name_of(part)].to(rows) for part in ("weight", "bias"))
        confidences = F.linear(features, weight, bias).softmax(1)
        system = torch.cat([confidences.T - torch.eye(len(slope)).to(rows), torch.ones(1, len(slope)).to(rows)])
        goal = torch.cat([num_examples * slope, torch.tensor([float(num_examples)]).to(rows)])
        counts = torch.linalg.pinv(system) @ goal
        return labels_of(round_to_total(counts, num_examples))
