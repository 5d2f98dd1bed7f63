from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from tests.defenses.dp_scenes import batch_of, client_of, play, small_network, train_steps
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import ModelError
from leaktight.core.privacy import gaussian_epsilon
from leaktight.core.rng import global_seed
from leaktight.core.tensors import digest, pack, squared_norm, unpack
from leaktight.core.training import LocalTraining
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Iid
from leaktight.defenses.dp_sgd import DpSgd, clipped_mean
from leaktight.engines.training import train
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.federation import assemble
from leaktight.fl.plan import FederationPlan
from leaktight.fl.state import ClientState
from leaktight.results.folder import open_run


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("clip_norm", [0.05, 0.3, 100.0])
def test_the_clipped_gradient_is_that_of_opacus(clip_norm: float) -> None:
    model, batch = small_network(), batch_of(7)
    theirs = GradSampleModule(copy.deepcopy(model))
    optimizer = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        expected_batch_size=len(batch),
    )
    F.cross_entropy(theirs(batch.inputs), batch.targets).backward()
    optimizer.pre_step()
    ours = train_steps(DpSgd(clip_norm=clip_norm, noise_multiplier=0.0), model, [batch]).gradient
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours[name.removeprefix("_module.")], parameter.grad, rtol=1e-9, atol=1e-12)


def test_without_clipping_and_noise_it_is_no_defense() -> None:
    model, batch = small_network(), batch_of(5)
    plain = torch.autograd.grad(F.cross_entropy(model(batch.inputs), batch.targets), tuple(model.parameters()))
    ours = train_steps(DpSgd(clip_norm=math.inf, noise_multiplier=0.0), model, [batch]).gradient
    for tensor, expected in zip(ours.values(), plain, strict=True):
        torch.testing.assert_close(tensor, expected)


@given(size=st.integers(1, 6), scale=st.floats(1e-3, 1e3), clip_norm=st.floats(1e-2, 1e2), seed=st.integers(0, 99))
def test_no_example_counts_for_more_than_the_clipping_norm(
    size: int, scale: float, clip_norm: float, seed: int
) -> None:
    """Removing any one example moves the sum by clip_norm at most; small gradients stay as they are."""
    generator = replayed(seed).public()
    each = {name: scale * torch.randn(size, *shape, generator=generator) for name, shape in (("w", (3, 2)), ("b", ()))}
    mean, factors = clipped_mean(each, [["w", "b"]], clip_norm)
    for place in range(size):
        alone, _ = clipped_mean({name: rows[place : place + 1] for name, rows in each.items()}, [["w", "b"]], clip_norm)
        assert math.sqrt(float(squared_norm(alone.values()))) <= clip_norm * (1 + 1e-6)
        if factors[0, place] == 1:
            assert all(torch.equal(alone[name], each[name][place]) for name in each)
    total = sum(float(rows.sum()) for rows in mean.values()) * size
    weighted = sum(float((factors[0] @ rows.reshape(size, -1).double()).sum()) for rows in each.values())
    assert total == pytest.approx(weighted, rel=1e-4, abs=1e-4 * scale)


def test_the_noise_has_the_variance_of_the_formula() -> None:
    model, batch = nn.Sequential(nn.Flatten(), nn.Linear(16, 2000)).double(), batch_of(4)
    clean = train_steps(DpSgd(clip_norm=0.5, noise_multiplier=0.0), model, [batch]).gradient
    noisy = train_steps(DpSgd(clip_norm=0.5, noise_multiplier=3.0), model, [batch]).gradient
    noise = torch.cat([(noisy[name] - clean[name]).flatten() for name in clean])
    expected, count = 3.0 * 0.5 / 4, noise.numel()
    assert float(noise.std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * count))
    assert abs(float(noise.mean())) < 4 * expected / math.sqrt(count)


def test_every_step_and_every_run_draws_noise_of_its_own() -> None:
    model, batch = small_network(), batch_of(4)
    defense = DpSgd(noise_multiplier=1.0)
    first, again, other = (train_steps(defense, model, [batch], seed=seed).gradient for seed in (0, 0, 1))
    assert digest(first) == digest(again) != digest(other)
    weak = DpSgd(clip_norm=1e-9, noise_multiplier=1.0)  # all that is left is noise
    one, two = (train_steps(weak, model, [batch] * steps).gradient for steps in (1, 2))
    assert digest(one) != digest(two)


def test_epsilon_is_that_of_opacus_called_by_hand() -> None:
    """40 examples in batches of 12: two epochs of three whole batches and one of 4, in each of two rounds."""
    model = small_network().float()
    done = play(client_of(DpSgd(noise_multiplier=1.5, delta=1e-4), model), model, 2)
    for index in range(2):
        accountant = RDPAccountant()
        for rate in [12 / 40] * 6 * (index + 1) + [4 / 40] * 2 * (index + 1):
            accountant.step(noise_multiplier=1.5, sample_rate=rate)
        report = done[index].report
        assert report["epsilon_if_poisson"] == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-9)
        assert report["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(2 * (index + 1)) / 1.5, 1e-4))
        assert report["delta"] == 1e-4
        assert report["steps"] == 8


def test_the_budget_goes_on_after_a_checkpoint_and_starts_afresh_for_another_client() -> None:
    model = small_network().float()
    defense = DpSgd(noise_multiplier=2.0)
    client = client_of(defense, model)
    whole = play(client, model, 3)
    first = play(client, model, 1)[0]
    second = play(client, model, 2, ClientState.restored(unpack(pack(first.state.stored()))))
    assert second[-1].report["epsilon"] == pytest.approx(whole[-1].report["epsilon"])
    other = play(client_of(defense, model, name="b"), model, 1)[0]
    assert other.report["epsilon"] == first.report["epsilon"]


def test_the_training_loss_is_not_sent() -> None:
    model = small_network().float()
    update = play(client_of(DpSgd(), model), model, 1)[0].trained.update
    assert update.metrics == {}
    assert update.num_examples == 40


def test_clipping_alone_claims_no_privacy() -> None:
    model = small_network().float()
    report = play(client_of(DpSgd(clip_norm=0.1, noise_multiplier=0.0), model), model, 1)[0].report
    assert 0 < report["clip_rate"] <= 1
    assert not {"epsilon", "epsilon_if_poisson", "delta"} & set(report)


def test_batch_statistics_are_refused_and_running_ones_are_not() -> None:
    model = small_network(normalised=True)
    with pytest.raises(ModelError, match="batch normalisation in training mode"):
        train_steps(DpSgd(), model, [batch_of(4)])
    result = train_steps(DpSgd(), model, [batch_of(4)], mode="eval")
    assert set(result.gradient) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 0.0}, "expected clip_norm > 0, got 0.0"),
        ({"clip_norm": math.nan}, "expected clip_norm > 0, got nan"),
        ({"clip_norm": math.inf}, "expected a finite clip_norm"),
        ({"noise_multiplier": -1.0}, "expected noise_multiplier >= 0, got -1.0"),
        ({"noise_multiplier": math.inf}, "expected noise_multiplier >= 0, got inf"),
        ({"delta": 0.0}, r"expected delta in \(0, 1\), got 0.0"),
        ({"delta": 1.0}, r"expected delta in \(0, 1\), got 1.0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DpSgd(**settings)  # type: ignore[arg-type]


def test_a_run_reports_the_largest_budget_of_any_client_at_its_end(tmp_path: Path) -> None:
    """Two of three clients in each round, so at least one client took part twice in three rounds."""
    generator = replayed(5).public()
    examples = Examples(
        torch.randint(256, (60, 1, 4, 4), generator=generator, dtype=torch.uint8),
        torch.randint(3, (60,), generator=generator),
    )
    dataset = Dataset("noise", examples, examples, ("a", "b", "c"))
    with global_seed(replayed(0)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    federation = assemble(
        dataset,
        Iid(clients=3).split(dataset, rng=replayed(0)),
        model,
        local=LocalTraining(batch_size=5),
        aggregator=FedAvg(),
        plan=FederationPlan(rounds=3, per_round=2),
        defense=DpSgd(accountant="gdp", noise_multiplier=2.0),
        rng=replayed(1),
    )
    with open_run(tmp_path / "run", "", resume=False) as folder:
        summary = train(federation, folder, defense_kind="dp_sgd", workers=1)
        stored = json.loads(folder.summary.read_text())
    per_round = [row.client["epsilon"] for row in summary.rounds]
    assert per_round == sorted(per_round)
    assert per_round[0] < per_round[-1]
    assert stored["defense"]["epsilon"] == per_round[-1]
    assert stored["defense"]["delta"] == 1e-5
