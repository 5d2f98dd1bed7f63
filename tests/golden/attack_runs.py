"""Every attack on one small victim, every attacker who knows a defense, and every rule for labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tests.golden.doors import (
    CONDITIONAL,
    LINEAR,
    Attack,
    Batch,
    Dataset,
    LocalTraining,
    Observation,
    adapted,
    build_model,
    draw,
    made,
    made_scene,
    malicious,
    names,
    observe,
    play,
    replayed,
)
from tests.golden.federation_runs import DEFENSES, defense_of, one_step_of
from torch import nn

Parts = Mapping[str, Any]
Run = Callable[[], Parts]
TWO_STEPS = LocalTraining(epochs=2, batch_size=2, learning_rate=0.1)
FIXED: Mapping[str, Any] = {"backend": "eager", "parallel": "none", "onednn": False}
"""What an optimisation attack needs to give the same bits each time."""


@cache
def digits() -> Dataset:
    found: Dataset = made("datasets", "digits", size=8).load(Path())
    return found


def network(kind: str = "lenet_zhu", init: str = "wide", classes: int = 10, **settings: Any) -> nn.Module:
    return build_model(made("models", kind, **settings), digits().inputs, classes, init=init, rng=replayed(3))


def victim(count: int = 1, model: nn.Module | None = None, local: LocalTraining | None = None) -> Observation:
    """What a curious server sees of digits of different classes, and all that it may know about them."""
    batch = draw(digits(), count, seed=3, unique=True)
    seen = observe(model or network(activation="sigmoid"), batch, 10, local=local)
    public = digits().test.batch(torch.arange(24))
    return replace(seen, labels=batch.targets.sort().values, public_data=public)


def answer(attack: Attack, *seen: Observation) -> Parts:
    found = attack.reconstruct(list(seen), rng=replayed(1))
    loss = torch.tensor(found.loss, dtype=torch.float64)  # every bit of it: priors are a small part of some losses
    return {"images": found.guess.inputs, "labels": found.guess.targets, "loss": loss}


def curious(kind: str, *, on: Callable[[], Observation] = victim, **settings: Any) -> Parts:
    return answer(made("attacks", kind, **settings), on())


def searched(kind: str, **settings: Any) -> Run:
    """An optimisation attack with few iterations, on the ordinary victim or, with `on`, on another.

    One of L-BFGS is 20 steps; after more, all that is left of a search is the truth and rounding.
    """
    return partial(curious, kind, **{"iterations": 4, **FIXED, **settings})


def cnn6() -> Observation:
    return victim(model=network("cnn6", init="default", head="linear"))


def mlp() -> Observation:
    return victim(model=network("mlp", init="default"))


def rectified() -> Observation:
    return victim(model=network(activation="relu"))


def one_layer() -> Observation:
    return victim(count=3, model=network("logistic_regression", init="default"))


def evaluated() -> Observation:
    """The gradient of a residual network that runs its batch norm as in evaluation."""
    batch = draw(digits(), 1, seed=3, unique=True)
    return observe(network("resnet20", init="default"), batch, 10, mode="eval")


def residual() -> Observation:
    return victim(count=2, model=network("resnet20", init="default"))


def pair() -> Observation:
    return victim(count=2)


def changed() -> Observation:
    """A model change after two epochs of two steps."""
    return victim(count=4, local=TWO_STEPS)


def made_image(conditional: bool = False) -> Observation:
    """The gradient of an image that the tests' generator can make."""
    seen: Observation = made_scene(CONDITIONAL if conditional else LINEAR)[0]
    return seen


def two_epochs() -> Parts:
    """AGIC on the updates of two epochs, each of which is two updates of one image."""
    both = draw(digits(), 2, seed=3, unique=True)
    model = network(activation="relu")
    singles = [Batch(both.inputs[place : place + 1], both.targets[place : place + 1]) for place in (0, 1, 1, 0)]
    seen = [replace(observe(model, each, 10), labels=each.targets) for each in singles]
    return answer(made("attacks", "agic", epochs=2, iterations=3, pre_iterations=3, **FIXED), *seen)


def active(kind: str, *, batch: int, defense: str = "none", **settings: Any) -> Parts:
    """A malicious server through its own rounds: what it sent and saw, and what it made of it."""
    attack = made("attacks", kind, **settings)
    place = malicious.scene(digits(), network(), batch=batch, mode="eval", defense=made("defenses", defense))
    truth, seen = place.play(attack)
    return {
        "queries": len(seen),
        "sent": [dict(each.broadcast.params) for each in seen],
        "seen": [dict(each.update.tensors) for each in seen],
        "truth": truth.inputs,
        **answer(attack, *seen),
    }


ATTACKS: Mapping[str, Run] = {
    "dlg": searched("dlg", iterations=1, restarts=2),
    "dlg-plain_steps": searched("dlg", iterations=1, restarts=1, line_search="none"),
    "dlg-box": searched("dlg", iterations=1, restarts=1, box=True),
    "idlg": searched("idlg", iterations=1),
    "cpl": searched("cpl", iterations=1, patch=4),
    "csdlg": searched("csdlg", on=pair, iterations=1),
    "csdlg-fx": searched("csdlg", on=pair, iterations=1, backend="fx"),
    "csdlg-changed": searched("csdlg", on=changed, iterations=1),
    "fedavg_epochs": searched("fedavg_epochs", on=changed, iterations=1),
    "inverting_gradients": searched("inverting_gradients", restarts=2),
    "inverting_gradients-fx": searched("inverting_gradients", restarts=2, backend="fx", parallel="vmap"),
    "inverting_gradients-long": searched("inverting_gradients", iterations=60),
    "inverting_gradients-changed": searched("inverting_gradients", on=changed),
    "inverting_gradients-one_batch": searched("inverting_gradients", on=changed, local="one_batch"),
    "gradinversion": searched("gradinversion", on=pair, batch_norm=0.0),
    "gradinversion-batch_norm": searched("gradinversion", on=residual, iterations=2),
    "agic": searched("agic"),
    "agic-epochs": two_epochs,
    "grnn": searched("grnn", iterations=2, latent=8),
    "grnn-code": searched("grnn", iterations=2, latent=8, variant="code", cosine=1.0),
    "ggl": searched("ggl", on=made_image, generator=LINEAR, population=8),
    "ggl-adam": searched("ggl", on=made_image, generator=LINEAR, optimizer="adam"),
    "ggl-bayesian": searched("ggl", on=made_image, generator=LINEAR, optimizer="bayesian", iterations=6),
    "gias": searched("gias", on=made_image, generator=LINEAR, latent_iterations=3, restarts=2),
    "gias-conditional": searched(
        "gias", on=partial(made_image, True), generator=CONDITIONAL, latent_iterations=3, restarts=2
    ),
    "auto": partial(curious, "auto", on=mlp, budget="quick"),
    "linear_inversion": partial(curious, "linear_inversion", on=mlp),
    "linear_inversion-batch": partial(curious, "linear_inversion", on=one_layer),
    "spear": partial(curious, "spear", on=mlp),
    "cocktail_party": partial(curious, "cocktail_party", on=mlp),
    "peeling": partial(curious, "peeling", on=evaluated, iterations=1),
    "tail_matching": partial(curious, "tail_matching", on=rectified, iterations=1, starts=1),
    "rgap": partial(curious, "rgap", on=cnn6),
    "robbing_the_fed": partial(active, "robbing_the_fed", batch=6, num_bins=24),
    "robbing_the_fed-fourier": partial(
        active, "robbing_the_fed", batch=6, num_bins=24, measure="fourier", form="hardtanh", law="normal", disguise=0.01
    ),
    "fishing": partial(active, "fishing", batch=6, iterations=4, **FIXED),
    "fishing-feature": partial(active, "fishing", batch=12, strategy="feature", target=3, iterations=4, **FIXED),
    "glaus": partial(
        active, "glaus", batch=1, defense="minmax", queries=8, colluders=2, iterations=1, restarts=1, **FIXED
    ),
    "glaus-values": partial(
        active, "glaus", batch=1, defense="minmax", queries=8, magnitudes="values", iterations=1, restarts=1, **FIXED
    ),
    "prior_only": searched("prior_only"),
    "mean_image": partial(curious, "mean_image"),
    "public_image": partial(curious, "public_image", on=changed),
    "nearest_public_image": partial(curious, "nearest_public_image"),
}


def knowing(kind: str, base: str = "csdlg", **settings: Any) -> Parts:
    """The attacker who knows this defense, on an update behind it."""
    defense = defense_of(kind)
    attack = made("attacks", base, **{"iterations": 1, **FIXED, **settings})
    return answer(adapted(attack, defense), play(defense, kind=one_step_of(kind)).seen)


ADAPTIVE: Mapping[str, Run] = {
    **{kind: partial(knowing, kind) for kind in DEFENSES if kind != "none"},
    "outpost-first_order": partial(knowing, "outpost", "inverting_gradients", iterations=3),
    "lrp-first_order": partial(knowing, "lrp", "inverting_gradients", iterations=3),
}


def read(kind: str) -> Parts:
    """Labels read from gradients and, where the rule can, from model changes; of one example and of several."""
    rule = made("labels", kind)
    relu = network(init="default", activation="relu")
    cases = {"one": victim(model=relu)}
    if kind != "idlg":
        cases |= {"several": victim(count=5, model=relu), "change": victim(count=4, model=relu, local=TWO_STEPS)}
    return {
        name: rule.infer(seen, seen.batch_size or 0, rng=replayed(2).child("labels")) for name, seen in cases.items()
    }


LABELS: Mapping[str, Run] = {kind: partial(read, kind) for kind in names("labels")}
