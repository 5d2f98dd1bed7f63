"""What is tried where nobody says what to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from leaktight.adaptive.auto import Auto
from leaktight.api.runs import parse_workers
from leaktight.attacks.controls import Control
from leaktight.attacks.presets.agic import Agic
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.preset import Preset
from leaktight.audits.settings import AuditSettings
from leaktight.config.audit import build_experiment, build_tracks, complete, production_fact, scenario_facts
from leaktight.config.scenario import load_data
from leaktight.config.settings import Config, load_config
from leaktight.config.tables import AUDIT_SCENARIO
from leaktight.core.errors import ConfigError, UsageError
from leaktight.core.protocols import Attack, Defense
from leaktight.core.training import LocalTraining


def test_without_a_config_auto_meets_three_defenses() -> None:
    config = complete(load_config(None, scenario=AUDIT_SCENARIO), trials=None, defenses_named=False)
    experiment = build_experiment(config, *load_data(config), adaptive=True)
    assert [each.name for each in experiment.defenses] == ["none", "outpost", "compression", "noise"]
    roles = [(each.name, each.role) for each in experiment.attacks if not each.adaptive]
    assert [name for name, role in roles if role == "attack"] == ["auto"]
    assert [name for name, role in roles if role == "control"] == ["prior_only", "mean_image", "public_image"]
    knowing = [(each.name, each.against) for each in experiment.attacks if each.adaptive]
    assert knowing == [("auto", "outpost"), ("auto", "compression"), ("auto", "noise")]
    assert not experiment.trains
    facts = scenario_facts(config, experiment)
    assert facts["attacked update"] == "1 example, 1 sgd step of 1 at learning rate 0.2"
    assert "20 (iid)" in facts["clients"]


def test_the_resolved_config_gives_the_same_experiment(tmp_path: Path) -> None:
    config = complete(load_config(None, scenario=AUDIT_SCENARIO), trials=2, defenses_named=False)
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    again = complete(load_config(path), trials=None, defenses_named=False)
    assert again == config


def test_a_users_own_training_is_attacked_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[local]\nbatch_size = 8\n[defense]\nkind = 'clipping'\n")
    config = complete(load_config(path), trials=None, defenses_named=False)
    experiment = build_experiment(config, *load_data(config), adaptive=False)
    assert experiment.attacked == config.local
    assert [each.name for each in experiment.defenses] == ["none", "clipping"]
    labels = [getattr(each.value, "labels", None) for each in experiment.attacks]
    assert labels[0] is not None, "the threat model discloses no labels, so they are inferred"


def test_no_defense_alone_can_be_asked_for() -> None:
    config = load_config(None, defenses=["none"], scenario=AUDIT_SCENARIO)
    assert complete(config, trials=None, defenses_named=True).defenses == (Defense(),)


def test_nothing_of_an_attack_is_left_to_the_machine() -> None:
    config = load_config(None, attacks=["auto", "csdlg", "dlg"], scenario=AUDIT_SCENARIO)
    config = complete(config, trials=None, defenses_named=False)
    experiment = build_experiment(config, *load_data(config), adaptive=False)
    searching = [each for each in experiment.attacks if "onednn" in each.settings]
    assert len(searching) == 4
    assert {each.settings["onednn"] for each in searching} == {False}
    assert {each.settings["progress_every"] for each in searching if each.name != "auto"} == {1}


def test_a_config_says_which_attacks_are_adapted(tmp_path: Path) -> None:
    def adapted(*overrides: str, attacks: Sequence[str] = ()) -> set[str]:
        config = load_config(None, overrides, scenario=AUDIT_SCENARIO, attacks=attacks)
        config = complete(config, trials=None, defenses_named=False)
        experiment = build_experiment(config, *load_data(config), adaptive=True)
        return {each.name for each in experiment.attacks if each.adaptive}

    several = ["csdlg", "dlg", "inverting_gradients"]
    assert adapted() == {"auto"}
    assert adapted(attacks=several) == {"csdlg"}
    assert adapted("audit.adapted=['dlg', 'csdlg']", attacks=several) == {"dlg", "csdlg"}
    assert adapted("audit.adapted=[]", attacks=several) == {"csdlg", "dlg", "inverting_gradients"}
    assert adapted(attacks=["idlg"]) == {"idlg"}, "none of those named is tried, so all are"
    with pytest.raises(ConfigError, match=r"audit\.adapted: unknown attack 'csdgl'"):
        adapted("audit.adapted=['csdgl']")


@pytest.mark.parametrize("text", ["-1", "two", "ray:/x"])
def test_workers_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="expected workers"):
        parse_workers(text)


def built_in(*overrides: str, attacks: Sequence[str] = (), **given: object) -> Config:
    config = load_config(None, overrides, scenario=AUDIT_SCENARIO, given=given, attacks=attacks)
    return complete(config, defenses_named=False)


def test_the_built_in_audit_has_a_production_track_of_ordinary_training() -> None:
    config = built_in()
    assert config.production is not None
    experiment, production = build_tracks(config, adaptive=True)
    assert production is not None
    assert [each.name for each in production.defenses] == ["none"]
    assert [each.name for each in production.attacks if each.role == "attack"] == ["agic"]
    assert [(each.name, each.undefended) for each in experiment.attacks if each.undefended] == [("agic", True)]
    assert production.rounds == (12,)
    assert production.attacked == production.federation.trainer.local, "as training, not as [audit.local]"
    assert (production.init, config.production.model.mode) == ("default", "train")
    size = min(production.federation.sizes.values())
    assert production.attacked.num_steps(size) == 10
    assert experiment.federation.dataset.test is production.federation.dataset.test, "the data are loaded once"
    fact = production_fact(config.production, production)
    assert "weights: default, train mode" in fact
    assert "attacked rounds: 12; by agic on no defense; victims: 5, and 20 where they do not decide" in fact


def strengths(config: Config) -> list[Attack]:
    """The attacks of both tracks, without what the threat model and the machine settle."""
    tracks = [config] if config.production is None else [config, config.production]
    attacks = [each for track in tracks for each in track.attacks if not isinstance(each, Control)]
    return [replace(each, labels=None) if isinstance(each, Preset) else each for each in attacks]


@pytest.mark.parametrize(
    "named",
    [
        {"overrides": ["data.kind=cifar10"]},
        {"overrides": ["data.kind=digits"]},
        {"overrides": ["model.kind=mlp"]},
        {"overrides": ["model.activation=sigmoid"]},
        {"overrides": ["production.model.init=wide"]},
        {"overrides": ["attack.0.onednn=false"]},
        {"given": {"data": {"kind": "cifar10"}}},
        {"given": {"model": {"kind": "mlp"}}},
        {"given": {"model": nn.Linear(2, 2)}},
    ],
    ids=str,
)
def test_who_names_data_or_a_model_has_attacks_at_their_own_strength(named: dict[str, Any]) -> None:
    config = load_config(None, **{"scenario": AUDIT_SCENARIO, **named})
    auto, agic = strengths(complete(config, defenses_named=False))
    assert isinstance(auto, Auto)
    assert auto.budget == Auto().budget
    assert agic == Agic()


def test_a_named_attack_has_its_own_strength() -> None:
    assert strengths(built_in("data.kind=cifar10", attacks=["csdlg"])) == [CsDlg()]
    assert strengths(built_in(attacks=["csdlg", "auto", "agic"])) == [CsDlg(), Auto(), Agic()]
    assert strengths(built_in("attack={kind='auto'}")) == [Auto()]
    assert strengths(built_in("attack.iterations=8", attacks=["csdlg"])) == [CsDlg(iterations=8)], "what is said holds"
    assert strengths(built_in("data.kind=cifar10", "attack.budget=quick"))[0] == Auto(budget="quick")
    said = strengths(built_in("data.kind=cifar10", "production.attack.iterations=9"))
    assert said == [Auto(), Agic(iterations=9)]


def test_the_built_in_scenario_keeps_its_quick_attacks() -> None:
    quick = [Auto(budget="quick"), Agic(iterations=240, learning_rate=0.1, onednn=True)]
    for same in ((), ("federation.per_round=5",), ("threat.preset=diagnostic",), ("data.root='elsewhere'",)):
        assert strengths(built_in(*same)) == quick


def test_what_a_caller_says_holds_for_both_tracks() -> None:
    assert load_config(None, scenario=AUDIT_SCENARIO, attacks=["dlg"]).production is None
    assert load_config(None, ["attack=[{kind='dlg'}]"], scenario=AUDIT_SCENARIO).production is None
    for config in (built_in("model.kind=mlp"), built_in(model={"kind": "mlp"})):
        assert config.production is not None
        assert config.production.model == config.model
    other = built_in("model.activation=sigmoid", "local.learning_rate=0.3", "federation.rounds=5", "audit.trials=3")
    assert other.production is not None
    assert other.production.audit == AuditSettings(trials=3, attack_round=4, adapted=("auto", "csdlg"))
    assert (other.production.local.learning_rate, other.production.local.samples) == (0.3, 32)
    assert other.production.model.init == "default"
    assert other.production.model.source == other.model.source
    own = built_in(local=LocalTraining(batch_size=7)).production
    assert own is not None
    assert own.local.batch_size == 7


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[production.modle]\n", r"\[production\] unknown table 'modle'; did you mean 'model'\?"),
        ("[production]\nseed = 3\n", r"\[production\] unknown table 'seed'"),
        ("[production.local]\nepoch = 3\n", r"mine.toml, \[production\]: \[local\] unknown key 'epoch'"),
        ("[production.attack]\nkind = 'agci'\n", r"mine.toml, \[production\]: \[attack\] unknown kind 'agci'"),
        ("[production.audit]\nconfidence = 2.0\n", r"mine.toml, \[production\]: \[audit\] expected confidence > 0"),
        ("production = 3\n", r"mine.toml: expected a table \[production\], got 3"),
    ],
)
def test_errors_in_the_production_track_are_named(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(table)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_file_has_a_production_track_if_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[audit]\nattack_round = 3\n[audit.local]\nsamples = 1\nbatch_size = 1\n")
    assert load_config(path).production is None
    path.write_text(path.read_text() + "[production.audit]\nattack_round = 7\n[[defense]]\nkind = 'clipping'\n")
    production = complete(load_config(path), defenses_named=False).production
    assert production is not None
    assert production.attacked is None
    assert production.audit == AuditSettings(attack_round=7)
    assert [type(each).__name__ for each in production.defenses] == ["Defense", "Clipping"]
    path.write_text("[audit]\nevery = 3\n[production]\n")
    last = load_config(path).production
    assert last is not None
    assert last.audit == AuditSettings(attack_round=49), "the last round"


def test_a_budget_of_auto_holds_for_both_tracks(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(
        '[[attack]]\nkind = "csdlg"\n[production.model]\ninit = "default"\n[production.attack]\nkind = "auto"\n'
    )
    config = complete(load_config(path), effort="quick", defenses_named=True)
    assert config.production is not None
    assert [each.budget for each in config.production.attacks if isinstance(each, Auto)] == ["quick"]


def test_a_budget_without_auto_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text('[[attack]]\nkind = "csdlg"\n')
    with pytest.raises(UsageError, match="expected the attack auto for the budget 'quick', got csdlg; add auto"):
        complete(load_config(path), effort="quick", defenses_named=True)
