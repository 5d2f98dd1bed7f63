"""The catalogue of metrics: complete, consistent, and each metric leaks the way it says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.seeds import replayed

from leaktight.core.errors import UsageError
from leaktight.metrics import METRICS, MetricUnavailable, Resources, build_metrics, legacy


def test_names() -> None:
    core = {"mse", "psnr", "ssim", "lpips_alex", "lpips_vgg", "mse_r", "label_accuracy"}
    published = {name for name, value in vars(legacy).items() if getattr(value, "__module__", "") == legacy.__name__}
    assert set(METRICS) == core | {name for name in published if not name.startswith("_")}
    assert {name for name, spec in METRICS.items() if spec.legacy} == set(METRICS) - core
    assert isinstance(METRICS, Mapping)
    assert not hasattr(METRICS, "__setitem__")


@pytest.mark.parametrize("name", METRICS)
def test_description_is_one_line(name: str) -> None:
    text = METRICS[name].description
    assert text
    assert "\n" not in text
    assert len(text) <= 80


@pytest.mark.parametrize("name", METRICS)
def test_built_metric_agrees_with_its_line_and_leaks_the_way_it_says(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue("real_data") if name.startswith("lpips") else tmp_path
    metric = METRICS[name].build(Resources(root=root, extract=lambda images: images.flatten(1)))
    assert metric.name == name
    assert metric.leaks_when == METRICS[name].leaks_when
    if METRICS[name].judges == "labels":
        same, other = (metric(torch.tensor([1, 2]), torch.tensor(true)) for true in ([2, 1], [3, 4]))
    else:
        generator = replayed(0).public()
        truth, guess = (torch.rand(2, 3, 32, 32, generator=generator) for _ in range(2))
        same, other = metric(truth, truth), metric(guess, truth)
        assert same.shape == other.shape == (2,)
    assert bool((same > other if metric.leaks_when == "high" else same < other).all())


def test_what_is_missing_is_said_not_made_up(tmp_path: Path) -> None:
    built = build_metrics(["psnr", "lpips_alex", "mse_r"], Resources(root=tmp_path))
    assert list(built.metrics) == ["psnr"]
    assert set(built.unavailable) == {"lpips_alex", "mse_r"}
    assert "alexnet_features.pth" in built.unavailable["lpips_alex"]
    assert "give extract" in built.unavailable["mse_r"]
    with pytest.raises(MetricUnavailable):
        METRICS["lpips_vgg"].build(Resources(root=tmp_path))


def test_unknown_name_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'psnr'"):
        build_metrics(["pnsr"], Resources(root=tmp_path))
