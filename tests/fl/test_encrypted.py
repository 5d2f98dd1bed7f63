"""Encrypted aggregation gives what the plain one gives, and fails cleanly where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fl.talks import SMALL, Talk, broadcast_of, flat, talk_of, updates_of
from tests.seeds import replayed
from torch import nn

from leaktight.core.errors import LeaktightError, NotDisclosedError, RoundFailedError, UsageError
from leaktight.core.protocols import Aggregator, Defense, Question
from leaktight.core.rng import global_seed
from leaktight.core.threat import ThreatModel
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Examples, RoundTrace, State, Update
from leaktight.crypto.cipher import integer_weights
from leaktight.crypto.ckks import Ckks
from leaktight.crypto.paillier import Paillier
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Iid
from leaktight.engines import inprocess
from leaktight.fl.aggregators import FedAvg, FedSgd, Linear, ServerAdam, ServerMomentum
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.fedboosting import FedBoosting, FixedFusion, MixtureWeights, NoisyFusion
from leaktight.fl.federation import Federation, FederationState, assemble
from leaktight.fl.messages import Answered, Ask, Failed, Outcome, Reply, Request, Train, Trained
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import RoundOutcome, carry, federate
from leaktight.fl.state import ClientState

SHAPES = {"w": (3, 2), "b": (2,)}
SIZES = {"c0": 5, "c1": 90, "c2": 30}
shapes = st.dictionaries(
    st.sampled_from("abcde"), st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4
)


def sealed_talk(of: Linear = FedAvg(), clients: int = 3, **settings_: Any) -> tuple[Talk, Broadcast, State]:
    talk = talk_of(Encrypted(of=of, cipher=replace(SMALL, **settings_)), clients)
    broadcast = broadcast_of(SHAPES)
    return talk, broadcast, talk.agreed(broadcast.params)


@settings(max_examples=30, deadline=None)
@given(shapes, st.lists(st.integers(1, 5000), min_size=2, max_size=6), st.sampled_from(["I", "II"]), st.integers(4, 24))
def test_encrypted_fedavg_is_fedavg_up_to_the_step(
    named: dict[str, tuple[int, ...]], sizes: list[int], scheme: Any, value_bits: int
) -> None:
    broadcast = broadcast_of(named)
    updates = updates_of(broadcast, {f"c{place}": size for place, size in enumerate(sizes)})
    cipher = replace(SMALL, value_bits=value_bits)
    talk = talk_of(Encrypted(of=FedAvg(scheme=scheme), cipher=cipher), len(sizes))
    change, _ = talk.round(updates, talk.agreed(broadcast.params), broadcast)
    plain, _ = FedAvg(scheme=scheme).combine(updates, {})
    assert {name: tensor.shape for name, tensor in change.items()} == {
        name: tensor.shape for name, tensor in plain.items()
    }
    assert float((flat(change) - flat(plain)).abs().max()) <= cipher.resolution * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(
    shapes,
    st.integers(2, 5),
    st.sampled_from(["paper", "code"]),
    st.sampled_from([None, FixedFusion(), NoisyFusion(noise_multiplier=0.01)]),
    st.integers(0, 99),
)
def test_encrypted_fedboosting_is_fedboosting_up_to_the_step(
    named: dict[str, tuple[int, ...]], clients: int, variant: Any, fusion: Any, seed: int
) -> None:
    """The mean is compared under the weights that follow from the losses reported; these are compared too."""
    of = FedBoosting(variant=variant, fusion=fusion)
    broadcast = broadcast_of(named, seed)
    updates = updates_of(broadcast, {f"c{place}": 7 for place in range(clients)}, seed)
    hidden, open_ = talk_of(Encrypted(of=of, cipher=SMALL), clients, seed), talk_of(of, clients, seed)
    change, _ = hidden.round(updates, hidden.agreed(broadcast.params), broadcast)
    open_.round(updates, open_.agreed(broadcast.params), broadcast)
    weights = weights_of(of, hidden)
    total = sum(weights.values())
    sent = open_.sent  # shortened, where the fusion has it so
    expected = sum(flat(sent[name].tensors) * (weights[name] / total) for name in sent)
    assert float((flat(change) - expected).abs().max()) <= SMALL.resolution * (1 + 1e-9)
    if fusion is None or not fusion.clip_norm:  # else the two draw different noise
        assert weights == pytest.approx(weights_of(of, open_), abs=1)


def weights_of(of: FedBoosting, talk: Talk) -> dict[str, int]:
    losses = {name: answer["losses"] for name, answer in talk.said if "losses" in answer}
    training = {name: update.metrics["training_loss"] for name, update in talk.sent.items()}
    validation = {model: {judge: losses[judge][model] for judge in losses} for model in training}
    return integer_weights(of.shares(training, validation), of.scale)


@pytest.mark.parametrize(
    "of", [FedAvg(), FedAvg(scheme="I"), ServerMomentum(), ServerAdam()], ids=lambda of: f"{type(of).__name__}"
)
def test_every_linear_aggregator_keeps_its_step_and_its_memory(of: Linear) -> None:
    talk, broadcast, state = sealed_talk(of, value_bits=28)
    plain = of.start(broadcast.params)
    for seed in range(3):
        updates = updates_of(broadcast, SIZES, seed)
        change, state = talk.round(updates, state, broadcast)
        expected, plain = of.combine(updates, plain)
        np.testing.assert_allclose(flat(change), flat(expected), atol=1e-6)


def test_gradients_can_be_encrypted_too() -> None:
    talk, broadcast, state = sealed_talk(FedSgd(learning_rate=0.5))
    assert talk.aggregator.update_kind == "gradient"
    updates = {name: replace(update, kind="gradient") for name, update in updates_of(broadcast, SIZES).items()}
    change, _ = talk.round(updates, state, broadcast)
    np.testing.assert_allclose(flat(change), flat(FedSgd(learning_rate=0.5).combine(updates, {})[0]), atol=1e-5)


def test_weights_that_do_not_fit_are_rounded_and_still_sum_to_the_scale() -> None:
    aggregator = Encrypted(cipher=replace(SMALL, weight_bits=8))
    assert aggregator._whole({"a": 3.0, "b": 6.0}) == {"a": 1, "b": 2}
    assert aggregator._whole({"a": 100_001.0, "b": 1.0}) == {"a": 256, "b": 0}
    assert sum(aggregator._whole({"a": 0.1, "b": 0.7, "c": 1e-9}).values()) == 256


def test_statistics_are_encrypted_and_counters_are_not() -> None:
    broadcast = Broadcast({"w": torch.zeros(2)}, {"mean": torch.ones(2), "seen": torch.tensor(3)}, 0)
    updates = {
        name: Update({"w": torch.full((2,), v)}, "delta", 9, {"mean": torch.full((2,), 1 + v), "seen": torch.tensor(5)})
        for name, v in (("c0", 0.5), ("c1", 0.25))
    }
    talk = talk_of(Encrypted(cipher=SMALL), 2)
    change, _ = talk.round(updates, talk.agreed(broadcast.params), broadcast)
    assert all(set(sent.buffers or {}) == {"seen"} and not sent.tensors for sent in talk.sent.values())
    np.testing.assert_allclose(change["mean"], [0.375, 0.375], atol=1e-5)
    np.testing.assert_allclose(change["w"], [0.375, 0.375], atol=1e-5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda sealed: {**sealed, "body": sealed["body"][:-1]}, "c1: .*truncated or foreign"),
        (lambda sealed: {**sealed, "body": torch.zeros_like(sealed["body"])}, "c1: .*impossible numbers"),
        (lambda sealed: {**sealed, "key": "0" * 32}, "c1: expected a ciphertext under key"),
        (lambda sealed: {**sealed, "form": "other"}, "c1: expected a ciphertext of Paillier"),
        (lambda sealed: {**sealed, "names": ["w"]}, "c1: expected encrypted values of the same names"),
        (lambda sealed: {**sealed, "names": 7}, "c1: expected encrypted values of the same names"),
        (lambda sealed: {**sealed, "count": 3}, "c1: expected 8 encrypted values, got 3"),
        (lambda sealed: {**sealed, "weight": 9}, "c1: expected 8 encrypted values"),
        (lambda sealed: {"names": ["w", "b"]}, "c1: expected an encrypted vector"),
    ],
)
def test_a_bad_ciphertext_fails_the_round_by_name(damage: Any, message: str) -> None:
    talk, broadcast, state = sealed_talk()
    sent = {name: talk.seal(name, update, broadcast) for name, update in updates_of(broadcast, SIZES).items()}
    sent["c1"] = replace(sent["c1"], sealed=damage(sent["c1"].sealed))
    with pytest.raises(RoundFailedError, match=message):
        talk.combine(sent, state, broadcast)


@pytest.mark.parametrize("names", [["w"], ["b", "w"], ["w", "b", "b"], [["w"], "b"], [{}], None, "wb"], ids=str)
def test_the_first_client_by_name_does_not_decide_what_the_others_must_send(names: object) -> None:
    """Its own names are wrong, so it is the one that is blamed, whatever they are."""
    talk, broadcast, state = sealed_talk()
    sent = {name: talk.seal(name, update, broadcast) for name, update in updates_of(broadcast, SIZES).items()}
    sent["c0"] = replace(sent["c0"], sealed={**(sent["c0"].sealed or {}), "names": names})
    with pytest.raises(RoundFailedError, match="c0: expected encrypted values of the same names as the others"):
        talk.combine(sent, state, broadcast)


def test_a_ciphertext_of_another_federation_is_refused() -> None:
    talk, broadcast, state = sealed_talk()
    other = talk_of(talk.aggregator, 3, seed=5)
    other.agreed(broadcast.params)
    updates = updates_of(broadcast, SIZES)
    sent = {name: talk.seal(name, update, broadcast) for name, update in updates.items()}
    sent["c2"] = other.seal("c2", updates["c2"], broadcast)
    with pytest.raises(RoundFailedError, match="c2: expected a ciphertext under key"):
        talk.combine(sent, state, broadcast)


@pytest.mark.parametrize("values", [None, torch.zeros(3), torch.full((8,), float("nan")), "eight"])
def test_a_reader_that_gives_nonsense_fails_the_round_by_name(values: object) -> None:
    talk, broadcast, state = sealed_talk()
    talk.after = lambda client, question, answer: {"values": values} if "he_open" in question.kind else answer
    with pytest.raises(RoundFailedError, match="c0 decrypted the aggregate to something else than 8 finite values"):
        talk.round(updates_of(broadcast, SIZES), state, broadcast)


def test_one_client_cannot_hide_in_a_sum() -> None:
    talk, broadcast, state = sealed_talk()
    with pytest.raises(RoundFailedError, match="got 1: the aggregate would be that update"):
        talk.round({"c0": updates_of(broadcast, SIZES)["c0"]}, state, broadcast)
    with pytest.raises(UsageError, match="at least 2 clients"):
        talk_of(Encrypted(cipher=SMALL), 1).agreed(broadcast.params)


def test_a_client_without_keys_says_so() -> None:
    talk, broadcast, _ = sealed_talk()
    newcomer = talk_of(talk.aggregator)
    with pytest.raises(LeaktightError, match="c0 has no public key: it was not there"):
        newcomer.seal("c0", updates_of(broadcast, SIZES)["c0"], broadcast)
    with pytest.raises(LeaktightError, match="c0 has no private key"):
        newcomer.ask("c0", Question("he_make_keys", {"publics": {}}))


def test_the_key_holder_looks_for_its_own_key_among_those_relayed() -> None:
    def swap(client: str, question: Question) -> Question:
        if question.kind != "he_make_keys":
            return question
        return Question(question.kind, {"publics": {**question.payload["publics"], "c0": bytes(32)}})

    talk = talk_of(Encrypted(cipher=SMALL))
    talk.before = swap
    with pytest.raises(LeaktightError, match="expected the public key of c0 among those relayed"):
        talk.agreed(broadcast_of(SHAPES).params)


def test_a_client_does_not_encrypt_under_a_key_that_the_server_put_in_place_of_the_clients() -> None:
    """The public key is relayed in the open; the secret one, which comes in a box, shows which one belongs to it."""
    theirs = SMALL.new_keys(replayed(99))

    def swap(client: str, question: Question) -> Question:
        swapped = question.kind == "he_take_keys"
        return Question(question.kind, {**question.payload, "public": theirs.public}) if swapped else question

    talk, broadcast = talk_of(Encrypted(cipher=SMALL)), broadcast_of(SHAPES)
    talk.before = swap
    talk.agreed(broadcast.params)
    with pytest.raises(LeaktightError, match="which belongs to the secret one"):
        talk.seal("c1", updates_of(broadcast, SIZES)["c1"], broadcast)


@dataclass(frozen=True, kw_only=True)
class Loud(NoisyFusion):
    """Adds more noise than it says."""

    def noise_std(self, shares: MixtureWeights) -> float:
        return 100 * super().noise_std(shares)


def test_noise_without_room_fails_the_round_and_is_not_cut_off() -> None:
    talk, broadcast, state = sealed_talk(FedBoosting(fusion=Loud()))
    with pytest.raises(RoundFailedError, match="cannot be added up: expected noise within ±"):
        talk.round(updates_of(broadcast, SIZES), state, broadcast)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 30),
    st.floats(0.51, 0.99),
    st.floats(0, 1),
    st.sampled_from([10, 100, 1000]),
    st.floats(1e-3, 100),
    st.integers(0, 99),
)
def test_there_is_room_for_twelve_deviations_of_any_noise_that_can_be_drawn(
    clients: int, least: float, span: float, scale: int, multiplier: float, seed: int
) -> None:
    own = (least, least + span * (0.99 - least))
    fusion = NoisyFusion(own=own, scale=scale, noise_multiplier=multiplier, update_norm=0.7)
    names = [f"c{place}" for place in range(clients)]
    low, high = fusion.noise_range(clients)
    assert low <= fusion.noise_std(fusion.shares(names, rng=replayed(seed))) <= high
    assert high <= fusion.noise_range(clients + 1)[1]  # a round of fewer clients has less
    aggregator = Encrypted(of=FedBoosting(fusion=fusion), cipher=replace(SMALL, value_bits=20))
    assert aggregator.sealing(clients).noise_bound == pytest.approx(12 * high)


def test_all_participants_find_the_same_room_and_one_told_another_is_refused() -> None:
    def lie(client: str, question: Question) -> Question:
        if client != "c1" or question.kind != "he_take_keys":
            return question
        return Question(question.kind, {**question.payload, "clients": 900})

    talk, broadcast = talk_of(Encrypted(of=FedBoosting(fusion=NoisyFusion()), cipher=SMALL)), broadcast_of(SHAPES)
    talk.before = lie
    with pytest.raises(RoundFailedError, match=r"c1: expected a ciphertext of Paillier .*same settings"):
        talk.round(updates_of(broadcast, SIZES), talk.agreed(broadcast.params), broadcast)
    for number in (1, "three", None):
        talk.before = lambda client, question, number=number: Question(  # type: ignore[misc]
            question.kind, {**question.payload, "clients": number}
        )
        with pytest.raises(LeaktightError, match="expected the number of clients"):
            talk.agreed(broadcast.params)


@pytest.mark.parametrize(
    ("fusion", "cipher", "message"),
    [
        (NoisyFusion(update_norm=3.0), SMALL, "bound to be at least the fusion's update_norm, 3, got 1; raise bound"),
        (NoisyFusion(noise_multiplier=1e-8), SMALL, "which the cipher can tell from 0, got 1.198e-08; raise noise_mul"),
        (NoisyFusion(noise_multiplier=1e-9), Ckks(), "which the cipher can tell from 0"),
        (None, replace(SMALL, noise_bound=1.0), "expected no noise_bound of the cipher, got 1; leave it out"),
    ],
)
def test_a_cipher_too_narrow_or_too_coarse_for_the_noise_is_refused(
    fusion: NoisyFusion | None, cipher: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Encrypted(of=FedBoosting(fusion=fusion), cipher=cipher)


@pytest.mark.parametrize("cipher", [SMALL, Ckks()], ids=["paillier", "ckks"])
def test_noise_too_large_for_the_cipher_is_refused_before_the_first_round(cipher: Any) -> None:
    talk = talk_of(Encrypted(of=FedBoosting(fusion=NoisyFusion(noise_multiplier=1e8)), cipher=cipher))
    with pytest.raises(UsageError, match=r"no room for the noise of a fusion of 3 clients: expected .* lower"):
        talk.agreed(broadcast_of(SHAPES).params)
    assert not talk.asked


def test_an_update_of_one_value_fits_once_it_is_shortened() -> None:
    """In float32, where a product may be rounded up."""
    of = FedBoosting(fusion=NoisyFusion(update_norm=0.1))
    talk = talk_of(Encrypted(of=of, cipher=replace(SMALL, bound=0.1)))
    broadcast = Broadcast({"w": torch.zeros(1)}, {}, 0)
    talk.agreed(broadcast.params)
    for value in torch.linspace(0.2, 3, 200):
        talk.seal("c0", Update({"w": value[None]}, "delta", 1), broadcast)


def test_only_linear_aggregators_can_be_encrypted() -> None:
    with pytest.raises(ValueError, match="linear aggregator"):
        Encrypted(of=Encrypted())  # type: ignore[arg-type]


# --- in a federation ------------------------------------------------------------------------------------------------


def make_federation(
    aggregator: Aggregator, model: nn.Module | None = None, defense: Defense = Defense(), **plan: Any
) -> Federation:
    generator = replayed(0).child("data").public()
    targets = torch.arange(120) % 3
    images = (torch.rand(120, 1, 2, 2, generator=generator) * 90 + 80 * targets[:, None, None, None]).to(torch.uint8)
    data = Dataset("blobs", Examples(images[:90], targets[:90]), Examples(images[90:], targets[90:]), ("a", "b", "c"))
    with global_seed(replayed(1)):
        model = model or nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    return assemble(
        data,
        Iid(clients=3).split(data, rng=replayed(2)),
        model,
        local=LocalTraining(batch_size=8, learning_rate=0.1),
        aggregator=aggregator,
        plan=FederationPlan(**{"rounds": 2, **plan}),
        defense=defense,
        rng=replayed(3),
    )


def played(federation: Federation, **settings_: Any) -> tuple[FederationState, list[RoundOutcome]]:
    outcomes: list[RoundOutcome] = []
    state = inprocess.run(
        federation, after_round=lambda outcome, state: outcomes.append(outcome), **{"workers": 1, **settings_}
    )
    return state, outcomes


@pytest.mark.parametrize("of", [FedAvg(), FedBoosting(variant="code", fusion=FixedFusion())], ids=["avg", "boosting"])
def test_a_whole_federation_learns_the_same_with_encryption(of: Linear) -> None:
    plain, _ = played(make_federation(of))
    hidden, outcomes = played(make_federation(Encrypted(of=of, cipher=SMALL)))
    np.testing.assert_allclose(flat(hidden.server.params), flat(plain.server.params), atol=3e-5)
    assert all(update.sealed and not update.tensors for outcome in outcomes for update in outcome.updates.values())
    assert outcomes[0].bytes_up == 3 * len(outcomes[0].updates["client-000"].sealed["body"])  # type: ignore[index]


def test_batch_norm_statistics_move_with_encryption_as_without() -> None:
    with global_seed(replayed(4)):
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    plain, _ = played(make_federation(FedAvg(), model))
    hidden, outcomes = played(make_federation(Encrypted(cipher=SMALL), model))
    for name, tensor in plain.server.buffers.items():
        np.testing.assert_allclose(hidden.server.buffers[name], tensor, atol=5e-5)
    assert set(outcomes[0].change) == set(plain.server.params)


def test_processes_change_no_bit() -> None:
    federation = make_federation(Encrypted(of=FedBoosting(), cipher=SMALL), rounds=1)
    alone, pool = played(federation), played(federation, workers=2)
    assert torch.equal(flat(alone[0].server.params), flat(pool[0].server.params))
    bodies = [outcome[1][0].updates["client-001"].sealed["body"] for outcome in (alone, pool)]  # type: ignore[index]
    assert torch.equal(*bodies)


def test_a_run_resumes_with_its_keys() -> None:
    federation = make_federation(Encrypted(cipher=SMALL))
    whole, _ = played(federation)
    half, _ = played(federation, until=1)
    rest, _ = played(federation, state=half)
    assert torch.equal(flat(rest.server.params), flat(whole.server.params))


def test_ckks_stands_in_for_paillier() -> None:
    plain, _ = played(make_federation(FedAvg()))
    hidden, _ = played(make_federation(Encrypted(cipher=Ckks())))
    np.testing.assert_allclose(flat(hidden.server.params), flat(plain.server.params), atol=1e-6)


def test_an_update_beyond_the_bound_leaves_its_client_out_by_name() -> None:
    tight = make_federation(Encrypted(cipher=replace(SMALL, bound=1e-6)))
    with pytest.raises(RoundFailedError, match=r"got 0 of 3 \(client-000: expected values within ±1e-06, got"):
        played(tight)


def test_an_attacker_sees_the_aggregate_and_no_update() -> None:
    traces: list[RoundTrace] = []
    inprocess.run(make_federation(Encrypted(cipher=SMALL), rounds=1), workers=1, record=traces.append)
    with pytest.raises(NotDisclosedError, match=r'set threat\.sees = "aggregate"'):
        ThreatModel().observe(traces[0], "client-000")
    seen = ThreatModel(sees="aggregate").observe(traces[0], "client-000")
    assert set(seen.update.tensors) == {"1.weight", "1.bias"}
    assert seen.batch_size == sum(len(client.truth.examples) for client in traces[0].clients.values())


def driven(
    federation: Federation, tamper: Any, after_round: Callable[[RoundOutcome], None] = lambda outcome: None
) -> None:
    """Play a federation in which `tamper(client, request, reply)` may change or drop replies."""
    states: dict[str, ClientState] = {}

    def exchange(requests: Mapping[str, Request]) -> dict[str, Reply]:
        replies = {}
        for name, request in requests.items():
            reply, states[name] = federation.client(name).handle(request, states.get(name))
            changed = tamper(name, request, reply)
            if changed is not None:
                replies[name] = changed
        return replies

    start = federation.first_state().server
    carry(federate(federation.server, start, evaluate=None, after_round=after_round), exchange)


def test_a_client_that_drops_out_is_left_out_or_named() -> None:
    def silent_in_training(client: str, request: Request, reply: Reply) -> Reply | None:
        return None if client == "client-001" and isinstance(request, Train) else reply

    def silent_on(kind: str) -> Any:
        def tamper(client: str, request: Request, reply: Reply) -> Reply | None:
            return None if isinstance(request, Ask) and request.question.kind.startswith(kind) else reply

        return tamper

    boosting = Encrypted(of=FedBoosting(), cipher=SMALL)
    driven(make_federation(boosting, min_clients=2), silent_in_training)
    with pytest.raises(RoundFailedError, match="client-001: no answer"):
        driven(make_federation(boosting), silent_in_training)
    for kind in ("he_publish", "he_make_keys", "he_take_keys", "cross_validate", "he_open"):
        with pytest.raises(RoundFailedError, match=f"did not answer '{kind}.*no answer"):
            driven(make_federation(boosting), silent_on(kind))


def test_plain_updates_are_refused_where_encrypted_ones_are_due_and_the_reverse() -> None:
    def plain(client: str, request: Request, reply: Reply) -> Reply:
        if isinstance(request, Train) and isinstance(reply, Trained) and client == "client-001":
            return replace(reply, update=replace(reply.update, tensors=dict(request.broadcast.params), sealed=None))
        return reply

    def sealed(client: str, request: Request, reply: Reply) -> Reply:
        return replace(reply, update=replace(reply.update, sealed={})) if isinstance(reply, Trained) else reply

    with pytest.raises(RoundFailedError, match="client-001: expected an encrypted update"):
        driven(make_federation(Encrypted(cipher=SMALL)), plain)
    with pytest.raises(RoundFailedError, match="expected a plain update"):
        driven(make_federation(FedAvg()), sealed)


def test_a_failed_answer_keeps_its_reason() -> None:
    def refuse(client: str, request: Request, reply: Reply) -> Outcome:
        return Failed("no key") if isinstance(reply, Answered) and "values" in reply.payload else reply

    with pytest.raises(RoundFailedError, match="client-000 did not answer 'he_open/0': no key"):
        driven(make_federation(Encrypted(cipher=SMALL)), refuse)


def test_real_keys_work_in_a_federation() -> None:
    plain, _ = played(make_federation(FedAvg(), rounds=1))
    hidden, _ = played(make_federation(Encrypted(cipher=Paillier()), rounds=1))
    np.testing.assert_allclose(flat(hidden.server.params), flat(plain.server.params), atol=1e-5)
