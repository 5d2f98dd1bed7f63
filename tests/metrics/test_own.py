"""Metrics of the user's own, named "package.module:name"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leaktight.audits.settings import AuditSettings
from leaktight.core.errors import UsageError
from leaktight.metrics import Resources, build_metrics, metric_spec

SOURCE = """
class Largest:
    leaks_when = "low"

    def __call__(self, guess, truth):
        return (guess - truth).abs().flatten(1).amax(1)

def mean(guess, truth):
    return (guess - truth).flatten(1).mean(1)

mean.leaks_when = "high"

def one_number(guess, truth):
    return (guess - truth).mean()

one_number.leaks_when = "low"

class Needs(Largest):
    def __init__(self, scale):
        pass

class Sideways(Largest):
    leaks_when = "left"

class Silent:
    leaks_when = "low"

def undirected(guess, truth):
    return guess
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_metrics.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "direction", "scores"), [("Largest", "low", [1, 0.5]), ("mean", "high", [1, 0.25])])
def test_a_class_or_a_function(name: str, direction: str, scores: list[float], tmp_path: Path) -> None:
    target = f"own_metrics:{name}"
    metric = build_metrics(AuditSettings(metrics=(target,)).metrics, Resources(root=tmp_path)).metrics[target]
    assert metric.leaks_when == direction
    guess = torch.tensor([[1.0, 1.0], [0.5, 0.0]]).reshape(2, 1, 1, 2)
    assert metric(guess, torch.zeros(2, 1, 1, 2)).tolist() == scores


def test_it_is_scored_beside_those_of_verdicts() -> None:
    assert AuditSettings(metrics=("own_metrics:mean",)).image_metrics == ("psnr", "mse", "ssim", "own_metrics:mean")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Largst", "did you mean 'Largest'"),
        ("Needs", "missing 1 required positional argument"),
        ("Sideways", "got 'left'; set it"),
        ("Silent", "called with guess and truth, got Silent"),
        ("undirected", 'leaks_when = "high" or "low", got nothing'),
    ],
)
def test_what_is_no_metric_is_an_error_before_anything_runs(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        metric_spec(f"own_metrics:{name}")
    with pytest.raises(ValueError, match=message):
        AuditSettings(metrics=(f"own_metrics:{name}",))


def test_one_number_for_a_batch_is_no_score(tmp_path: Path) -> None:
    metric = metric_spec("own_metrics:one_number").build(Resources(root=tmp_path))
    with pytest.raises(UsageError, match=r"one score for each image, 2 in all, got a single number"):
        metric(torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 4))
