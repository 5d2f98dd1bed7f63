"""Metrics of guesses against truths: pure functions, and their catalogue by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from leaktight.core.errors import UsageError, suggestion
from leaktight.core.faults import raise_fault
from leaktight.core.inputs import ALL_INPUTS
from leaktight.core.own import is_own
from leaktight.core.protocols import Metric
from leaktight.metrics import legacy
from leaktight.metrics.features import FeatureMse, feature_mse
from leaktight.metrics.image import mse, psnr, ssim
from leaktight.metrics.labels import (
    attack_success_rate,
    label_accuracy,
    label_accuracy_per_batch,
    reidentification,
    reidentification_top_k,
)
from leaktight.metrics.lpips import Lpips, LpipsUnavailable
from leaktight.metrics.match import NO_GUESS, align, match, pairwise, score
from leaktight.metrics.spec import FunctionMetric, LeaksWhen, MetricSpec, MetricUnavailable, Resources, own_spec

__all__ = [
    "METRICS",
    "NO_GUESS",
    "BuiltMetrics",
    "FeatureMse",
    "FunctionMetric",
    "Lpips",
    "LpipsUnavailable",
    "MetricSpec",
    "MetricUnavailable",
    "Resources",
    "align",
    "attack_success_rate",
    "build_metrics",
    "feature_mse",
    "label_accuracy",
    "match",
    "metric_spec",
    "mse",
    "pairwise",
    "psnr",
    "reidentification",
    "reidentification_top_k",
    "score",
    "ssim",
]


def _function(
    name: str,
    function: Callable[[Tensor, Tensor], Tensor],
    leaks_when: LeaksWhen,
    description: str,
    *,
    legacy: bool = False,
) -> MetricSpec:
    metric = FunctionMetric(name=name, leaks_when=leaks_when, function=function)
    return MetricSpec(leaks_when=leaks_when, description=description, build=lambda _: metric, legacy=legacy)


def _lpips(net: Literal["alex", "vgg"], description: str) -> MetricSpec:
    def build(resources: Resources) -> Metric:
        metric = Lpips(net=net, root=resources.root)
        if reason := metric.available():
            raise LpipsUnavailable(reason)
        return metric

    return MetricSpec(leaks_when="low", description=description, build=build)


def _feature_mse(resources: Resources) -> Metric:
    if resources.extract is None:
        raise MetricUnavailable("mse_r needs a model with a final linear layer, got no features; give extract")
    return FeatureMse(extract=resources.extract)


METRICS: Mapping[str, MetricSpec] = MappingProxyType(
    {
        "mse": _function("mse", mse, "low", "mean squared error on [0, 1]"),
        "psnr": _function("psnr", psnr, "high", "peak signal-to-noise ratio in dB, at most 100"),
        "ssim": _function("ssim", ssim, "high", "structural similarity, Gaussian window of 11 pixels"),
        "lpips_alex": _lpips("alex", "learned perceptual distance, AlexNet (needs its ImageNet weights)"),
        "lpips_vgg": _lpips("vgg", "learned perceptual distance, VGG16 (needs its ImageNet weights)"),
        "mse_r": MetricSpec(
            leaks_when="low",
            description="mean squared error of the input of the model's final linear layer",
            build=_feature_mse,
            needs_features=True,
        ),
        "label_accuracy": replace(
            _function(
                "label_accuracy",
                label_accuracy_per_batch,
                "high",
                "share of the batch's labels that were named, in any order",
            ),
            judges="labels",
            takes=ALL_INPUTS,
        ),
        "grnn_mae": _function(
            "grnn_mae", legacy.grnn_mae, "low", "GRNN's 'mses': mean absolute error on [0, 1]", legacy=True
        ),
        "thesis_mse_255": _function(
            "thesis_mse_255", legacy.thesis_mse_255, "low", "thesis, chapter 3: MSE on 0..255", legacy=True
        ),
        "thesis_psnr": _function(
            "thesis_psnr", legacy.thesis_psnr, "high", "thesis, chapter 3: 10 log10(255^2 / MSE)", legacy=True
        ),
        "fedkl_rmse": _function(
            "fedkl_rmse", legacy.fedkl_rmse, "low", "FedKL's and AdaDefense's 'MSE': RMSE of bytes", legacy=True
        ),
        "fedkl_psnr": _function(
            "fedkl_psnr", legacy.fedkl_psnr, "high", "FedKL's and AdaDefense's 10 log10(255^2 / RMSE)", legacy=True
        ),
        "ggl_mse": _function(
            "ggl_mse", legacy.ggl_mse, "low", "GGL's and LRP's MSE, on [-1, 1]: 4 times the true one", legacy=True
        ),
        "ggl_psnr": _function(
            "ggl_psnr", legacy.ggl_psnr, "high", "GGL's and LRP's PSNR, 6.02 dB below the true one", legacy=True
        ),
        "ig_psnr_normalised": _function(
            "ig_psnr_normalised",
            legacy.ig_psnr_normalised,
            "high",
            "Inverting Gradients' PSNR on normalised images",
            legacy=True,
        ),
        "plato_min_mse": _function(
            "plato_min_mse",
            legacy.plato_min_mse,
            "low",
            "Plato's least MSE over all truths on normalised images",
            legacy=True,
        ),
        "plato_psnr_2022": _function(
            "plato_psnr_2022", legacy.plato_psnr_2022, "high", "Plato's PSNR of 2022, from its least MSE", legacy=True
        ),
    }
)


def metric_spec(name: str) -> MetricSpec:
    """The metric of this name: of `METRICS`, or "package.module:name" for one of the user's own."""
    if is_own(name):
        return own_spec(name)
    if name not in METRICS:
        raise UsageError(f"expected the name of a metric, got {name!r}; {suggestion(name, METRICS)}")
    return METRICS[name]


@dataclass(frozen=True)
class BuiltMetrics:
    """metrics: those that can be computed, by name. unavailable: the reason for each of the others, by name."""

    metrics: Mapping[str, Metric]
    unavailable: Mapping[str, str]


def build_metrics(names: Iterable[str], resources: Resources) -> BuiltMetrics:
    """Build the metrics of these names; `unavailable` lists those that cannot be built."""
    metrics: dict[str, Metric] = {}
    unavailable: dict[str, str] = {}
    for name in names:
        try:
            metrics[name] = metric_spec(name).build(resources)
        except MetricUnavailable as error:
            raise_fault(error)
            unavailable[name] = str(error)
    return BuiltMetrics(metrics, unavailable)
