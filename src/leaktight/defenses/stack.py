"""Several defenses as one: every hook calls the parts in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NoReturn

from torch import nn

from leaktight.core.errors import OutsideBudgetError, UsageError
from leaktight.core.inputs import Inputs
from leaktight.core.privacy import Spent
from leaktight.core.protocols import (
    Answers,
    Asked,
    ClientFacts,
    Conversation,
    Defense,
    Question,
    Questions,
    Report,
    RoundPlan,
    Step,
)
from leaktight.core.rng import Rng
from leaktight.core.types import Batch, HiddenBatch, Params, State, Update

_SEPARATOR = ":"


@dataclass(frozen=True, kw_only=True)
class Stack(Defense):
    """Several defenses in order: each acts on the output of the one before.

    parts: the defenses. Those that need per-example gradients go first, because these are undefined once an earlier
    part has changed their mean; another order is an error.

    Every part has its own state, random stream and name: its kind (for your own defense, its class in snake case), with
    a number from the second of its kind on. Its figures are reported as "name.figure", its time as "name_seconds", its
    questions to clients as "name:question". On the server `on_aggregate` runs from the last part to the first, to undo
    them in reverse. After a part with differential privacy the later ones get its gradient but not the examples, so
    that its (epsilon, delta) holds for the stack.

    Reference: none. Assumes: nothing beyond what its parts assume.
    """

    parts: tuple[Defense, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("expected at least one defense in parts, got none; name some")
        for part in self.parts:
            if not isinstance(part, Defense):
                raise ValueError(f"expected defenses in parts, got {type(part).__name__}")

    @property
    def takes(self) -> frozenset[type[Inputs]]:
        return frozenset.intersection(*(part.takes for part in self.parts))

    @property
    def named(self) -> dict[str, Defense]:
        """The parts by name, in order.

        >>> list(Stack(parts=(Defense(), Defense())).named)
        ['defense', 'defense_2']
        """
        result: dict[str, Defense] = {}
        seen: Counter[str] = Counter()
        for part in self.parts:
            own = _name(type(part))
            seen[own] += 1
            result[own if seen[own] == 1 else f"{own}_{seen[own]}"] = part
        return result

    @property
    def questions(self) -> Mapping[str, Asked]:
        return {
            f"{name}{_SEPARATOR}{kind}": asked
            for name, part in self.named.items()
            for kind, asked in part.questions.items()
        }

    @property
    def private_parts(self) -> bool:
        return any(part.private_parts for part in self.parts)

    @property
    def needs_mean(self) -> str | None:
        reasons = ((name, part.needs_mean) for name, part in self.named.items())
        return next((f"{name}: {reason}" for name, reason in reasons if reason is not None), None)

    @property
    def private(self) -> bool:
        return any(part.private for part in self.parts)

    def spent(self, state: State) -> Spent | None:
        """The largest budget of the parts."""
        found = [part.spent(state[name]) for name, part in self.named.items() if part.private]
        return max((each for each in found if each is not None), key=lambda each: each.epsilon, default=None)

    def prepare(self, model: nn.Module, *, rng: Rng) -> nn.Module:
        for name, part in self.named.items():
            model = part.prepare(model, rng=rng.child(name))
        return model

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        states: dict[str, State] = {}
        for name, part in self.named.items():
            model, states[name] = part.start(model, facts, rng=rng.child(name))
        return model, states

    def agree(self, clients: Sequence[str]) -> Conversation[None]:
        for name, part in self.named.items():
            yield from _addressed(part.agree(clients), name)

    def answer(self, question: Question, state: State, facts: ClientFacts, *, rng: Rng) -> tuple[State, State]:
        name, separator, kind = question.kind.partition(_SEPARATOR)
        part = self.named.get(name)
        if part is None or not separator:
            raise ValueError(f"no part of the stack has an answer to {question.kind!r}; parts: {', '.join(self.named)}")
        answer, own = part.answer(Question(kind, question.payload), state[name], facts, rng=rng.child(name))
        return answer, {**state, name: own}

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        states = dict(state)
        for name, part in self.named.items():
            with _measured(name, report) as own_report:
                plan, states[name] = part.on_round(plan, state[name], rng=rng.child(name), report=own_report)
        return plan, states

    def on_batch(self, batch: Batch, state: State, *, rng: Rng, report: Report) -> tuple[Batch, State]:
        states = dict(state)
        for name, part in self.named.items():
            with _measured(name, report) as own_report:
                batch, states[name] = part.on_batch(batch, state[name], rng=rng.child(name), report=own_report)
        return batch, states

    def on_gradient(self, step: Step, state: State, *, rng: Rng, report: Report) -> tuple[Params, State]:
        states = dict(state)
        changed_by: str | None = None
        for name, part in self.named.items():
            seen = step if changed_by is None else replace(step, per_example=_no_per_example(name, changed_by))
            if changed_by is not None and self.named[changed_by].private:
                seen = _without_examples(seen, name, changed_by)
            with _measured(name, report) as own_report:
                gradient, states[name] = part.on_gradient(seen, state[name], rng=rng.child(name), report=own_report)
            if changed_by is None and _differs(gradient, step.gradient):
                changed_by = name
            step = replace(step, gradient=gradient)
        return step.gradient, states

    def on_update(self, update: Update, state: State, *, rng: Rng, report: Report) -> tuple[Update, State]:
        states = dict(state)
        for name, part in self.named.items():
            with _measured(name, report) as own_report:
                update, states[name] = part.on_update(update, state[name], rng=rng.child(name), report=own_report)
        return update, states

    def on_aggregate(self, change: Params, num_clients: int, state: State) -> tuple[Params, State]:
        """Calls the parts from last to first, because the last one made the update that was sent."""
        states = dict(state)
        for name, part in reversed(self.named.items()):
            change, states[name] = part.on_aggregate(change, num_clients, state.get(name, {}))
        return change, states


def _name(part: type[Defense]) -> str:
    """The kind of a defense: ours are named as their files, others as their classes in snake case."""
    folder, _, file = part.__module__.rpartition(".")
    return file if folder == __package__ else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part.__name__).lower()


@contextmanager
def _measured(name: str, report: Report) -> Iterator[Report]:
    """A report function that adds the name of a part; the time inside is reported as that of the part."""
    begin = perf_counter()
    yield lambda figure, value: report(f"{name}.{figure}", value)
    report(f"{name}_seconds", perf_counter() - begin)


def _differs(gradient: Params, before: Params) -> bool:
    """Whether a part replaced any tensor."""
    return gradient.keys() != before.keys() or any(gradient[name] is not tensor for name, tensor in before.items())


def _no_per_example(asking: str, changed_by: str) -> Callable[[], Params]:
    """Replaces per-example gradients by an error once an earlier part has changed their mean."""

    def refuse() -> Params:
        raise UsageError(
            f"{asking} needs the gradient of each example, but {changed_by} before it in the stack has changed the "
            f"gradient already; put {asking} before {changed_by}"
        )

    return refuse


def _without_examples(step: Step, asking: str, private: str) -> Step:
    error = OutsideBudgetError(
        f"{asking} reads the examples after {private} in the stack, which the epsilon of {private} does not count; "
        f"put {asking} before it or leave it out"
    )

    def refuse(params: Params, batch: Batch) -> NoReturn:
        raise error

    return replace(step, batch=HiddenBatch(error, len(step.batch)), loss=refuse)


def _addressed(conversation: Conversation[None], name: str) -> Generator[Questions, Answers, None]:
    """A part's questions with its name before their kind, by which `answer` finds the part."""
    try:
        questions = next(conversation)
        while True:
            answers = yield {
                client: Question(f"{name}{_SEPARATOR}{question.kind}", question.payload)
                for client, question in questions.items()
            }
            questions = conversation.send(answers)
    except StopIteration:
        return
