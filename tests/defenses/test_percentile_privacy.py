"""Percentile privacy against NumPy's percentile and clip, as NVFlare computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.seeds import replayed

from leaktight.core.protocols import RoundPlan
from leaktight.core.types import Params, Update
from leaktight.defenses.percentile_privacy import PercentilePrivacy
from leaktight.fl.local import silent


def sent(defense: PercentilePrivacy, tensors: Params, steps: int) -> Params:
    plan = RoundPlan(0, (0.1,) * steps)
    _, state = defense.on_round(plan, {}, rng=replayed(0), report=silent)
    return defense.on_update(Update(tensors, "delta"), state, rng=replayed(0), report=silent)[0].tensors


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("percentile", [0.0, 10.0, 65.0])
def test_it_is_numpys_percentile_and_clip_of_the_change_by_step(steps: int, percentile: float) -> None:
    generator = replayed(1).public()
    tensors = {"a": torch.randn(7, 5, generator=generator), "b": torch.randn(11, generator=generator)}
    found = sent(PercentilePrivacy(percentile=percentile, gamma=0.3), tensors, steps)
    by_step = {name: tensor.double().numpy() / steps for name, tensor in tensors.items()}
    cutoff = np.percentile(np.concatenate([np.abs(each).ravel() for each in by_step.values()]), percentile)
    for name, each in by_step.items():
        expected = np.where(np.abs(each) < cutoff, 0, each).clip(-0.3, 0.3) * steps
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-6)


def test_scalars_are_sent_as_they_are() -> None:
    found = sent(PercentilePrivacy(), {"a": torch.ones(3), "scalar": torch.tensor(5.0)}, 1)
    assert float(found["scalar"]) == 5
    assert float(found["a"].max()) == pytest.approx(0.01)


@pytest.mark.parametrize("settings", [{"gamma": 0.0}, {"percentile": 101.0}, {"percentile": -1.0}])
def test_settings_outside_their_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        PercentilePrivacy(**settings)  # type: ignore[arg-type]
