"""Federations of many clients and of large models: memory of the process, and seconds, as the number of clients grows.

Every client of the federation trains in the one round that is played, on one example. Memory is that which the process
cannot give back (`RssAnon`), beyond what it had before the round, at its most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.scenes import alone
from leaktight.config.catalogue import MODELS
from leaktight.core.rng import Rng
from leaktight.core.tensors import num_bytes, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset
from leaktight.data.partition import Iid
from leaktight.engines import inprocess
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.federation import Federation, assemble
from leaktight.fl.plan import FederationPlan
from leaktight.models.initialise import build_model

STATUS = Path("/proc/self/status")


def perceptron(dataset: Dataset) -> nn.Module:
    """A network of 50 million parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 12288), nn.ReLU(), nn.Linear(12288, 1000), nn.Linear(1000, 10))


def lenet(dataset: Dataset) -> nn.Module:
    return build_model(MODELS["lenet_zhu"](), dataset.inputs, 10, init="default", rng=Rng(0))


CASES: tuple[tuple[str, Callable[[Dataset], nn.Module], tuple[int, ...]], ...] = (
    ("LeNet-Zhu", lenet, (100, 1000)),
    ("50 million parameters", perceptron, (8, 32)),
)


def federation(network: Callable[[Dataset], nn.Module], clients: int) -> Federation:
    generator = Rng(0).public()
    images = torch.randint(256, (clients, 3, 32, 32), generator=generator, dtype=torch.uint8)
    examples = Examples(images, torch.randint(10, (clients,), generator=generator))
    dataset = Dataset("noise", examples, examples, tuple("0123456789"))
    return assemble(
        dataset,
        Iid(clients=clients, validation=0.0).split(dataset, rng=Rng(0)),
        network(dataset),
        local=LocalTraining(batch_size=1, learning_rate=0.01),
        aggregator=FedAvg(),
        plan=FederationPlan(rounds=1),
        rng=Rng.fresh(),
    )


def measure(network: Callable[[Dataset], nn.Module], clients: int) -> tuple[float, float, float]:
    """Megabytes of an update, megabytes at the most, and seconds of a round."""
    made = federation(network, clients)
    before, most, ended = held(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.02):
            most = max(most, held() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    inprocess.run(made, workers=1, score=False)
    seconds = time.perf_counter() - began
    ended.set()
    watching.join()
    return num_bytes(parameters_of(made.trainer.model)) / 1e6, most, seconds


def held() -> float:
    """Megabytes of this process that are not pages of files."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1000


def main() -> None:
    if not STATUS.exists():
        print("this benchmark needs /proc, which only Linux has")
        return
    for name, network, numbers in CASES:
        for clients in numbers:
            update, most, seconds = alone(measure, network, clients)
            print(
                f"{name:>22}, {clients:5d} clients of {update:7.1f} MB an update: {most:7.0f} MB at the most, "
                f"{update * clients:7.0f} MB if all were held; {seconds:6.1f} s",
                flush=True,
            )
