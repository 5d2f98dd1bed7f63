"""How a server combines updates. Sums run over clients in the order of their names, so results are reproducible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from leaktight.core.errors import UsageError, require_above
from leaktight.core.protocols import Aggregator, Conversation
from leaktight.core.rng import Rng
from leaktight.core.tensors import weighted_mean
from leaktight.core.types import Broadcast, Params, State, Update, UpdateKind


class Combined(Protocol):
    """Computes the weighted mean of a round's updates as a part of a question to clients; it may be encrypted.

    noise_std: standard deviation of the Gaussian noise on every value.
    """

    def __call__(self, weights: Mapping[str, int], *, noise_std: float = 0.0, rng: Rng) -> State: ...


@dataclass(frozen=True, kw_only=True)
class Linear(Aggregator):
    """A weighted mean of the updates, then a step of the server. It also works on encrypted updates."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"num_examples"})

    def weights(self, updates: Mapping[str, Update]) -> dict[str, float]:
        """The weight of each client, from the metadata of its update."""
        for client, update in updates.items():
            if not update.num_examples:
                raise UsageError(
                    f"expected the number of examples of {client}, got none; "
                    'weight clients equally (aggregator.scheme = "I")'
                )
        return {client: float(update.num_examples or 0) for client, update in updates.items()}

    def weigh(
        self, updates: Mapping[str, Update], combined: Combined, *, broadcast: Broadcast, rng: Rng
    ) -> Conversation[dict[str, float]]:
        """The weight of each client, for subclasses that have to ask the clients."""
        yield from ()
        return self.weights(updates)

    def step(self, mean: Params, state: State) -> tuple[Params, State]:
        """The change of the model, from the weighted mean."""
        return mean, state

    def combine(self, updates: Mapping[str, Update], state: State) -> tuple[Params, State]:
        tensors = {client: update.tensors for client, update in updates.items()}
        return self.step(weighted_mean(tensors, self.weights(updates)), state)


@dataclass(frozen=True, kw_only=True)
class FedAvg(Linear):
    """The weighted mean of the clients' changes.

    scheme: "II", weights proportional to the number of examples (W = sum of p_k W_k over the round / sum of p_k); or
    "I", equal weights, each client's loss scaled by N p_k, so that the sum over clients is the global loss.
    Reference: McMahan et al. 2017; the two schemes as in section 5.2 of Wan et al. (LRP).
    """

    scheme: Literal["I", "II"] = "II"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.scheme == "I" else super().needs

    def loss_scale(self, num_examples: int, all_examples: Sequence[int]) -> float:
        if self.scheme == "II":
            return 1.0
        return num_examples * len(all_examples) / sum(all_examples)

    def weights(self, updates: Mapping[str, Update]) -> dict[str, float]:
        return dict.fromkeys(updates, 1.0) if self.scheme == "I" else super().weights(updates)


@dataclass(frozen=True, kw_only=True)
class FedSgd(Linear):
    """One step of the server along the mean gradient of the clients' batches, weighted by their sizes.

    learning_rate: of the server.

    Reference: McMahan et al. 2017 (FedSGD).
    """

    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        require_above(0, learning_rate=self.learning_rate)

    @property
    def update_kind(self) -> UpdateKind:
        return "gradient"

    def step(self, mean: Params, state: State) -> tuple[Params, State]:
        return {name: -self.learning_rate * tensor for name, tensor in mean.items()}, state


@dataclass(frozen=True, kw_only=True)
class ServerMomentum(FedAvg):
    """FedAvg with momentum at the server (FedAvgM).

    learning_rate, momentum: of the server.

    Reference: Hsu et al. 2019.
    """

    learning_rate: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require_above(0, learning_rate=self.learning_rate)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"expected momentum in [0, 1), got {self.momentum}")

    def start(self, params: Params) -> State:
        return {"velocity": {name: torch.zeros_like(tensor) for name, tensor in params.items()}}

    def step(self, mean: Params, state: State) -> tuple[Params, State]:
        velocity = {
            name: self.momentum * tensor + mean[name] if name in mean else tensor
            for name, tensor in state["velocity"].items()
        }
        return {name: self.learning_rate * velocity[name] for name in mean}, {"velocity": velocity}


@dataclass(frozen=True, kw_only=True)
class ServerAdam(FedAvg):
    """FedAvg with Adam at the server (FedAdam), without bias correction.

    learning_rate: of the server. beta1, beta2: decay of its moments. epsilon: in the denominator.

    Reference: Reddi et al. 2021, algorithm 2.
    """

    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        require_above(0, learning_rate=self.learning_rate, epsilon=self.epsilon)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected {name} in [0, 1), got {getattr(self, name)}")

    def start(self, params: Params) -> State:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        return {"first": zeros, "second": zeros}

    def step(self, mean: Params, state: State) -> tuple[Params, State]:
        first, second, step = dict(state["first"]), dict(state["second"]), {}
        for name, tensor in mean.items():
            first[name] = self.beta1 * first[name] + (1 - self.beta1) * tensor
            second[name] = self.beta2 * second[name] + (1 - self.beta2) * tensor.square()
            step[name] = self.learning_rate * first[name] / (second[name].sqrt() + self.epsilon)
        return step, {"first": first, "second": second}
