"""`guard_mod`: the guard in a ClientApp of your own, by one line."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from leaktight.core.errors import LeaktightError, RefusedError, UsageError
from leaktight.core.types import Broadcast, State, Update
from leaktight.engines.flower.arrays import only_arrays, tensors_of, unnamed
from leaktight.engines.flower.shelf import LOG, Shelf, refusal
from leaktight.fl.local import Meter
from leaktight.guard import BroadcastGuard

_ROUND = "server-round"  # as Flower's strategies name it


def guard_mod(
    guard: BroadcastGuard,
    model: nn.Module,
    *,
    inputs: Tensor | None = None,
    state_dir: Path | str | None = None,
    name: str = "guard",
) -> Mod:
    """A mod that looks at every model before `@app.train` does: `ClientApp(mods=[guard_mod(BroadcastGuard(), net)])`.

    A refused model never reaches your function, and an error without any text is sent in place of an update; the
    reasons are in the node's own log. Put it first, before `defense_mod`: what the server changed is seen best in what
    it sent and in what it was sent.

    model: the network that was agreed on, by whose names arrays are known. inputs: some of the client's own images, as
    the network takes them, for the sign "constant"; without them it is not looked for.
    state_dir: where the last model is kept, so that it outlives the node's process; without it, `state-dir` of the
    node's config; without that, Flower's context. name: of the state; another name starts anew.
    """
    params = {parameter for parameter, _ in model.named_parameters()}

    def received(message: Message, known: State) -> Broadcast:
        tensors = tensors_of(message.content.array_records[only_arrays(message.content, "server's message")])
        if unnamed(tensors):
            raise UsageError("expected arrays with the names of the network's state_dict, got numbers only")
        return Broadcast(
            params={key: tensor for key, tensor in tensors.items() if key in params or key not in model.state_dict()},
            buffers={key: tensor for key, tensor in tensors.items() if key in model.state_dict() and key not in params},
            round=_round(message.content, known),
        )

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        try:
            shelf = Shelf(name, context, state_dir)
            known = shelf.read() or {}
            broadcast = received(message, known)
            state = guard.admit(broadcast, model, inputs, known, report=Meter())
        except LeaktightError as error:
            LOG.error("%s%s", "" if isinstance(error, RefusedError) else "nothing was sent: ", error)
            return refusal(message)
        reply = call_next(message, context)
        if reply.has_content():
            state = guard.after(_change(reply.content, broadcast), broadcast, state)
        shelf.write(state)
        return reply

    return mod


def _round(content: RecordDict, known: State) -> int:
    """Which round this is, from 0: as the server says, else the next."""
    for record in content.config_records.values():
        if isinstance(number := record.get(_ROUND), int):
            return number - 1
    return int(known.get("round", -1)) + 1


def _change(content: RecordDict, broadcast: Broadcast) -> Update:
    """What the client's answer makes of the model that was sent."""
    after = tensors_of(content.array_records[only_arrays(content, "client's reply")])
    change = {name: after[name] - tensor for name, tensor in broadcast.params.items() if name in after}
    return Update(tensors=change, kind="delta")
