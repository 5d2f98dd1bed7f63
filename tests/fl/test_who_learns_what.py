"""What a curious server and a curious client learn of encrypted updates: every claim of docs/fedboosting.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.decomposition import FastICA
from tests.crypto.noise import chance, recovered
from tests.fl.talks import SMALL, Talk, broadcast_of, flat, talk_of, updates_of
from tests.seeds import replayed

from leaktight.core.protocols import Question
from leaktight.core.types import Broadcast, State, Update
from leaktight.crypto.cipher import Cipher, CipherError, Keys, Sealed
from leaktight.crypto.ckks import Ckks
from leaktight.crypto.key_transport import boxed, opened
from leaktight.crypto.paillier_keys import SecretKey
from leaktight.crypto.secure_sum import new_private_key, public_key
from leaktight.fl.aggregators import FedAvg, Linear
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.fedboosting import FedBoosting, FixedFusion, Fusion, NoisyFusion
from leaktight.fl.messages import encode

SHAPES = {"w": (300,), "b": (20,)}
WIDE = replace(SMALL, bound=10.0)
Rows = NDArray[np.float64]


def played(
    of: Linear, clients: int = 3, cipher: Cipher = SMALL, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> tuple[Talk, Broadcast, State, dict[str, Update]]:
    """A round, with every message on record."""
    talk, broadcast = talk_of(Encrypted(of=of, cipher=cipher), clients), broadcast_of(shapes)
    updates = updates_of(broadcast, {f"c{place}": 10 * (place + 1) for place in range(clients)}, bound=0.5)
    state = talk.agreed(broadcast.params)
    _, state = talk.round(updates, state, broadcast)
    return talk, broadcast, state, updates


def rows(updates: dict[str, Update]) -> Rows:
    return np.stack([flat(updates[name].tensors).numpy() for name in sorted(updates)])


def seen_by(talk: Talk, client: str) -> Rows:
    """What a client has of the candidates it was asked to try, decrypted with the key that every client holds."""
    (sent,) = [q.payload for name, q in talk.asked if name == client and q.kind.startswith("cross_validate")]
    assert isinstance(talk.aggregator, Encrypted)
    read = talk.aggregator._opened(sent, talk.states[client], talk.members[client])
    return np.stack([flat(read[model]["changes"]).numpy() for model in sorted(read)])


def mixed(talk: Talk, updates: dict[str, Update], fusion: NoisyFusion) -> tuple[Rows, float]:
    """A round's mixtures before noise, and the standard deviation of that noise: what only the server could compute."""
    inside = ["of"] if isinstance(talk.aggregator, Encrypted) else []
    names = sorted(updates)
    shares = fusion.shares(names, rng=replayed(talk.seed).child("server", 4, *inside, "fusion", "shares"))
    mix = np.array([[shares[model][name] for name in names] for model in names]) / fusion.scale
    norms = np.linalg.norm(rows(updates), axis=1, keepdims=True)
    return mix @ (rows(updates) * np.minimum(1, fusion.update_norm / norms)), fusion.noise_std(shares)


def closeness(guess: NDArray[np.floating[Any]], truth: Rows) -> Rows:
    """The cosine of each guess to its truth."""
    result: Rows = (guess * truth).sum(1) / np.linalg.norm(guess, axis=1) / np.linalg.norm(truth, axis=1)
    return result


# --- the server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [FedAvg(), FedBoosting(fusion=FixedFusion())], ids=["avg", "boosting"])
def test_no_key_that_opens_anything_passes_the_server(of: Linear) -> None:
    talk, _, state, _ = played(of)
    key = SecretKey.from_bytes(talk.states["c0"]["secret"])
    size = key.p.bit_length() // 8
    secrets = [key.p.to_bytes(size, "big"), key.q.to_bytes(size, "big")]
    privates = [new_private_key(replayed(0).child(name, "he_publish")) for name in talk.members]
    passed = [question.payload for _, question in talk.asked] + [answer for _, answer in talk.said] + [state]
    raw = b"".join(_bytes_in(message) for message in passed)
    assert key.public.n.to_bytes(2 * size, "big") in raw  # the search works: the public key is there
    assert all(public_key(private) in raw for private in privates)
    assert not any(secret in raw for secret in [*secrets, *privates])
    assert all(talk.states[name]["secret"] == talk.states["c0"]["secret"] for name in talk.members)


def _bytes_in(value: Any) -> bytes:
    match value:
        case bytes():
            return value + b"|"
        case torch.Tensor():
            return value.numpy().tobytes() + b"|"
        case dict():
            return b"".join(_bytes_in(item) for item in value.values())
        case list():
            return b"".join(_bytes_in(item) for item in value)
    return b""


def test_the_server_holds_no_update_and_cannot_recognise_one() -> None:
    talk, broadcast, state, updates = played(FedAvg())
    assert all(not sent.tensors and not sent.buffers for sent in talk.sent.values())
    again = talk.seal("c1", updates["c1"], replace(broadcast, round=5))
    first, second = (Sealed.from_state(sent.sealed or {}) for sent in (talk.sent["c1"], again))
    ours = SMALL.encrypt(rows(updates)[1], Keys(state["public"], b""))  # the server encrypts its guess, which is right
    assert len({bytes(each.body) for each in (first, second, ours)}) == 3
    with pytest.raises(CipherError):
        SMALL.decrypt(first, state["public"])


def test_the_server_learns_the_aggregate_the_sizes_and_the_losses() -> None:
    talk, _, _, updates = played(FedBoosting(variant="code"))
    readable = [answer for _, answer in talk.said if set(answer) - {"public", "boxes"}]
    assert all(set(answer) in ({"losses"}, {"values"}) for answer in readable)
    assert [sent.num_examples for sent in talk.sent.values()] == [10, 20, 30]
    assert sum("values" in answer for answer in readable) == 1
    assert not np.allclose(closeness(np.stack([flat(talk.change).numpy()] * 3), rows(updates)), 1, atol=1e-3)


def test_a_malicious_server_has_single_updates_opened() -> None:
    """The client that decrypts cannot tell an aggregate from an update: the server must follow the protocol."""
    talk, _, _, updates = played(FedAvg())
    victim: State = {"names": [], "sealed": talk.sent["c2"].sealed}
    values = talk.ask("c0", Question("he_open/0", victim))["values"]
    assert np.abs(values.numpy() - rows(updates)[2]).max() <= SMALL.resolution * 1.001


def test_a_malicious_server_that_swaps_public_keys_gets_the_secret_key() -> None:
    """Public keys have to reach the clients unchanged; nothing in the protocol can prove that they do."""
    fake = new_private_key(replayed(99))
    boxes: dict[str, bytes] = {}

    def swap(client: str, question: Question) -> Question:
        sent = question.payload
        if question.kind == "he_make_keys":
            honest = sent["publics"]["c0"]
            return Question(
                question.kind, {"publics": {name: public_key(fake) for name in sent["publics"]} | {"c0": honest}}
            )
        if question.kind == "he_take_keys":
            boxes[client] = sent["box"]
            content = opened(sent["box"], fake, sent["sender"], label="key of encrypted aggregation")
            relayed = boxed(content, fake, talk.said_public(client), label="key of encrypted aggregation")
            return Question(question.kind, {**sent, "sender": public_key(fake), "box": relayed})
        return question

    class Swapped(Talk):
        def said_public(self, client: str) -> bytes:
            public: bytes = next(answer["public"] for name, answer in self.said if name == client)
            return public

    plain = talk_of(Encrypted(cipher=SMALL))
    talk = Swapped(plain.aggregator, plain.members)
    talk.before = swap
    broadcast = broadcast_of(SHAPES)
    talk.agreed(broadcast.params)
    updates = updates_of(broadcast, {"c0": 1, "c1": 1, "c2": 1})
    stolen = opened(boxes["c1"], fake, talk.said_public("c0"), label="key of encrypted aggregation")
    sent = talk.seal("c2", updates["c2"], broadcast)  # nobody noticed
    values = SMALL.decrypt(Sealed.from_state(sent.sealed or {}), stolen)
    assert np.abs(values - rows(updates)[2]).max() <= SMALL.resolution * 1.001


def test_the_server_and_any_one_client_together_read_everything() -> None:
    talk, _, _, updates = played(FedBoosting(fusion=NoisyFusion(update_norm=10.0)), cipher=WIDE)
    assert isinstance(talk.aggregator, Encrypted)
    cipher = talk.aggregator.sealing(len(talk.members))
    for helper in talk.members:
        secret = talk.states[helper]["secret"]
        read = [cipher.decrypt(Sealed.from_state(sent.sealed or {}), secret) for sent in talk.sent.values()]
        assert np.abs(np.stack(read) - rows(updates)).max() <= WIDE.resolution * 1.001


# --- the clients ----------------------------------------------------------------------------------------------------


def test_with_fedavg_clients_get_no_ciphertext_but_the_aggregate() -> None:
    talk, _, _, _ = played(FedAvg())
    after = [
        question.kind for name, question in talk.asked if not question.kind.startswith("he_") or "open" in question.kind
    ]
    assert after == ["he_open/4"]
    assert [name for name, question in talk.asked if question.kind == "he_open/4"] == ["c0"]


def test_of_two_clients_each_computes_the_others_update() -> None:
    talk, _, _, updates = played(FedAvg(), clients=2)
    own, other = rows(updates)
    aggregate = flat(talk.change).numpy()  # the next broadcast minus this one
    assert np.abs((30 * aggregate - 10 * own) / 20 - other).max() < 3 * SMALL.resolution


def test_without_fusion_every_client_reads_every_update() -> None:
    talk, _, _, updates = played(FedBoosting(), clients=4)
    assert np.abs(seen_by(talk, "c1") - rows(updates)).max() <= SMALL.resolution * 1.001


@pytest.mark.parametrize("clients", [2, 3, 6])
def test_the_fusion_of_the_thesis_is_undone_by_every_client(clients: int) -> None:
    """F = A G with A = 0.9 I + 0.1 / (N - 1) (J - I), which is public: G = A^-1 F."""
    talk, _, _, updates = played(FedBoosting(fusion=FixedFusion()), clients)
    shares = FixedFusion().shares(sorted(updates), rng=replayed(0))
    mix = np.array([[shares[model][name] for name in sorted(updates)] for model in sorted(updates)]) / 1000
    for spy in updates:
        solved = np.linalg.solve(mix, seen_by(talk, spy))
        assert np.abs(solved - rows(updates)).max() < 4 * SMALL.resolution
        assert closeness(solved, rows(updates)).min() > 0.999999


def heavy_tailed(clients: int, size: int = 4000) -> Rows:
    result: Rows = replayed(7).public_numpy().laplace(0, 0.05, (clients, size))
    return result


def mixtures(fusion: Fusion, truth: Rows, *, noise: bool) -> Rows:
    names = [f"c{place}" for place in range(len(truth))]
    shares = fusion.shares(names, rng=replayed(1))
    mix = np.array([[shares[model][name] for name in names] for model in names]) / fusion.scale
    std = fusion.noise_std(shares) if noise else 0.0
    result: Rows = mix @ truth + std * replayed(2).public_numpy().normal(size=truth.shape)
    return result


def unmixed(seen: Rows) -> Rows:
    """A client that does not know the weights: independent components, put to scale by weights that sum to 1.

    F = M S with S independent and M of unknown scale and order; A = M D has rows that sum to 1, so M d = 1 gives D, and
    the largest weight of every row gives the order.
    """
    ica = FastICA(n_components=len(seen), whiten="unit-variance", random_state=0, max_iter=2000, tol=1e-6)
    sources = ica.fit_transform(seen.T).T + (np.linalg.pinv(ica.mixing_) @ ica.mean_)[:, None]
    scale = np.linalg.solve(ica.mixing_, np.ones(len(seen)))
    order = np.argmax(ica.mixing_ * scale, axis=1)
    result: Rows = (sources / scale[:, None])[order]
    return result


def test_secret_weights_alone_protect_nothing() -> None:
    truth = heavy_tailed(4)
    seen = mixtures(NoisyFusion(), truth, noise=False)
    assert closeness(seen, truth).min() > 0.85  # a mixture is close to its update as it stands
    assert closeness(unmixed(seen), truth).min() > 0.995  # and unmixing gives the rest


def test_noise_limits_what_mixtures_give_away() -> None:
    """More noise, less of the update; and neither unmixing nor the true weights bring it back."""
    truth = heavy_tailed(4)
    norm = float(np.linalg.norm(truth, axis=1).max())
    found = []
    for multiplier in (0.001, 0.01, 0.1, 1.0):
        fusion = NoisyFusion(update_norm=norm, noise_multiplier=multiplier)
        seen = mixtures(fusion, truth, noise=True)
        names = [f"c{place}" for place in range(4)]
        shares = fusion.shares(names, rng=replayed(1))
        mix = np.array([[shares[model][name] for name in names] for model in names]) / fusion.scale
        found.append(float(closeness(np.linalg.solve(mix, seen), truth).mean()))
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.9
    assert found[-1] < 0.05


def test_noise_reaches_the_clients_and_not_the_aggregate() -> None:
    fusion = NoisyFusion(update_norm=10.0, noise_multiplier=1e-3)
    talk, _, _, updates = played(FedBoosting(fusion=fusion), cipher=WIDE)
    truth, std = mixed(talk, updates, fusion)
    noise = seen_by(talk, "c0") - truth
    assert noise.std() == pytest.approx(std, rel=0.1)
    np.testing.assert_array_equal(seen_by(talk, "c0"), seen_by(talk, "c2"))  # no averaging over colluding clients
    inside = np.linalg.lstsq(rows(updates).T, flat(talk.change).numpy(), rcond=None)
    assert inside[0].sum() == pytest.approx(1, abs=1e-4)
    assert np.abs(inside[0] @ rows(updates) - flat(talk.change).numpy()).max() < 3 * WIDE.resolution


LARGE = {"w": (4000,)}
STRONG = NoisyFusion(noise_multiplier=3.3)
"""Noise of five to eight bounds on every value."""


@pytest.mark.parametrize("cipher", [SMALL, Ckks()], ids=["paillier", "ckks"])
def test_strong_noise_reaches_clients_whole_and_subtracting_its_limit_gives_nothing_back(cipher: Cipher) -> None:
    """Were noise cut off at the bound, this attacker would have five of six values of every mixture back."""
    talk, _, _, updates = played(FedBoosting(fusion=STRONG), cipher=cipher, shapes=LARGE)
    seen, (truth, std) = seen_by(talk, "c1"), mixed(talk, updates, STRONG)
    assert 5 < std < 8
    noise = (seen - truth).flatten()
    assert noise.std() == pytest.approx(std, rel=5 / np.sqrt(2 * noise.size))
    assert stats.kstest(noise, "norm", args=(0, std)).pvalue > 1e-4
    assert isinstance(talk.aggregator, Encrypted)
    limits = [0.0, cipher.bound, 2 * cipher.bound, talk.aggregator.sealing(3).noise_bound]
    within = 1e-4 * cipher.bound
    assert recovered(seen, truth, limits, within=within) <= chance(std, within, noise.size, len(limits) + 1)


@pytest.mark.parametrize("fusion", [STRONG, NoisyFusion()], ids=["strong", "default"])
def test_clients_see_the_same_noise_with_encryption_and_without(fusion: NoisyFusion) -> None:
    talk, broadcast, _, updates = played(FedBoosting(fusion=fusion), shapes=LARGE)
    truth, std = mixed(talk, updates, fusion)
    hidden = (seen_by(talk, "c0") - truth) / std
    open_ = talk_of(FedBoosting(fusion=fusion), seed=1)
    open_.round(updates, open_.agreed(broadcast.params), broadcast)
    (sent,) = [question.payload for name, question in open_.asked if name == "c0"]
    shown = np.stack([flat(part["changes"]).numpy() for _, part in sorted(sent["candidates"].items())])
    truth, std = mixed(open_, updates, fusion)
    assert stats.ks_2samp(hidden.flatten(), ((shown - truth) / std).flatten()).pvalue > 1e-4


def test_messages_of_all_kinds_can_travel() -> None:
    talk, _, _, _ = played(FedBoosting(fusion=FixedFusion()))
    for message in [question for _, question in talk.asked] + list(talk.sent.values()):
        assert encode({"message": message})
