"""Two clients that learn to read words, each from images of its own kind: FedAvg and FedBoosting side by side.

Run it with `python examples/text_recognition.py`; it needs no download. Every cell of the grid goes equally often over
the data, so that more local epochs mean fewer rounds. Models are scored on rendered words whose spelling none of the
clients has, and on real words where they lie below the data root (IIIT5K, Synth90k). A finished cell is kept in the
folder of results and not run again. `--set` changes the recipe, as in `leaktight train`.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from leaktight.cli.display import progress_bars
from leaktight.config.scenario import build_federation, load_data
from leaktight.config.settings import Config, load_config
from leaktight.core.files import write_atomically
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset, DatasetSource, data_root
from leaktight.data.files import MissingDataError
from leaktight.data.partition import Partition
from leaktight.data.words.collections import Iiit5k, Synth90k
from leaktight.engines import inprocess
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.federation import FederationState
from leaktight.fl.local import evaluate
from leaktight.fl.protocol import RoundOutcome
from leaktight.report.figures import AccuracyCurve, plot_accuracy_curves

RECIPE = Path("recipe:fedboosting-figure-4-4")
RENDERED = "rendered words"
LEAST = 3  # letters of a real word, as in the thesis
WIDE = 150  # characters in a line of the table, where there is no terminal to tell
REAL: Mapping[str, DatasetSource] = {"IIIT5K": Iiit5k(), "Synth90k": Synth90k()}

Scores = dict[str, list[float]]
"""For each test set the word accuracy after every round."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    method: str
    epochs: int
    batch_size: int
    config: Config

    @property
    def label(self) -> str:
        """As in the thesis: epochs and batch size."""
        return f"{self.epochs}E{self.batch_size}B"


def grid(config: Config, batch_sizes: list[int], epochs: list[int]) -> list[Cell]:
    """FedAvg and the recipe's own aggregator for each batch size and number of epochs; equally many passes for all."""
    passes = config.plan.rounds * config.local.epochs
    cells = []
    for count in epochs:
        plan = replace(config.plan, rounds=max(passes // count, 1))
        for size in batch_sizes:
            local = replace(config.local, epochs=count, batch_size=size)
            for method, aggregator in {"FedAvg": FedAvg(), "FedBoosting": config.aggregator}.items():
                cells.append(Cell(method, count, size, replace(config, aggregator=aggregator, plan=plan, local=local)))
    return cells


def real_words(root: Path, shortest: int, longest: int) -> dict[str, Examples]:
    """The real words that are there: all of 3 letters or more, as in the thesis, and those as long as rendered ones."""
    found = {}
    for name, source in REAL.items():
        try:
            data = source.load(root)
        except MissingDataError:
            continue
        # Training and test part alike: no model has seen either.
        words = Examples(
            torch.cat([data.train.inputs, data.test.inputs]), torch.cat([data.train.targets, data.test.targets])
        )
        lengths = (words.targets >= 0).sum(1)
        found[name] = words.take((lengths >= LEAST).nonzero().flatten())
        alike = (lengths >= shortest) & (lengths <= longest)
        found[f"{name}, {shortest} to {longest} letters"] = words.take(alike.nonzero().flatten())
    return found


def run(
    cell: Cell, dataset: Dataset, partition: Partition, tests: Mapping[str, Examples], progress: Progress
) -> Scores:
    """Train as the cell says and score the model on every test set after every round."""
    federation = build_federation(cell.config, dataset, partition)
    task = progress.add_task(f"{cell.method} {cell.label}", total=cell.config.plan.rounds)
    scores: Scores = {name: [] for name in tests}

    def after_round(outcome: RoundOutcome, state: FederationState) -> None:
        for name, examples in tests.items():
            score = evaluate(federation.trainer, outcome.state.params, outcome.state.buffers, examples)
            scores[name].append(score.accuracy)
        said = f"{cell.method} {cell.label}: {100 * scores[RENDERED][-1]:.1f} %"
        progress.update(task, advance=1, description=said)
        if not progress.console.is_terminal:
            progress.console.print(f"{said} after round {len(scores[RENDERED])}", highlight=False)

    inprocess.run(federation, workers=1, after_round=after_round, score=False)
    return scores


def finished(path: Path, config_text: str) -> Scores | None:
    """The scores of a cell that was run before with the same settings."""
    if not path.is_file():
        return None
    kept = json.loads(path.read_text())
    scores: Scores | None = kept["accuracy"] if kept["config"] == config_text else None
    return scores


def draw(results: Mapping[Cell, Scores], picture: Path) -> None:
    rows: dict[str, dict[str, list[AccuracyCurve]]] = {}
    for cell, scores in results.items():
        for name in (RENDERED, *REAL):
            if name not in scores:
                continue
            accuracies = scores[name]
            places = [cell.epochs * (place + 1) for place in range(len(accuracies))]
            curve = AccuracyCurve(cell.label, places, accuracies)
            rows.setdefault(cell.method, {}).setdefault(name, []).append(curve)
    plot_accuracy_curves(rows, picture, across="passes over the data (a mark for each round)")


def table(results: Mapping[Cell, Scores], tests: Mapping[str, Examples]) -> Table:
    made = Table(
        "method", "cell", "rounds", *(f"{name} ({len(examples)})" for name, examples in tests.items()), box=None
    )
    for cell, scores in results.items():
        last = (f"{100 * scores[name][-1]:.1f}" for name in tests)
        made.add_row(cell.method, cell.label, str(cell.config.plan.rounds), *last)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="overrides")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("text-recognition"))
    chosen = parser.parse_args()
    config = load_config(RECIPE, chosen.overrides)
    dataset, partition = load_data(config)
    lengths = (dataset.train.targets >= 0).sum(1)
    tests = {
        RENDERED: dataset.test,
        **real_words(data_root(chosen.data_root), int(lengths.min()), int(lengths.max())),
    }
    results: dict[Cell, Scores] = {}
    with progress_bars(Console(stderr=True)) as progress:
        for cell in grid(config, chosen.batch_sizes, chosen.epochs):
            path = chosen.out / f"{cell.method.lower()}-{cell.label}.json"
            scores = finished(path, cell.config.to_toml())
            if scores is None or set(scores) != set(tests):
                scores = run(cell, dataset, partition, tests, progress)
                kept = {"config": cell.config.to_toml(), "accuracy": scores}
                write_atomically(path, json.dumps(kept, indent=1))
            results[cell] = scores
    draw(results, chosen.out / "curves.png")
    print("word accuracy (%) after the last round, with the number of words:")
    Console(width=max(Console().width, WIDE)).print(table(results, tests), highlight=False)
    print(f"curves: {chosen.out / 'curves.png'}")


if __name__ == "__main__":
    main()
