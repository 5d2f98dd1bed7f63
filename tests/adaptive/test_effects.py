"""Who expects a defense gets clearly more out of an update than who does not: LeNet with wide weights, one digit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.adaptive.scenes import LOCAL, play, score
from tests.seeds import replayed

from leaktight.adaptive.table import adapt
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.idlg import IdlgAttack
from leaktight.attacks.presets.preset import Preset
from leaktight.core.protocols import Attack, Defense
from leaktight.defenses.adadefense import AdaDefense
from leaktight.defenses.clipping import Clipping
from leaktight.defenses.compression import GradientCompression
from leaktight.defenses.fed_cdp import FedCdp
from leaktight.defenses.fedkl import FedKl
from leaktight.defenses.graddefense import GradDefense
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.minmax import MinMaxSampling
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.outpost import Outpost
from leaktight.defenses.percentile_privacy import PercentilePrivacy
from leaktight.defenses.precode import Precode
from leaktight.defenses.soteria import Soteria
from leaktight.defenses.stack import Stack

CSDLG = CsDlg(iterations=6, onednn=False)
DLG = Dlg(iterations=10, restarts=1, onednn=False)
DELTA = {"kind": "delta"}
TWO_STEPS = {"kind": "delta", "local": replace(LOCAL, steps=2)}
FOUR = replace(LOCAL, batch_size=4)


@dataclass(frozen=True)
class Effect:
    """At least so many dB, and so many more than the same attack that does not expect the defense."""

    defense: Defense
    least: float = 35.0
    gain: float = 15.0
    attack: Preset = CSDLG
    options: dict[str, Any] = field(default_factory=dict)


EFFECTS = {
    "compression": Effect(GradientCompression()),
    "minmax": Effect(MinMaxSampling(keep_share=0.2)),
    "minmax-biased": Effect(MinMaxSampling(keep_share=0.1, unbiased=False)),
    "minmax-batch": Effect(MinMaxSampling(), least=18.0, gain=10.0, options={"count": 4, "local": FOUR}),
    "percentile_privacy": Effect(PercentilePrivacy(), options=DELTA),
    "compression-2-steps": Effect(GradientCompression(), options=TWO_STEPS),
    "soteria-2-steps": Effect(Soteria(), options=TWO_STEPS),
    "soteria": Effect(Soteria()),
    "graddefense": Effect(GradDefense(), gain=10.0),
    "outpost": Effect(Outpost(), least=70.0),
    "clipping-layers": Effect(Clipping(clip_norm=0.1, scope="layer")),
    "fed_cdp": Effect(FedCdp(clip_norm=0.5, noise_multiplier=0.001), least=30.0),
    "adadefense": Effect(AdaDefense()),
    "adadefense-code": Effect(AdaDefense(variant="code"), options=DELTA),
    # A rate above the usual one: a searched label absorbs a smaller one, so that DLG needs no knowledge of it.
    "lrp-dlg": Effect(Lrp(), attack=DLG, options={"kind": "delta", "seed": 4}),
    "lrp-3-steps": Effect(Lrp(), gain=5.0, options={"kind": "delta", "local": replace(LOCAL, steps=3)}),
    "fedkl": Effect(FedKl(), attack=replace(CSDLG, iterations=10)),
    "precode": Effect(Precode(), least=80.0, attack=replace(CSDLG, iterations=8)),
    "stack": Effect(Stack(parts=(Clipping(clip_norm=0.1, scope="layer"), GradientCompression()))),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_knowing_the_defense_helps(name: str) -> None:
    effect = EFFECTS[name]
    scene = play(effect.defense, **effect.options)
    unaware = scene.score(effect.attack)
    knowing = scene.score(knows(effect.attack, effect.defense))
    assert knowing > effect.least, (unaware, knowing)
    assert knowing > unaware + effect.gain, (unaware, knowing)


def knows(attack: Attack, defense: Defense) -> Attack:
    made = adapt(attack, defense)
    assert made is not None
    return made


def test_noise_meets_a_prior_and_repeated_rounds_average_it_away() -> None:
    defense = AdditiveNoise(noise_std=0.03)
    scenes = [play(defense, noise_seed=number) for number in range(16)]
    attack = knows(CSDLG, defense)
    unaware, once = scenes[0].score(CSDLG), scenes[0].score(attack)
    often = score(attack.reconstruct([scene.seen for scene in scenes], rng=replayed(0)).guess.inputs, scenes[0].truth)
    assert once > unaware + 1.5, (unaware, once)
    assert often > once + 2, (once, often)


@pytest.mark.parametrize("defense", [AdaDefense(), FedKl(key_length=16), Precode(latent_size=8)], ids=lambda d: type(d))
def test_labels_that_would_be_searched_for_are_read(defense: Defense) -> None:
    scene = play(defense)
    found = knows(replace(DLG, iterations=1), defense).reconstruct([replace(scene.seen, labels=None)], rng=replayed(0))
    assert found.guess.targets.tolist() == scene.truth.targets.tolist()


def test_idlg_reads_the_label_of_an_inverted_stand_in() -> None:
    scene = play(AdaDefense())
    attack = knows(IdlgAttack(iterations=1, restarts=1), AdaDefense())
    found = attack.reconstruct([replace(scene.seen, labels=None)], rng=replayed(0))
    assert found.guess.targets.tolist() == scene.truth.targets.tolist()
