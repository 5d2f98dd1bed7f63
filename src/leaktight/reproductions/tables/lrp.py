"""LRP's Table 1, two clients with learning rates of their own, and Figure 4, the losses between two latents.

The settings are overrides of the recipe's config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import correlation
from typing import TypeAlias

import torch
from torch import Tensor, nn

from leaktight.api import audit
from leaktight.attacks.generative.ggl import Ggl
from leaktight.audits.experiment import TrialRunner, truth_of
from leaktight.audits.plan import Experiment, TrialSpec
from leaktight.config.settings import Config, load_config
from leaktight.config.toml import kind_of
from leaktight.core.errors import ConfigError
from leaktight.core.inputs import Images
from leaktight.core.protocols import ClientFacts, Defense, Report, RoundPlan
from leaktight.core.rng import Rng, global_seed
from leaktight.core.types import State
from leaktight.data.dataset import Dataset, data_root
from leaktight.data.partition import Holding, Partition
from leaktight.defenses.lrp import Lrp
from leaktight.engines import inprocess
from leaktight.fl.aggregators import FedAvg
from leaktight.fl.federation import assemble
from leaktight.fl.local import evaluate
from leaktight.metrics import Resources, build_metrics
from leaktight.models.gan import Generator, MlpNetwork
from leaktight.models.initialise import build_model

Values: TypeAlias = dict[str, dict[str, dict[str, float]]]

RATES = (0.005, 0.01, 0.02)
FEW, MANY = (0, 1), tuple(range(2, 10))
"""The labels of the first and of the second client."""
_MODELS = {"shallow_cnn": "CNN", "mlp": "MLP", "logistic_regression": "logistic regression"}

DEFENSES = {"none": "no defense", "noise": "additive noise", "ada_lrp": "LRP"}
ALPHAS = tuple(place / 10 for place in range(11))
_STARTS, _INVERSIONS = 8, 400
_INSIDE = 1 - 1e-6


@dataclass(frozen=True, kw_only=True)
class _OwnRates(Defense):
    """Each client's own learning rate. rates: by client, in the order of names. spread: as in `Lrp`."""

    rates: tuple[float, ...]
    spread: float = 0.0

    def start(self, model: nn.Module, facts: ClientFacts, *, rng: Rng) -> tuple[nn.Module, State]:
        return model, {"rate": self.rates[int(facts.client.rpartition("-")[2])]}

    def on_round(self, plan: RoundPlan, state: State, *, rng: Rng, report: Report) -> tuple[RoundPlan, State]:
        draws = 1 + self.spread * (2 * rng.secret().uniform(len(plan.learning_rates)) - 1)
        return replace(plan, learning_rates=tuple(float(state["rate"] * draw) for draw in draws)), state


def two_clients(settings: Sequence[str]) -> Values:
    """Table 1: the test accuracy in percent for every pair of rates, for the config's network.

    `audit.trials` is the number of seeds. The defense `lrp` says by its `spread` whether rates are drawn.
    """
    config = load_config(Path("recipe:lrp-table-1"), settings)
    seeds = config.audit.trials if config.audit else "auto"
    if not isinstance(seeds, int) or not isinstance(config.defense, Lrp):
        raise ConfigError("expected audit.trials as the number of seeds and the defense lrp, got others; set them")
    spread = config.defense.spread
    row = f"{_MODELS[str(kind_of(config.model.source))]}{', perturbed' if spread else ''}"
    dataset = config.data.load(data_root(config.data_root))
    return {
        row: {
            f"{first:g}, {second:g}": {
                f"seed {seed}": 100 * _accuracy(config, dataset, _OwnRates(rates=(first, second), spread=spread), seed)
                for seed in range(seeds)
            }
            for first, second in product(RATES, repeat=2)
        }
    }


def two_holdings(dataset: Dataset, shard: int, rng: Rng) -> Partition:
    """Four shards of each of two labels for the first client, one shard of each other label for the second."""
    draw = rng.public()
    targets = dataset.train.targets

    def some(label: int, number: int) -> Tensor:
        members = torch.nonzero(targets == label).flatten()
        return members[torch.randperm(len(members), generator=draw)[:number]]

    owned = [
        torch.cat([some(label, number) for label in labels]) for labels, number in ((FEW, 4 * shard), (MANY, shard))
    ]
    empty = torch.empty(0, dtype=torch.long)
    return Partition({f"client-{place:03d}": Holding(each.sort().values, empty) for place, each in enumerate(owned)})


def _accuracy(config: Config, dataset: Dataset, rates: _OwnRates, seed: int) -> float:
    """The accuracy of the global model after the last round."""
    rng = Rng(seed, key=Rng.fresh().key)
    model = build_model(
        config.model.source, dataset.inputs, dataset.num_classes, init=config.model.init, rng=rng.child("model")
    )
    smallest = int(torch.bincount(dataset.train.targets)[list(FEW)].min())
    federation = assemble(
        dataset,
        two_holdings(dataset, min(100, smallest // 4), rng.child("partition")),
        model,
        local=config.local,
        aggregator=FedAvg(scheme="I"),
        plan=config.plan,
        defense=rates,
        rng=rng.child("federation"),
    )
    end = inprocess.run(federation, workers=1, score=False).server
    return evaluate(federation.trainer, end.params, end.buffers, dataset.test).accuracy


def landscape(settings: Sequence[str]) -> Values:
    """Figure 4: the matching loss and the perceptual distance between GGL's latent (0) and that of the image (1).

    Rows: both for each defense. Columns: places on the line between the latents, in percent of the largest loss or as
    they are; the loss at GGL's latent; the correlation of both curves; that of the loss with the undefended loss.
    The distance is the first of `audit.metrics`.
    """
    planned = audit.plan("audit", Path("recipe:lrp-figure-4"), adaptive=False, settings=settings)
    runner = TrialRunner(planned.experiment)
    curves: dict[tuple[int, str], tuple[list[float], list[float]]] = {}
    for spec in planned.experiment.trials:
        if spec.attack.role == "attack" and spec.defense.name in DEFENSES:
            curves[spec.trial, spec.defense.name] = _curves(planned.experiment, runner, spec)
    values: Values = {}
    for (trial, defense), (losses, distances) in curves.items():
        victim, plain = f"victim {trial}", curves[trial, "none"][0]
        highest = max(losses)
        said = {
            **{f"{alpha:g}": loss / highest for alpha, loss in zip(ALPHAS, losses, strict=True)},
            "loss at 0": losses[0],
            "agreement": correlation(losses, distances),
            "likeness": correlation(losses, plain),
        }
        shown = {f"{alpha:g}": distance for alpha, distance in zip(ALPHAS, distances, strict=True)}
        for row, columns in ((f"{DEFENSES[defense]}, loss", said), (f"{DEFENSES[defense]}, LPIPS", shown)):
            for column, value in columns.items():
                values.setdefault(row, {}).setdefault(column, {})[victim] = value
    return values


def _curves(experiment: Experiment, runner: TrialRunner, spec: TrialSpec) -> tuple[list[float], list[float]]:
    """The losses and the distances to the true image on the line from GGL's latent to that of the image."""
    scene = runner.scene(spec)
    played = runner.play(spec, scene)
    truth = truth_of(played.counted, [scene.victim]).inputs
    attack, rng = spec.attack.value, experiment.rng(spec.trial).child("landscape")
    if not isinstance(attack, Ggl):
        raise ConfigError(f"expected the attack ggl, got {spec.attack.name}; set it")
    matching = attack.matching()
    evidence = matching.evidence(played.given[0], rng=rng.child("labels"))
    found = matching.search(evidence, rng=rng.child("search")).search.best.variables["latents"]
    problem = matching.problem(evidence, rng, [0], together=False)
    squash = (attack.regulariser or ("tanh" if attack.optimizer == "cma_es" else "kl")) == "tanh"
    into: Callable[[Tensor], Tensor] = torch.tanh if squash else _same
    back = _atanh if squash else _same
    ends = into(found), into(inverted(attack.generator.read(), truth, evidence.labels, into, rng.child("inversion")))
    places = [back((1 - alpha) * ends[0] + alpha * ends[1]) for alpha in ALPHAS]
    name = experiment.settings.metrics[0]
    metric = build_metrics([name], Resources(root=experiment.data_root)).metrics[name]
    with torch.no_grad():
        losses = [float(problem.loss({"latents": place}, {}, problem.constants)) for place in places]
    images = torch.cat([problem.images({"latents": place}) for place in places])
    return losses, metric(images, truth.expand_as(images)).tolist()


def inverted(
    generator: Generator, truth: Tensor, label: Tensor | None, into: Callable[[Tensor], Tensor], rng: Rng
) -> Tensor:
    """GAN inversion: the variables (1, L) whose image is closest to the truth (1, C, H, W), by Adam from some starts.

    label: its class, (1,), for a class-conditional generator. into: from variables to latents.
    Reference: Huh et al. 2020, with the squared error of pixels alone.
    """
    sought = torch.randn(_STARTS, generator.latent, generator=rng.public(), requires_grad=True)
    weights, statistics, size = generator.weights, generator.statistics, Images(*truth.shape[1:])
    labels = None if label is None or generator.num_classes is None else label.expand(_STARTS)
    optimizer = torch.optim.Adam([sought], lr=0.05)

    def errors() -> Tensor:
        made = generator.fitted(generator.images(weights, statistics, into(sought), labels), size)
        return (made - truth).square().flatten(1).mean(1)

    for _ in range(_INVERSIONS):
        optimizer.zero_grad()
        errors().sum().backward()
        optimizer.step()
    with torch.no_grad():
        return sought[errors().argmin()][None].clone()


def untrained_generator(latent: int) -> nn.Module:
    """A generator of grey 28x28 images with random weights, for quick runs without files."""
    network = MlpNetwork([latent, 32, 28 * 28], Images(1, 28, 28))
    with global_seed(Rng(0).child("untrained")):
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.3)
    return network


def _same(latents: Tensor) -> Tensor:
    return latents


def _atanh(latents: Tensor) -> Tensor:
    return latents.clamp(-_INSIDE, _INSIDE).atanh()
