"""One policy for labels: given where the threat model discloses them, else inferred; for every attack in every form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.attacks.generators import EIGHT
from tests.audits.scenes import SMALL

from leaktight.api.audit import plan
from leaktight.attacks.labels.rules import Given, Inferred
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.audits.experiment import TrialRunner
from leaktight.config.catalogue import ATTACKS
from leaktight.config.toml import kind_of
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Attack, Progress
from leaktight.core.rng import Rng
from leaktight.core.threat import Knowledge, require
from leaktight.core.threat_presets import PRESETS
from leaktight.core.types import Batch, Observation, Reconstruction
from leaktight.results.schema import Trial

Settings = Mapping[str, Any]

QUICK: Settings = {"iterations": 1, "backend": "eager", "restarts": 1}
ONE_LAYER = ("model.kind=mlp", "model.init=default", "model.activation=relu")
MALICIOUS = ("threat.server=malicious",)
OWN: Mapping[str, tuple[Settings, Sequence[str]]] = {
    "auto": ({"budget": "quick"}, ONE_LAYER),
    "gradinversion": ({**QUICK, "batch_norm": 0.0, "restarts": 2}, ()),
    "grnn": ({**QUICK, "latent": 8}, ()),
    "cpl": ({**QUICK, "patch": 4}, ()),
    "ggl": ({**QUICK, "generator": EIGHT, "optimizer": "adam"}, ()),
    "gias": ({**QUICK, "generator": EIGHT, "latent_iterations": 1}, ()),
    "linear_inversion": ({}, ONE_LAYER),
    "spear": ({}, ONE_LAYER),
    "cocktail_party": ({"iterations": 3}, (*ONE_LAYER, "audit.local.samples=2", "audit.local.batch_size=2")),
    "peeling": ({"iterations": 1}, ("model.kind=resnet20", "model.init=default", "model.mode=eval")),
    "tail_matching": ({"iterations": 1, "starts": 1}, ("model.activation=relu", "model.mode=eval")),
    "rgap": ({}, ("model.kind=cnn6", "model.init=default", "model.head=linear")),
    "robbing_the_fed": ({"num_bins": 24}, MALICIOUS),
    "fishing": (QUICK, (*MALICIOUS, "audit.local.samples=4", "audit.local.batch_size=4")),
    "glaus": ({**QUICK, "queries": 4, "colluders": 2}, (*MALICIOUS, "federation.rounds=20")),
    "mean_image": ({}, ()),
    "public_image": ({}, ()),
    "nearest_public_image": ({"candidates": 20}, ()),
}
"""By kind, quick settings and the scene that it works in."""
UNTOLD = 'threat.knows=["batch_size", "buffers", "local_training", "public_data"]'
ONE = ("local.samples=1", "local.batch_size=1")
SEVERAL = ("audit.local.samples=3", "audit.local.batch_size=3")


def run_one(folder: Path, attack: Attack | Settings | str, *overrides: str) -> Trial:
    """One trial of an attack without a defense."""
    path = folder / "mine.toml"
    path.write_text(SMALL.partition("[[defense]]")[0])
    planned = plan("audit", path, attacks=[attack], settings=["audit.trials=1", *overrides], adaptive=False)
    experiment = planned.experiment.keyed(bytes(32))
    kind = attack["kind"] if isinstance(attack, Mapping) else attack if isinstance(attack, str) else kind_of(attack)
    spec = next(each for each in experiment.trials if each.attack.name == kind)
    return TrialRunner(experiment)(spec.id, lambda _: None)[0]


@pytest.mark.parametrize("form", ["table", "object"])
@pytest.mark.parametrize("kind", list(ATTACKS))
def test_every_attack_that_is_named_runs_without_disclosed_labels(tmp_path: Path, kind: str, form: str) -> None:
    settings, scene = OWN.get(kind, (QUICK, ()))
    attack = {"kind": kind, **settings} if form == "table" else ATTACKS[kind](**settings)
    assert run_one(tmp_path, attack, UNTOLD, *scene).error is None


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "diagnostic"])
@pytest.mark.parametrize("kind", ["csdlg", "inverting_gradients"])
def test_every_threat_model_that_discloses_no_labels(tmp_path: Path, kind: str, preset: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL.partition("[[defense]]")[0].partition("[threat]")[0] + f'[threat]\npreset = "{preset}"\n')
    planned = plan("audit", path, attacks=[{"kind": kind, **QUICK}], settings=["audit.trials=1", *ONE])
    spec = next(each for each in planned.experiment.trials if each.attack.name == kind)
    trial = TrialRunner(planned.experiment.keyed(bytes(32)))(spec.id, lambda _: None)[0]
    assert trial.error is None
    assert trial.ledger is not None
    assert trial.ledger.labels == "inferred"


@pytest.mark.parametrize(
    "scene",
    [
        ("local.optimizer=adam",),
        ("local.optimizer=adam", *SEVERAL),
        ("model.kind=cnn6", "model.init=default", "model.head=linear"),
        ("model.kind=cnn6", "model.init=default", "model.head=linear", *SEVERAL),
        ('threat.knows=["batch_size"]', *SEVERAL),
        ("federation.aggregator.kind=fedsgd", "local.steps=1", *SEVERAL),
    ],
    ids=" ".join,
)
def test_labels_are_inferred_by_the_rule_that_fits_the_update(tmp_path: Path, scene: Sequence[str]) -> None:
    trial = run_one(tmp_path, {"kind": "csdlg", **QUICK}, UNTOLD, *scene)
    assert trial.error is None
    assert trial.ledger is not None
    assert trial.ledger.labels == "inferred"
    assert trial.label_accuracy is not None


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
    for attack in (Stubborn(), "tests.audits.test_labels:Stubborn"):
        trial = run_one(tmp_path, attack, *([] if told else [UNTOLD]))
        assert trial.error is None
        assert trial.ledger is not None
        assert trial.ledger.labels == ("not needed" if told else "inferred")
        assert (trial.label_accuracy is None) == told, "labels that were read are scored"


def test_the_policy_is_the_same_for_the_attack_that_is_not_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL.partition("[[defense]]")[0])
    unnamed = plan("audit", path, settings=[UNTOLD]).experiment.attacks[0]
    named = plan("audit", path, settings=[UNTOLD], attacks=["csdlg"]).experiment.attacks[0]
    assert (unnamed.name, unnamed.labels_from) == ("auto", "inferred")
    assert (named.name, named.labels_from) == ("csdlg", "inferred")
    assert isinstance(named.value, CsDlg)
    assert named.value.labels == Inferred()
    assert plan("audit", path, attacks=["csdlg"]).experiment.attacks[0].labels_from == "given"


@pytest.mark.parametrize(
    ("attack", "overrides", "message"),
    [
        (
            CsDlg(labels=Given()),
            (UNTOLD,),
            'csdlg needs the labels, which the threat model does not disclose; set in [threat]: knows = ["batch_size", '
            '"buffers", "labels", "local_training", "public_data"], or infer them: set in [[attack]] of it: labels = '
            '{kind = "inferred"}',
        ),
        (
            "nearest_public_image",
            (),
            "nearest_public_image needs public data, which the threat model does not disclose; set in [threat]: "
            'knows = ["batch_size", "buffers", "labels", "local_training", "public_data"]',
        ),
        (
            "csdlg",
            ('threat.knows=["labels"]', "federation.aggregator.kind=median", "federation.per_round=4"),
            "csdlg needs the number of examples, which the threat model does not disclose; set in [threat]: knows = "
            '["batch_size", "labels"]',
        ),
        (
            "fishing",
            (),
            "fishing changes the model that the server sends, which the threat model does not allow; set in "
            '[threat]: server = "malicious"',
        ),
    ],
)
def test_what_an_attack_needs_and_is_not_told_is_an_error_before_any_work(
    tmp_path: Path, attack: Attack | str, overrides: Sequence[str], message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        run_one(tmp_path, attack, *overrides)
    assert str(raised.value) == message
