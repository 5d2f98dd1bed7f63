"""The in-process engine: worker processes against one process, and its overhead over a bare PyTorch loop.

10 clients of 500 colour images, LeNet-Zhu, batch 32, one epoch each.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F

from bench.timing import medians
from leaktight.config.catalogue import MODELS
from leaktight.core.rng import Rng
from leaktight.core.training import LocalTraining
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Iid
from leaktight.engines.inprocess import Carrier, RoundWork, RoundWorkers
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.federation import Federation, assemble
from leaktight.fl.local import plan_batches
from leaktight.fl.plan import FederationPlan
from leaktight.fl.protocol import play_round
from leaktight.models.initialise import build_model
from leaktight.runtime.executor import Inline
from leaktight.runtime.processes import Processes, available_cores, one_thread

CLIENTS, SAMPLES, BATCH = 10, 500, 32


def federation() -> Federation:
    generator = Rng(0).public()
    count = CLIENTS * SAMPLES
    images = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    examples = Examples(images, torch.randint(10, (count,), generator=generator))
    dataset = Dataset("noise", examples, examples.part(0, 1000), tuple("0123456789"))
    return assemble(
        dataset,
        Iid(clients=CLIENTS, validation=0.0).split(dataset, rng=Rng(0)),
        build_model(MODELS["lenet_zhu"](), dataset.inputs, 10, init="default", rng=Rng(0)),
        local=LocalTraining(batch_size=BATCH, learning_rate=0.01),
        aggregator=FedAvg(),
        plan=FederationPlan(rounds=1),
        rng=Rng.fresh(),
    )


def engine_round(fed: Federation, workers: RoundWorkers) -> None:
    """One round as the engine plays it, without scoring."""
    conversation = play_round(fed.server, fed.first_state().server)
    try:
        conversation.send(Carrier(fed, workers).exchange(next(conversation)))
    except StopIteration:
        return


def bare_round(fed: Federation) -> None:
    """The same work as anyone would write it: model, optimiser, loop over batches, average of the weights."""
    total: dict[str, torch.Tensor] = {}
    for name in fed.shares:
        client = fed.client(name)
        model = copy.deepcopy(fed.trainer.model).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        chosen, steps = plan_batches(len(client.train), fed.trainer.local, rng=Rng.fresh())
        for step in steps:
            batch = client.train.batch(chosen[step])
            optimizer.zero_grad()
            F.cross_entropy(model(batch.inputs), batch.targets).backward()
            optimizer.step()
        for key, tensor in model.state_dict().items():
            total[key] = total.get(key, torch.zeros_like(tensor)) + tensor / len(fed.shares)


def main() -> None:
    fed = federation()
    cores = available_cores()
    work = RoundWork(fed)
    with one_thread(), Processes(cores).start(work) as many, Inline().start(work) as one:
        seconds = medians(
            {
                "bare": partial(bare_round, fed),
                "one process": partial(engine_round, fed, one),
                f"{cores} processes": partial(engine_round, fed, many),
            },
            repeats=15,
        )
    bare, single, pooled = seconds.values()
    print(f"{CLIENTS} LeNet clients, {SAMPLES} samples, batch {BATCH}; one thread per process")
    for name, value in seconds.items():
        print(f"{name:>14}: {1000 * value:7.0f} ms a round")
    print(f"overhead of the engine over a bare PyTorch loop: {100 * (single / bare - 1):+.1f} % (target: under 10 %)")
    print(f"{cores} processes against one: {single / pooled:.2f} times (target: 1.8 on two cores)")
