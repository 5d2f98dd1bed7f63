from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import LeaktightError, RoundFailedError, UsageError
from leaktight.core.protocols import Aggregator, ClientFacts, Defense, Question, RoundPlan
from leaktight.core.rng import Rng, global_seed
from leaktight.core.tensors import digest, pack
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Examples, RoundTrace, State
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Holding, Partition
from leaktight.defenses.ada_lrp import AdaLrp
from leaktight.defenses.lrp import Lrp
from leaktight.engines.inprocess import run
from leaktight.fl.aggregators import FedAvg, FedSgd
from leaktight.fl.client import Client
from leaktight.fl.federation import Federation, FederationState, assemble
from leaktight.fl.local import silent
from leaktight.fl.messages import Answered, Ask, Failed, Reply, Request, Train, encode
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import federate, initial_state
from leaktight.fl.state import ClientState, load_checkpoint, save_checkpoint

CLASSES = {"ann": 1, "bob": 2, "cyd": 3, "dan": 4}
SIZES = {"ann": 10, "bob": 20, "cyd": 30, "dan": 60}


def make_federation(
    defense: Defense,
    aggregator: Aggregator | None = None,
    sizes: Mapping[str, int] = SIZES,
    steps: int = 3,
    batch_size: int = 8,
) -> Federation:
    """Clients with so many examples, of as many classes as `CLASSES` says."""
    count = sum(sizes.values())
    targets = torch.cat([torch.arange(size) % CLASSES[name] for name, size in sizes.items()])
    generator = replayed(1).public()
    examples = Examples(torch.randint(256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8), targets)
    ends = np.cumsum([0, *sizes.values()]).tolist()
    nothing = torch.arange(0)
    holdings = {
        name: Holding(torch.arange(start, stop), nothing)
        for name, start, stop in zip(sizes, ends[:-1], ends[1:], strict=True)
    }
    with global_seed(replayed(2)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    return assemble(
        Dataset("blocks", examples, examples, ("a", "b", "c", "d")),
        Partition(holdings),
        model,
        local=LocalTraining(steps=steps, batch_size=batch_size, learning_rate=0.1),
        aggregator=aggregator or FedAvg(scheme="I"),
        plan=FederationPlan(rounds=2),
        defense=defense,
        rng=replayed(3),
    )


def agreed(examples: int = 10, all_examples: int = 40, clients: int = 2, **more: int) -> State:
    """A client's state after the sums have arrived; `more` gives the classes."""
    own, sums = {"examples": examples}, {"examples": all_examples}
    if more:
        own, sums = {**own, "classes": more["classes"]}, {**sums, "classes": more["all_classes"]}
    return {"own": own, "sums": sums, "clients": clients}


def draw(defense: Lrp, state: State, steps: int = 4000, rng: Rng = replayed(0)) -> tuple[float, ...]:
    plan, after = defense.on_round(RoundPlan(0, (0.01,) * steps, 7.0), state, rng=rng, report=silent)
    assert after == state
    assert plan.loss_scale == 1.0, "the rate carries p_k N, so the loss must not"
    return plan.learning_rates


@pytest.mark.parametrize(
    ("defense", "state", "mean"),
    [
        (Lrp(), agreed(), 0.01 * 10 * 2 / 40),
        (Lrp(), agreed(examples=30, all_examples=60, clients=4), 0.02),
        (AdaLrp(zeta=0.25), agreed(classes=4, all_classes=4), 0.005 * 1.5),
        (AdaLrp(zeta=0.25, beta=0.5), agreed(classes=1, all_classes=2), 0.005 * 0.5),
    ],
    ids=["lrp-small", "lrp-large", "ada-above-mean", "ada-at-mean"],
)
def test_rates_follow_the_uniform_law(defense: Lrp, state: State, mean: float) -> None:
    rates = draw(defense, state)
    assert stats.kstest(rates, stats.uniform(0, 2 * mean).cdf).pvalue > 1e-3
    error = mean / np.sqrt(3 * len(rates))
    assert np.mean(rates) == pytest.approx(mean, abs=4 * error)
    assert np.var(rates) == pytest.approx(mean**2 / 3, rel=0.1)
    assert 0 <= min(rates) <= max(rates) < 2 * mean


def test_the_spread_narrows_the_interval_around_the_same_middle() -> None:
    half = draw(Lrp(spread=0.5), agreed())
    assert stats.kstest(half, stats.uniform(0.0025, 0.005).cdf).pvalue > 1e-3
    assert set(draw(Lrp(spread=0), agreed(), steps=5)) == {0.005}


def test_rates_differ_by_round_and_client_and_repeat_with_the_stream() -> None:
    state = agreed()
    assert draw(Lrp(), state, 3, replayed(1)) == draw(Lrp(), state, 3, replayed(1))
    assert not set(draw(Lrp(), state, 3, replayed(1))) & set(draw(Lrp(), state, 3, replayed(2)))


def test_the_factor_of_classes_is_linear_until_the_clamp() -> None:
    defense = AdaLrp(zeta=0.5, beta=1.0, min_factor=0.2)
    factors = [defense.rate_factor(agreed(examples=20, classes=classes, all_classes=8)) for classes in range(1, 8)]
    assert factors == pytest.approx([0.2, 0.2, 0.5, 1.0, 1.5, 2.0, 2.5])
    assert min(draw(defense, agreed(classes=1, all_classes=20))) >= 0


def test_factors_average_to_one_over_the_clients() -> None:
    """Sum of p_k N over N clients is N, and beta = 1 keeps the mean of the factor of classes."""
    total, classes = sum(SIZES.values()), sum(CLASSES.values())
    plain = [Lrp().rate_factor(agreed(size, total, len(SIZES))) for size in SIZES.values()]
    assert np.mean(plain) == pytest.approx(1)
    equal = [AdaLrp().rate_factor(agreed(10, 40, 4, classes=own, all_classes=classes)) for own in CLASSES.values()]
    assert np.mean(equal) == pytest.approx(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spread": 1.5}, r"expected spread in \[0, 1\], got 1.5"),
        ({"spread": -0.1}, "expected spread"),
        ({"zeta": -1.0}, "expected zeta >= 0"),
        ({"zeta": float("nan")}, "expected zeta >= 0"),
        ({"beta": 0.0}, "expected beta > 0"),
        ({"min_factor": 0.0}, "expected min_factor > 0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaLrp(**settings)


# --- the agreement, through the real protocol ---


def play(
    federation: Federation, tap: Callable[[str, Request, Reply], Reply | None] = lambda client, request, reply: reply
) -> dict[str, ClientState]:
    """Drive `federate` with real clients; `tap` sees every message as it passes and may change or drop the reply."""
    clients = {name: federation.client(name) for name in federation.shares}
    states: dict[str, ClientState] = {}
    model = federation.trainer.model
    params = {name: tensor.detach() for name, tensor in model.named_parameters()}
    conversation = federate(
        federation.server,
        initial_state(federation.server, params, {}),
        evaluate=lambda params, buffers: pytest.fail("not scored here"),
        after_round=lambda outcome: None,
    )
    requests = next(conversation)
    while all(isinstance(request, Ask) for request in requests.values()):
        replies = {}
        for name, request in requests.items():
            reply, states[name] = clients[name].handle(request, states.get(name))
            passed = tap(name, request, reply)
            if passed is not None:
                replies[name] = passed
        requests = conversation.send(replies)
    conversation.close()
    return states


def test_the_agreed_sums_are_the_true_sums() -> None:
    states = play(make_federation(AdaLrp()))
    for name, state in states.items():
        memory = state.defense
        assert memory["sums"] == {"examples": sum(SIZES.values()), "classes": sum(CLASSES.values())}
        assert memory["own"] == {"examples": SIZES[name], "classes": CLASSES[name]}
        assert memory["clients"] == len(SIZES)
        assert "private" not in memory, "the key has done its work"
    assert Lrp().rate_factor(states["dan"].defense) == pytest.approx(2.0)


def test_only_what_is_needed_is_summed() -> None:
    assert play(make_federation(Lrp()))["ann"].defense["sums"] == {"examples": sum(SIZES.values())}


def test_no_message_to_the_server_holds_a_count_or_a_private_key() -> None:
    sent: dict[str, list[Reply]] = {name: [] for name in SIZES}

    def tap(client: str, request: Request, reply: Reply) -> Reply:
        sent[client].append(reply)
        return reply

    play(make_federation(AdaLrp()), tap)
    for client, replies in sent.items():
        key, counts, last = [reply.payload for reply in replies if isinstance(reply, Answered)]
        assert set(key) == {"public"}
        assert set(counts) == {"masked"}
        assert last == {}
        words = np.frombuffer(counts["masked"], dtype="<u8").tolist()
        assert all(word > 2**40 for word in words), f"{client}: a masked count is a number of 64 random bits"


@pytest.mark.parametrize("question", ["lrp_key", "lrp_counts", "lrp_sums"])
@pytest.mark.parametrize("reply", [None, Failed("out of battery")])
def test_a_client_that_drops_out_of_the_agreement_is_named(question: str, reply: Reply | None) -> None:
    def tap(client: str, request: Request, sent: Reply) -> Reply | None:
        assert isinstance(request, Ask)
        return reply if client == "cyd" and request.question.kind == question else sent

    reason = "no answer" if reply is None else "out of battery"
    with pytest.raises(RoundFailedError, match=f"cyd did not answer '{question}': {reason}"):
        play(make_federation(Lrp()), tap)


def test_masks_are_used_once() -> None:
    client = make_federation(Lrp()).client("ann")
    other = make_federation(Lrp()).client("bob")
    keys = {}
    states: dict[str, ClientState | None] = {"ann": None, "bob": None}
    for each in (client, other):
        reply, states[each.name] = each.handle(Ask(Question("lrp_key", {}), "defense"), None)
        assert isinstance(reply, Answered)
        keys[each.name] = reply.payload["public"]
    counts = Ask(Question("lrp_counts", {"publics": keys}), "defense")
    _, after = client.handle(counts, states["ann"])
    with pytest.raises(LeaktightError, match="asked 'lrp_counts' a second time"):
        client.handle(counts, after)


def test_an_impossible_sum_is_refused() -> None:
    client = make_federation(Lrp()).client("dan")
    with pytest.raises(LeaktightError, match="at least dan's own, got 3 < 60"):
        client.handle(Ask(Question("lrp_sums", {"sums": [3]}), "defense"), None)


def test_an_unknown_question_is_refused() -> None:
    with pytest.raises(ValueError, match="Lrp has no answer to 'weather'"):
        Lrp().answer(Question("weather", {}), {}, ClientFacts("a", 1, 1), rng=replayed(0))


# --- training ---


def traces_of(federation: Federation) -> list[RoundTrace]:
    traces: list[RoundTrace] = []
    run(federation, workers=1, record=traces.append)
    return traces


def test_rates_of_a_run_lie_in_each_clients_own_interval() -> None:
    means: dict[str, list[float]] = {name: [] for name in SIZES}
    for trace in traces_of(make_federation(Lrp(), steps=200)):
        for name, client in trace.clients.items():
            means[name].extend(client.truth.learning_rates)
    for name, rates in means.items():
        middle = 0.1 * SIZES[name] * len(SIZES) / sum(SIZES.values())
        assert stats.kstest(rates, stats.uniform(0, 2 * middle).cdf).pvalue > 1e-3, name


def test_neither_rates_nor_sizes_leave_the_client() -> None:
    federation = make_federation(AdaLrp(), steps=6)
    states = play(federation)
    params = {name: tensor.detach() for name, tensor in federation.trainer.model.named_parameters()}
    request = Train(Broadcast(params, {}, 0), 0.1, "delta", loss_scale=2.0)
    for name in SIZES:
        done = federation.client(name).train_round(request, states[name])
        assert done.trained.update.num_examples is None
        sent = encode({"reply": done.trained})
        rates = done.truth().learning_rates
        assert len(set(rates)) == 6
        for rate in (*rates, sum(rates), sum(rates) / 6):
            for form in (struct.pack("<d", rate), struct.pack("<f", rate), repr(rate).encode()):
                assert form not in sent
        assert set(done.report) == {"defense_seconds", "loss", "seconds", "steps"}
        assert struct.pack("<d", rates[0]) not in pack(done.state.stored()), "nor are they kept"


def test_scaling_is_applied_once() -> None:
    """Without spread the rate is p_k N eta: the same round as scheme I without defense, which scales the loss."""
    plain = traces_of(make_federation(Defense(), FedAvg(scheme="I")))
    scaled = traces_of(make_federation(Lrp(spread=0.0), FedAvg(scheme="I")))
    for name in SIZES:
        for key, tensor in plain[0].clients[name].update.tensors.items():
            torch.testing.assert_close(scaled[0].clients[name].update.tensors[key], tensor)
    assert scaled[0].clients["dan"].truth.learning_rates == pytest.approx((0.2,) * 3)
    assert plain[0].clients["dan"].truth.learning_rates == pytest.approx((0.1,) * 3)


def test_one_step_is_the_gradient_times_an_unknown_number() -> None:
    plain = traces_of(make_federation(Defense(), FedAvg(scheme="I"), steps=1))
    hidden = traces_of(make_federation(Lrp(), steps=1))
    for name in SIZES:
        ours, theirs = (
            torch.cat([tensor.flatten() for tensor in trace[0].clients[name].update.tensors.values()])
            for trace in (hidden, plain)
        )
        assert float(nn.functional.cosine_similarity(ours, theirs, dim=0)) == pytest.approx(1, abs=1e-5)
        ratio = float(ours.norm() / theirs.norm())
        assert 0 < ratio < 2
        assert abs(ratio - 1) > 1e-3


def test_a_server_that_needs_the_sizes_is_refused() -> None:
    with pytest.raises(UsageError, match=r'weight clients equally \(aggregator.scheme = "I"\)'):
        run(make_federation(Lrp(), FedAvg(scheme="II")), workers=1)


def test_a_gradient_is_refused_because_no_rate_is_in_it() -> None:
    with pytest.raises(UsageError, match="do not change a gradient"):
        run(make_federation(Lrp(), FedSgd(), steps=1), workers=1)


def test_one_client_alone_needs_no_sum() -> None:
    (trace, _) = traces_of(make_federation(AdaLrp(), sizes={"bob": 20}, steps=50))
    rates = trace.clients["bob"].truth.learning_rates
    assert 0.15 < max(rates) < 0.2


def test_a_run_resumed_from_its_checkpoint_keeps_the_sums_and_ends_equal(tmp_path: Path) -> None:
    federation = make_federation(AdaLrp())
    states: list[FederationState] = []
    final = run(federation, workers=1, after_round=lambda outcome, state: states.append(state))
    save_checkpoint(tmp_path / "clients", states[0].stored())
    stored = FederationState.restored(load_checkpoint(tmp_path / "clients")).clients
    for name in SIZES:
        assert stored[name].defense["sums"] == {"examples": sum(SIZES.values()), "classes": sum(CLASSES.values())}
    asked: list[str] = []

    def noting(self: Client, request: Request, state: State | None) -> tuple[Reply, State]:
        asked.append(self.name)
        raise AssertionError("nothing is asked again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "handle", noting)
        resumed = run(federation, FederationState(states[0].server, stored), workers=1)
    assert asked == []
    assert digest(resumed.server.params) == digest(final.server.params)


def test_worker_processes_agree_to_the_same_bits() -> None:
    federation = make_federation(AdaLrp())
    one, two = (run(federation, workers=workers) for workers in (1, 2))
    assert digest(one.server.params) == digest(two.server.params)
