"""FedBoosting: decision boundaries (Figure 4.2), word readers (Table 4.1, Figures 4.4 to 4.6), a poisoned client.

The settings are overrides of the recipe's config; "own." precedes those of a function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from leaktight.config.recipes import PREFIX
from leaktight.config.scenario import build_federation, centralised, load_data
from leaktight.config.settings import Config, load_config
from leaktight.core.errors import ConfigError
from leaktight.core.protocols import Aggregator
from leaktight.core.rng import Rng
from leaktight.core.types import Examples
from leaktight.data.dataset import Dataset, DatasetSource, data_root
from leaktight.data.files import MissingDataError
from leaktight.data.gaussians import TwoGaussians
from leaktight.data.partition import Holding, Partition
from leaktight.data.words.collections import Icdar, Iiit5k, Svt, Synth90k
from leaktight.engines import inprocess
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.fedboosting import FedBoosting
from leaktight.fl.federation import Federation, FederationState
from leaktight.fl.local import evaluate
from leaktight.fl.protocol import RoundOutcome, ServerState
from leaktight.reproductions.tables.own import Values, divided, workers


@dataclass(frozen=True, kw_only=True)
class _ValidationOnly(FedBoosting):
    """FedBoosting without the training results: all training losses count as equal (thesis, section 4.3.2.3)."""

    def shares(self, training: Mapping[str, float], validation: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        return super().shares(dict.fromkeys(training, 1.0), validation)


METHODS: Mapping[str, Aggregator] = {
    "FedAvg": FedAvg(),
    "FedBoosting (paper)": FedBoosting(variant="paper"),
    "FedBoosting (code)": FedBoosting(variant="code"),
    "FedBoosting (code), validation only": _ValidationOnly(variant="code"),
}
CENTRALISED = "centralised"
REAL: Mapping[str, DatasetSource] = {"IIIT5K": Iiit5k(), "SVT": Svt(), "IC15": Icdar(), "Synth90k": Synth90k()}
LEAST = 3
"""Letters of a real word, as in the thesis."""
_SIDE = 200
_POISONED = 2
"""The place of the poisoned client among five."""


def _seeds(own: Mapping[str, str]) -> range:
    return range(int(own.get("seeds", "3")))


def boundaries(settings: Sequence[str]) -> Values:
    """Figure 4.2: FedAvg, both kinds of FedBoosting and centralised training on the same clients.

    Columns: the test accuracy in percent and, for points in the plane, the percentage of the plane where the class is
    that of the centralised model, and the length of the boundary in sides of the picture.
    own.column: the begin of their names. own.seeds: trainings; a seed also draws the points.
    """
    own, rest = divided(settings)
    config = load_config(Path(f"{PREFIX}fedboosting-figure-4-2"), rest)
    values: Values = defaultdict(lambda: defaultdict(dict))
    for seed in _seeds(own):
        chosen = replace(config, seed=seed)
        if isinstance(chosen.data, TwoGaussians):
            chosen = replace(chosen, data=replace(chosen.data, draw_seed=seed))
        federated = list(METHODS)[:3]
        runs = {name: replace(chosen, aggregator=METHODS[name]) for name in federated}
        runs = {CENTRALISED: _pooled(chosen), **runs}
        planes: dict[str, Tensor] = {}
        for row, run in runs.items():
            federation = build_federation(run, *load_data(run))
            server = inprocess.run(federation, workers=1, score=False).server
            measured = {"accuracy": _accuracy(federation, server, federation.dataset.test)}
            if isinstance(chosen.data, TwoGaussians):
                planes[row] = _plane(federation, server)
                measured["as centralised, %"] = 100 * float((planes[row] == planes[CENTRALISED]).float().mean())
                measured["length of the boundary"] = _length(planes[row])
            for name, value in measured.items():
                values[row][f"{own['column']}: {name}"][f"seed {seed}"] = value
    return {row: dict(columns) for row, columns in values.items()}


def _pooled(config: Config) -> Config:
    """Centralised training on as many examples a round as all clients together use."""
    local, (_, partition) = config.local, load_data(config)
    samples = None if local.samples is None else local.samples * len(partition.clients)
    return centralised(replace(config, aggregator=FedAvg(), local=replace(local, samples=samples)))


def _accuracy(federation: Federation, server: ServerState, examples: Examples) -> float:
    return 100 * evaluate(federation.trainer, server.params, server.buffers, examples).accuracy


def _plane(federation: Federation, server: ServerState) -> Tensor:
    """The class at each place of a square of points, (S, S)."""
    ticks = torch.linspace(0, 1, _SIDE)
    upwards, right = torch.meshgrid(ticks, ticks, indexing="ij")
    points = torch.stack([right, upwards], dim=-1).reshape(-1, 1, 1, 2)
    with torch.no_grad():
        outputs: Tensor = functional_call(federation.trainer.model, {**server.params, **server.buffers}, (points,))
    return outputs.argmax(1).reshape(_SIDE, _SIDE)


def _length(plane: Tensor) -> float:
    """How many neighbours differ in class, in sides of the square.

    >>> _length(torch.tensor([[0, 0], [1, 1]]))
    1.0
    """
    across = (plane[:, 1:] != plane[:, :-1]).sum() + (plane[1:] != plane[:-1]).sum()
    return float(across) / len(plane)


def words(settings: Sequence[str]) -> Values:
    """Table 4.1 and Figures 4.4 to 4.6: word accuracy in percent of a federation that reads words.

    Columns: "rendered words", the config's test words, real words of 3 letters or more where they are at hand, those of
    them that are as long as the config's (", short"), and by passes over the data ("1", "2") the config's test words.
    own.row: the row. own.seeds: trainings. own.results: "validation" leaves the training results out.
    own.real: "no" leaves real words out. own.workers: processes.
    """
    own, rest = divided(settings)
    config = load_config(Path(f"{PREFIX}fedboosting-figure-4-4"), rest)
    if own.get("results") == "validation":
        config = replace(config, aggregator=_ValidationOnly(variant="code"))
    dataset, _ = load_data(config)
    real = {} if own.get("real") == "no" else _real_words(data_root(config.data_root), dataset)
    tests = {"rendered words": dataset.test, **real}
    columns: dict[str, dict[str, float]] = defaultdict(dict)
    for seed in _seeds(own):
        for column, value in _reader(replace(config, seed=seed), dataset, tests, workers(own)).items():
            columns[column][f"seed {seed}"] = value
    return {own["row"]: dict(columns)}


def _reader(config: Config, dataset: Dataset, tests: Mapping[str, Examples], processes: int | None) -> dict[str, float]:
    """The columns of one training."""
    partition = config.partition.split(dataset, rng=Rng(config.seed).child("partition"))
    federation = build_federation(config, dataset, partition)
    columns: dict[str, float] = {}

    def after_round(outcome: RoundOutcome, state: FederationState) -> None:
        passes = config.local.epochs * outcome.state.round
        columns[str(passes)] = _accuracy(federation, outcome.state, dataset.test)

    server = inprocess.run(federation, workers=processes, after_round=after_round, score=False).server
    return {**columns, **{name: _accuracy(federation, server, examples) for name, examples in tests.items()}}


def _real_words(root: Path, dataset: Dataset) -> dict[str, Examples]:
    """The real words that are at hand, training and test part alike, as no model has seen either."""
    own = (dataset.train.targets >= 0).sum(1)
    found: dict[str, Examples] = {}
    for name, source in REAL.items():
        try:
            data = source.load(root)
        except MissingDataError:
            continue
        both = [data.train, data.test]
        all_words = Examples(torch.cat([each.inputs for each in both]), torch.cat([each.targets for each in both]))
        lengths = (all_words.targets >= 0).sum(1)
        found[name] = all_words.take((lengths >= LEAST).nonzero().flatten())
        alike = (lengths >= own.min()) & (lengths <= own.max())
        found[f"{name}, short"] = all_words.take(alike.nonzero().flatten())
    return found


def poisoned(settings: Sequence[str]) -> Values:
    """A client of five whose labels, training and validation, are in random order, and who holds half of all examples.

    It reports its losses honestly. Columns: the test accuracy in percent without and with it, and what is lost to it.
    own.seeds: trainings. own.examples: of all clients together.
    """
    own, rest = divided(settings)
    config = load_config(Path(f"{PREFIX}fedboosting-figure-4-4"), rest)
    dataset = config.data.load(data_root(config.data_root))
    values: Values = defaultdict(lambda: defaultdict(dict))
    for seed in _seeds(own):
        partition = dealt(dataset, int(own.get("examples", "12000")), Rng(seed).child("deal"))
        for row, method in METHODS.items():
            chosen = replace(config, seed=seed, aggregator=method)
            federation = build_federation(chosen, dataset, partition)
            found = [_trained(each) for each in (federation, with_poison(federation, Rng(seed).child("poison")))]
            said = {"clean": found[0], "poisoned": found[1], "lost to the poisoned client": found[0] - found[1]}
            for column, value in said.items():
                values[row][column][f"seed {seed}"] = value
    return {row: dict(columns) for row, columns in values.items()}


def _trained(federation: Federation) -> float:
    server = inprocess.run(federation, workers=1, score=False).server
    return _accuracy(federation, server, federation.dataset.test)


def dealt(dataset: Dataset, total: int, rng: Rng) -> Partition:
    """Five clients, of which one holds half of these examples; a fifth of each holding is for validation."""
    sizes = [total // 2 if place == _POISONED else total // 8 for place in range(5)]
    if sum(sizes) > len(dataset.train):
        raise ConfigError(f"expected own.examples of at most {len(dataset.train)}, got {total}; lower it")
    order = torch.randperm(len(dataset.train), generator=rng.public())[: sum(sizes)]
    holdings = [(part[: -(len(part) // 5)], part[-(len(part) // 5) :]) for part in order.split(sizes)]
    return Partition(
        {
            f"client-{place:03d}": Holding(train.sort().values, validation.sort().values)
            for place, (train, validation) in enumerate(holdings)
        }
    )


def with_poison(federation: Federation, rng: Rng) -> Federation:
    """The same with the labels of one client in random order."""
    share = federation.shares[sorted(federation.shares)[_POISONED]]
    targets = federation.examples.targets.clone()
    order = torch.randperm(share.stop - share.start, generator=rng.public())
    targets[share.start : share.stop] = targets[share.start : share.stop][order]
    return federation.with_examples(Examples(federation.examples.inputs, targets))


def sources(settings: Sequence[str]) -> Values:
    """Figure 4.3: how often logistic regression on ten plain features tells which client an image is from, in percent.

    Features: mean and deviation of each channel, colourfulness, and steps between neighbours. The second row is a
    control: the images of the first client in two random halves. own.seeds: random divisions of the images.
    """
    own, rest = divided(settings)
    config = load_config(Path(f"{PREFIX}fedboosting-figure-4-4"), rest)
    dataset, _ = load_data(config)
    if dataset.groups is None:
        raise ConfigError(f"expected data with a source for each example, got {dataset.name}; choose other data")
    features, clients = _features(dataset.train), dataset.groups.numpy()
    first = features[clients == 0]
    values: Values = {"the two clients": {"told apart, %": {}}, "two halves of one client": {"told apart, %": {}}}
    for seed in _seeds(own):
        draws = Rng(seed).child("sources").public_numpy()
        halves = draws.permutation(np.arange(len(first)) % 2)
        for row, seen, groups in (
            ("the two clients", features, clients),
            ("two halves of one client", first, halves),
        ):
            values[row]["told apart, %"][f"seed {seed}"] = 100 * _told_apart(seen, groups, draws)
    return values


def _features(examples: Examples) -> np.ndarray:
    """(N, 10) for images (N, 3, H, W)."""
    images = examples.inputs.float() / 255
    columns = [images.mean((2, 3)), images.std((2, 3)), (images.amax(1) - images.amin(1)).mean((1, 2))[:, None]]
    steps = [images.diff(dim=dim).abs().mean((1, 2, 3))[:, None] for dim in (2, 3)]
    spread = images.mean(1).flatten(1).std(1)[:, None]
    return torch.cat([*columns, *steps, spread], 1).numpy()


def _told_apart(features: np.ndarray, groups: np.ndarray, draws: np.random.Generator) -> float:
    """The accuracy on one half of the examples, after training on the other."""
    from sklearn.linear_model import LogisticRegression  # slow to import
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    order = draws.permutation(len(features))
    known, asked = order[::2], order[1::2]
    judge = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(features[known], groups[known])
    return float(judge.score(features[asked], groups[asked]))
