"""`defense_mod`: a defense in your own ClientApp."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from flwr.app import Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from leaktight.core.errors import CheckpointError, LeaktightError, UsageError
from leaktight.core.protocols import ClientFacts, Defense, RoundPlan
from leaktight.core.rng import Rng
from leaktight.core.tensors import digest, first_non_finite
from leaktight.core.text import sides
from leaktight.core.types import State, Update
from leaktight.defenses.stack import Stack
from leaktight.engines.flower.steps import DefendedSteps, HiddenModel
from leaktight.engines.flower.user_app import (
    LOG,
    ModState,
    is_statistic,
    only_arrays,
    record_of,
    refusal,
    tensors_of,
    unnamed,
)
from leaktight.fl.local import silent

Sends: TypeAlias = Literal["model", "delta", "gradient"]

COUNT = "num-examples"
"""The metric by which Flower's strategies weight a client."""

_NEEDS_MORE = "use `leaktight train --engine flower`, or leaktight.defenses.wrap with a server that does its part"


def defense_mod(
    defense: Defense,
    *,
    sends: Sends = "model",
    server_side: bool = False,
    scores: bool = False,
    state_dir: Path | str | None = None,
    name: str = "defense",
    rng: Rng | None = None,
) -> Mod:
    """A mod that defends what `@app.train` of your ClientApp sends: `ClientApp(mods=[defense_mod(Outpost())])`.

    The defense acts on every step of PyTorch's optimisers inside your function, and on the update. If it fails, or your
    function raises, the server gets an error without text instead of the update.

    sends: the content of your function's reply: the local "model", its change ("delta"), or a "gradient".
    server_side: True if your server calls `defense.on_aggregate` on the combined change, for a defense that needs it.
    scores: True lets other functions than `@app.train` answer with a differentially private defense, although its
    epsilon does not count their answers. With other defenses they always answer.
    state_dir: the folder of the private state, so that it survives a restart of the node; default: `state-dir` of the
    node's config, else Flower's context, which lasts as long as the run. name: of the state; a new name starts with an
    empty one. rng: fresh entropy by default; give one only in tests.
    """
    _check_fits(defense, server_side=server_side)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            if defense.private and not scores:
                LOG.error("not answered: the epsilon of %s counts updates alone; see `scores`", type(defense).__name__)
                return refusal(message)
            return call_next(message, context)
        try:
            memory = ModState(name, context, state_dir)
            return _DefendedRound(defense, sends, memory, rng or Rng.fresh()).call(message, context, call_next)
        except Exception:
            LOG.exception("nothing was sent")
            return refusal(message)

    return mod


def _check_fits(defense: Defense, *, server_side: bool) -> None:
    """Raise UsageError for a defense that a mod cannot apply completely."""
    for part in _parts(defense):
        kind, own = type(part), type(part).__name__
        if kind.prepare is not Defense.prepare:
            raise UsageError(f"{own} changes the shared network, which a mod cannot; {_NEEDS_MORE}")
        if kind.agree is not Defense.agree:
            raise UsageError(f"{own} asks clients before the first round, which a mod cannot; {_NEEDS_MORE}")
        if kind.on_batch is not Defense.on_batch:
            raise UsageError(f"{own} changes batches, which a mod cannot see; {_NEEDS_MORE}")
        if kind.on_aggregate is not Defense.on_aggregate and not server_side:
            raise UsageError(
                f"{own} has a part on the server: call its on_aggregate on the combined change there and say "
                f"server_side=True; or {_NEEDS_MORE}"
            )


def _parts(defense: Defense) -> Iterator[Defense]:
    if isinstance(defense, Stack):
        for part in defense.parts:
            yield from _parts(part)
    else:
        yield defense


def _acts_on_steps(defense: Defense) -> bool:
    return any(
        type(part).on_gradient is not Defense.on_gradient and getattr(part, "at", "step") == "step"
        for part in _parts(defense)
    )


@dataclass(frozen=True)
class _DefendedRound:
    """One round of a user's client with the hooks of the defense."""

    defense: Defense
    sends: Sends
    memory: ModState
    rng: Rng

    def call(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        before = tensors_of(message.content.array_records[only_arrays(message.content, "server's message")])
        known = self._recall(before)
        number, state = int(known["round"]), known["defense"]
        rng = self.rng.child("owner", self.memory.owner, "round", number, digest(before))
        plan = RoundPlan(number, (1.0,))
        changed, state = self.defense.on_round(plan, state, rng=rng.child("round"), report=silent)
        if changed != plan:
            raise UsageError(f"{type(self.defense).__name__} changes learning rates, which a mod cannot; {_NEEDS_MORE}")
        steps = DefendedSteps(self.defense, state, number, _stand_in(before), rng, silent)
        with steps.active():
            reply = call_next(message, context)
        if steps.error is not None:
            raise steps.error
        if not reply.has_content():
            raise LeaktightError("the app answered with an error")
        if not steps.count and _acts_on_steps(self.defense):
            raise UsageError("no step of a PyTorch optimiser was seen, so nothing was defended")
        state = self._defend(reply.content, before, steps.state, rng)
        self.memory.write({**known, "round": number + 1, "defense": state})
        spent = self.defense.spent(state)
        LOG.info("round %d defended%s", number + 1, "" if spent is None else f"; epsilon so far {spent.epsilon:.4g}")
        return reply

    def _recall(self, before: Mapping[str, Tensor]) -> State:
        shapes = {name: tuple(tensor.shape) for name, tensor in before.items()}
        identity = hashlib.sha256(f"{self.defense!r} {shapes}".encode()).hexdigest()
        held = self.memory.read()
        if held is None:
            facts = ClientFacts(self.memory.owner, 0, 0)
            _, state = self.defense.start(_stand_in(before), facts, rng=self.rng.child("start"))
            return {"identity": identity, "round": 0, "defense": state}
        if held["identity"] != identity:
            raise CheckpointError(
                f"the private state at {self.memory.path or self.memory.key} is of another defense or model; give "
                "defense_mod another name to start with an empty one"
            )
        return held

    def _defend(self, content: RecordDict, before: Mapping[str, Tensor], state: State, rng: Rng) -> State:
        """Replace the user's update in the reply by the defended one."""
        key = only_arrays(content, "client's reply")
        after = tensors_of(content.array_records[key])
        for name, tensor in after.items():
            if name not in before or before[name].shape != tensor.shape:
                raise UsageError(f"expected arrays as the server sent them, got {name!r} of {sides(tensor.shape)}")
        update = self._update(content, before, after)
        defended, state = self.defense.on_update(update, state, rng=rng.child("update"), report=silent)
        broken = first_non_finite(defended.tensors) or first_non_finite(defended.buffers or {})
        if broken is not None:
            raise LeaktightError(f"the update of {broken!r} is not finite; lower the learning rate or check the data")
        if defended is not update:
            content[key] = record_of({name: self._sent(name, before, after, update, defended) for name in after})
            _limit_metrics(content, defended)
        if self.defense.private:
            for name in list(content.config_records):
                del content[name]
        return state

    def _update(self, content: RecordDict, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Update:
        statistics = {name for name, tensor in after.items() if is_statistic(name, tensor)}
        numbers = _metrics(content)
        change = {
            name: tensor - before[name] if self.sends == "model" else tensor
            for name, tensor in after.items()
            if name not in statistics
        }
        return Update(
            tensors=change,
            kind="gradient" if self.sends == "gradient" else "delta",
            num_examples=int(numbers.pop(COUNT)) if COUNT in numbers else None,
            buffers={} if self.defense.private else {name: after[name] for name in statistics},
            metrics=numbers,
        )

    def _sent(
        self,
        name: str,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        update: Update,
        defended: Update,
    ) -> Tensor:
        """The tensor to send by a name; one that the defense withholds is sent as received, or as no change."""
        if name in update.tensors:
            if name not in defended.tensors:
                return before[name] if self.sends == "model" else before[name].new_zeros(before[name].shape)
            if defended.tensors[name] is update.tensors[name]:
                return after[name]
            return (before[name] if self.sends == "model" else 0) + defended.tensors[name].to(after[name].dtype)
        return (defended.buffers or {}).get(name, before[name])


def _stand_in(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A model that has batch normalisation if the network has it, as far as the names of its arrays show."""
    if unnamed(tensors):
        return HiddenModel()
    norms = any(name.rpartition(".")[2] == "running_mean" for name in tensors)
    return nn.ModuleList([nn.BatchNorm1d(1)] if norms else []).train()


def _metrics(content: RecordDict) -> dict[str, float]:
    """The scalar metrics of all records, by name."""
    return {
        name: value
        for record in content.metric_records.values()
        for name, value in record.items()
        if isinstance(value, float | int)
    }


def _limit_metrics(content: RecordDict, defended: Update) -> None:
    """Keep only the metrics that the defense sends; if it hides the number of examples, send 1."""
    for key, record in list(content.metric_records.items()):
        kept = {name: value for name, value in record.items() if name in defended.metrics}
        if COUNT in record:
            kept[COUNT] = 1 if defended.num_examples is None else defended.num_examples
        content[key] = MetricRecord(kept)
