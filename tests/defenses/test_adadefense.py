from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.defenses.dp_scenes import client_of, play, small_network
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.core.protocols import Defense
from leaktight.core.rng import global_seed
from leaktight.core.tensors import digest, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import State, Update, UpdateKind
from leaktight.data.embedded import Digits
from leaktight.data.partition import Iid
from leaktight.defenses.adadefense import AdaDefense
from leaktight.engines.inprocess import run
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.federation import Federation, assemble
from leaktight.fl.local import silent
from leaktight.fl.messages import Evaluated
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome
from leaktight.fl.state import ClientState, load_checkpoint, save_checkpoint
from leaktight.runtime.sharing import dumped, loaded

FRESH: State = {"time": 0, "first": {}, "second": {}}


def gradients(count: int, scale: float = 1.0) -> list[Tensor]:
    generator = replayed(0).public()
    return [scale * torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(count)]


def stand_ins(defense: AdaDefense, rounds: list[Tensor]) -> list[Tensor]:
    state, result = FRESH, []
    for gradient in rounds:
        sent, state = defense.stand_in({"w": gradient}, state)
        result.append(sent["w"])
    return result


@pytest.mark.parametrize("form", ["adam", "adagrad", "yogi"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_moments_of_half_precision_are_kept_in_float32(form: Any, dtype: torch.dtype) -> None:
    """In float16 epsilon is zero, and so is 0.001 g^2 of a g of 0.005: the stand-in would be infinite."""
    defense, states = AdaDefense(form=form), {dtype: FRESH, torch.float32: FRESH}
    for gradient in gradients(3, scale=0.005):
        sent = {}
        for last in states:
            update = Update({"w": gradient.to(dtype).to(last)}, "delta", 10)
            update, states[last] = defense.on_update(update, states[last], rng=replayed(0), report=silent)
            sent[last] = update.tensors["w"]
        assert sent[dtype].dtype == dtype
        assert torch.equal(sent[dtype], sent[torch.float32].to(dtype))
    assert states[dtype]["second"]["w"].dtype == torch.float32


@pytest.mark.parametrize("form", ["adam", "adagrad"])
def test_the_stand_in_is_the_step_of_the_optimiser_in_pytorch(form: str) -> None:
    weight = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam([weight], lr=1.0, eps=1e-3) if form == "adam" else torch.optim.Adagrad([weight], 1.0, eps=1e-3)
    )
    rounds = gradients(6)
    ours = stand_ins(AdaDefense(form=form, epsilon=1e-3), rounds)  # type: ignore[arg-type]
    for gradient, sent in zip(rounds, ours, strict=True):
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(before - weight.detach(), sent, rtol=1e-9, atol=1e-12)


def test_yogi_moves_its_second_moment_by_the_square_alone() -> None:
    rounds = gradients(5)
    ours = stand_ins(AdaDefense(form="yogi", beta1=0.8, beta2=0.95, epsilon=1e-3), rounds)
    first = [0.0] * 50
    second = [0.0] * 50
    for time, (gradient, sent) in enumerate(zip(rounds, ours, strict=True), start=1):
        for place, value in enumerate(gradient.tolist()):
            first[place] = 0.8 * first[place] + 0.2 * value
            step = 0.05 * value**2
            second[place] += step if second[place] < value**2 else -step
            expected = first[place] / (1 - 0.8**time) / (math.sqrt(second[place] / (1 - 0.95**time)) + 1e-3)
            assert float(sent[place]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_the_first_round_in_closed_form(scale: float) -> None:
    """With moments of zero the stand-in is g / (|g| + epsilon): known moments make it invertible."""
    gradient = gradients(1, scale)[0]
    size = gradient.abs()
    outside, inside = (
        stand_ins(AdaDefense(epsilon=1e-5, epsilon_inside=inside), [gradient])[0] for inside in (False, True)
    )
    torch.testing.assert_close(outside, gradient / (size + 1e-5))
    torch.testing.assert_close(inside, gradient / (size.square() + 1e-5).sqrt())
    code = stand_ins(AdaDefense(variant="code"), [gradient])[0]
    torch.testing.assert_close(code, 1e-3 * gradient / (size + 1e-8 / math.sqrt(1e-3)))
    ratio = code.abs() / 1e-3
    torch.testing.assert_close(torch.sign(code) * 3.1623e-7 * ratio / (1 - ratio), gradient, rtol=1e-3, atol=0.0)


def test_the_time_of_the_published_code_is_one_round_late() -> None:
    """Its factor takes T = 1, 1, 2, 3, and it does not correct the moments themselves."""
    rounds = gradients(4)
    ours = stand_ins(AdaDefense(variant="code"), rounds)
    first, second = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for late, gradient, sent in zip((1, 1, 2, 3), rounds, ours, strict=True):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        scale = 1e-3 * math.sqrt(1 - 0.999**late) / (1 - 0.9**late)
        torch.testing.assert_close(sent, scale * first / (second.sqrt() + 1e-8))


@pytest.mark.parametrize(("kind", "sign"), [("delta", -1.0), ("gradient", 1.0)])
def test_the_stand_in_points_where_the_update_did(kind: UpdateKind, sign: float) -> None:
    """g is received minus local, so a change of the parameters is -g, and its stand-in must be a change too."""
    gradient = gradients(1)[0]
    update = Update({"w": sign * gradient}, kind, num_examples=3)
    sent, state = AdaDefense().on_update(update, FRESH, rng=replayed(0), report=silent)
    torch.testing.assert_close(sent.tensors["w"], sign * gradient.sign(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state["first"]["w"], 0.1 * gradient)
    assert sent.num_examples == 3
    assert FRESH == {"time": 0, "first": {}, "second": {}}


def test_the_server_applies_its_own_learning_rate() -> None:
    change = {"w": torch.ones(3)}
    assert AdaDefense(learning_rate=0.25).on_aggregate(change, 2, {})[0]["w"].tolist() == [0.25] * 3
    assert AdaDefense(variant="code").on_aggregate(change, 2, {})[0]["w"].tolist() == [1.0] * 3


def test_moments_belong_to_one_client_and_are_never_sent() -> None:
    model = small_network().float()
    alone = play(client_of(AdaDefense(), model), model, 2)
    ours, theirs = client_of(AdaDefense(), model), client_of(AdaDefense(), model, name="b")
    first = play(ours, model, 1)[0]
    before = digest(first.state.defense["first"]), digest(first.state.defense["second"])
    other = play(theirs, model, 1)[0]
    assert (digest(first.state.defense["first"]), digest(first.state.defense["second"])) == before
    assert digest(other.state.defense["second"]) != before[1]
    assert alone[1].state.defense["time"] == 2
    sent = alone[1].trained
    assert set(sent.update.tensors) == set(parameters_of(model))
    assert not sent.update.metrics
    hidden = {digest({"": tensor}) for key in ("first", "second") for tensor in alone[1].state.defense[key].values()}
    assert not hidden & {digest({"": tensor}) for tensor in sent.update.tensors.values()}


def test_the_state_survives_a_checkpoint_and_the_way_to_a_worker(tmp_path: Path) -> None:
    model = small_network().float()
    client = client_of(AdaDefense(), model)
    whole = play(client, model, 2)
    save_checkpoint(tmp_path / "state", whole[0].state.stored())
    for state in (loaded(dumped(whole[0].state)), ClientState.restored(load_checkpoint(tmp_path / "state"))):
        assert state.defense["time"] == 1
        assert digest(state.defense["second"]) == digest(whole[0].state.defense["second"])
        again = play(client, model, 1, state)[0]
        assert digest(again.trained.update.tensors) == digest(whole[1].trained.update.tensors)
        assert again.state.defense["time"] == 2


def test_a_round_without_the_client_does_not_advance_its_time() -> None:
    model = small_network().float()
    client = client_of(AdaDefense(), model)
    first = play(client, model, 1)[0]
    later = play(client, model, 5, first.state)  # rounds 0 to 4: its second to sixth, whatever their number
    assert [done.state.defense["time"] for done in later] == [2, 3, 4, 5, 6]


def test_batch_statistics_are_sent_as_they_are() -> None:
    model = small_network(normalised=True).float()
    plain = play(client_of(Defense(), model), model, 1)[0].trained.update.buffers
    defended = play(client_of(AdaDefense(), model), model, 1)[0].trained.update.buffers
    assert plain is not None
    assert defended is not None
    assert digest(plain) == digest(defended)


def digits_federation(defense: AdaDefense) -> Federation:
    dataset = Digits().load(Path())
    with global_seed(replayed(0)):
        side = dataset.inputs.size
        model = nn.Sequential(nn.Flatten(), nn.Linear(side, dataset.num_classes))
    return assemble(
        dataset,
        Iid(clients=4).split(dataset, rng=replayed(0)),
        model,
        local=LocalTraining(batch_size=32, learning_rate=0.05),
        aggregator=FedAvg(),
        plan=FederationPlan(rounds=8),
        defense=defense,
        rng=replayed(1),
    )


@pytest.mark.parametrize("defense", [AdaDefense(), AdaDefense(variant="code")], ids=["paper", "code"])
def test_a_federation_learns_from_stand_ins(defense: AdaDefense) -> None:
    scores: list[Evaluated] = []

    def keep(outcome: RoundOutcome, _: object) -> None:
        assert outcome.score is not None
        scores.append(outcome.score)

    run(digits_federation(defense), workers=1, after_round=keep)
    losses = [score.loss for score in scores]
    assert losses == sorted(losses, reverse=True)
    assert scores[-1].accuracy > 0.6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta1": 1.0}, r"expected beta1 in \[0, 1\), got 1.0"),
        ({"beta2": -0.1}, r"expected beta2 in \[0, 1\), got -0.1"),
        ({"epsilon": 0.0}, "expected epsilon > 0, got 0.0"),
        ({"learning_rate": 0.0}, "expected learning_rate > 0, got 0.0"),
        ({"variant": "code", "epsilon_inside": True}, "expected epsilon_inside = false"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(AdaDefense(), **settings)  # type: ignore[arg-type]
