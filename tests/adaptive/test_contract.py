"""What every attacker who knows a defense owes: it runs, it says what it needs, and it can be stored and sent."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.adaptive.scenes import LOCAL, play
from tests.seeds import replayed

from leaktight.adaptive.knowing import Knowing
from leaktight.adaptive.table import ADAPTATIONS, adapt
from leaktight.attacks.controls import MeanImage, PriorOnly
from leaktight.attacks.labels.rules import Given
from leaktight.attacks.matching.attack import Matching
from leaktight.attacks.matching.spread import Parallel
from leaktight.attacks.optimizers.descent import Adam
from leaktight.attacks.presets.agic import Agic
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.config.catalogue import DEFENSES
from leaktight.config.toml import kind_of, settings_of
from leaktight.core.errors import NotDisclosedError, UsageError
from leaktight.core.protocols import Attack, Defense
from leaktight.core.threat import Knowledge
from leaktight.core.training import LocalTraining
from leaktight.core.types import UpdateKind
from leaktight.defenses.ada_lrp import AdaLrp
from leaktight.defenses.adadefense import AdaDefense
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.clipping import Clipping
from leaktight.defenses.compression import GradientCompression
from leaktight.defenses.dp_sgd import DpSgd
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

CASES: Mapping[str, Defense] = {
    "noise": AdditiveNoise(noise_std=0.01),
    "clipping": Clipping(clip_norm=0.1, scope="layer"),
    "compression": GradientCompression(),
    "minmax": MinMaxSampling(),
    "percentile_privacy": PercentilePrivacy(),
    "soteria": Soteria(),
    "graddefense": GradDefense(),
    "outpost": Outpost(),
    "dp_sgd": DpSgd(noise_multiplier=0.01),
    "fed_cdp": FedCdp(noise_multiplier=0.01),
    "client_dp": ClientDp(noise_multiplier=0.01),
    "adadefense": AdaDefense(),
    "lrp": Lrp(),
    "ada_lrp": AdaLrp(),
    "fedkl": FedKl(key_length=16),
    "precode": Precode(latent_size=8),
    "stack": Stack(parts=(Clipping(clip_norm=0.1, scope="layer"), GradientCompression())),
}
PAGE = Path(__file__).parents[2] / "docs" / "adaptive.md"
QUICK = CsDlg(iterations=1, backend="eager", onednn=False)

every_kind = pytest.mark.parametrize("kind", CASES)


def made(kind: str, attack: Attack = QUICK) -> Knowing:
    adapted = adapt(attack, CASES[kind])
    assert isinstance(adapted, Knowing)
    return adapted


def test_every_defense_has_an_attacker_who_knows_it() -> None:
    assert set(CASES) == set(DEFENSES) - {"none"}
    assert set(ADAPTATIONS) == {type(defense) for defense in CASES.values()} - {Stack}
    assert all(adapt(QUICK, defense) is not None for defense in CASES.values())
    assert adapt(QUICK, Defense()) is None
    assert all(kind_of(defense) == kind for kind, defense in CASES.items())


@pytest.mark.parametrize("kind", CASES)
def test_the_documentation_has_a_row_for_it(kind: str) -> None:
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.count("|") == 5]
    assert sum(f"`{kind}`" in row[1] for row in rows) == 1


def test_the_adaptation_says_in_its_docstring_what_it_assumes_and_cannot_do() -> None:
    for kind in set(ADAPTATIONS.values()):
        text = kind.__doc__ or ""
        assert "Assumes:" in text, kind
        assert "Cannot:" in text, kind


@every_kind
def test_it_can_be_stored_and_sent(kind: str) -> None:
    attack = made(kind)
    settings = settings_of(attack)
    stored = json.loads(json.dumps(settings))
    assert stored["attack"]["kind"] == "csdlg"
    assert stored["adaptation"]["defense"]["kind"] == kind
    assert stored == settings
    assert pickle.loads(pickle.dumps(attack)) == attack
    assert Knowledge.DEFENSE in attack.requires
    assert attack.requires >= QUICK.requires


@every_kind
def test_it_runs_touches_nothing_and_depends_on_its_seed_alone(kind: str) -> None:
    update: UpdateKind = "delta" if kind in ("lrp", "ada_lrp", "client_dp") else "gradient"
    scene = play(CASES[kind], kind=update)
    before = {name: tensor.clone() for name, tensor in scene.seen.update.tensors.items()}
    weights = {name: tensor.clone() for name, tensor in scene.seen.model.state_dict().items()}
    first = made(kind).reconstruct([scene.seen], rng=replayed(1))
    again = made(kind).reconstruct([scene.seen], rng=replayed(1))
    assert first.guess.inputs.shape == scene.truth.inputs.shape
    assert bool(torch.isfinite(first.guess.inputs).all())
    assert torch.equal(first.guess.inputs, again.guess.inputs)
    assert all(torch.equal(before[name], tensor) for name, tensor in scene.seen.update.tensors.items())
    assert all(torch.equal(weights[name], tensor) for name, tensor in scene.seen.model.state_dict().items())


FIRST_ORDER = Matching(
    labels=Given(), optimizer=Adam(learning_rate=0.01), iterations=2, restarts=2, precision="float64", onednn=False
)


TRACED: Mapping[str, tuple[Parallel, LocalTraining]] = {
    "clipping": ("vmap", LOCAL),
    "fedkl": ("vmap", LOCAL),
    "precode": ("vmap", LOCAL),
    "outpost": ("vmap", LOCAL),
    "lrp": ("none", replace(LOCAL, steps=2)),
}


@pytest.mark.parametrize("kind", TRACED)
def test_its_iterations_are_traced_and_agree_with_eager_ones(kind: str) -> None:
    """Weights, unknowns and models of a defense are part of the one traced function; plain steps, as signs jump."""
    parallel, local = TRACED[kind]
    scene = play(CASES[kind], kind="delta", local=local)
    traced = made(kind, replace(FIRST_ORDER, parallel=parallel)).reconstruct([scene.seen], rng=replayed(1))
    eager = made(kind, replace(FIRST_ORDER, backend="eager", parallel="none")).reconstruct(
        [scene.seen], rng=replayed(1)
    )
    assert traced.notes["backend"] == "fx"
    assert traced.loss == pytest.approx(eager.loss, rel=1e-6)
    torch.testing.assert_close(traced.guess.inputs, eager.guess.inputs, rtol=0, atol=1e-5)


def test_what_is_not_disclosed_is_not_used() -> None:
    scene = play(CASES["outpost"])
    with pytest.raises(NotDisclosedError, match="'defense'"):
        made("outpost").reconstruct([replace(scene.seen, defense=None)], rng=replayed(0))
    with pytest.raises(UsageError, match="to which this attack is adapted"):
        made("compression").reconstruct([scene.seen], rng=replayed(0))


@pytest.mark.parametrize("attack", [MeanImage(), PriorOnly(iterations=1), Agic(epochs=2)], ids=lambda each: type(each))
def test_what_does_not_match_one_update_is_not_adapted(attack: Attack) -> None:
    assert adapt(attack, Outpost()) is None


@pytest.mark.parametrize(
    "attack", [Dlg(), InvertingGradients(), Agic(), CsDlg().matching()], ids=lambda each: type(each)
)
def test_every_other_attack_is(attack: Attack) -> None:
    adapted = adapt(attack, Outpost())
    assert isinstance(adapted, Knowing)
    assert adapted.matching().objective is not None
