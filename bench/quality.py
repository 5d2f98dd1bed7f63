"""Time to quality: processor time until an image is recognisable, against the package breaching with its own settings.

Inverting Gradients of breaching, as it comes, on the gradient of one CIFAR-10 image, then the attack here, each until
SSIM 0.9 or its end. Batch norm is in training mode, or in evaluation mode (`--mode eval`), as in the papers. Times are
compared at 0.9, or else at the best of all iterates of breaching; here a guess is the best so far by the attack's own
loss. Because the last thousandths of a best value can come late, times until 0.01 below it are compared too. An image
on which the attack here stays below counts as a ratio of 0.

Time is that of the processor, with the processes that a compiler starts; looking at images does not count, tracing and
compiling do. A guess is looked at when 1 % more time is spent than at the look before.

Where the 24,000 iterations of breaching take too long there are two ways to do with less, and a result says which.
`--iterations` shortens its whole schedule, falls of the learning rate included, which makes it faster than as it comes.
`--minutes` ends it after that much time for each image, and nothing is said of what it would reach later.

An SSIM is worth little by itself: that of an even grey image, which knows nothing, is printed beside it.

    python -m bench quality lenet_zhu --victims 10
    python -m bench quality resnet20 --mode eval --iterations 2400
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

import torch
from PIL import Image
from torch import Tensor
from torch._inductor import config as inductor

from bench.rivals import breaching_attack, has_breaching
from bench.scenes import COLOUR, observed
from leaktight.attacks.labels.rules import Given
from leaktight.attacks.presets.agic import Agic
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.attacks.presets.preset import Preset
from leaktight.config.catalogue import MODELS
from leaktight.core.rng import Rng, global_seed
from leaktight.core.types import Batch, Mode
from leaktight.data.cifar import Cifar10
from leaktight.data.dataset import data_root
from leaktight.metrics import ssim
from leaktight.models.initialise import build_model

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
FIRST = 9000
"""Of the test images; no setting of an attack was tuned on these."""
GOAL = 0.9
RESOLUTION = 1.01
"""Of time, as a factor. To look at a guess can take longer than to make it."""
SMOOTH = Agic(labels=Given(), iterations=300, learning_rate=0.05, decay="cosine", total_variation=0.8, backend="fx")
"""Chosen on test image 100 and ResNet-20. In so few iterations compiling does not pay."""
CLEAR = InvertingGradients(
    labels=Given(),
    iterations=300,
    coarse=200,
    soft_relus=0.1,
    learning_rate=0.2,
    decay="cosine",
    total_variation=0.1,
    backend="fx",
)
"""Chosen on test images 100 to 109 and ResNet-20 in evaluation mode; docs/results/speed.md says against what."""
CLEAR_WIDE = InvertingGradients(
    labels=Given(), iterations=150, coarse=150, learning_rate=0.1, decay="cosine", total_variation=0.05, backend="fx"
)
"""Chosen on test images 100, 101, 103 and 104 and ResNet20-4 in evaluation mode."""
ATTACKS: Mapping[str, tuple[str, Mapping[Mode, Preset]]] = {
    "lenet_zhu": ("wide", {"train": CsDlg(labels=Given(), coarse=5)}),
    "resnet20": ("default", {"train": SMOOTH, "eval": CLEAR}),
    "resnet20_4": ("default", {"train": SMOOTH, "eval": CLEAR_WIDE}),
}
"""By network: its initial weights, and the attack by the mode of batch norm."""
HEAD = "SSIM, grey | breaching | here | s | s | ratio | 0.01 less: s | s | ratio | here: begun | best | guesses"


class Reached(BaseException):
    """The goal is reached, or time is over; not an `Exception`, so that no attack takes it for a failure."""


def processor_time() -> float:
    """Seconds of this process and of the processes that it started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Clock:
    """Looks at guesses of an image, and ends an attack when one is good enough, or after `most` seconds.

    begun: seconds until the first guess. points: seconds and SSIM of every guess that was better than all before it.
    """

    def __init__(self, truth: Tensor, goal: float, most: float = float("inf")) -> None:
        self.truth, self.goal, self.most = truth, goal, most
        self.points: list[tuple[float, float]] = []
        self.guess = torch.zeros_like(truth)
        self.begun, self.last, self.guesses = 0.0, 0.0, 0
        self.looked, self.began = 0.0, processor_time()

    @property
    def best(self) -> float:
        return self.points[-1][1] if self.points else 0.0

    def seconds(self, goal: float) -> float | None:
        """Until the first guess that has this SSIM; None if there was none."""
        return next((seconds for seconds, value in self.points if value >= goal), None)

    def look(self, guess: Tensor) -> None:
        now = processor_time()
        spent = now - self.began - self.looked
        self.begun = self.begun or spent
        self.guesses += 1
        if spent < RESOLUTION * self.last:
            return
        self.last = spent
        image = guess.detach().float().clamp(0, 1)
        value = float(ssim(image, self.truth).mean())
        if value > self.best:
            self.points.append((spent, value))
            self.guess = image.clone()
        self.looked += processor_time() - now
        if self.best >= self.goal or spent > self.most:
            raise Reached

    def run(self, attack: Callable[[], object]) -> Clock:
        with contextlib.suppress(Reached):
            attack()
        return self


def compare(
    kind: str, mode: Mode, place: int, batch: Batch, most: float, iterations: int | None
) -> tuple[Clock, Clock]:
    """breaching, for `most` seconds or with other `iterations`, and this project; on test image `place`."""
    init, attacks = ATTACKS[kind]
    attack = attacks[mode]
    sources = MODELS[kind](mean=MEAN, std=STD), MODELS[kind]()
    rng = Rng(place)
    model, bare = (build_model(source, COLOUR, 10, init=init, rng=rng) for source in sources)
    seen = observed(model, batch, mode=mode)
    theirs = Clock(batch.inputs, GOAL, most)
    with global_seed(rng.child("breaching")):
        theirs.run(breaching_attack(bare, seen, MEAN, STD, theirs.look, iterations))
    ours = Clock(batch.inputs, GOAL)

    def look(iteration: int, loss: float, guess: Tensor | None) -> None:
        if guess is not None:
            ours.look(guess)

    ours.run(lambda: attack.pinned(onednn=kind != "lenet_zhu").reconstruct([seen], rng=rng, progress=look))
    return theirs, ours


def ratio(theirs: Clock, ours: Clock, goal: float) -> float:
    """How many times sooner the attack here is as good; 0 if it never is."""
    mine, others = ours.seconds(goal), theirs.seconds(goal)
    return 0.0 if mine is None or others is None else others / mine


def line(theirs: Clock, ours: Clock) -> str:
    """The row of an image.

    The SSIM of grey, and the best of both; seconds until that of breaching, and their ratio; the same for 0.01 less;
    seconds here until the first guess and until the best; how many guesses.
    """
    grey = float(ssim(torch.full_like(theirs.truth, 0.5), theirs.truth).mean())
    cells = [f"{each:.3f}" for each in (grey, theirs.best, ours.best)]
    for goal in (theirs.best, theirs.best - 0.01):
        times = [clock.seconds(goal) for clock in (theirs, ours)]
        cells += ["never" if each is None else f"{each:.1f}" for each in times]
        cells.append(f"{ratio(theirs, ours, goal):.1f}")
    cells += [f"{ours.begun:.1f}", f"{ours.points[-1][0]:.1f}", f"{theirs.guesses} and {ours.guesses}"]
    return " | ".join(cells)


def picture(folder: Path, name: str, images: list[Tensor]) -> None:
    """The truth, the best of breaching, that of this project, side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    row = torch.cat([image[0] for image in images], dim=2).mul(255).round().byte()
    whole = Image.fromarray(row.permute(1, 2, 0).numpy())
    whole.resize((8 * whole.width, 8 * whole.height), Image.Resampling.NEAREST).save(folder / f"{name}.png")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench quality", description=__doc__)
    parser.add_argument("networks", nargs="+", choices=ATTACKS, metavar="NETWORK", help=", ".join(ATTACKS))
    parser.add_argument("--mode", choices=get_args(Mode), default="train", help="of batch norm (default: train)")
    parser.add_argument("--victims", type=int, default=10, metavar="N", help="images (default: 10)")
    parser.add_argument("--first", type=int, default=FIRST, metavar="N", help=f"the first image (default: {FIRST})")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of breaching for an image, at the most")
    parser.add_argument("--iterations", type=int, metavar="N", help="of breaching (default: its own number, 24000)")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to put pictures")
    chosen = parser.parse_args(arguments)
    if not has_breaching():
        parser.error("this benchmark needs the package breaching")
    if odd := [kind for kind in chosen.networks if chosen.mode not in ATTACKS[kind][1]]:
        parser.error(f"expected networks with batch norm for --mode {chosen.mode}, got {', '.join(odd)}")
    torch.set_num_threads(1)
    inductor.compile_threads = 1  # a compiler that is a child of this process counts
    test = Cifar10().load(data_root()).test
    for kind in chosen.networks:
        print(f"{kind} | {HEAD}", flush=True)
        ratios: list[tuple[float, float]] = []
        for place in range(chosen.first, chosen.first + chosen.victims):
            batch = test.batch(slice(place, place + 1))
            theirs, ours = compare(kind, chosen.mode, place, batch, 60 * chosen.minutes, chosen.iterations)
            ratios.append((ratio(theirs, ours, theirs.best), ratio(theirs, ours, theirs.best - 0.01)))
            print(f"{place} | {line(theirs, ours)}", flush=True)
            if chosen.plots:
                picture(chosen.plots, f"{kind}-{place}", [batch.inputs, theirs.guess, ours.guess])
        reached = sum(exact > 0 for exact, _ in ratios)
        middle, nearly = (statistics.median(each) for each in zip(*ratios, strict=True))
        print(f"{kind}: as good as breaching on {reached} of {len(ratios)}; median ratio {middle:.1f}, {nearly:.1f}")
