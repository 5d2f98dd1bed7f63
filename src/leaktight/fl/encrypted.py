"""Aggregation of encrypted updates, which the server cannot read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leaktight.core.errors import LeaktightError, RoundFailedError, UnusableError, UsageError
from leaktight.core.protocols import Aggregator, Asked, Conversation, Member, Question
from leaktight.core.rng import Rng
from leaktight.core.tensors import unflattened
from leaktight.core.types import Broadcast, Params, State, Update, UpdateKind
from leaktight.crypto.cipher import Cipher, CipherError, Keys, Sealed, Values, integer_weights
from leaktight.crypto.key_transport import boxed, opened
from leaktight.crypto.paillier import Paillier
from leaktight.crypto.secure_sum import new_private_key, public_key
from leaktight.fl.aggregators import FedAvg, Linear
from leaktight.fl.fedboosting import FedBoosting, Fusion, changes_of
from leaktight.fl.robust import Robust

_BOX = "key of encrypted aggregation"
_SPREAD = 12  # standard deviations of noise that the cipher has room for; exceeded with probability 10^-32


@dataclass(frozen=True, kw_only=True)
class Encrypted(Aggregator):
    """Homomorphic encryption around a linear aggregator: the server adds encrypted updates that only clients can read.

    of: the linear aggregator. cipher: how updates are encrypted. If the fusion of `of` adds noise, the cipher's range
    is widened for it, from these settings and the number of clients.

    Before the first round one client (the first by name) makes the key pair and sends the secret key to every other in
    encrypted boxes, which the server relays and cannot open. In a round the server combines ciphertexts, one client
    decrypts the result, and the server applies it. The server learns the aggregate, the number of examples and the
    losses that clients send, and no update. Batch statistics are encrypted with the parameters.

    Reference: Ren, thesis 2023, section 4.2.2.
    Assumes: a server that follows the protocol, and no client that colludes with it: every client has the secret key,
    with which the ciphertexts can be decrypted (`leaktight docs fedboosting`).
    Differs from the paper: packed values, real key sizes, integer weights that sum to their scale; the server gets the
    decrypted aggregate in every round, as in the published code, not only after the last.
    """

    of: Linear = FedAvg()
    cipher: Cipher = Paillier()

    def __post_init__(self) -> None:
        if isinstance(self.of, Robust):
            raise ValueError(
                f"{self.of.why_plain}; use it without encryption, or encrypt a mean (fedavg, fedboosting, ...)"
            )
        if not isinstance(self.of, Linear):
            raise ValueError(f"expected of to be a linear aggregator (fedavg, fedboosting, ...), got {self.of}")
        if self.cipher.noise_bound:
            raise ValueError(
                f"expected no noise_bound of the cipher, got {self.cipher.noise_bound:g}; leave it out: it follows "
                "from the fusion"
            )
        self._check_fusion()

    @property
    def update_kind(self) -> UpdateKind:
        return self.of.update_kind

    @property
    def needs(self) -> frozenset[str]:
        return self.of.needs

    @property
    def questions(self) -> Mapping[str, Asked]:
        return {
            "he_publish": Asked("a public key, for the box in which the secret key arrives", ("public",)),
            "he_make_keys": Asked("the public key of the cipher, and the secret key in boxes", ("public", "boxes")),
            "he_take_keys": Asked("that the key arrived"),
            "he_open": Asked("the aggregate, decrypted by one client", ("values",), each_round=True),
            **self.of.questions,
        }

    @property
    def sealed(self) -> bool:
        return True

    def loss_scale(self, num_examples: int, all_examples: Sequence[int]) -> float:
        return self.of.loss_scale(num_examples, all_examples)

    def sealing(self, clients: int) -> Cipher:
        """The cipher with room for the noise of a federation of this many clients."""
        fusion = self._fusion
        if fusion is None:
            return self.cipher
        try:
            return replace(self.cipher, noise_bound=_SPREAD * fusion.noise_range(clients)[1])
        except ValueError as error:
            raise UsageError(
                f"the cipher has no room for the noise of a fusion of {clients} clients: {error}"
            ) from error

    def start(self, params: Params) -> State:
        return {"of": self.of.start(params), "public": b"", "clients": 0}

    def agree(self, clients: Sequence[str], state: State) -> Conversation[State]:
        """Relay public keys and boxes; keep the cipher's public key and the number of clients."""
        if len(clients) < 2:
            raise UsageError(
                "expected at least 2 clients for encrypted aggregation, got 1: the aggregate is its update"
            )
        self.sealing(len(clients))
        inside = yield from self.of.agree(clients, state["of"])
        answers = yield {client: Question("he_publish", {}) for client in clients}
        publics = {client: _sent_key(client, answers[client]["public"]) for client in clients}
        holder, *others = sorted(clients)
        made = (yield {holder: Question("he_make_keys", {"publics": publics})})[holder]
        public = _sent_key(holder, made["public"])
        yield {
            client: Question(
                "he_take_keys",
                {
                    "sender": publics[holder],
                    "box": made["boxes"][client],
                    "public": public,
                    "clients": len(clients),
                },
            )
            for client in others
        }
        return {"of": inside, "public": public, "clients": len(clients)}

    def on_update(
        self, update: Update, state: State, member: Member, *, broadcast: Broadcast, rng: Rng
    ) -> tuple[Update, State]:
        update, inside = self.of.on_update(
            update, state.get("of", {}), member, broadcast=broadcast, rng=rng.child("of")
        )
        changes = changes_of(update, broadcast)
        keys = Keys(_kept(state, "public", member), _kept(state, "secret", member))
        cipher = self.sealing(_kept(state, "clients", member))
        sealed = cipher.encrypt(_flat(changes), keys, rng=rng.child("encrypt"))
        counters = {name: tensor for name, tensor in (update.buffers or {}).items() if name not in changes}
        sent = replace(
            update,
            tensors={},
            buffers=None if update.buffers is None else counters,
            sealed={"names": list(changes), **sealed.to_state()},
        )
        return sent, {**state, "of": inside}

    def aggregate(
        self, updates: Mapping[str, Update], state: State, *, broadcast: Broadcast, rng: Rng
    ) -> Conversation[tuple[Params, State]]:
        names, vectors = self._read(updates, broadcast)
        combined = SealedCombined(self.sealing(state["clients"]), vectors, state["public"], names)
        weights = yield from self.of.weigh(updates, combined, broadcast=broadcast, rng=rng.child("of"))
        total = combined(self._whole(weights), rng=rng)
        reader = min(updates)
        answers = yield {reader: Question(f"he_open/{broadcast.round}", total)}
        mean = _checked(answers[reader].get("values"), reader, names, broadcast)
        statistics = {name: tensor for name, tensor in mean.items() if name in broadcast.buffers}
        inner = {name: tensor for name, tensor in mean.items() if name in broadcast.params}
        change, inside = self.of.step(inner, state["of"])
        return {**change, **statistics}, {**state, "of": inside}

    def answer(self, question: Question, state: State, member: Member, *, rng: Rng) -> tuple[State, State]:
        kind, sent = question.kind.partition("/")[0], question.payload
        if kind == "he_publish":
            private = new_private_key(rng)
            return {"public": public_key(private)}, {**state, "private": private}
        if kind == "he_make_keys":
            return self._make_keys(sent["publics"], state, member, rng)
        if kind == "he_take_keys":
            secret = opened(sent["box"], _kept(state, "private", member), sent["sender"], label=_BOX)
            if type(sent["clients"]) is not int or sent["clients"] < 2:
                raise LeaktightError(f"expected the number of clients, at least 2, got {sent['clients']!r:.40}")
            kept = {"public": sent["public"], "secret": secret, "clients": sent["clients"]}
            return {}, {**_without_private(state), **kept}
        if kind == "he_open":
            return {"values": torch.from_numpy(self._open(sent, state, member))}, state
        if "candidates" in sent:
            question = Question(question.kind, {**sent, "candidates": self._opened(sent, state, member)})
        answer, inside = self.of.answer(question, state.get("of", {}), member, rng=rng)
        return answer, {**state, "of": inside}

    def _make_keys(self, publics: Mapping[str, bytes], state: State, member: Member, rng: Rng) -> tuple[State, State]:
        private = _kept(state, "private", member)
        if publics.get(member.name) != public_key(private):
            raise LeaktightError(f"expected the public key of {member.name} among those relayed, got another or none")
        keys = self.cipher.new_keys(rng.child("keys"))
        others = {client: key for client, key in publics.items() if client != member.name}
        boxes = {client: boxed(keys.secret, private, key, label=_BOX) for client, key in others.items()}
        kept = {"public": keys.public, "secret": keys.secret, "clients": len(publics)}
        return {"public": keys.public, "boxes": boxes}, {**_without_private(state), **kept}

    @property
    def _fusion(self) -> Fusion | None:
        return self.of.fusion if isinstance(self.of, FedBoosting) else None

    def _check_fusion(self) -> None:
        """Raise ValueError if the cipher's range is too small for clipped updates, or too coarse for the noise."""
        fusion = self._fusion
        if fusion is None or fusion.clip_norm is None:
            return
        if self.cipher.bound < fusion.clip_norm:
            raise ValueError(
                f"expected the cipher's bound to be at least the fusion's update_norm, {fusion.clip_norm:g}, got "
                f"{self.cipher.bound:g}; raise bound, or lower update_norm"
            )
        least, finest = fusion.noise_range(2)[0], self.cipher.finest_noise(fusion.scale)
        if least < finest:
            raise ValueError(
                f"expected noise with a standard deviation of at least {finest:g}, which the cipher can tell from 0, "
                f"got {least:g}; raise noise_multiplier, or value_bits"
            )

    def _open(self, sent: Mapping[str, Any], state: State, member: Member) -> Values:
        secret, clients = _kept(state, "secret", member), _kept(state, "clients", member)
        return self.sealing(clients).decrypt(Sealed.from_state(sent["sealed"]), secret)

    def _opened(self, sent: Mapping[str, Any], state: State, member: Member) -> dict[str, State]:
        """The candidates that a client is to evaluate, decrypted."""
        known = {**sent["params"], **sent["buffers"]}
        candidates: dict[str, State] = {}
        for name, part in sent["candidates"].items():
            values = torch.from_numpy(self._open(part, state, member))
            candidates[name] = {"changes": unflattened(values, {each: known[each] for each in part["names"]})}
        return candidates

    def _read(self, updates: Mapping[str, Update], broadcast: Broadcast) -> tuple[list[str], dict[str, Sealed]]:
        """The names of the encrypted tensors and the ciphertext of each client, checked as far as the server can."""
        if len(updates) < 2:
            raise RoundFailedError("expected at least 2 encrypted updates, got 1: the aggregate would be that update")
        known = {**broadcast.params, **broadcast.buffers}
        states = {client: updates[client].sealed or {} for client in sorted(updates)}
        names = _usual_names(states, known)
        count = sum(known[name].numel() for name in names)
        vectors, unusable = {}, {}
        for client, state in states.items():
            try:
                vectors[client] = Sealed.from_state(state)
            except CipherError as error:
                unusable[client] = str(error)
                continue
            if len(state) != len(vars(vectors[client])) + 1:  # more would make a replay look like a new update
                unusable[client] = "expected an encrypted vector and its names, got more"
            elif state.get("names") != names:
                unusable[client] = "expected encrypted values of the same names as the others, got others"
            elif vectors[client].count != count or vectors[client].weight != 1:
                unusable[client] = f"expected {count} encrypted values, got {vectors[client].count}"
        if unusable:
            raise UnusableError(unusable)
        return names, vectors

    def _whole(self, weights: Mapping[str, float]) -> dict[str, int]:
        """Integer weights: if they are integers that fit, without common factor; else rounded to the largest scale."""
        if all(weight == int(weight) for weight in weights.values()):
            common = math.gcd(*(int(weight) for weight in weights.values()))
            whole = {client: int(weight) // max(common, 1) for client, weight in weights.items()}
            if 0 < sum(whole.values()) <= self.cipher.most_weight:
                return whole
        return integer_weights(weights, self.cipher.most_weight)


@dataclass(frozen=True)
class SealedCombined:
    """Computes weighted means of encrypted updates."""

    cipher: Cipher
    vectors: Mapping[str, Sealed]
    public: bytes
    names: Sequence[str]

    def __call__(self, weights: Mapping[str, int], *, noise_std: float = 0.0, rng: Rng) -> State:
        clients = sorted(weights)
        count = self.vectors[clients[0]].count
        noise = noise_std * rng.secret().normal(count) if noise_std else None
        try:
            mean = self.cipher.combine(
                [self.vectors[client] for client in clients],
                [weights[client] for client in clients],
                self.public,
                noise=noise,
            )
        except CipherError as error:
            unusable = self._unusable()
            if unusable:
                raise UnusableError(unusable) from error
            raise RoundFailedError(f"the round's updates cannot be added up: {error}") from error
        return {"names": list(self.names), "sealed": mean.to_state()}

    def _unusable(self) -> dict[str, str]:
        """The clients whose ciphertext alone is invalid, with the reason."""
        reasons = {}
        for client, vector in self.vectors.items():
            try:
                self.cipher.combine([vector], [1], self.public)
            except CipherError as error:
                reasons[client] = str(error)
        return reasons


def _sent_key(client: str, key: object) -> bytes:
    if not isinstance(key, bytes) or not key:
        raise RoundFailedError(f"{client} sent no public key but {type(key).__name__}; start again without this client")
    return key


def _usual_names(states: Mapping[str, State], known: Params) -> list[str]:
    """The names of encrypted tensors that most clients sent."""
    sent = [state.get("names") for state in states.values()]
    valid = [tuple(names) for names in sent if isinstance(names, list) and _are_names(names, known)]
    return list(Counter(valid).most_common(1)[0][0]) if valid else []


def _are_names(names: Sequence[object], known: Params) -> bool:
    """Whether these are names of tensors, each once."""
    return all(isinstance(name, str) and name in known for name in names) and len(set(names)) == len(names)


def _flat(changes: Params) -> Values:
    """All changes in one vector: of float32, unless one of them has more digits."""
    wide = any(tensor.dtype == torch.float64 for tensor in changes.values())
    parts = [tensor.detach().to(torch.float64 if wide else torch.float32).flatten() for tensor in changes.values()]
    flat: Values = (torch.cat(parts) if parts else torch.zeros(0)).numpy()
    return flat


def _checked(values: Any, reader: str, names: Sequence[str], broadcast: Broadcast) -> dict[str, Tensor]:
    """The decrypted aggregate as tensors by name; RoundFailedError if it has another length or is not finite."""
    known = {**broadcast.params, **broadcast.buffers}
    like = {name: known[name] for name in names}
    count = sum(tensor.numel() for tensor in like.values())
    if not isinstance(values, Tensor) or values.shape != (count,) or not bool(torch.isfinite(values).all()):
        raise RoundFailedError(f"{reader} decrypted the aggregate to something else than {count} finite values")
    return unflattened(values, like)


def _kept(state: State, name: str, member: Member) -> Any:
    """A value kept from the key agreement: the "private", "public" or "secret" key, or the number of "clients"."""
    if not state.get(name):
        raise LeaktightError(f"{member.name} has no {name} key: it was not there when keys were agreed on")
    return state[name]


def _without_private(state: State) -> dict[str, Any]:
    """The state without the key that opens the box, which is no longer needed."""
    return {name: value for name, value in state.items() if name != "private"}
