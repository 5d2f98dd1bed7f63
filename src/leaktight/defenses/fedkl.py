"""FedKL: the scale and shift of batch norm are functions of a key that never leaves the client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from leaktight.core.errors import require_at_least
from leaktight.core.protocols import ClientFacts, Defense, Report
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.types import Broadcast, Params, State, Update
from leaktight.fl.client import Client
from leaktight.fl.messages import Evaluate, Evaluated
from leaktight.fl.state import ClientState, Conduct
from leaktight.models.keylock import LOCK, Blocks, lock_blocks, normalise_blocks

LockContent = Literal["own", "random_key", "wrong_key", "random", "zero"]


@dataclass(frozen=True, kw_only=True)
class FedKl(Defense):
    """FedKL: batch norm whose scale and shift come from a private key through a private lock (Ren et al.).

    blocks: "first" locks the first convolution, as in the thesis; "all" locks all of them, with the same key.
    key_length: the length of the key, which is drawn from U(0, 1) once per client.
    variant: "paper": scale and shift are plain linear functions of the key, and the statistics of the locked norms stay
        private; "code": ReLU on both, which switches about half of the channels off, and statistics are sent.

    The server's network has norms without scale and shift. It never gets keys or locks, so clients evaluate the model;
    `score_keys` evaluates it with other keys.
    Reference: Ren, thesis (Swansea 2023), chapter 5; github.com/Rand2AI/FedKL.
    Assumes: layers are registered in the order in which they run. The architecture is public, lock and key are not.
    Differs from the paper: every client draws its own initial lock. In the paper the server sends it and so knows W
        in scale = W k + b; as keys have mean 1/2, that alone reveals three quarters of the variance of the first
        round's scales. A convolution without batch norm (LeNet) gets one in the shared network, as in the published
        LeNet_kl: compare with a network that has it too.
    """

    blocks: Blocks = "first"
    key_length: int = 1024
    variant: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        require_at_least(1, key_length=self.key_length)
        for name, valid in (("blocks", ("first", "all")), ("variant", ("paper", "code"))):
            if getattr(self, name) not in valid:
                raise ValueError(f"expected {name} to be one of {', '.join(valid)}, got {getattr(self, name)!r}")

    @property
    def private_parts(self) -> bool:
        return True

    def prepare(self, model: nn.Module, *, rng: Rng) -> nn.Module:
        normalise_blocks(model, self.blocks)
        return model

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        published = self.variant == "code"
        norms = lock_blocks(model, self.blocks, key_length=self.key_length, rectified=published, rng=rng)
        return model, {"withheld": [] if published else _statistics(model, norms)}

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        if update.buffers is None:
            return update, state
        private = set(state["withheld"])
        sent = {name: tensor for name, tensor in update.buffers.items() if name not in private}
        return replace(update, buffers=sent), state


def score_keys(
    client: Client, broadcast: Broadcast, states: Mapping[str, ClientState], *, rng: Rng
) -> dict[LockContent, Evaluated]:
    """The test score of the global model at `client`, by the content of its lock.

    states: of all clients after training. The client's private statistics are always used.

    - own: the client's key and lock.
    - random_key: a fresh key in the client's lock. wrong_key: another client's key in it.
    - random: a fresh key and a fresh lock, as a server can draw them ("Random" in Table 5.3 of the thesis).
    - zero: scale and shift 0, so that all images look the same; the published code's "random".
    """
    own = states[client.name]
    fresh = _fresh_parts(client, rng)
    other = next(name for name in sorted(states) if name != client.name)
    by_content: dict[LockContent, ClientState] = {
        "own": _with(own),
        "random_key": _with(own, buffers=_keys(fresh["buffers"])),
        "wrong_key": _with(own, buffers=_keys(states[other].buffers)),
        "random": _with(own, buffers=_keys(fresh["buffers"]), params=fresh["params"]),
        "zero": _with(own, params={name: torch.zeros_like(lock) for name, lock in fresh["params"].items()}),
    }
    scores: dict[LockContent, Evaluated] = {}
    for content, state in by_content.items():
        reply, _ = client.handle(Evaluate(broadcast, "test"), state)
        assert isinstance(reply, Evaluated)
        scores[content] = reply
    return scores


def _statistics(model: nn.Module, norms: Sequence[str]) -> list[str]:
    """The names of the running statistics of these norms."""
    return [f"{norm}.{name}" for norm in norms for name, _ in model.get_submodule(norm).named_buffers(recurse=False)]


def _fresh_parts(client: Client, rng: Rng) -> dict[str, Params]:
    """A fresh key and a fresh lock, by name."""
    model, _ = client.trainer.defense.start(copy.deepcopy(client.trainer.model), client.facts, rng=rng)
    return {"params": _locks(parameters_of(model)), "buffers": buffers_of(model)}


def _with(state: ClientState, *, params: Params | None = None, buffers: Params | None = None) -> ClientState:
    """The client's state with other private parameters and buffers."""
    return replace(
        state,
        conduct=Conduct(),  # allows a score for each key
        params={**state.params, **(params or {})},
        buffers={**state.buffers, **(buffers or {})},
    )


def _locks(tensors: Params) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if LOCK in name.split(".")}


def _keys(tensors: Params) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in _locks(tensors).items() if name.endswith(".key")}
