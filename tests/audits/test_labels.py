"""One policy for labels: given where the threat model discloses them, else inferred; for every attack in every form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.attacks.generators import EIGHT
from tests.audits.scenes import SMALL

from leaktight.api.audit import plan
from leaktight.attacks.labels.rules import Given
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.audits.experiment import TrialRunner
from leaktight.config.catalogue import ATTACKS
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Attack, Progress
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.results.schema import Trial

QUICK: Mapping[str, object] = {"iterations": 1, "backend": "eager", "restarts": 1}
ONE_LAYER = ("model.kind=mlp", "model.init=default", "model.activation=relu")
OWN: Mapping[str, tuple[Mapping[str, object], Sequence[str]]] = {
    "auto": ({"budget": "quick"}, ()),
    "gradinversion": ({"iterations": 1, "batch_norm": 0.0, "restarts": 2}, ()),
    "grnn": ({"iterations": 1, "latent": 8}, ()),
    "cpl": ({"iterations": 1, "patch": 4}, ()),
    "ggl": ({"iterations": 1, "generator": EIGHT, "optimizer": "adam"}, ()),
    "gias": ({"iterations": 1, "generator": EIGHT, "latent_iterations": 1, "restarts": 1}, ()),
    "linear_inversion": ({}, ONE_LAYER),
    "spear": ({}, ONE_LAYER),
    "cocktail_party": ({"iterations": 3}, (*ONE_LAYER, "audit.local.samples=2", "audit.local.batch_size=2")),
    "rgap": ({}, ("model.kind=cnn6", "model.init=default", "model.head=linear")),
    "robbing_the_fed": ({"num_bins": 24}, ("threat.server=malicious",)),
    "fishing": ({"iterations": 1}, ("threat.server=malicious", "audit.local.samples=4", "audit.local.batch_size=4")),
    "glaus": ({"iterations": 1, "queries": 4, "colluders": 2}, ("threat.server=malicious", "federation.rounds=20")),
    "prior_only": ({"iterations": 1}, ()),
    "mean_image": ({}, ()),
    "public_image": ({}, ()),
    "nearest_public_image": ({"candidates": 20}, ()),
}
"""By kind, quick settings and the scene that it works in."""
UNTOLD = 'threat.knows=["batch_size", "buffers", "local_training", "public_data"]'


def run_one(path: Path, attack: object, *overrides: str) -> tuple[Trial, ...]:
    """One trial of an attack on each defense."""
    path.write_text(SMALL.replace('kind = "noise"', 'kind = "clipping"').partition("[[attack]]")[0])
    settings = ["audit.trials=1", *overrides]
    planned = plan("audit", path, attacks=[attack], settings=settings, adaptive=False)  # type: ignore[list-item]
    runner = TrialRunner(planned.experiment.keyed(bytes(32)))
    return tuple(runner(spec.id, lambda _: None)[0] for spec in planned.experiment.trials)


@pytest.mark.parametrize("kind", list(ATTACKS))
def test_every_attack_that_is_named_runs_without_disclosed_labels(tmp_path: Path, kind: str) -> None:
    settings, scene = OWN.get(kind, (QUICK, ()))
    for attack in ({"kind": kind, **settings}, ATTACKS[kind](**settings)):
        trials = run_one(tmp_path / "mine.toml", attack, UNTOLD, *scene)
        assert [(each.attack, each.error) for each in trials if each.status == "failed"] == []


SEVERAL = ("audit.local.samples=3", "audit.local.batch_size=3")


@pytest.mark.parametrize(
    "scene",
    [
        ("local.optimizer=adam",),
        ("local.optimizer=adam", *SEVERAL),
        ("model.kind=cnn6", "model.init=default", "model.head=linear"),
        ("model.kind=cnn6", "model.init=default", "model.head=linear", *SEVERAL),
        ('threat.knows=["batch_size"]',),
        ('threat.knows=["batch_size"]', *SEVERAL),
        SEVERAL,
        ("federation.aggregator.kind=fedsgd", "local.steps=1", *SEVERAL),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("kind", ["csdlg", "inverting_gradients", "agic", "gradinversion"])
def test_labels_are_inferred_by_the_rule_that_fits_the_update(tmp_path: Path, kind: str, scene: Sequence[str]) -> None:
    settings, _ = OWN.get(kind, (QUICK, ()))
    trials = run_one(tmp_path / "mine.toml", {"kind": kind, **settings}, UNTOLD, *scene)
    assert [(each.attack, each.error) for each in trials if each.status == "failed"] == []
    found = [each for each in trials if each.role == "attack"]
    assert {each.ledger.labels for each in found if each.ledger} == {"inferred"}
    assert all(each.label_accuracy is not None for each in found)


@dataclass(frozen=True, kw_only=True)
class Stubborn(Attack):
    """An own class that needs labels, and shows them in its guess."""

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS, Knowledge.BATCH_SIZE})

    def reconstruct(self, seen: Sequence[Observation], *, rng: Rng, progress: Progress | None = None) -> Reconstruction:
        require(seen[0], *self.requires)
        assert seen[0].labels is not None
        return Reconstruction(Batch(torch.zeros(len(seen[0].labels), *seen[0].inputs.shape), seen[0].labels), 0.0)


@pytest.mark.parametrize("told", [True, False])
def test_an_own_class_has_labels_like_any_other(tmp_path: Path, told: bool) -> None:
    attacks: list[object] = [Stubborn(), "tests.audits.test_labels:Stubborn"]
    for attack in attacks:
        found = run_one(tmp_path / "mine.toml", attack, *([] if told else [UNTOLD]))
        assert [each.error for each in found if each.status == "failed"] == []
        ledgers = [each.ledger for each in found if each.role == "attack"]
        assert {each.labels for each in ledgers if each} == {"not needed" if told else "inferred"}


def test_labels_that_are_said_to_be_given_and_are_not_are_an_error_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"csdlg needs the labels.*set in \[threat\]: knows = .*\"labels\""):
        run_one(tmp_path / "mine.toml", CsDlg(labels=Given()), UNTOLD)
