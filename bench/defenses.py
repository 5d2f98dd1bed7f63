"""What each defense adds to a local step: LeNet-Zhu, CIFAR-shaped images, E = 5, B = 32, one thread.

A client's whole first round is timed (500 examples, as with CIFAR on 100 clients), so that a network that grew counts
as well as the hooks. OUTPOST acts ever more rarely, so its later rounds cost less than this. Defenses take turns with
no defense; the figures are ratios within one run, of the fastest rounds in this process's own time. Settings are the
catalogue's defaults.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch

from bench.timing import fastest
from leaktight.config.catalogue import DEFENSES, MODELS
from leaktight.core.inputs import Images
from leaktight.core.protocols import Defense
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Broadcast, Examples, State
from leaktight.defenses.clipping import Clipping
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.stack import Stack
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.client import Client
from leaktight.fl.local import Trainer
from leaktight.fl.messages import Answered, Ask, Train
from leaktight.fl.plan import Setup
from leaktight.fl.state import ClientState
from leaktight.models.initialise import build_model

EXAMPLES = 500
LOCAL = LocalTraining(epochs=5, batch_size=32, learning_rate=0.01)
SLOW = ("soteria",)
"""Measured apart and on one batch, lest the others wait for them."""

NEEDY: Mapping[str, Defense] = {"stack": Stack(parts=(Clipping(), AdditiveNoise()))}
"""Settings of the kinds that have no defaults."""


class Round:
    """One client's first round under a defense, after what the defense settles before it."""

    def __init__(self, defense: Defense, examples: int) -> None:
        clients = {name: make_client(name, defense, examples) for name in ("a", "b")}
        self.client, self.state = clients["a"], settled(defense, clients).get("a")
        model = self.client.trainer.model
        self.request = Train(Broadcast(parameters_of(model), buffers_of(model), 0), LOCAL.learning_rate)
        self.in_hooks: list[float] = []

    def __call__(self) -> None:
        report = self.client.train_round(self.request, self.state).report
        self.in_hooks.append(report["defense_seconds"] / report["seconds"])


def make_client(name: str, defense: Defense, number: int) -> Client:
    generator = Rng(0).child(name).public()
    images = torch.randint(256, (number, 3, 32, 32), generator=generator, dtype=torch.uint8)
    examples = Examples(images, torch.randint(10, (number,), generator=generator))
    model = build_model(MODELS["lenet_zhu"](), Images(3, 32, 32), 10, init="default", rng=Rng(0))
    shared = defense.prepare(model, rng=Rng(1))
    return Client(
        name, examples, examples, Setup(Trainer(shared, LOCAL, defense=defense), FedAvg()), Rng.fresh().child(name)
    )


def settled(defense: Defense, clients: Mapping[str, Client]) -> dict[str, ClientState]:
    """What every client remembers after the conversation before the first round."""
    states: dict[str, ClientState] = {}
    conversation = defense.agree(sorted(clients))
    answers: dict[str, State] | None = None
    while True:
        try:
            questions = next(conversation) if answers is None else conversation.send(answers)
        except StopIteration:
            return states
        answers = {}
        for name, question in questions.items():
            reply, states[name] = clients[name].handle(Ask(question, "defense"), states.get(name))
            assert isinstance(reply, Answered)
            answers[name] = reply.payload


def compare(kinds: Sequence[str], *, examples: int, repeats: int) -> None:
    """Rows of the table: the time of a step, how it compares to no defense, and what the hooks alone take of it."""
    rounds = {kind: Round(NEEDY.get(kind) or DEFENSES[kind](), examples) for kind in ("none", *kinds)}
    seconds = fastest(rounds, repeats)
    for kind, value in seconds.items():
        step, ratio = 1000 * value / LOCAL.num_steps(examples), value / seconds["none"]
        hooks = 100 * statistics.median(rounds[kind].in_hooks)
        print(f"{kind:>12} {step:10.2f} ms {ratio:9.3f} {100 * (ratio - 1):+10.1f} % {hooks:8.1f} %", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    print(f"LeNet-Zhu, 3x32x32, E = {LOCAL.epochs}, B = {LOCAL.batch_size}, {LOCAL.num_steps(EXAMPLES)} steps a round")
    print(f"{'defense':>12} {'a step':>13} {'times':>9} {'extra':>12} {'in hooks':>10}")
    compare([kind for kind in DEFENSES if kind != "none" and kind not in SLOW], examples=EXAMPLES, repeats=9)
    print("the slow ones, beside no defense again:")
    compare(SLOW, examples=LOCAL.batch_size, repeats=3)
