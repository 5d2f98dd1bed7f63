"""How often the judge is wrong: intervals that miss the mean, whole audits that say too much or too little.

made-up: the judge alone, on trials with ranks and labels by chance. audits: attacks that do not look at the update;
any word but nothing-found and cannot-conclude is an error. null: a defense that changes next to nothing, under attacks
from strong to hardly working; nothing-found is an error. power: how weak a leak identification finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from bench import coverage, made_up
from bench.audits import Scene, chances, verdicts
from bench.guessers import Blind, Labels, NoisyInversion, Picture
from leaktight.attacks.controls import MeanImage
from leaktight.audits.judge.statistics import rate_interval
from leaktight.defenses.noise import AdditiveNoise
from leaktight.results.schema import ERROR, UNDEFENDED, WORDS, Verdict

SAYS_MORE = ("reconstructed", "identified", "labels-read")
AUDITS = 400
PICTURES: tuple[Picture, ...] = ("mean", "random", "average", "noise", "central")
LABELS: tuple[Labels, ...] = ("random", "balanced", "constant")
BLIND = tuple(Blind(picture=each) for each in PICTURES)
BLIND_LABELS = tuple(Blind(picture="mean", labels=each) for each in LABELS)
DESTROYED = AdditiveNoise(noise_std=1000.0)
UNTOUCHED = AdditiveNoise(noise_std=1e-9)
STRENGTHS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Standard deviations of the noise on an exact guess, in the picture's range of 1."""
VICTIMS = (5, 20)
TESTS = 24
"""Tests of an audit that a chance is corrected for: 3 attacks on 4 defenses, two looks."""
PARTITIONS: tuple[Literal["iid", "shards"], ...] = ("iid", "shards")

KNOWN = (
    *(Scene(f"one attack works, {each}", (*BLIND, NoisyInversion(noise=0)), (DESTROYED,), each) for each in PARTITIONS),
    *(Scene(f"20 victims, batch {size}, shards", BLIND, (), "shards", batch=size, trials=20) for size in (1, 4)),
)
"""Labels known. Where one attack works, the second look is taken, and judged are the others and a safe defense."""
UNKNOWN = tuple(
    Scene(f"batch {size}, {each}", BLIND_LABELS, (), each, size, labels=False, trials=20, controls=(MeanImage(),))
    for size in (1, 4, 16)
    for each in PARTITIONS
)
NULL = tuple(Scene(f"noise {each:g}", (NoisyInversion(noise=each),), (UNTOUCHED,)) for each in STRENGTHS)
EDGE = tuple(
    Scene(f"noise {each:g}, 20 victims", (NoisyInversion(noise=each),), (UNTOUCHED,), trials=20, controls=())
    for each in (2.5, 3.0, 3.5, 4.0)
)
"""Attacks that hardly work on 20 victims."""
WEAK = tuple(
    Scene(f"noise {each:g}", (NoisyInversion(noise=each),), trials=max(VICTIMS), controls=()) for each in STRENGTHS
)


def seeds(scenes: Sequence[Scene], scene: Scene) -> range:
    """The seeds of the audits of a scene, of 400 in all."""
    number = scenes.index(scene)
    count = AUDITS * (number + 1) // len(scenes) - AUDITS * number // len(scenes)
    return range(1000 * number, 1000 * number + count)


def worst_blind(found: Sequence[Verdict]) -> str:
    """The worst word that says more of attacks that do not look at the update, or of any on a destroyed one.

    If there is none, the word on the last defense.
    """
    words = [
        attacker.verdict
        for verdict in found
        for attacker in verdict.attackers
        if "Blind" in attacker.attack or verdict.defense != UNDEFENDED
    ]
    return min((each for each in words if each in SAYS_MORE), key=WORDS.index, default=found[-1].verdict)


def defended(found: Sequence[Verdict]) -> str:
    """The word on the defense."""
    return next(verdict.verdict for verdict in found if verdict.defense != UNDEFENDED)


def tally(scenes: Sequence[Scene], word: Callable[[Sequence[Verdict]], str], wrong: Sequence[str]) -> None:
    """Run the audits of these scenes, and print how often they say what would be wrong."""
    total: Counter[str] = Counter()
    for scene in scenes:
        words = Counter(word(verdicts(scene, seed)) for seed in seeds(scenes, scene))
        total += words
        print(row(scene.name, words, wrong), flush=True)
    print(row("all", total, wrong))


def row(name: str, words: Counter[str], wrong: Sequence[str]) -> str:
    """A row of a table: the audits, those that are wrong with the interval of their rate, and how often each word."""
    audits, errors = words.total(), sum(words[each] for each in wrong)
    low, high = rate_interval(errors, audits)
    counts = ", ".join(f"{each} {words[each]}" for each in WORDS if words[each])
    return f"| {name} | {audits} | {errors} | {100 * low:.1f} to {100 * high:.1f} % | {counts} |"


def audits() -> None:
    for name, scenes in (("labels known", KNOWN), ("labels unknown", UNKNOWN)):
        print(f"| {name} | audits | say more than nothing-found | 95 % interval | words |\n|---|---|---|---|---|")
        tally(scenes, worst_blind, SAYS_MORE)


def null() -> None:
    print("| strength | audits | nothing-found | 95 % interval | words |\n|---|---|---|---|---|")
    for scenes in (NULL, EDGE):
        tally(scenes, defended, ("nothing-found",))


def power() -> None:
    """The share of audits in which one attack identifies its victims, as the only test and among 24."""
    print(f"| strength | {' | '.join(f'{n} victims, {t} test' + 's' * (t > 1) for n in VICTIMS for t in (1, TESTS))} |")
    print("|---" * (1 + 2 * len(VICTIMS)) + "|")
    for scene in WEAK:
        found = [chances(scene, seed, VICTIMS) for seed in seeds(WEAK, scene)]
        shares = [
            sum(each[place] <= ERROR / tests for each in found) / len(found)
            for place in range(len(VICTIMS))
            for tests in (1, TESTS)
        ]
        print(f"| {scene.name} | {' | '.join(f'{100 * each:.0f} %' for each in shares)} |", flush=True)


PARTS: Mapping[str, Callable[[], None]] = {
    "intervals": coverage.main,
    "made-up": made_up.main,
    "audits": audits,
    "null": null,
    "power": power,
}


def main(parts: Sequence[str]) -> None:
    """Run the parts that are named, or all."""
    torch.set_num_threads(1)
    for name in parts or PARTS:
        print(f"== calibration {name}", flush=True)
        PARTS[name]()
