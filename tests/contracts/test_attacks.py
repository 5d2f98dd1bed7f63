"""What every attack of the catalogue keeps, on a victim of one small image."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.attacks import tampered
from tests.attacks.generative.test_ggl import scene as made_scene
from tests.attacks.generators import LINEAR
from tests.attacks.scenes import draw, observe
from tests.seeds import replayed
from torch import Tensor, nn

from leaktight.adaptive.auto import Auto
from leaktight.attacks.controls import MeanImage, PriorOnly, PublicImage
from leaktight.attacks.exact.cocktail_party import CocktailParty
from leaktight.attacks.exact.linear_inversion import LinearInversion
from leaktight.attacks.exact.peeling import Peeling
from leaktight.attacks.exact.rgap import RGap
from leaktight.attacks.exact.spear import Spear
from leaktight.attacks.generative.ggl import Ggl
from leaktight.attacks.generative.gias import Gias
from leaktight.attacks.generative.grnn import Grnn
from leaktight.attacks.malicious.fishing import Fishing
from leaktight.attacks.malicious.robbing_the_fed import RobbingTheFed
from leaktight.attacks.presets.agic import Agic
from leaktight.attacks.presets.cpl import Cpl
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.fedavg_epochs import FedAvgEpochs
from leaktight.attacks.presets.glaus import Glaus
from leaktight.attacks.presets.gradinversion import GradInversion
from leaktight.attacks.presets.idlg import IdlgAttack
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.attacks.retrieval import NearestPublicImage
from leaktight.attacks.tails.tail_matching import TailMatching
from leaktight.audits.plan import LABELS_FOUND
from leaktight.config.catalogue import ATTACKS, MODELS
from leaktight.core.errors import NotDisclosedError
from leaktight.core.protocols import ActiveAttack, Attack, Defense, LabelSource, Progress
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge
from leaktight.core.types import Batch, Mode, Observation, Reconstruction
from leaktight.data.dataset import Dataset
from leaktight.data.embedded import Digits
from leaktight.defenses.minmax import MinMaxSampling
from leaktight.models.initialise import build_model

QUICK: typing.Any = {"iterations": 3, "backend": "eager", "onednn": False}
ONE: typing.Any = {**QUICK, "iterations": 1, "restarts": 1}


@cache
def digits() -> Dataset:
    return Digits(size=8).load(Path())


def network(kind: str = "lenet_zhu", init: str = "wide", **settings: typing.Any) -> nn.Module:
    return build_model(MODELS[kind](**settings), digits().inputs, 10, init=init, rng=replayed(3))


def one(kind: str = "lenet_zhu", init: str = "wide", mode: Mode = "train", **settings: typing.Any) -> list[Observation]:
    """A gradient of one digit, with all that an attacker may know about it."""
    batch = draw(digits(), 1, seed=3, unique=True)
    seen = observe(network(kind, init, **settings), batch, 10, mode=mode)
    return [replace(seen, labels=batch.targets, public_data=digits().test.batch(torch.arange(24)))]


def smooth() -> list[Observation]:
    return one(activation="sigmoid")


def made() -> list[Observation]:
    """The gradient of an image that the tests' generator can make."""
    return [made_scene(LINEAR)[0]]


def asked(attack: ActiveAttack, *, batch: int, defense: Defense = Defense()) -> list[Observation]:
    """All that a malicious server with this attack sees."""
    return tampered.scene(digits(), network(), batch=batch, mode="eval", defense=defense).play(attack)[1]


FISHING = Fishing(**QUICK)
ROBBING = RobbingTheFed(num_bins=24)
GLAUS = Glaus(queries=4, colluders=2, **ONE)
CASES: Mapping[str, tuple[Attack, Callable[[], Sequence[Observation]]]] = {
    "auto": (Auto(budget="quick", onednn=False), smooth),
    "dlg": (Dlg(**ONE), smooth),
    "idlg": (IdlgAttack(**ONE), smooth),
    "cpl": (Cpl(patch=4, **ONE), smooth),
    "csdlg": (CsDlg(**ONE), smooth),
    "fedavg_epochs": (FedAvgEpochs(**ONE), smooth),
    "inverting_gradients": (InvertingGradients(restarts=2, **QUICK), smooth),
    "gradinversion": (GradInversion(batch_norm=0.0, **QUICK), smooth),
    "agic": (Agic(**QUICK), smooth),
    "grnn": (Grnn(latent=8, **QUICK), smooth),
    "ggl": (Ggl(generator=LINEAR, optimizer="adam", **QUICK), made),
    "gias": (Gias(generator=LINEAR, latent_iterations=3, restarts=2, **QUICK), made),
    "linear_inversion": (LinearInversion(), lambda: one("mlp", "default")),
    "spear": (Spear(), lambda: one("mlp", "default")),
    "cocktail_party": (CocktailParty(iterations=3), lambda: one("mlp", "default", activation="sigmoid")),
    "peeling": (Peeling(iterations=1), lambda: one("resnet20", "default", mode="eval")),
    "tail_matching": (TailMatching(iterations=1, starts=1), lambda: one(activation="relu", mode="eval")),
    "rgap": (RGap(), lambda: one("cnn6", "default", head="linear")),
    "robbing_the_fed": (ROBBING, lambda: asked(ROBBING, batch=6)),
    "fishing": (FISHING, lambda: asked(FISHING, batch=6)),
    "glaus": (GLAUS, lambda: asked(GLAUS, batch=1, defense=MinMaxSampling())),
    "prior_only": (PriorOnly(**QUICK), smooth),
    "mean_image": (MeanImage(), smooth),
    "public_image": (PublicImage(), smooth),
    "nearest_public_image": (NearestPublicImage(), smooth),
}
CLOSED_FORMS = {
    *("linear_inversion", "spear", "peeling", "rgap", "robbing_the_fed", "nearest_public_image"),
    *("prior_only", "mean_image", "public_image"),
}
every_attack = pytest.mark.parametrize("kind", CASES)


@cache
def case(kind: str) -> tuple[Attack, tuple[Observation, ...]]:
    attack, seen = CASES[kind]
    return attack, tuple(seen())


@cache
def answered(kind: str) -> Reconstruction:
    attack, seen = case(kind)
    return attack.reconstruct(list(seen), rng=replayed(1))


def assert_same(one: Reconstruction, other: Reconstruction) -> None:
    assert torch.equal(one.guess.inputs, other.guess.inputs)
    assert torch.equal(one.guess.targets, other.guess.targets)
    assert repr((one.loss, one.first_loss, one.history)) == repr((other.loss, other.first_loss, other.history))


def tensors_of(seen: Sequence[Observation]) -> list[Tensor]:
    """All tensors that an attack is shown."""
    found: list[Tensor] = []
    for each in seen:
        found += [*each.model.parameters(), *each.model.buffers(), *each.update.tensors.values()]
        found += [*each.broadcast.params.values(), *each.broadcast.buffers.values()]
        found += [] if each.labels is None else [each.labels]
        found += [] if each.public_data is None else [each.public_data.inputs, each.public_data.targets]
    return found


def test_every_attack_of_the_catalogue_is_here() -> None:
    assert set(CASES) == set(ATTACKS)
    assert all(type(attack) is ATTACKS[kind] for kind, (attack, _) in CASES.items())


@every_attack
def test_the_same_seed_gives_the_same_bytes(kind: str) -> None:
    attack, seen = case(kind)
    assert_same(attack.reconstruct(list(seen), rng=replayed(1)), answered(kind))


@every_attack
def test_what_it_is_shown_stays_as_it_was(kind: str) -> None:
    attack, seen = case(kind)
    before = [tensor.clone() for tensor in tensors_of(seen)]
    modes = [module.training for each in seen for module in each.model.modules()]
    state = torch.get_rng_state()
    attack.reconstruct(list(seen), rng=replayed(1))
    assert all(torch.equal(old, new) for old, new in zip(before, tensors_of(seen), strict=True))
    assert modes == [module.training for each in seen for module in each.model.modules()]
    assert torch.equal(state, torch.get_rng_state())


@every_attack
def test_watching_changes_nothing(kind: str) -> None:
    attack, seen = case(kind)
    told: list[float] = []
    pinned = attack.pinned(onednn=False)
    watched = pinned.reconstruct(list(seen), rng=replayed(1), progress=lambda iteration, loss, guess: told.append(loss))
    assert_same(watched, answered(kind))
    if "chosen" in watched.notes:
        return  # the first report is that of another attack of the ensemble
    assert repr(told[0]) == repr(watched.first_loss), "an audit need not watch to know where a search began"


NEEDS = [(kind, fact) for kind, (attack, _) in CASES.items() for fact in sorted(attack.requires, key=lambda f: f.value)]


def play(attack: Attack, seen: Sequence[Observation]) -> None:
    """All that an attack does with what it sees; a malicious server also asks on."""
    if isinstance(attack, ActiveAttack):
        attack.tamper(seen[0].broadcast, seen[:1], rng=replayed(1))
    attack.reconstruct(list(seen), rng=replayed(1))


@pytest.mark.parametrize(("kind", "fact"), NEEDS, ids=[f"{kind}-{fact.value}" for kind, fact in NEEDS])
def test_a_fact_that_it_needs_and_is_not_told_raises(kind: str, fact: Knowledge) -> None:
    attack, seen = case(kind)
    hidden: dict[str, typing.Any] = {fact.value: None}
    with pytest.raises(NotDisclosedError, match=fact.value):
        play(attack, [replace(each, **hidden) for each in seen])


@every_attack
def test_what_an_audit_asks_of_it(kind: str) -> None:
    attack, seen = case(kind)
    assert attack.labels_from in typing.get_args(LabelSource)
    assert attack.labels_from not in LABELS_FOUND or Knowledge.LABELS not in attack.requires
    assert attack.searches == (kind not in CLOSED_FORMS)
    once = attack.pinned(onednn=False)
    assert type(once) is type(attack)
    assert once.pinned(onednn=True) == once, "what is fixed stays fixed"
    fitted = attack.fitted(replace(seen[0], labels=None))
    assert Knowledge.LABELS not in fitted.requires
    assert fitted.fitted(replace(seen[0], labels=None)) == fitted


@dataclass(frozen=True, kw_only=True)
class Grey(Attack):
    """An attack from outside: what it has to write is one method."""

    level: float = 0.5

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        images = torch.full((seen[0].batch_size or 1, *seen[0].inputs.shape), self.level)
        return Reconstruction(Batch(images, torch.zeros(len(images), dtype=torch.long)), 0.0)


def test_an_attack_from_outside_needs_reconstruct_alone() -> None:
    attack = Grey(level=0.25)
    assert attack.requires == frozenset()
    assert attack.labels_from == "not needed"
    assert attack.pinned(onednn=True) == attack == attack.fitted(smooth()[0])
    assert attack.reconstruct(smooth(), rng=replayed(0)).first_loss is None
