"""A malicious server in an ordinary federation: the rounds that it asks for, and what it sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tests.seeds import replayed
from torch import nn

from leaktight.audits.experiment import tampered, truth_of
from leaktight.core.protocols import ActiveAttack, Defense, Guard
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Mode, Observation, RoundTrace
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Iid
from leaktight.engines.inprocess import run
from leaktight.fl.aggregators import FedAvg, FedSgd
from leaktight.fl.federation import Federation, assemble
from leaktight.fl.plan import FederationPlan

KNOWS = frozenset({Knowledge.BATCH_SIZE, Knowledge.LOCAL_TRAINING, Knowledge.PUBLIC_DATA})


@dataclass(frozen=True)
class Scene:
    """A federation whose clients train on all they have in one step, and what its malicious server sees."""

    federation: Federation
    names: tuple[str, ...]
    public: Batch
    threat: ThreatModel

    def play(self, attack: ActiveAttack, seed: int = 0) -> tuple[Batch, list[Observation]]:
        """All queries of the attack: the truth behind the last, and what was seen of each."""
        seen: list[Observation] = []
        traces: list[RoundTrace] = []
        state = self.federation.first_state()
        honest = state.server
        while True:
            asked = replace(honest, round=len(seen))
            model = self.federation.trainer.model
            sent = attack.tamper(
                Broadcast(asked.params, asked.buffers, asked.round, model), seen, rng=replayed(seed).child("tamper")
            )
            if sent is None:
                members = self.names[:1] if self.threat.sees == "client" else sorted(traces[-1].clients)
                return truth_of(traces[-1:], members), seen
            federation, before = tampered(self.federation, replace(state, server=asked), sent)
            played: list[RoundTrace] = []
            state = run(federation, before, workers=1, until=len(seen) + 1, record=played.append, score=False)
            traces.append(replace(played[0], public_data=self.public))
            seen.append(self.threat.observe(traces[-1], self.names[0]))


def scene(
    data: Dataset,
    model: nn.Module,
    *,
    batch: int,
    examples: Sequence[int] | None = None,
    clients: int = 1,
    steps: str = "gradient",
    mode: Mode = "train",
    defense: Defense = Defense(),
    guard: Guard | None = None,
    threat: ThreatModel | None = None,
    seed: int = 0,
) -> Scene:
    """Clients of `batch` examples each: those named, or the first of a random order; the rest is public."""
    order = torch.randperm(len(data.train), generator=replayed(seed).child("order").public())
    own = torch.tensor(examples) if examples is not None else order[: batch * clients]
    held = replace(data, train=data.train.take(own), groups=None)
    public = data.test.batch(torch.randperm(len(data.test), generator=replayed(seed).child("public").public())[:512])
    federation = assemble(
        held,
        Iid(clients=clients, validation=0.0).split(held, rng=replayed(seed)),
        model,
        local=LocalTraining(batch_size=batch, learning_rate=0.1),
        aggregator=FedSgd() if steps == "gradient" else FedAvg(),
        plan=FederationPlan(rounds=1000),
        defense=defense,
        mode=mode,
        guard=guard,
        rng=replayed(seed).child("federation"),
    )
    names = tuple(sorted(federation.shares))
    return Scene(federation, names, public, threat or ThreatModel(server="malicious", knows=KNOWS))
