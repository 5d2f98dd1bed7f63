"""What is tried where nobody says what to try."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from leaktight.api.runs import parse_workers
from leaktight.config.audit import build_experiment, complete, scenario_facts
from leaktight.config.scenario import load_data
from leaktight.config.settings import load_config
from leaktight.config.tables import AUDIT_SCENARIO
from leaktight.core.errors import ConfigError, UsageError
from leaktight.core.protocols import Defense


def test_without_a_config_three_attacks_meet_three_defenses() -> None:
    config = complete(load_config(None, scenario=AUDIT_SCENARIO), trials=None, defenses_named=False)
    experiment = build_experiment(config, *load_data(config), adaptive=True)
    assert [each.name for each in experiment.defenses] == ["none", "outpost", "compression", "noise"]
    roles = [(each.name, each.role) for each in experiment.attacks if not each.adaptive]
    assert [name for name, role in roles if role == "attack"] == ["csdlg", "dlg", "inverting_gradients"]
    assert [name for name, role in roles if role == "control"] == ["prior_only", "mean_image", "public_image"]
    knowing = [(each.name, each.against) for each in experiment.attacks if each.adaptive]
    assert knowing == [("csdlg", "outpost"), ("csdlg", "compression"), ("csdlg", "noise")]
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
    config = complete(load_config(None, scenario=AUDIT_SCENARIO), trials=None, defenses_named=False)
    experiment = build_experiment(config, *load_data(config), adaptive=False)
    searching = [each for each in experiment.attacks if "onednn" in each.settings]
    assert len(searching) == 4
    assert {each.settings["onednn"] for each in searching} == {False}
    assert {each.settings["progress_every"] for each in searching} == {1}


def test_a_config_says_which_attacks_are_adapted(tmp_path: Path) -> None:
    def adapted(*overrides: str, attacks: Sequence[str] = ()) -> set[str]:
        config = load_config(None, overrides, scenario=AUDIT_SCENARIO, attacks=attacks)
        config = complete(config, trials=None, defenses_named=False)
        experiment = build_experiment(config, *load_data(config), adaptive=True)
        return {each.name for each in experiment.attacks if each.adaptive}

    assert adapted() == {"csdlg"}
    assert adapted("audit.adapted=['dlg', 'csdlg']") == {"dlg", "csdlg"}
    assert adapted("audit.adapted=[]") == {"csdlg", "dlg", "inverting_gradients"}
    assert adapted(attacks=["idlg"]) == {"idlg"}, "none of those named is tried, so all are"
    with pytest.raises(ConfigError, match=r"audit\.adapted: unknown attack 'csdgl'"):
        adapted("audit.adapted=['csdgl']")


@pytest.mark.parametrize("text", ["-1", "two", "ray:/x"])
def test_workers_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="expected workers"):
        parse_workers(text)
