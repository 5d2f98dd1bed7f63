"""The server's checks of the answers of clients, which may be malicious."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from leaktight.core.faults import raise_fault
from leaktight.core.protocols import Asked
from leaktight.core.tensors import digest, flatten_state, squared_norm
from leaktight.core.text import described, printable
from leaktight.core.types import Broadcast, Params, State, Update
from leaktight.fl.messages import Evaluated, Failed, Outcome, Trained, why_declined
from leaktight.fl.plan import Server

LARGEST_VALUE = 1e6
"""An update with a larger number is not used: no training step is that large, and it would outweigh all others."""
LARGEST_COUNT = 10**9
"""Of the examples that a client says to have scored."""
UNUSUAL_NORM = 10.0
"""An update is flagged if it is longer than this many times the median of its round."""
LEAST_COMPARED = 3
"""Updates of a round from which their median says something."""
REMEMBERED = 1000
"""Updates of each client that a replay is looked for in."""

Seen = Mapping[str, Sequence[str]]
"""Hashes of the updates of earlier rounds, by client."""


@dataclass(frozen=True)
class Accepted:
    """What the server uses of the answers in a round.

    updates: by client. failures: why there is none of the other clients. flags: what is unusual about an update that is
    used. seen: with the hashes of these updates.
    """

    updates: Mapping[str, Update]
    failures: Mapping[str, str]
    flags: Mapping[str, str]
    seen: Seen

    def without(self, reasons: Mapping[str, str]) -> Accepted:
        """What is left without these clients, whose updates cannot be combined for these reasons."""
        return replace(
            self,
            updates={client: update for client, update in self.updates.items() if client not in reasons},
            failures={**self.failures, **{client: printable(reason) for client, reason in reasons.items()}},
            flags={client: flag for client, flag in self.flags.items() if client not in reasons},
        )


def why_malformed(
    update: Update,
    broadcast: Broadcast,
    kind: str,
    most_examples: int | None = None,
    *,
    sealed: bool = False,
    figures: Collection[str] | None = None,
) -> str | None:
    """Why an update must not be aggregated, or None. Names may be missing, but not unknown.

    most_examples: the number of examples of the client, which limits its weight; None: no limit.
    sealed: whether the update must be encrypted. figures: the names of metrics that may be sent; None: any.
    """
    if update.kind != kind:
        return f"expected a {kind}, got a {printable(update.kind, 40)}"
    parts: tuple[Any, Any] = update.tensors, {} if update.buffers is None else update.buffers
    if not all(isinstance(part, Mapping) for part in parts):
        return "expected tensors by name, got something else"
    fits = isinstance(update.sealed, Mapping) and not update.tensors if sealed else update.sealed is None
    if not fits:
        return f"expected {'an encrypted' if sealed else 'a plain'} update, got another"
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
    if count is not None and figures is not None and "num_examples" not in figures:
        return "expected no number of examples, which is not needed, got one: it would be a weight that others lack"
    return _why_no_figures(update.metrics, figures)


def _why_not_like(name: Any, tensor: Any, known: Params) -> str | None:
    if name not in known:
        return f"unknown name {name!r:.80}"
    expected = known[name]
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return f"{name!r}: expected a tensor, got {type(tensor).__name__}"
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        return f"{name!r}: expected {described(expected)}, got {described(tensor)}"
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    largest = float(tensor.abs().max())
    if not math.isfinite(largest):
        return f"{name!r} is not finite"
    return f"{name!r} has a value of {largest:.3g}, beyond {LARGEST_VALUE:.0e}" if largest > LARGEST_VALUE else None


def _why_no_figures(figures: Any, allowed: Collection[str] | None) -> str | None:
    if not isinstance(figures, Mapping) or not all(
        isinstance(name, str) and _is_number(value) for name, value in figures.items()
    ):
        return "expected metrics to be finite numbers by name"
    unknown = [] if allowed is None else sorted(set(figures).difference(allowed))
    return f"expected no metrics but those that are needed, got {printable(unknown[0], 40)!r}" if unknown else None


def _is_number(value: Any) -> bool:
    """Whether this is a finite number that fits into a float."""
    return type(value) in (float, int) and abs(value) < math.inf and abs(value) <= 1e300


def _why_unfit(reply: Trained, broadcast: Broadcast, server: Server, client: str) -> str | None:
    update: object = reply.update
    if not isinstance(update, Update):
        return "expected an update, got something else"
    if update.buffers and server.setup.defense.private:
        return "expected no batch statistics, which are not sent beside this defense, got some"
    aggregator = server.setup.aggregator
    return why_malformed(
        update,
        broadcast,
        aggregator.update_kind,
        server.sizes[client],
        sealed=aggregator.sealed,
        figures=aggregator.needs,
    )


def _checked(
    reply: Outcome, broadcast: Broadcast, server: Server, client: str, known: Collection[str | None]
) -> tuple[str | None, str | None]:
    """Why the update of a reply must not be used, or None; and its hash. known: hashes of earlier updates."""
    if not isinstance(reply, Trained):
        return why_declined(reply), None
    try:
        reason = _why_unfit(reply, broadcast, server, client)
        found = fingerprint(reply.update) if reason is None else None
    except Exception as error:  # whatever a client sends, it harms nobody but itself
        raise_fault(error)
        return f"the update cannot be checked ({type(error).__name__})", None
    return "the update is, bit for bit, that of an earlier round" if found in known else reason, found


def accepted(
    replies: Mapping[str, Outcome], drawn: Sequence[str], broadcast: Broadcast, server: Server, seen: Seen | None = None
) -> Accepted:
    """The valid updates by client, and for the other clients the reason why there is none. seen: in earlier rounds."""
    updates: dict[str, Update] = {}
    failures: dict[str, str] = {}
    before = {} if seen is None else seen
    known = {each for hashes in before.values() for each in hashes}
    hashes: dict[str, str | None] = {}
    for client in drawn:
        reply = replies.get(client, Failed("no answer"))
        reason, hashes[client] = _checked(reply, broadcast, server, client, known)
        if reason is None and isinstance(reply, Trained):
            updates[client] = reply.update
        else:
            failures[client] = printable(reason or "no update")
    used = Accepted(updates, failures, {}, before)
    if "num_examples" in server.setup.aggregator.needs:
        used = used.without(_unweighted(updates))
    norms = _norms(used.updates)
    used = replace(used, flags=_unusual(norms, UNUSUAL_NORM))
    if server.plan.norm_limit is not None:
        used = used.without(_unusual(norms, server.plan.norm_limit))
    fresh = {client: found for client in used.updates if (found := hashes[client]) is not None}
    kept = {client: [*before.get(client, ()), found][-REMEMBERED:] for client, found in fresh.items()}
    return replace(used, seen={**before, **kept})


def fingerprint(update: Update) -> str | None:
    """A hash of what an update changes, or None if it changes nothing: such a one may come again."""
    tensors, _ = flatten_state({"tensors": update.tensors, "sealed": update.sealed or {}})
    if not any(bool(tensor.any()) for tensor in tensors.values()):
        return None
    return digest(tensors)[:32]


def _unweighted(updates: Mapping[str, Update]) -> dict[str, str]:
    """Updates without a number of examples, with the reason; none if nobody sends one, as then the config is wrong."""
    without = [client for client, update in updates.items() if not update.num_examples]
    if len(without) == len(updates):
        return {}
    return dict.fromkeys(without, "the update has no number of examples, which its weight needs")


def _norms(updates: Mapping[str, Update]) -> dict[str, float]:
    """The norm of each plain update; empty if there are too few to compare."""
    plain = {client: update for client, update in updates.items() if update.sealed is None}
    if len(plain) < LEAST_COMPARED:
        return {}
    return {client: float(squared_norm(update.tensors.values())) ** 0.5 for client, update in plain.items()}


def _unusual(norms: Mapping[str, float], most: float) -> dict[str, str]:
    """Updates that are longer than `most` times the median of their round, with the reason."""
    median = statistics.median(norms.values()) if norms else 0.0
    return {
        client: f"its norm, {norm:.3g}, is {norm / median:.3g} times the median of the round's updates"
        for client, norm in norms.items()
        if median > 0 and norm > most * median
    }


def why_not_listed(payload: State, asked: Asked | None) -> str | None:
    """Why the answer to a question must not be used, or None: it has the fields that the method lists, and no more."""
    if not isinstance(payload, Mapping) or asked is None or set(payload) != set(asked.answer):
        return "the answer has other fields than those listed for the question"
    return None


def is_score(reply: Outcome) -> TypeGuard[Evaluated]:
    """Whether a reply is a valid score."""
    return (
        isinstance(reply, Evaluated)
        and type(reply.num_examples) is int
        and type(reply.num_correct) is int
        and 0 <= reply.num_correct <= reply.num_examples
        and 0 < reply.num_examples <= LARGEST_COUNT
        and _is_number(reply.loss_sum)
    )
