"""The server's checks of the answers of clients, which may be malicious."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from leaktight.core.types import Broadcast, Params, Update
from leaktight.fl.messages import Evaluated, Failed, Outcome, Trained, why_declined
from leaktight.fl.plan import Server

LARGEST_VALUE = 1e6
"""An update with a larger number is not used: no training step is that large, and it would outweigh all others."""


def why_malformed(
    update: Update, broadcast: Broadcast, kind: str, most_examples: int | None = None, *, sealed: bool = False
) -> str | None:
    """Why an update must not be aggregated, or None. Names may be missing, but not unknown.

    most_examples: the number of examples of the client, which limits its weight; None: no limit.
    sealed: whether the update must be encrypted.
    """
    if update.kind != kind:
        return f"expected a {kind}, got a {update.kind!s:.40}"
    if sealed != isinstance(update.sealed, Mapping) or (sealed and update.tensors):
        return f"expected {'an encrypted' if sealed else 'a plain'} update, got another"
    parts: tuple[Any, Any] = update.tensors, {} if update.buffers is None else update.buffers
    if not all(isinstance(part, Mapping) for part in parts):
        return "expected tensors by name, got something else"
    for tensors, known in zip(parts, (broadcast.params, broadcast.buffers), strict=True):
        for name, tensor in tensors.items():
            reason = _why_not_like(name, tensor, known)
            if reason is not None:
                return reason
    if not update.tensors and not sealed:
        return "the update is empty"
    count, most = update.num_examples, math.inf if most_examples is None else most_examples
    if count is not None and (type(count) is not int or not 0 <= count <= most):
        return f"expected at most {most} examples, got {count!r:.40}"
    return None if _are_figures(update.metrics) else "expected metrics to be finite numbers by name"


def _why_not_like(name: Any, tensor: Any, known: Params) -> str | None:
    if name not in known:
        return f"unknown name {name!r:.80}"
    expected = known[name]
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return f"{name!r}: expected a tensor, got {type(tensor).__name__}"
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        return (
            f"{name!r}: expected {tuple(expected.shape)} of {expected.dtype}, "
            f"got {tuple(tensor.shape)} of {tensor.dtype}"
        )
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    largest = float(tensor.abs().max())
    if not math.isfinite(largest):
        return f"{name!r} is not finite"
    return f"{name!r} has a value of {largest:.3g}, beyond {LARGEST_VALUE:.0e}" if largest > LARGEST_VALUE else None


def _are_figures(figures: Any) -> bool:
    """Whether these are finite numbers by name."""
    return isinstance(figures, Mapping) and all(
        isinstance(name, str) and isinstance(value, float | int) and math.isfinite(value)
        for name, value in figures.items()
    )


def _why_unfit(reply: Trained, broadcast: Broadcast, server: Server, client: str) -> str | None:
    update: object = reply.update
    if not isinstance(update, Update):
        return "expected an update, got something else"
    aggregator = server.setup.aggregator
    return why_malformed(update, broadcast, aggregator.update_kind, server.sizes[client], sealed=aggregator.sealed)


def accepted(
    replies: Mapping[str, Outcome], drawn: list[str], broadcast: Broadcast, server: Server
) -> tuple[dict[str, Trained], dict[str, str]]:
    """The valid updates by client, and for the other clients the reason why there is none."""
    trained: dict[str, Trained] = {}
    failures: dict[str, str] = {}
    for client in drawn:
        reply = replies.get(client, Failed("no answer"))
        if isinstance(reply, Trained):
            reason = _why_unfit(reply, broadcast, server, client)
            if reason is None:
                trained[client] = reply
                continue
        else:
            reason = why_declined(reply)
        failures[client] = reason
    return trained, failures


def is_score(reply: Outcome) -> TypeGuard[Evaluated]:
    """Whether a reply is a valid score."""
    return (
        isinstance(reply, Evaluated)
        and type(reply.num_examples) is int
        and type(reply.num_correct) is int
        and 0 <= reply.num_correct <= reply.num_examples
        and reply.num_examples > 0
        and isinstance(reply.loss_sum, float | int)
        and math.isfinite(reply.loss_sum)
    )
