"""How time and memory of both ciphers grow with the number of parameters, and packed Paillier beside `phe`.

Two clients encrypt, the server forms a weighted sum, one client decrypts it. Seconds are those of the processor, of all
threads together, so that a busy machine does not bend the curve. Every point is a process of its own, for its memory.

`python -m bench encryption round CIPHER PARAMETERS` plays one round of `leaktight train`.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench import paillier
from leaktight.core.rng import Rng
from leaktight.crypto.cipher import Cipher
from leaktight.crypto.ckks import Ckks
from leaktight.crypto.paillier import Paillier

SIZES: Mapping[str, Sequence[int]] = {
    "ckks": (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000),
    "paillier": (10_000, 30_000, 100_000, 300_000, 1_000_000),
}
CIPHERS: Mapping[str, Cipher] = {"ckks": Ckks(), "paillier": Paillier()}
WEIGHTS = (601, 255)
STEPS = ("encrypt", "add", "decrypt")


@dataclass(frozen=True)
class Point:
    """Seconds of each step for `count` parameters, and the most memory of the process in bytes."""

    cipher: str
    count: int
    seconds: tuple[float, float, float]
    memory: int


def point(name: str, count: int) -> Point:
    cipher = CIPHERS[name]
    keys = cipher.new_keys(Rng.fresh())
    updates = [Rng(seed).public_numpy().normal(0, 0.05, count).astype(np.float32) for seed in range(len(WEIGHTS))]
    marks = [time.process_time()]
    sealed = [cipher.encrypt(update, keys, rng=Rng.fresh()) for update in updates]
    marks.append(time.process_time())
    total = cipher.combine(sealed, WEIGHTS, keys.public)
    marks.append(time.process_time())
    mean = cipher.decrypt(total, keys.secret)
    marks.append(time.process_time())
    memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = float(np.abs(mean - np.average(updates, axis=0, weights=WEIGHTS)).max())
    assert error <= cipher.resolution + 1e-8, error
    encrypt, add, decrypt = np.diff(marks).tolist()
    return Point(name, count, (encrypt, add, decrypt), memory)


def _send(name: str, count: int, to: Connection) -> None:
    to.send(point(name, count))


def alone(name: str, count: int) -> Point:
    """A point, measured in a new process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(name, count, there))
    process.start()
    there.close()
    found: Point = here.recv()
    process.join()
    return found


def exponent(points: Sequence[Point]) -> float:
    """b of the power law a n^b that fits the seconds best, over the three largest sizes."""
    logs = np.log([(each.count, sum(each.seconds)) for each in points[-3:]])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def plot(found: Mapping[str, Sequence[Point]], folder: Path) -> Path:
    """Seconds and memory by the number of parameters; dotted: growth in proportion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, points in found.items():
        counts, seconds = [each.count for each in points], [sum(each.seconds) for each in points]
        (line,) = left.plot(counts, seconds, marker="o", label=f"{name}, exponent {exponent(points):.2f}")
        left.plot(counts, [seconds[-1] * each / counts[-1] for each in counts], ":", color=line.get_color())
        right.plot(counts, [each.memory / 1e9 for each in points], marker="o", label=name)
    left.set(xscale="log", yscale="log", xlabel="parameters", ylabel="seconds of the processor")
    right.set(xscale="log", ylim=(0, None), xlabel="parameters", ylabel="most memory of the process, GB")
    for axes in (left, right):
        axes.legend()
    figure.suptitle("Two clients encrypt, the server adds, one client decrypts; dotted: in proportion")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "encryption.png"
    figure.savefig(path, dpi=120)
    return path


def growth(plots: Path | None) -> None:
    found: dict[str, list[Point]] = {}
    print(f"{'':>9} {'parameters':>11} " + " ".join(f"{step:>10}" for step in STEPS) + f" {'memory':>9}")
    for name, sizes in SIZES.items():
        for count in sizes:
            each = alone(name, count)
            found.setdefault(name, []).append(each)
            times = " ".join(f"{seconds:8.2f} s" for seconds in each.seconds)
            print(f"{name:>9} {count:>11} {times} {each.memory / 1e9:6.2f} GB", flush=True)
        print(f"{name:>9} grows with the number of parameters to the power of {exponent(found[name]):.2f}")
    if plots is not None:
        print(plot(found, plots))


def main(plots: Path | None) -> None:
    growth(plots)
    paillier.main()
