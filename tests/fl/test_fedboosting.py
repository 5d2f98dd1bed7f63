from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fl.talks import broadcast_of, flat, talk_of, updates_of
from tests.seeds import replayed

from leaktight.config.catalogue import MODELS
from leaktight.core.errors import RoundFailedError, UsageError
from leaktight.core.protocols import Defense, Question
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Update
from leaktight.data.embedded import Digits
from leaktight.data.partition import Iid
from leaktight.defenses.adadefense import AdaDefense
from leaktight.engines import inprocess
from leaktight.fl.fedboosting import TRAINING_LOSS, FedBoosting, FixedFusion, Fusion, NoisyFusion
from leaktight.fl.federation import assemble
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome
from leaktight.models.initialise import build_model

SHAPES = {"w": (3, 2), "b": (2,)}
SIZES = {"c0": 5, "c1": 90, "c2": 30}


def test_the_formula_of_the_thesis_by_hand() -> None:
    training = {"a": 0.2, "b": 1.0}
    validation = {"a": {"a": 0.3, "b": 0.5}, "b": {"a": 2.0, "b": 1.0}}
    fit = [math.exp(0.2), math.exp(1.0)]
    inner = [fit[0] / sum(fit) * 0.8, fit[1] / sum(fit) * 3.0]
    outer = [math.exp(value) for value in inner]
    shares = FedBoosting(variant="paper").shares(training, validation)
    assert list(shares.values()) == pytest.approx([value / sum(outer) for value in outer])
    assert shares["b"] > shares["a"]  # as printed, the worse model counts for more


def test_the_formula_of_the_code_by_hand() -> None:
    training = {"a": 0.2, "b": 1.0}
    validation = {"a": {"a": 0.3, "b": 0.5}, "b": {"a": 2.0, "b": 1.0}}
    inverse = [1 / 0.4 / 0.2, 1 / 1.5 / 1.0]
    shares = FedBoosting(variant="code").shares(training, validation)
    assert list(shares.values()) == pytest.approx([value / sum(inverse) for value in inverse])


losses = st.floats(0, 50)


@given(st.lists(st.tuples(losses, losses), min_size=1, max_size=8), st.sampled_from(["paper", "code"]))
def test_shares_are_shares(reported: list[tuple[float, float]], variant: str) -> None:
    training = {f"c{place}": loss for place, (loss, _) in enumerate(reported)}
    validation = {f"c{place}": dict.fromkeys(training, loss) for place, (_, loss) in enumerate(reported)}
    shares = FedBoosting(variant=variant).shares(training, validation)  # type: ignore[arg-type]
    assert all(0 <= share <= 1 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(1)


@given(losses, losses, losses)
def test_with_the_codes_weights_a_worse_model_never_counts_more(training: float, good: float, extra: float) -> None:
    shares = FedBoosting(variant="code").shares(
        {"a": training, "b": training}, {"a": {"a": good, "b": good}, "b": {"a": good, "b": good + extra}}
    )
    assert shares["b"] <= shares["a"] + 1e-12


@pytest.mark.parametrize("fusion", [None, FixedFusion()], ids=str)
def test_the_round_is_what_the_losses_say(fusion: Fusion | None) -> None:
    """The whole conversation beside a computation from the definitions."""
    aggregator = FedBoosting(variant="code", fusion=fusion)
    talk, broadcast = talk_of(aggregator), broadcast_of(SHAPES)
    updates = updates_of(broadcast, SIZES)
    change, _ = talk.round(updates, talk.agreed(broadcast.params), broadcast)
    names = sorted(updates)
    changes = torch.stack([flat(updates[name].tensors) for name in names])
    mix = torch.eye(3) if fusion is None else torch.full((3, 3), 0.05) + 0.85 * torch.eye(3)
    shown = flat(broadcast.params) + mix.double() @ changes
    own = flat(broadcast.params) + changes
    goals = torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64)
    training = (own - goals[:, None]).square().mean(1)
    validation = (shown[:, None] - goals[None, :, None]).square().mean(2).mean(1)
    shares = 1 / (training * validation)
    shares = (1000 * shares / shares.sum()).round() / 1000
    np.testing.assert_allclose(flat(change), shares @ changes / shares.sum(), atol=2e-3)
    assert {client for client, _ in talk.asked} == set(names)
    assert [talk.sent[name].metrics["training_loss"] for name in names] == pytest.approx(training.tolist())


def test_batch_statistics_count_like_parameters_and_counters_do_not() -> None:
    broadcast = Broadcast(
        {"w": torch.zeros(2)}, {"mean": torch.ones(2), "seen": torch.tensor(3), "unsent": torch.ones(1)}, 0
    )
    updates = {
        name: Update(
            {"w": torch.full((2,), value)}, "delta", 9, {"mean": 1 + torch.full((2,), value), "seen": torch.tensor(5)}
        )
        for name, value in (("c0", 0.5), ("c1", 0.25))
    }
    talk = talk_of(FedBoosting(), clients=2)
    change, _ = talk.round(updates, talk.agreed(broadcast.params), broadcast)
    assert set(change) == {"w", "mean"}
    torch.testing.assert_close(change["w"], change["mean"])


def test_a_poisoned_model_loses_its_weight_only_with_the_codes_formula() -> None:
    broadcast = broadcast_of(SHAPES)
    updates = updates_of(broadcast, {f"c{place}": 10 for place in range(5)}, bound=0.01)
    updates["c3"] = Update({name: tensor + 3 for name, tensor in updates["c3"].tensors.items()}, "delta", 10)
    size = {}
    for variant in ("code", "paper"):
        talk = talk_of(FedBoosting(variant=variant), clients=5)
        change, _ = talk.round(updates, talk.agreed(broadcast.params), broadcast)
        size[variant] = float(flat(change).mean())
    assert size["code"] < 0.05 * 3
    assert size["paper"] > 0.5 * 3


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), "low", None])
def test_losses_that_are_none_fail_the_round_by_name(value: object) -> None:
    broadcast = broadcast_of(SHAPES)
    talk = talk_of(FedBoosting())
    talk.after = lambda client, question, answer: (
        {"losses": {**answer["losses"], "c0": value}} if client == "c1" else answer
    )
    with pytest.raises(RoundFailedError, match=r"c1 reports a loss of .* for c0"):
        talk.round(updates_of(broadcast, SIZES), talk.agreed(broadcast.params), broadcast)


def test_an_update_without_a_training_loss_is_named() -> None:
    broadcast = broadcast_of(SHAPES)
    talk = talk_of(FedBoosting())
    with pytest.raises(RoundFailedError, match="c0: reports a loss of None for training_loss"):
        talk.combine(updates_of(broadcast, SIZES), talk.agreed(broadcast.params), broadcast)


def test_other_questions_have_no_answer() -> None:
    with pytest.raises(ValueError, match="no answer to 'weather'"):
        talk_of(FedBoosting()).ask("c0", Question("weather", {}))


@given(st.integers(1, 6), st.integers(10, 2000), st.integers(0, 99))
def test_the_target_dominates_its_mixture(clients: int, scale: int, seed: int) -> None:
    names = [f"c{place}" for place in range(clients)]
    for fusion in (FixedFusion(scale=scale), NoisyFusion(scale=scale)):
        shares = fusion.shares(names, rng=replayed(seed))
        assert all(sum(row.values()) == scale for row in shares.values())
        assert all(row[name] == max(row.values()) > scale / 2 - 1 for name, row in shares.items())


def test_secret_shares_are_drawn_anew() -> None:
    drawn = [NoisyFusion().shares(["a", "b", "c"], rng=replayed(seed)) for seed in (0, 1, 0)]
    assert drawn[0] != drawn[1]
    assert drawn[0] == drawn[2]


def test_noise_is_calibrated_to_what_one_client_can_move() -> None:
    """Against the definition: replace a client's update by its opposite, and see how far all mixtures move."""
    fusion = NoisyFusion(update_norm=2.0, noise_multiplier=0.5)
    names = ["a", "b", "c", "d"]
    shares = fusion.shares(names, rng=replayed(3))
    mix = np.array([[shares[model][name] / fusion.scale for name in names] for model in names])
    update = np.zeros(7)
    update[2] = 2.0
    moved = [np.linalg.norm(np.outer(mix[:, place], update) - np.outer(mix[:, place], -update)) for place in range(4)]
    assert fusion.noise_std(shares) == pytest.approx(0.5 * max(moved))
    assert FixedFusion().noise_std(shares) == 0


def test_the_budget_of_the_mixtures_by_hand_and_beside_an_accountant() -> None:
    fusion = NoisyFusion(noise_multiplier=2.0)
    assert fusion.epsilon(1, 1e-5) == pytest.approx(1 / 8 + 2 * math.sqrt(math.log(1e5) / 8))
    accountant = pytest.importorskip("opacus.accountants").RDPAccountant()
    for _ in range(10):
        accountant.step(noise_multiplier=2.0, sample_rate=1.0)
    assert accountant.get_epsilon(1e-5) <= fusion.epsilon(10, 1e-5) <= 1.3 * accountant.get_epsilon(1e-5)


def test_updates_are_shortened_to_the_norm_that_noise_is_made_for() -> None:
    broadcast = broadcast_of(SHAPES)
    talk = talk_of(FedBoosting(fusion=NoisyFusion(update_norm=0.5)))
    sent = talk.seal("c0", updates_of(broadcast, SIZES)["c0"], broadcast)
    assert float(flat(sent.tensors).norm()) == pytest.approx(0.5)
    short = updates_of(broadcast, SIZES, bound=1e-3)["c0"]
    torch.testing.assert_close(flat(talk.seal("c0", short, broadcast).tensors), flat(short.tensors))


def test_noise_is_refused_where_statistics_are_sent() -> None:
    broadcast = Broadcast({"w": torch.zeros(2)}, {"mean": torch.zeros(2)}, 0)
    update = Update({"w": torch.ones(2)}, "delta", 3, {"mean": torch.ones(2)})
    with pytest.raises(UsageError, match="also sends batch statistics"):
        talk_of(FedBoosting(fusion=NoisyFusion())).seal("c0", update, broadcast)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedBoosting(scale=1), "scale >= 10"),
        (lambda: FixedFusion(own=1.0), r"own in \(0, 1\)"),
        (lambda: NoisyFusion(own=(0.9, 0.6)), "smaller first"),
        (lambda: NoisyFusion(noise_multiplier=0.0), "noise_multiplier > 0"),
        (lambda: FixedFusion(scale=3), "scale >= 10"),
    ],
)
def test_senseless_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def judged(defense: Defense, aggregator: FedBoosting) -> tuple[list[float], list[float]]:
    """Training and validation losses of a round of digits, as clients report them."""
    data = Digits(size=16).load(Path())
    data = replace(data, train=data.train.part(0, 120), test=data.test.part(0, 40))
    federation = assemble(
        data,
        Iid(clients=3, validation=0.3).split(data, rng=replayed(0)),
        build_model(MODELS["lenet_zhu"](), data.inputs, data.num_classes, init="default", rng=replayed(0)),
        local=LocalTraining(batch_size=8, learning_rate=0.05),
        aggregator=aggregator,
        plan=FederationPlan(rounds=1),
        defense=defense,
        rng=replayed(1),
    )
    training: list[float] = []
    validation: list[float] = []
    answer = FedBoosting.answer

    def noted(self: FedBoosting, *arguments: Any, **more: Any) -> Any:
        answered, state = answer(self, *arguments, **more)
        validation.extend(answered["losses"].values())
        return answered, state

    def finished(outcome: RoundOutcome, state: object) -> None:
        training.extend(update.metrics[TRAINING_LOSS] for update in outcome.updates.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedBoosting, "answer", noted)
        inprocess.run(federation, workers=1, after_round=finished)
    return training, validation


def test_models_are_judged_as_the_server_would_make_them() -> None:
    """AdaDefense's stand-ins have elements of the order of 1, of which the server takes a thousandth."""
    for figures in judged(AdaDefense(), FedBoosting()):
        assert len(figures) >= 3
        assert all(2.0 < loss < 2.6 for loss in figures), "as an untrained model of ten classes, not 26 to 32"
