"""Two clients with points from different Gaussians: what FedAvg, FedBoosting and centralised training make of them.

Run it with `python examples/decision_boundary.py`; it needs no download. It prints accuracies on the test points of
both clients and draws the boundaries. `--set` changes the recipe, as in `leaktight train`.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from leaktight.config.scenario import build_federation, centralised, load_data
from leaktight.config.settings import Config, load_config
from leaktight.core.protocols import Aggregator
from leaktight.core.types import Examples
from leaktight.data.gaussians import REACH, coordinates
from leaktight.engines import inprocess
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.fedboosting import FedBoosting
from leaktight.fl.local import evaluate
from leaktight.report.figures import Boundary, Points, plot_boundaries

RECIPE = Path("recipe:fedboosting-figure-4-2")
METHODS: dict[str, Aggregator] = {
    "fedavg": FedAvg(),
    "fedboosting (paper)": FedBoosting(variant="paper"),
    "fedboosting (code)": FedBoosting(variant="code"),
}


def trained(config: Config, title: str) -> Boundary:
    """Train as the config says; print the accuracy and keep the boundary."""
    dataset, partition = load_data(config)
    federation = build_federation(config, dataset, partition)
    server = inprocess.run(federation, workers=1, score=False).server
    score = evaluate(federation.trainer, server.params, server.buffers, dataset.test)
    print(f"{title}: {100 * score.accuracy:.2f} %, loss {score.loss:.4f}", flush=True)
    with torch.no_grad():
        outputs: Tensor = functional_call(federation.trainer.model, {**server.params, **server.buffers}, (grid(),))
    chances = outputs.softmax(1)[:, 1].reshape(200, 200)
    return Boundary(f"{title}: {100 * score.accuracy:.2f} %", chances.numpy())


def grid(side: int = 200) -> Tensor:
    """Inputs for a square of points, row by row from below."""
    ticks = torch.linspace(0, 1, side)
    upwards, right = torch.meshgrid(ticks, ticks, indexing="ij")
    return torch.stack([right, upwards], dim=-1).reshape(-1, 1, 1, 2)


def some(title: str, examples: Examples, number: int = 2000) -> Points:
    chosen = examples.take(torch.linspace(0, len(examples) - 1, min(number, len(examples))).long())
    return Points(title, coordinates(chosen.inputs).numpy(), chosen.targets.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="overrides")
    parser.add_argument("--out", type=Path, default=Path("decision-boundary.png"))
    chosen = parser.parse_args()
    config = load_config(RECIPE, chosen.overrides)
    models = [trained(replace(config, aggregator=method), title) for title, method in METHODS.items()]
    models.append(trained(centralised(replace(config, aggregator=FedAvg())), "centralised"))
    dataset, partition = load_data(config)
    sets = [some(name, dataset.train.take(holding.train)) for name, holding in partition.clients.items()]
    plot_boundaries(models, [*sets, some("test points", dataset.test)], REACH, chosen.out)
    print(f"boundaries: {chosen.out}")


if __name__ == "__main__":
    main()
