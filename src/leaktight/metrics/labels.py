"""Metrics of labels, success rates, and re-identification."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from leaktight.core.errors import UsageError
from leaktight.core.text import described
from leaktight.metrics.image import as_images
from leaktight.metrics.spec import Extract, LeaksWhen

_REACHES = {"high": torch.ge, "low": torch.le}


def label_accuracy(guess_labels: Tensor, true_labels: Tensor) -> float:
    """The share of common labels, as multisets: the order does not matter, repetitions do.

    Labels are class indices (N,), encoded words (N, L) of integers, or scores of classes (N, C) of floats, of which
    the highest counts. The overlap is divided by the larger count, so that surplus labels lower the score.

    >>> label_accuracy(torch.tensor([1, 1, 2]), torch.tensor([2, 1, 3]))
    0.6666666666666666
    """
    guess, truth = _counted(guess_labels), _counted(true_labels)
    if not truth.total():
        raise UsageError("expected at least one true label, got none")
    return (guess & truth).total() / max(guess.total(), truth.total())


def label_accuracy_per_batch(guess_labels: Tensor, true_labels: Tensor) -> Tensor:
    """`label_accuracy` as a tensor of shape (1,): one score per batch, because labels have no order."""
    return torch.tensor([label_accuracy(guess_labels, true_labels)], dtype=torch.float64)


def _counted(labels: Tensor) -> Counter[tuple[int, ...]]:
    if labels.ndim not in (1, 2) or (labels.ndim == 1 and labels.is_floating_point()):
        raise UsageError(f"expected labels (N,) or (N, L) of integers, or scores (N, C), got {described(labels)}")
    whole = labels.argmax(1) if labels.is_floating_point() else labels
    rows = whole if whole.ndim == 2 else whole.unsqueeze(1)
    return Counter(tuple(row) for row in rows.tolist())


def attack_success_rate(scores: Tensor, threshold: float, leaks_when: LeaksWhen) -> float:
    """The share of scores that reach the threshold: >= if high scores leak, <= if low ones do.

    NaN does not reach it.

    >>> attack_success_rate(torch.tensor([12.0, 25.0, float("nan")]), 20, "high")
    0.3333333333333333
    """
    if leaks_when not in _REACHES:
        raise UsageError(f"expected leaks_when 'high' or 'low', got {leaks_when!r}")
    if not scores.numel():
        raise UsageError("expected at least one score, got none")
    return float(_REACHES[leaks_when](scores, threshold).to(torch.float64).mean())


def reidentification_top_k(
    guess_embeddings: Tensor, gallery_embeddings: Tensor, gallery_index_of_truth: Tensor, k: int
) -> Tensor:
    """1 where the truth is among the k gallery entries nearest to the guess, 0 elsewhere: (N,).

    guess_embeddings (N, D), gallery_embeddings (G, D), gallery_index_of_truth (N,): the gallery index of each guess's
    truth. Distances are Euclidean. An entry at the same distance as the truth counts as nearer, so constant features
    identify nobody; neither does a guess with a NaN. Chance level is k / G.
    """
    size = len(gallery_embeddings)
    if not 1 <= k <= size:
        raise UsageError(f"expected k between 1 and the size of the gallery, {size}, got {k}")
    if len(guess_embeddings) != len(gallery_index_of_truth):
        raise UsageError(
            f"expected the gallery index of the truth for each guess, "
            f"got {len(guess_embeddings)} guesses and {len(gallery_index_of_truth)} indices"
        )
    where = gallery_index_of_truth.to("cpu", torch.long)
    if bool(((where < 0) | (where >= size)).any()):
        raise UsageError(f"expected gallery indices in 0..{size - 1}, got {where.tolist()}")
    guess, gallery = (e.detach().to("cpu", torch.float64).flatten(1) for e in (guess_embeddings, gallery_embeddings))
    # The faster way, a matrix product, is too inexact to recognise equal distances.
    distances = torch.cdist(guess, gallery, compute_mode="donot_use_mm_for_euclid_dist")
    to_truth = distances.gather(1, where.unsqueeze(1))
    rank = (distances <= to_truth).sum(1)
    return ((rank <= k) & to_truth.squeeze(1).isfinite()).to(torch.float64)


@torch.no_grad()
def reidentification(
    guess: Tensor, gallery: Tensor, gallery_index_of_truth: Tensor, *, extract: Extract, k: int = 1
) -> Tensor:
    """`reidentification_top_k` of images in [0, 1], clamped, in the feature space of `extract`."""
    guess, gallery = (as_images(images).to(torch.float32) for images in (guess, gallery))
    return reidentification_top_k(extract(guess), extract(gallery), gallery_index_of_truth, k)
