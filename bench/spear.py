"""SPEAR's certificate: how many batches are recovered exactly, how many are certified, and whether a certificate lies.

Untrained networks, the float32 gradient of one step. Exact: every example over 60 dB, and none too few or too many. A
certificate of a batch that is not exact is false. CIFAR-10 batches are of training images 5000 to 9999 (`spear` was
tuned on earlier ones); the rows of scikit-learn's breast cancer table are scaled to [0, 1]. The last setting is sixty
trials on layers that are too narrow: 20, 32, 48 and 64 units, batches of 8, 12 and 16, five draws each.

    python -m bench spear
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch

from bench.scenes import observed
from leaktight.attacks.exact.spear import Spear
from leaktight.core.inputs import Images
from leaktight.core.rng import Rng
from leaktight.core.types import Batch
from leaktight.data.cifar import Cifar10
from leaktight.data.dataset import data_root
from leaktight.metrics.match import match
from leaktight.models.initialise import build_model
from leaktight.models.small import Mlp

FIRST, LAST = 5000, 10000
EXACT = 1e-6
"""The mean squared error of an example at 60 dB."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A batch of so many examples of `data`, on an MLP with two hidden layers of `width` units; trials: how many."""

    data: str
    width: int
    examples: int
    trials: int


class Outcome(NamedTuple):
    """figure: of the certificate. seconds: of the processor."""

    exact: bool
    certified: bool
    figure: float
    seconds: float


GROUPS: Mapping[str, Sequence[Setting]] = {
    "3072-400-400-10, CIFAR-10, 8": [Setting(data="cifar10", width=400, examples=8, trials=10)],
    "3072-400-400-10, CIFAR-10, 16": [Setting(data="cifar10", width=400, examples=16, trials=10)],
    "30-200-200-2, breast cancer, 8": [Setting(data="table", width=200, examples=8, trials=10)],
    "30-400-400-2, breast cancer, 16": [Setting(data="table", width=400, examples=16, trials=10)],
    "too narrow, CIFAR-10": [
        Setting(data="cifar10", width=width, examples=examples, trials=5)
        for width, examples in product((20, 32, 48, 64), (8, 12, 16))
    ],
}


def table() -> Batch:
    """Breast cancer as images of 1 x 1 x 30 in [0, 1]."""
    from sklearn.datasets import load_breast_cancer

    inputs, targets = load_breast_cancer(return_X_y=True)
    rows = torch.tensor(inputs, dtype=torch.float32)
    low, high = rows.amin(0), rows.amax(0)
    return Batch(((rows - low) / (high - low)).reshape(-1, 1, 1, rows.shape[1]), torch.tensor(targets))


def images() -> Batch:
    return Cifar10().load(data_root()).train.batch(slice(FIRST, LAST))


def outcomes(setting: Setting, data: Batch) -> Iterator[Outcome]:
    """Of each trial, with other weights and another draw."""
    classes = int(data.targets.max()) + 1
    for trial in range(setting.trials):
        rng = Rng(trial).child(setting.data, setting.width, setting.examples)
        some = torch.randperm(len(data), generator=rng.child("batch").public())[: setting.examples]
        batch = Batch(data.inputs[some], data.targets[some])
        network = Mlp(hidden=(setting.width, setting.width))
        model = build_model(network, Images(*batch.inputs.shape[1:]), classes, rng=rng.child("weights"))
        seen = replace(observed(model, batch), num_classes=classes, labels=None)
        began = time.process_time()
        found = Spear().reconstruct([seen], rng=rng.child("attack"))
        seconds = time.process_time() - began
        assert found.certificate is not None, "spear has one for every guess"
        exact = is_exact(found.guess, batch)
        yield Outcome(exact, found.certificate.holds, found.certificate.figure, seconds)


def is_exact(guess: Batch, truth: Batch) -> bool:
    if len(guess) != len(truth):
        return False
    order = match(guess.inputs, truth.inputs)
    errors = (guess.inputs[order] - truth.inputs).square().flatten(1).mean(1)
    return bool((errors < EXACT).all())


def told(name: str, found: Sequence[Outcome]) -> str:
    wrong = [each.figure for each in found if not each.exact]
    times = sorted(each.seconds for each in found)
    return (
        f"{name}: {sum(each.exact for each in found)} of {len(found)} exact, "
        f"{sum(each.certified for each in found)} certified, "
        f"{sum(each.certified and not each.exact for each in found)} false certificates, "
        f"highest figure of one that is not exact {f'{max(wrong):.4f}' if wrong else 'none'}, "
        f"{times[0]:.1f} to {times[-1]:.1f} s"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench spear", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="print every trial")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = {"cifar10": images(), "table": table()}
    every: list[Outcome] = []
    for name, settings in GROUPS.items():
        group: list[Outcome] = []
        for setting in settings:
            for outcome in outcomes(setting, data[setting.data]):
                group.append(outcome)
                if chosen.verbose:
                    print(setting, outcome, flush=True)
        print(told(name, group), flush=True)
        every += group
    print(told("all", every))
