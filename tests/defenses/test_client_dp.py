from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from tests.defenses.dp_scenes import batch_of, client_of, play, small_network, train_steps
from tests.seeds import replayed

from leaktight.core.errors import ModelError, UsageError
from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.tensors import digest, parameters_of, squared_norm
from leaktight.core.types import Broadcast, Update
from leaktight.defenses.client_dp import ClientDp
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.local import silent
from leaktight.fl.messages import Train


def defended(defense: ClientDp, tensors: dict[str, torch.Tensor], seed: int = 0) -> Update:
    update = Update(tensors, "delta", num_examples=10, metrics={"loss": 1.0})
    result, _ = defense.on_update(update, {"rounds": 1, "answered": 1}, rng=replayed(seed), report=silent)
    return result


@given(scale=st.floats(1e-3, 1e3), clip_norm=st.floats(1e-2, 1e2))
def test_the_update_keeps_its_direction_and_gets_the_norm_of_the_formula(scale: float, clip_norm: float) -> None:
    generator = replayed(0).public()
    tensors = {name: scale * torch.randn(4, 3, generator=generator, dtype=torch.float64) for name in ("a", "b")}
    before = math.sqrt(float(squared_norm(tensors.values())))
    sent = defended(ClientDp(clip_norm=clip_norm, noise_multiplier=0.0), tensors).tensors
    factor = min(1.0, clip_norm / before)
    for name, tensor in tensors.items():
        torch.testing.assert_close(sent[name], factor * tensor)


@pytest.mark.parametrize("shares", [1, 4])
def test_the_noise_of_all_shares_adds_up_to_the_whole(shares: int) -> None:
    zero = {"w": torch.zeros(200, 100, dtype=torch.float64)}
    defense = ClientDp(clip_norm=0.5, noise_multiplier=3.0, noise_shares=shares)
    each = [defended(defense, zero, seed).tensors["w"] for seed in range(shares)]
    tolerance = 4 / math.sqrt(2 * each[0].numel())
    assert float(each[0].std()) == pytest.approx(1.5 / math.sqrt(shares), rel=tolerance)
    assert float(torch.stack(each).sum(0).std()) == pytest.approx(1.5, rel=tolerance)


def test_an_update_of_zeros_is_sent_as_it_is_without_noise() -> None:
    sent = defended(ClientDp(noise_multiplier=0.0), {"w": torch.zeros(3)})
    assert sent.tensors["w"].tolist() == [0.0, 0.0, 0.0]


def test_the_loss_is_not_sent_and_shares_hide_the_number_of_examples() -> None:
    whole = defended(ClientDp(), {"w": torch.ones(3)})
    assert whole.metrics == {}
    assert whole.num_examples == 10
    shared = defended(ClientDp(noise_shares=2), {"w": torch.ones(3)})
    with pytest.raises(UsageError, match='scheme = "I"'):
        FedAvg().combine({"a": shared, "b": shared}, {})
    FedAvg(scheme="I").combine({"a": shared, "b": shared}, {})


def test_epsilon_counts_the_rounds_in_which_the_client_took_part() -> None:
    model = small_network().float()
    defense = ClientDp(noise_multiplier=4.0)
    accountant = RDPAccountant()
    for _ in range(6):
        accountant.step(noise_multiplier=4.0, sample_rate=0.25)
    for sampled, expected in ((defense, 0.0), (replace(defense, sampling_rate=0.25), accountant.get_epsilon(1e-5))):
        client = client_of(sampled, model)
        first = play(client, model, 1)[0]
        done = client.train_round(Train(Broadcast(parameters_of(model), {}, round=5), learning_rate=0.1), first.state)
        assert done.report["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(2) / 4, 1e-5))
        assert done.report.get("epsilon_if_poisson", 0.0) == pytest.approx(expected, rel=1e-9)


def test_shares_of_noise_promise_less_of_one_update_than_of_the_sum() -> None:
    model = small_network().float()
    report = play(client_of(ClientDp(noise_shares=100), model), model, 1)[0].report
    assert report["epsilon"] == pytest.approx(gaussian_epsilon(10.0, 1e-5))
    assert report["epsilon_of_sum"] == pytest.approx(gaussian_epsilon(1.0, 1e-5))


def test_replacing_a_client_costs_what_half_the_noise_does_for_removing_it() -> None:
    model = small_network().float()
    replaced, removed = (
        play(client_of(defense, model), model, 1)[0].report["epsilon"]
        for defense in (
            ClientDp(noise_multiplier=4.0, adjacency="replace"),
            ClientDp(noise_multiplier=2.0, adjacency="remove"),
        )
    )
    assert replaced == removed


def test_rounds_and_clients_draw_noise_of_their_own() -> None:
    model = small_network().float()
    rounds = play(client_of(ClientDp(clip_norm=1e-9), model), model, 2)
    other = play(client_of(ClientDp(clip_norm=1e-9), model, name="b"), model, 1)
    digests = {digest(done.trained.update.tensors) for done in (*rounds, *other)}
    assert len(digests) == 3


def test_batch_statistics_are_refused_and_running_ones_are_not() -> None:
    model = small_network(normalised=True)
    with pytest.raises(ModelError, match="batch normalisation in training mode"):
        train_steps(ClientDp(), model, [batch_of(4)])
    train_steps(ClientDp(), model, [batch_of(4)], mode="eval")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 0.0}, "expected clip_norm > 0, got 0.0"),
        ({"noise_multiplier": -0.1}, "expected noise_multiplier >= 0, got -0.1"),
        ({"noise_shares": 0}, "expected noise_shares >= 1, got 0"),
        ({"sampling_rate": 0.0}, r"expected sampling_rate in \(0, 1\], got 0.0"),
        ({"sampling_rate": 1.5}, r"expected sampling_rate in \(0, 1\], got 1.5"),
        ({"sampling_rate": 0.5, "adjacency": "replace"}, "expected sampling_rate = 1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClientDp(**settings)  # type: ignore[arg-type]
