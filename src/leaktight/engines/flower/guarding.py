"""`guard_mod`: the guard in your own ClientApp."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from leaktight.core.errors import LeaktightError, RefusedError, UsageError
from leaktight.core.types import Broadcast, State, Update
from leaktight.engines.flower.user_app import LOG, ModState, only_arrays, refusal, tensors_of, unnamed
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
    """A mod that checks every model before `@app.train` gets it: `ClientApp(mods=[guard_mod(BroadcastGuard(), net)])`.

    A refused model does not reach your function; the server gets an error without text, and the node's log has the
    reasons. Put it before `defense_mod`, so that it compares the server's model with what was sent to the server.

    model: the network that was agreed on; its names identify arrays. inputs: some of the client's images, (N, C, H, W),
    for the sign "constant"; None skips that sign.
    state_dir: the folder of the last model, so that it survives a restart of the node; default: `state-dir` of the
    node's config, else Flower's context. name: of the state; a new name starts with an empty one.
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
            memory = ModState(name, context, state_dir)
            known = memory.read() or {}
            broadcast = received(message, known)
            state = guard.admit(broadcast, model, inputs, known, report=Meter())
        except LeaktightError as error:
            LOG.error("%s%s", "" if isinstance(error, RefusedError) else "nothing was sent: ", error)
            return refusal(message)
        reply = call_next(message, context)
        if reply.has_content():
            state = guard.after(_change(reply.content, broadcast), broadcast, state)
        memory.write(state)
        return reply

    return mod


def _round(content: RecordDict, known: State) -> int:
    """The index of the round, from 0: as the server states it, else the next one."""
    for record in content.config_records.values():
        if isinstance(number := record.get(_ROUND), int):
            return number - 1
    return int(known.get("round", -1)) + 1


def _change(content: RecordDict, broadcast: Broadcast) -> Update:
    """The client's reply as a change of the model that was sent."""
    after = tensors_of(content.array_records[only_arrays(content, "client's reply")])
    change = {name: after[name] - tensor for name, tensor in broadcast.params.items() if name in after}
    return Update(tensors=change, kind="delta")
