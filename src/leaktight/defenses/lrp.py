"""Learning-rate perturbation: random rates that the server does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.protocols import Asked, ClientFacts, Conversation, Defense, Question, Report, RoundPlan
from leaktight.core.rng import Rng
from leaktight.core.types import State, Update
from leaktight.crypto.secure_sum import masked, new_private_key, public_key, unmasked_sum


@dataclass(frozen=True, kw_only=True)
class Lrp(Defense):
    """Draws the learning rate of every local step from U(0, 2 p_k N eta); neither rates nor p_k leave the client.

    spread: half the width of the interval over its middle, in [0, 1]. 1 as in the paper; 0 always uses the middle,
    p_k N eta, the paper's "vanilla training (scaled)", which is no defense.

    p_k N is the client's share of all examples, times the number of clients. The sum of all examples comes from a
    secure sum before the first round. Without that sum p_k N = 1, as for a single client.

    The server must weight clients equally: `aggregator = {kind = "fedavg", scheme = "I"}`. That scheme also scales each
    client's loss by p_k N. Here the rate includes this factor, so the client uses 1 in place of the server's scale.
    The client does not send its number of examples; scheme II, which needs it, is an error.

    Reference: Wan et al. 2023, Algorithm 1 (black parts) and section 4.3.
    Assumes: a server that is curious and not malicious; it learns the sum of all examples, and so does every client.
    With one local step the update is the gradient times an unknown positive number, which does not hinder an attacker
    with a scale-free distance.
    Differs from the paper: sums are modulo 2^64 with masks from X25519, and a client that does not answer is an error;
    the paper has no modulus and does not treat clients that drop out. Our server object has every client's number of
    examples for other methods; this defense does not read it.
    """

    spread: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= 1:
            raise ValueError(f"expected spread in [0, 1], got {self.spread}")

    @property
    def questions(self) -> Mapping[str, Asked]:
        return {
            "lrp_key": Asked("a public key, for masks that two clients share", ("public",)),
            "lrp_counts": Asked("the client's counts under masks that cancel only in the sum", ("masked",)),
            "lrp_sums": Asked("that the sums arrived"),
        }

    def counts(self, facts: ClientFacts) -> Mapping[str, int]:
        """The counts that are summed over the clients, by name."""
        return {"examples": facts.num_examples}

    def rate_factor(self, state: State) -> float:
        """The client's mean learning rate as a multiple of the server's."""
        return float(state["own"]["examples"] * state["clients"] / state["sums"]["examples"])

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        own = self.counts(facts)
        return model, {"own": own, "sums": own, "clients": 1}

    def agree(self, clients: Sequence[str]) -> Conversation[None]:
        """Relay the public keys, collect the masked counts, send the sums back. A single client needs no sum."""
        if len(clients) < 2:
            return
        keys = yield {client: Question("lrp_key", {}) for client in clients}
        relayed = {"publics": {client: keys[client]["public"] for client in clients}}
        answers = yield {client: Question("lrp_counts", relayed) for client in clients}
        sums = unmasked_sum({client: answer["masked"] for client, answer in answers.items()}, clients)
        yield {client: Question("lrp_sums", {"sums": sums}) for client in clients}

    def answer(self, question: Question, state: State, facts: ClientFacts, *, rng: Rng) -> tuple[State, State]:
        answers: Mapping[str, Callable[..., tuple[State, State]]] = {
            "lrp_key": self._publish_key,
            "lrp_counts": self._mask_counts,
            "lrp_sums": self._keep_sums,
        }
        if question.kind not in answers:
            return super().answer(question, state, facts, rng=rng)
        return answers[question.kind](state, facts.client, rng, **question.payload)

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        draws = 1 + self.spread * (2 * rng.secret().uniform(len(plan.learning_rates)) - 1)
        factor = self.rate_factor(state)
        rates = tuple(float(rate * factor * draw) for rate, draw in zip(plan.learning_rates, draws, strict=True))
        return replace(plan, learning_rates=rates, loss_scale=1.0), state

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        if update.kind == "gradient":
            raise UsageError(
                "perturbed learning rates do not change a gradient, which is sent before a rate is applied; "
                "choose an aggregator of model changes (federation.aggregator.kind = fedavg)"
            )
        return replace(update, num_examples=None), state

    def _publish_key(self, state: State, client: str, rng: Rng) -> tuple[State, State]:
        private = new_private_key(rng)
        return {"public": public_key(private)}, {**state, "private": private}

    def _mask_counts(self, state: State, client: str, rng: Rng, *, publics: Mapping[str, bytes]) -> tuple[State, State]:
        """Deletes the private key: a second answer under the same masks would reveal the difference of the two."""
        if "private" not in state:
            raise LeaktightError(f"expected to be asked for a key first; {client} masks its counts once for each key")
        names, values = list(state["own"]), list(state["own"].values())
        sent = masked(values, client, state["private"], publics, label=f"lrp {' '.join(names)}")
        kept = {name: value for name, value in state.items() if name != "private"}
        return {"masked": sent}, {**kept, "clients": len(publics)}

    def _keep_sums(self, state: State, client: str, rng: Rng, *, sums: Sequence[int]) -> tuple[State, State]:
        named = dict(zip(state["own"], sums, strict=True))
        for name, own in state["own"].items():
            if named[name] < own:
                raise LeaktightError(f"expected a sum of {name} of at least {client}'s own, got {named[name]} < {own}")
        return {}, {**state, "sums": named}
