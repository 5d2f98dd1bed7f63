"""`leaktight list KIND NAME`: what it says of every method comes from the method, and its example is a valid table."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields, is_dataclass

import pytest
from typer.testing import CliRunner

from leaktight.cli.app import app
from leaktight.config.catalogue import ATTACKS, CATALOGUE, DEFENSES
from leaktight.config.details import details
from leaktight.config.fields import check_tables
from leaktight.config.toml import choose
from leaktight.core.errors import LeaktightError, UsageError

METHODS = [(family, name) for family in CATALOGUE for name in CATALOGUE[family]]


@pytest.mark.parametrize(("family", "name"), METHODS, ids=lambda each: each)
def test_every_setting_is_explained(family: str, name: str) -> None:
    method, found = CATALOGUE[family][name], details(family, name)
    assert [each.name for each in found.settings] == (
        [field.name for field in fields(method)] if is_dataclass(method) else []
    )
    assert not [each.name for each in found.settings if not each.meaning]


@pytest.mark.parametrize(("family", "name"), METHODS, ids=lambda each: each)
def test_the_example_is_a_valid_table(family: str, name: str) -> None:
    if example := details(family, name).example:
        check_tables(tomllib.loads(example), "example")


@pytest.mark.parametrize("name", [name for name in DEFENSES if name != "stack"])  # which needs its parts
def test_the_example_of_a_defense_builds_its_defaults(name: str) -> None:
    (table,) = tomllib.loads(details("defenses", name).example)["defense"]
    assert choose(DEFENSES, table, "example", "defense") == DEFENSES[name]()


def test_notes_and_defaults_are_those_of_the_class() -> None:
    found = details("defenses", "outpost")
    assert "IEEE/ACM ToN 2024" in found.notes["Reference"]
    assert found.notes["Assumes"].startswith("nothing.")
    (decay,) = [each for each in found.settings if each.name == "decay"]
    assert (decay.default, decay.kind) == ("0.1", "a number")
    assert decay.meaning.startswith("beta; local step i is perturbed")
    assert [each.default for each in details("datasets", "arrays").settings if each.name == "path"] == [None]


def test_a_name_that_does_not_exist_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match="no 'agc' among the attacks; did you mean 'agic'"):
        details("attacks", "agc")


def test_the_command_lists_kinds_names_and_one_method() -> None:
    run = CliRunner().invoke
    kinds = json.loads(run(app, ["list", "--json"]).stdout)["kinds"]
    assert kinds["attacks"] == list(ATTACKS)
    shown = run(app, ["list", "defenses", "outpost"]).stdout
    assert 'kind = "outpost"' in shown
    assert "min(Var[w_d], 1)" in " ".join(shown.split())  # brackets are text, not markup
    assert (
        json.loads(run(app, ["list", "defenses", "outpost", "--json"]).stdout)["settings"][0]["name"] == "noise_scale"
    )
    assert "psnr" in run(app, ["list", "metrics", "psnr"]).stdout


def test_a_setting_of_one_of_several_attacks_has_to_name_it() -> None:
    from leaktight.api.audit import plan

    with pytest.raises(
        LeaktightError, match=r"say which: attack.0.iterations=20 \(csdlg\) or attack.1.iterations=20 \(dlg\)"
    ):
        plan("audit", attacks=["csdlg", "dlg"], settings=["attack.iterations=20"])
    alone = plan("audit", attacks=["csdlg"], settings=["attack.csdlg.iterations=20"]).config.attacks[0]
    assert getattr(alone, "iterations", None) == 20, "as a dry run writes it, also where there is only one"
    named = plan("audit", attacks=["csdlg", "dlg"], settings=["attack.csdlg.iterations=20"]).config.attacks[:2]
    assert [each.iterations for each in named] == [20, ATTACKS["dlg"]().iterations]  # type: ignore[attr-defined]
    whole = plan("audit", settings=["attack.budget=standard"])
    assert getattr(whole.config.attacks[0], "budget", None) == "standard"
    assert whole.production is not None
