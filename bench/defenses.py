"""What each defense adds to a local step: LeNet-Zhu, CIFAR-shaped images, E = 5, B = 32, one thread.

A client's whole first round is timed (500 examples, as with CIFAR on 100 clients), so that a network that grew counts
as well as the hooks. Defenses take turns with no defense; the figures are ratios within one run, of the fastest rounds
in this process's own time. Settings are the catalogue's defaults. OUTPOST acts ever more rarely, so ten rounds of it
follow, on two networks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
NETWORKS = {"lenet_zhu": EXAMPLES, "resnet20": 64}
"""On which OUTPOST is timed over several rounds, with the examples of its client."""
ROUNDS = 10
SLOW = ("soteria",)
"""Measured apart and on one batch, lest the others wait for them."""

NEEDY: Mapping[str, Defense] = {"stack": Stack(parts=(Clipping(), AdditiveNoise()))}
"""Settings of the kinds that have no defaults."""


class Round:
    """One client's first round under a defense, after what the defense settles before it."""

    def __init__(self, defense: Defense, examples: int, network: str = "lenet_zhu") -> None:
        clients = {name: make_client(name, defense, examples, network) for name in ("a", "b")}
        self.client, self.state = clients["a"], settled(defense, clients).get("a")
        model = self.client.trainer.model
        self.request = Train(Broadcast(parameters_of(model), buffers_of(model), 0), LOCAL.learning_rate)
        self.in_hooks: list[float] = []

    def __call__(self) -> None:
        report = self.client.train_round(self.request, self.state).report
        self.in_hooks.append(report["defense_seconds"] / report["seconds"])

    def several(self, rounds: int) -> list[tuple[float, float]]:
        """The seconds in hooks and in all, of each of the client's rounds one after another."""
        state, seconds = self.state, []
        for number in range(rounds):
            broadcast = replace(self.request.broadcast, round=number)
            done = self.client.train_round(replace(self.request, broadcast=broadcast), state)
            state = done.state
            seconds.append((done.report["defense_seconds"], done.report["seconds"]))
        return seconds


def make_client(name: str, defense: Defense, number: int, network: str) -> Client:
    generator = Rng(0).child(name).public()
    images = torch.randint(256, (number, 3, 32, 32), generator=generator, dtype=torch.uint8)
    examples = Examples(images, torch.randint(10, (number,), generator=generator))
    model = build_model(MODELS[network](), Images(3, 32, 32), 10, init="default", rng=Rng(0))
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


def over_rounds(kind: str, network: str, examples: int) -> None:
    """How much of a client's time a defense takes in its first round, and in several."""
    turns = [Round(DEFENSES[kind](), examples, network).several(ROUNDS) for _ in range(3)]
    hooks, whole = zip(*(zip(*turn, strict=True) for turn in turns), strict=True)
    first = statistics.median(hook[0] / total[0] for hook, total in zip(hooks, whole, strict=True))
    mean = statistics.median(sum(hook) / sum(total) for hook, total in zip(hooks, whole, strict=True))
    steps = LOCAL.num_steps(examples)
    print(
        f"{kind} on {network}, {steps} steps a round: {100 * first:.2f} % of the first round, {100 * mean:.2f} % of "
        f"{ROUNDS} rounds",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    print(f"LeNet-Zhu, 3x32x32, E = {LOCAL.epochs}, B = {LOCAL.batch_size}, {LOCAL.num_steps(EXAMPLES)} steps a round")
    print(f"{'defense':>12} {'a step':>13} {'times':>9} {'extra':>12} {'in hooks':>10}")
    compare([kind for kind in DEFENSES if kind != "none" and kind not in SLOW], examples=EXAMPLES, repeats=9)
    print("the slow ones, beside no defense again:")
    compare(SLOW, examples=LOCAL.batch_size, repeats=3)
    for network, examples in NETWORKS.items():
        over_rounds("outpost", network, examples)
