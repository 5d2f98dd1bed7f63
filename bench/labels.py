"""Labels of 64 examples, read by `public_images` from one step of the published CIFAR-10 ResNet-20, beside a guess.

Equal counts are the guess without the update. Victims are test images from number 7500 and training images from number
5000 on; the attacker has the first 5000 test images. The weights must be in the data folder.

    python -m bench labels --batches 30 --only "training mode"
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from bench.scenes import COLOUR
from leaktight.attacks.labels.last_layer import LabelStrategy, labels_of
from leaktight.attacks.labels.public import PublicImages
from leaktight.audits.judge.statistics import interval
from leaktight.config.catalogue import MODELS
from leaktight.core.rng import Rng
from leaktight.core.tasks import Classification
from leaktight.core.tensors import buffers_of, parameters_of
from leaktight.core.training import LocalTraining
from leaktight.core.types import Batch, Broadcast, Examples, Mode, Observation, Update, UpdateKind
from leaktight.data.cifar import Cifar10
from leaktight.data.dataset import Dataset, data_root
from leaktight.fl.local import Trainer, local_update
from leaktight.metrics.labels import label_accuracy
from leaktight.models.initialise import build_model

NUMBER, CLASSES, PUBLIC = 64, 10, 5000
WEIGHTS = "weights_cifar10_resnet/resnet20-12fca82f.th"
NORMAL = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
EQUAL = labels_of(torch.tensor([7] * 4 + [6] * 6))
"""The best guess without the update, if labels are uniform."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """mode: of batch norm. buffers: whether they are sent. rate: of the step behind a model change; None: a gradient.

    skew: of the labels, Dirichlet; None: uniform.
    """

    mode: Mode = "train"
    buffers: bool = True
    rate: float | None = None
    skew: float | None = None


SETTINGS: Mapping[str, Setting] = {
    "training mode, gradient": Setting(),
    "training mode, model change": Setting(rate=0.01),
    "training mode, gradient without buffers": Setting(buffers=False),
    "evaluation mode, gradient": Setting(mode="eval"),
    "evaluation mode, model change": Setting(mode="eval", rate=0.01),
    "training mode, gradient, Dirichlet(0.3)": Setting(skew=0.3),
    "evaluation mode, gradient, Dirichlet(0.3)": Setting(mode="eval", skew=0.3),
}


def victims(data: Dataset, part: str) -> Examples:
    return data.test.part(7500, 10_000) if part == "test" else data.train.part(5000, 10_000)


def drawn(held: Examples, setting: Setting, seed: int) -> Batch:
    """Labels with repeats, then other images for each."""
    generator = np.random.default_rng(seed)
    shares = np.full(CLASSES, 1 / CLASSES) if setting.skew is None else generator.dirichlet([setting.skew] * CLASSES)
    counts = generator.multinomial(NUMBER, shares)
    targets = held.targets.numpy()
    chosen = [generator.choice(np.flatnonzero(targets == label), count, False) for label, count in enumerate(counts)]
    return held.batch(torch.from_numpy(generator.permutation(np.concatenate(chosen))))


def observed(model: nn.Module, batch: Batch, setting: Setting) -> Observation:
    params, buffers = parameters_of(model), buffers_of(model)
    training = LocalTraining(batch_size=NUMBER, learning_rate=setting.rate or 0.01)
    trainer = Trainer(model, training, mode=setting.mode)
    result = local_update(trainer, params, buffers, [batch], learning_rates=[training.learning_rate])
    kind: UpdateKind = "gradient" if setting.rate is None else "delta"
    return Observation(
        model=model,
        task=Classification(),
        broadcast=Broadcast(params, buffers, 0),
        update=Update(result.update(params, kind), kind, NUMBER, result.buffers if setting.buffers else None),
        inputs=COLOUR,
        num_classes=CLASSES,
        batch_size=NUMBER,
        local_training=training,
        mode=setting.mode,
    )


def accuracies(
    model: nn.Module, data: Dataset, part: str, setting: Setting, batches: int, rule: LabelStrategy
) -> Iterator[tuple[float, float]]:
    """For each batch the share of right labels, of equal counts and of the rule."""
    public = data.test.batch(slice(PUBLIC))
    for seed in range(batches):
        batch = drawn(victims(data, part), setting, seed)
        seen = replace(observed(model, batch, setting), public_data=public)
        found: Tensor = rule.infer(seen, NUMBER, rng=Rng(seed))
        yield label_accuracy(EQUAL, batch.targets), label_accuracy(found, batch.targets)


def said(values: Sequence[float]) -> str:
    """The mean and its 95 % interval, in percent."""
    found = interval(values, None, None)
    return f"{100 * statistics.fmean(values):5.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench labels", description=__doc__)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--only", default="", help="part of the name of a setting")
    parser.add_argument("--most", type=int, default=PublicImages().most, help="public images that the rule uses")
    chosen = parser.parse_args(arguments)
    root = data_root(None)
    model = build_model(MODELS["resnet20"](**NORMAL), COLOUR, CLASSES, init=root / WEIGHTS, rng=Rng(0))
    data = Cifar10().load(root)
    rule = PublicImages(most=chosen.most)
    for name, setting in SETTINGS.items():
        for part in ("test", "train") if chosen.only in name else ():
            pairs = list(accuracies(model, data, part, setting, chosen.batches, rule))
            equal, right = zip(*pairs, strict=True)
            gains = [ours - blind for blind, ours in pairs]
            print(f"{name}, {part} images: equal counts {said(equal)}, found {said(right)}, gain {said(gains)}")
