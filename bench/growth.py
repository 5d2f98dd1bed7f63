"""How the time of one attack iteration grows with the batch, the image and the number of local steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.scenes import observation, per_iteration
from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.view import OneBatch, Simulation
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.core.inputs import Images
from leaktight.core.training import LocalTraining

BASE = InvertingGradients(labels=Given()).matching()


@dataclass(frozen=True)
class Curve:
    """Milliseconds of an iteration by the size of something, for one or several ways."""

    what: str
    sizes: Sequence[int]
    milliseconds: Mapping[str, Sequence[float]]


def curves(iterations: int = 40) -> list[Curve]:
    """LeNet, `fx`."""
    batches, sides, steps = (1, 2, 4, 8, 16), (16, 32, 64, 128), (1, 2, 4, 8)
    by_batch = [1000 * per_iteration(BASE, observation("lenet_zhu", batch), iterations) for batch in batches]
    by_side = [
        1000 * per_iteration(BASE, observation("lenet_zhu", 1, Images(3, side, side)), iterations) for side in sides
    ]
    by_steps: dict[str, list[float]] = {"simulated": [], "one batch": []}
    for number in steps:
        seen = observation("lenet_zhu", 8, local=LocalTraining(batch_size=8 // number, learning_rate=1e-4))
        for name, matched in (("simulated", Simulation()), ("one batch", OneBatch())):
            by_steps[name].append(1000 * per_iteration(replace(BASE, matched=matched), seen, iterations))
    return [
        Curve("images in the batch", batches, {"32 x 32": by_batch}),
        Curve("pixels of the image", [side * side for side in sides], {"one image": by_side}),
        Curve("local steps over 8 images", steps, by_steps),
    ]


def show(found: Sequence[Curve]) -> None:
    for curve in found:
        print(f"    {curve.what:<28}" + "".join(f"{size:>9}" for size in curve.sizes))
        for name, values in curve.milliseconds.items():
            print(f"    {name:>24} ms " + "".join(f"{value:9.2f}" for value in values))


def plot(found: Sequence[Curve], folder: Path) -> Path:
    """One panel per curve, both axes logarithmic; the dotted line is growth in proportion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found), 3.6), layout="constrained")
    for axes, curve in zip(figure.subplots(1, len(found)), found, strict=True):
        for name, values in curve.milliseconds.items():
            axes.plot(curve.sizes, values, marker="o", label=name)
        first = next(iter(curve.milliseconds.values()))[0]
        line = [first * size / curve.sizes[0] for size in curve.sizes]
        axes.plot(curve.sizes, line, color="grey", linestyle=":", label="in proportion")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(curve.sizes, [str(size) for size in curve.sizes])
        axes.set_xlabel(curve.what)
        axes.set_ylabel("ms for one iteration")
        axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "attack-growth.png"
    figure.suptitle("One iteration of Inverting Gradients on LeNet, fx, one thread")
    figure.savefig(path, dpi=120)
    return path
