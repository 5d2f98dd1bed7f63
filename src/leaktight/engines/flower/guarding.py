"""`guard_mod`: the guard in your own ClientApp."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from leaktight.core.errors import LeaktightError, RefusedError, UsageError
from leaktight.core.protocols import Sight
from leaktight.core.rng import Rng
from leaktight.core.tasks import Classification, Task
from leaktight.core.types import Batch, Broadcast, State, Update
from leaktight.engines.flower.user_app import LOG, ModState, only_arrays, refusal, tensors_of, unnamed
from leaktight.fl.local import Meter
from leaktight.guard import BroadcastGuard
from leaktight.guard.behaviour import output_size
from leaktight.models.initialise import materialised
from leaktight.models.surgery import copied, lazy_names

_ROUND = "server-round"  # as Flower's strategies name it


def guard_mod(
    guard: BroadcastGuard,
    model: nn.Module,
    *,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    share: float = 0.1,
    task: Task = Classification(),
    state_dir: Path | str | None = None,
    name: str = "guard",
) -> Mod:
    """A mod that checks every model before `@app.train` gets it: `ClientApp(mods=[guard_mod(BroadcastGuard(), net)])`.

    A refused model does not reach your function; the server gets an error without text, and the node's log has the
    reasons. Put it before `defense_mod`, so that it compares the server's model with what was sent to the server.

    model: the network that was agreed on; its names identify arrays, and its own weights, which the server does not
    choose, show what is usual. inputs, targets: some of the client's examples, as the model takes them, for the signs
    that need examples; inputs of None skips these, targets of None makes targets up.
    share: the part of the clients that the server draws in a round, as agreed on; a round number that this makes
    unlikely is refused.
    state_dir: the folder of the last model, so that it survives a restart of the node; default: `state-dir` of the
    node's config, else Flower's context. name: of the state; a new name starts with an empty one.
    """
    model = _with_sizes(model, inputs)
    params = {parameter for parameter, _ in model.named_parameters()}
    if not 0 < share <= 1:
        raise ValueError(f"expected share in (0, 1], got {share}")

    def received(message: Message, known: State) -> Broadcast:
        tensors = tensors_of(message.content.array_records[only_arrays(message.content, "server's message")])
        if unnamed(tensors):
            raise UsageError("expected arrays with the names of the network's state_dict, got numbers only")
        return Broadcast(
            params={key: tensor for key, tensor in tensors.items() if key in params or key not in model.state_dict()},
            buffers={key: tensor for key, tensor in tensors.items() if key in model.state_dict() and key not in params},
            round=_round(message.content, known),
        )

    def sight() -> Sight:
        rng = Rng.fresh()
        if inputs is None:
            return Sight(inputs=None, rng=rng, task=task, share=share)
        own = targets
        if own is None:
            outputs = output_size(model, inputs[:2])
            own = task.blind_targets(len(inputs), outputs, rng.public())
        return Sight(inputs=None, rng=rng, examples=Batch(inputs, own), task=task, share=share)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        try:
            memory = ModState(name, context, state_dir)
            known = memory.read() or {}
            broadcast = received(message, known)
            state = guard.admit(broadcast, model, sight(), known, report=Meter())
        except LeaktightError as error:
            LOG.error("%s%s", "" if isinstance(error, RefusedError) else "nothing was sent: ", error)
            return refusal(message)
        reply = call_next(message, context)
        if reply.has_content():
            state = guard.after(_change(reply.content, broadcast), broadcast, state)
        memory.write(state)
        return reply

    return mod


def _with_sizes(model: nn.Module, inputs: Tensor | None) -> nn.Module:
    """The model; of one with lazy modules a copy that has run on an example."""
    if not lazy_names(model):
        return model
    if inputs is None:
        raise UsageError("expected a model whose sizes are known, got lazy modules; run it once, or give inputs")
    return materialised(copied(model), inputs[:1], "the inputs given")


def _round(content: RecordDict, known: State) -> int:
    """The index of the round, from 0: as the server states it (-1 if that is no number), else the next one."""
    for record in content.config_records.values():
        if (number := record.get(_ROUND)) is not None:
            return number - 1 if type(number) is int else -1
    return int(known.get("round", -1)) + 1


def _change(content: RecordDict, broadcast: Broadcast) -> Update:
    """The client's reply as a change of the model that was sent."""
    after = tensors_of(content.array_records[only_arrays(content, "client's reply")])
    change = {name: after[name] - tensor for name, tensor in broadcast.params.items() if name in after}
    return Update(tensors=change, kind="delta")
