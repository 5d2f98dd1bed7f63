"""The judge alone, on made-up trials: ranks among decoys and chances of labels as a guess without the update has them.

The strictest rule of looking is tried: an audit says more than nothing-found if it would at either look. Then how often
nothing is found under a defense that does nothing, by an attack that counts as working without it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from leaktight.audits.judge.cells import gather
from leaktight.audits.judge.statistics import clear_chance, rate_interval
from leaktight.audits.judge.verdict import Panel
from leaktight.core.rng import Rng
from leaktight.results.schema import ERROR, SCHEMA_VERSION, UNDEFENDED, Rank, Threat, Trial

AUDITS = 2000
LOOKS = (5, 20)
ATTACKS, DEFENSES = 3, 4
DECOYS = 99
SIMULATED = 999
REPETITIONS = 40_000
THREAT = Threat(server="curious", sees="client", knows=("batch_size",))


def trial(attack: int, defense: int, number: int, generator: np.random.Generator) -> Trial:
    """A finished trial of a guess that is poor, closest to a random candidate and right about labels by chance."""
    return Trial(
        schema_version=SCHEMA_VERSION,
        id=f"{defense}.{attack}.{number}",
        attack=f"attack {attack}",
        role="attack",
        defense=f"defense {defense}" if defense else UNDEFENDED,
        adaptive=False,
        searches=False,
        trial=number,
        round=0,
        client=str(number),
        seed=0,
        threat=THREAT,
        scores={"ssim": (0.2,), "psnr": (12.0,)},
        rank=Rank(place=int(generator.integers(1, DECOYS + 2)), decoys=DECOYS),
        label_accuracy=0.1,
        label_chance=float(generator.integers(1, SIMULATED + 2)) / (SIMULATED + 1),
        seconds=0.0,
    )


def says_more(trials: list[Trial]) -> bool:
    panel = Panel(gather(trials), 0.15, len(LOOKS))
    return any(panel.level(cell) is not None for cell in panel.attacks)


def audit(number: int) -> list[bool]:
    """Whether a made-up audit says more than nothing-found, at each look."""
    generator = Rng(number).child("made up").public_numpy()
    trials = [
        trial(attack, defense, victim, generator)
        for attack in range(ATTACKS)
        for defense in range(DEFENSES)
        for victim in range(max(LOOKS))
    ]
    return [says_more([each for each in trials if each.trial < victims]) for victims in LOOKS]


def worst_miss(tests: int, *, same: bool) -> tuple[float, float]:
    """The largest probability of nothing-found for a defense that does nothing, and the share of victims it occurs at.

    For an attack that picks out this share of 20 victims, and has random ranks for the others. same: it picks out the
    same victims without the defense and with it; else any.
    """
    generator = Rng(tests).child("miss", int(same)).public_numpy()
    clear, needed = clear_chance(ERROR / tests), ERROR / (tests - 1)
    found = []
    for share in np.arange(0.02, 0.8, 0.02):
        picked = generator.random((REPETITIONS, max(LOOKS))) < share
        again = picked if same else generator.random(picked.shape) < share
        control, defended = (_combined(each, generator) for each in (picked, again))
        found.append((float(((control <= clear) & (defended > needed)).mean()), float(share)))
    return max(found)


def _combined(picked: NDArray[np.bool_], generator: np.random.Generator) -> NDArray[np.float64]:
    """The chances of audits by Fisher's method. picked: the victims with the first place, (audits, victims)."""
    from scipy.special import gammaincc

    places = np.where(picked, 1, generator.integers(1, DECOYS + 2, picked.shape))
    combined: NDArray[np.float64] = gammaincc(picked.shape[1], -np.log(places / (DECOYS + 1)).sum(1))
    return combined


def main() -> None:
    found = [audit(number) for number in range(AUDITS)]
    counts = [sum(at_look) for at_look in zip(*found, strict=True)]
    print("| look | audits | say more than nothing-found | 95 % interval |\n|---|---|---|---|")
    for name, count in zip(("5 victims", "20 victims", "either"), [*counts, sum(map(any, found))], strict=True):
        low, high = rate_interval(count, AUDITS)
        print(f"| {name} | {AUDITS} | {count} | {100 * low:.1f} to {100 * high:.1f} % |")
    print(
        "| tests | victims that are picked out | nothing-found of a defense that does nothing, at most |\n|---|---|---|"
    )
    for tests in (2, 12, 48):
        for name, same in (("any", False), ("the same", True)):
            most, share = worst_miss(tests, same=same)
            print(f"| {tests} | {name} | {100 * most:.1f} %, if {100 * share:.0f} % are |")
