"""AGIC's Tables V and VI, the updates of two epochs matched and joined, and Figure 8, the time of a search.

In the tables a client trains twice over its images, each time in a new order of batches; every batch is one gradient
update. The settings are overrides of the recipe's config: `audit.trials` is the number of images, `local` the client's
training.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from leaktight.api import audit
from leaktight.attacks.presets.agic import Agic, ExampleIndex, match_epochs
from leaktight.attacks.presets.preset import Preset
from leaktight.audits.experiment import TrialRunner
from leaktight.audits.plan import Experiment
from leaktight.config.scenario import load_data
from leaktight.config.settings import Config, load_config
from leaktight.core.errors import ConfigError
from leaktight.core.rng import Rng
from leaktight.core.tensors import buffers_of, cloned, parameters_of
from leaktight.core.types import Batch, Broadcast, Observation, Update
from leaktight.data.dataset import data_root
from leaktight.fl.local import Trainer, local_update
from leaktight.metrics import Resources, build_metrics, match
from leaktight.models.initialise import build_model
from leaktight.models.small import LeNetZhu

Values: TypeAlias = dict[str, dict[str, dict[str, float]]]

STEPS = (1, 2, 4, 8)
_ATTACKS = {"inverting_gradients": "InvG", "agic": "AGIC"}
_ITERATIONS = 10_000
_POOL = 2
_METRICS = {"PSNR": "psnr", "SSIM": "ssim", "LPIPS": "lpips_alex"}


@dataclass(frozen=True)
class Seen:
    """One gradient update. images: the indices of its images among those of the client."""

    observation: Observation
    images: Tensor


@dataclass(frozen=True)
class TwoEpochs:
    """A client's images, the updates of two epochs over them, the attack, and its random stream."""

    images: Batch
    updates: tuple[list[Seen], list[Seen]]
    attack: Agic
    rng: Rng
    root: Path


def matched(settings: Sequence[str]) -> Values:
    """Table V: for each image whether the guesses for it from both epochs are matched with each other.

    Rows: what the matching uses. Columns: the batch size. A guess of a batch stands for the image that it is closest to
    in the best assignment within its update.
    """
    scene = _played(load_config(Path("recipe:agic-table-5"), settings))
    rough = [[_alone(scene, seen, scene.attack.pre_iterations) for seen in epoch] for epoch in scene.updates]
    stands = [
        {
            ExampleIndex(place, example): int(image)
            for place, (guess, seen) in enumerate(zip(guesses, epoch, strict=True))
            for example, image in _images_of(guess, seen, scene.images)
        }
        for guesses, epoch in zip(rough, scene.updates, strict=True)
    ]
    column = f"batch size {len(scene.updates[0][0].images)}"
    values: Values = {}
    for labels, pooled in product((False, True), repeat=2):
        shown = rough if labels else [[_unlabelled(guess) for guess in epoch] for epoch in rough]
        chains = match_epochs(shown, _POOL if pooled else 1)
        row = " and ".join([*["labels"] * labels, *["pooling"] * pooled]) or "neither"
        values[row] = {
            column: {
                f"image {stands[0][first]}": float(stands[0][first] == stands[1][second]) for first, second in chains
            }
        }
    return values


def joined(settings: Sequence[str]) -> Values:
    """Table VI: the images from the updates of the first epoch, of the second, and of both after matching."""
    scene = _played(load_config(Path("recipe:agic-table-6"), settings))
    both = replace(scene.attack, epochs=2).reconstruct(
        [seen.observation for epoch in scene.updates for seen in epoch], rng=scene.rng.child("joined")
    )
    members = [seen.images for seen in scene.updates[0]]
    guesses = both.guess.inputs.split([len(each) for each in members])
    values = {"1, 2": _scores(scene, zip(guesses, members, strict=True))}
    for number, epoch in enumerate(scene.updates, 1):
        found = [(_alone(scene, seen, scene.attack.iterations).inputs, seen.images) for seen in epoch]
        values[str(number)] = _scores(scene, found)
    return values


def speed(settings: Sequence[str]) -> Values:
    """Figure 8 (b): minutes of 10 000 iterations for the images of an update, by steps; columns: the attacks.

    An iteration is timed as the difference of a short and a long search, so that tracing does not count; nor does the
    order of the labels. One image is repeated in all steps; several are dealt to the steps.
    """
    values: Values = {}
    for steps in STEPS:
        planned = audit.plan(
            "audit", Path("recipe:agic-figure-8"), adaptive=False, defenses=["none"], settings=_steps(settings, steps)
        )
        runner = TrialRunner(planned.experiment)
        for spec in planned.experiment.trials:
            if isinstance(spec.attack.value, Preset):
                seen = runner.play(spec, runner.scene(spec)).given[0]
                column = f"{_ATTACKS[spec.attack.name]} minutes{_suffix(planned.experiment)}"
                found = values.setdefault(str(steps), {}).setdefault(column, {})
                found[f"victim {spec.trial}"] = _ITERATIONS / 60 * _seconds(spec.attack.value, seen, Rng(spec.trial))
    return values


def _steps(settings: Sequence[str], steps: int) -> list[str]:
    """The settings with the images of an update in so many local steps."""
    attacked = load_config(Path("recipe:agic-figure-8"), settings).attacked
    images = 1 if attacked is None or attacked.samples is None else attacked.samples
    return [*settings, f"audit.local.batch_size={max(1, images // steps)}", f"audit.local.steps={steps}"]


def _suffix(experiment: Experiment) -> str:
    """What tells the columns of a network and of a repeated image from the others."""
    network = ", LeNet" if isinstance(experiment.source, LeNetZhu) else ""
    return f"{network}, one image" if experiment.attacked.samples == 1 else network


def _seconds(attack: Preset, seen: Sequence[Observation], rng: Rng) -> float:
    """Seconds of one iteration of a search."""
    matching = attack.matching()
    evidence = matching.evidence(seen, rng=rng)
    # Of the processor, where other work on the machine does not count; a GPU's time is not in it.
    clock = time.process_time if evidence.device.type == "cpu" else time.perf_counter
    long, short = matching.iterations, max(1, matching.iterations // 4)
    times = []
    for iterations in (short, long, short):  # the first warms up
        began = clock()
        replace(matching, iterations=iterations, progress_every=long).search(evidence, rng=rng)
        times.append(clock() - began)
    return (times[1] - times[2]) / (long - short)


def _played(config: Config) -> TwoEpochs:
    """Train twice over the images, one gradient update for each batch."""
    (attack,) = (each for each in config.attacks if isinstance(each, Agic))
    number = config.audit.trials if config.audit else "auto"
    if not isinstance(number, int):
        raise ConfigError("expected audit.trials to be the number of images, got 'auto'; set it")
    dataset, _ = load_data(config)
    rng = Rng(config.seed)
    model = build_model(
        config.model.source, dataset.inputs, dataset.num_classes, init=config.model.init, rng=rng.child("model")
    )
    trainer = Trainer(model, config.local, dataset.task, mode=config.model.mode)
    images = dataset.train.batch(torch.randperm(len(dataset.train), generator=rng.child("images").public())[:number])
    params, buffers = cloned(parameters_of(model)), cloned(buffers_of(model))
    epochs: tuple[list[Seen], list[Seen]] = ([], [])
    for epoch, updates in enumerate(epochs):
        order = torch.randperm(number, generator=rng.child("order", epoch).public())
        for places in order.split(config.local.batch_size):
            batch = Batch(images.inputs[places], images.targets[places])
            result = local_update(
                trainer, params, buffers, [batch], learning_rates=[config.local.learning_rate], rng=rng.child("local")
            )
            observation = Observation(
                model=model,
                task=dataset.task,
                broadcast=Broadcast(params, buffers, epoch * number + len(updates)),
                update=Update(result.update(params, "gradient"), "gradient", len(batch), result.buffers),
                inputs=dataset.inputs,
                num_classes=dataset.num_classes,
                labels=batch.targets.sort().values,
                batch_size=len(batch),
                local_training=config.local,
                mode=config.model.mode,
            )
            updates.append(Seen(observation, places))
            params, buffers = result.params, result.buffers
    return TwoEpochs(images, epochs, attack, rng.child("attack"), data_root(config.data_root))


def _alone(scene: TwoEpochs, seen: Seen, iterations: int) -> Batch:
    """The images of one update, from that update."""
    place = scene.rng.child("alone", seen.observation.broadcast.round)
    attack = replace(scene.attack, iterations=iterations, epochs=1)
    return attack.reconstruct([seen.observation], rng=place).guess


def _images_of(guess: Batch, seen: Seen, images: Batch) -> Iterable[tuple[int, int]]:
    """For each guess of an update its index, and the index of the image that it stands for."""
    assignment = match(guess.inputs, images.inputs[seen.images])
    return zip(assignment.tolist(), seen.images.tolist(), strict=True)


def _unlabelled(guess: Batch) -> Batch:
    """The guess with the same label for all, so that labels tell no two apart."""
    return Batch(guess.inputs, torch.zeros_like(guess.targets))


def _scores(scene: TwoEpochs, found: Iterable[tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """By metric and image. found: guesses, and the indices of the images that they are guesses of."""
    metrics = build_metrics(_METRICS.values(), Resources(root=scene.root)).metrics
    values: dict[str, dict[str, float]] = {name: {} for name, metric in _METRICS.items() if metric in metrics}
    for guesses, places in found:
        truth = scene.images.inputs[places]
        ordered = guesses[match(guesses, truth)]
        for name, scores in values.items():
            given = metrics[_METRICS[name]](ordered, truth).tolist()
            scores.update({f"image {place}": score for place, score in zip(places.tolist(), given, strict=True)})
    return values
