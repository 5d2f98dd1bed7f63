from __future__ import annotations

import math

import pytest
import torch
from opacus.accountants import RDPAccountant
from tests.defenses.dp_scenes import batch_of, client_of, play, small_network, train_steps
from torch import nn

from leaktight.core.errors import ModelError
from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.protocols import Defense
from leaktight.core.tensors import parameters_of
from leaktight.core.training import LocalTraining
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.fed_cdp import FedCdp
from leaktight.fl.local import Trainer, per_example_gradients


def by_hand(model: nn.Module, clip_norm: float, layers: list[list[str]]) -> dict[str, torch.Tensor]:
    """One example and one layer at a time."""
    batch = batch_of(5)
    each = per_example_gradients(Trainer(model, LocalTraining()), parameters_of(model), {}, batch)
    result = {name: torch.zeros_like(tensor[0]) for name, tensor in each.items()}
    for place in range(len(batch)):
        for names in layers:
            norm = torch.cat([each[name][place].flatten() for name in names]).norm()
            for name in names:
                result[name] += each[name][place] / max(1.0, float(norm) / clip_norm) / len(batch)
    return result


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("tensor", [["0.weight"], ["0.bias"], ["3.weight"], ["3.bias"]]),
        ("module", [["0.weight", "0.bias"], ["3.weight", "3.bias"]]),
    ],
)
def test_every_layer_is_clipped_on_its_own(kind: str, layers: list[list[str]]) -> None:
    model = small_network()
    defense = FedCdp(clip_norm=0.2, noise_multiplier=0.0, layers=kind)  # type: ignore[arg-type]
    ours = train_steps(defense, model, [batch_of(5)]).gradient
    for name, tensor in by_hand(model, 0.2, layers).items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-12)


def test_one_layer_is_dp_sgd() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)).double()
    results = [
        train_steps(cls(clip_norm=0.1, noise_multiplier=1.0), model, [batch_of(5)]).gradient for cls in (DpSgd, FedCdp)
    ]
    assert torch.equal(results[0]["1.weight"], results[1]["1.weight"])


def test_the_clipping_norm_falls_in_equal_steps_and_stays() -> None:
    defense = FedCdp(clip_norm=6.0, final_clip_norm=2.0, decay_rounds=4)
    assert [defense.clip_norm_in(index) for index in (0, 1, 2, 3, 4, 9)] == [6.0, 5.0, 4.0, 3.0, 2.0, 2.0]
    assert {FedCdp(clip_norm=3.0).clip_norm_in(index) for index in range(9)} == {3.0}


@pytest.mark.parametrize(("round_index", "clip_norm"), [(0, 0.8), (1, 0.5), (2, 0.2), (7, 0.2)])
def test_clipping_and_noise_follow_the_norm_of_the_round(round_index: int, clip_norm: float) -> None:
    model, batch = nn.Sequential(nn.Flatten(), nn.Linear(16, 2000)).double(), batch_of(4)

    def gradient(defense: Defense) -> torch.Tensor:
        return train_steps(defense, model, [batch], round_index=round_index).gradient["1.weight"]

    decay = {"clip_norm": 0.8, "final_clip_norm": 0.2, "decay_rounds": 2}
    clean = gradient(FedCdp(noise_multiplier=0.0, **decay))  # type: ignore[arg-type]
    torch.testing.assert_close(clean, gradient(FedCdp(noise_multiplier=0.0, clip_norm=clip_norm)))
    noise = gradient(FedCdp(noise_multiplier=3.0, **decay)) - clean  # type: ignore[arg-type]
    assert float(noise.std()) == pytest.approx(3.0 * clip_norm / 4, rel=4 / math.sqrt(2 * noise.numel()))


@pytest.mark.parametrize(("kind", "num_layers"), [("tensor", 4), ("module", 2)])
def test_the_accountant_gets_the_noise_over_the_sensitivity_of_all_layers(kind: str, num_layers: int) -> None:
    model = small_network().float()
    defense = FedCdp(noise_multiplier=6.0, final_clip_norm=1.0, layers=kind)  # type: ignore[arg-type]
    report = play(client_of(defense, model), model, 2)[-1].report
    accountant = RDPAccountant()
    for rate in [12 / 40] * 12 + [4 / 40] * 4:
        accountant.step(noise_multiplier=6.0 / math.sqrt(num_layers), sample_rate=rate)
    assert report["epsilon_if_poisson"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    assert report["epsilon"] == pytest.approx(gaussian_epsilon(2 * math.sqrt(num_layers) / 6, 1e-5))


def test_batch_statistics_are_refused() -> None:
    with pytest.raises(ModelError, match="batch normalisation in training mode"):
        train_steps(FedCdp(), small_network(normalised=True), [batch_of(4)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": -1.0}, "expected clip_norm > 0, got -1.0"),
        ({"clip_norm": 1.0, "final_clip_norm": 2.0}, "expected 0 < final_clip_norm <= clip_norm"),
        ({"final_clip_norm": 0.0}, "expected 0 < final_clip_norm"),
        ({"clip_norm": math.inf, "final_clip_norm": 1.0, "noise_multiplier": 0.0}, "clip_norm < inf"),
        ({"decay_rounds": 0}, "expected decay_rounds >= 1, got 0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedCdp(**settings)  # type: ignore[arg-type]
