"""One default for every setting of a method, and a defense is named with its settings wherever it is named."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from tests.audits.scenes import SMALL
from tests.results.made_cards import made_card
from typer.testing import CliRunner

from leaktight.api.scenario import configure
from leaktight.attacks.controls import Control
from leaktight.cli.app import app
from leaktight.config.audit import complete
from leaktight.config.catalogue import ATTACKS, DEFENSES
from leaktight.config.tables import AUDIT_SCENARIO, SCENARIO
from leaktight.config.toml import settings_of
from leaktight.core.protocols import Defense
from leaktight.report import words
from leaktight.report.board import render_leaderboard
from leaktight.report.words import defense_words

SETTLED = {"labels", "local", "onednn", "progress_every"}
"""Settings of an attack that a command settles by what the threat model discloses and by the machine."""
SHOWN = {"lrp": "lrp (spread 1)", "minmax": "minmax (keep_share 0.05)", "dp_sgd": "dp_sgd (clip_norm 2, "}
"""What must be read wherever these defenses are named; no other word of an output is one of these names."""


def needed(cls: type) -> bool:
    """Whether an instance needs settings."""
    return any(each.default is MISSING and each.default_factory is MISSING for each in fields(cls))


KINDS = [kind for kind, cls in DEFENSES.items() if kind != "none" and not needed(cls)]
ATTACK_KINDS = [kind for kind, cls in ATTACKS.items() if not needed(cls)]


def strength(method: object) -> dict[str, object]:
    return {name: value for name, value in settings_of(method).items() if name not in SETTLED}


def is_own(method: object) -> bool:
    """Whether a method has the settings of its class."""
    return strength(method) == strength(type(method)())


@pytest.mark.parametrize("kind", KINDS)
def test_no_command_changes_a_default_of_a_defense(kind: str) -> None:
    own = DEFENSES[kind]()
    assert configure(None, {"defenses": [kind]}).defense == own, "train"
    config = configure(None, {"defenses": [kind]}, scenario=AUDIT_SCENARIO)
    assert complete(config, defenses_named=True).defenses == (Defense(), own), "audit and tradeoff"
    config = configure(None, {"settings": [f"defense.kind={kind}"]}, scenario=AUDIT_SCENARIO)
    assert complete(config, defenses_named=False).defenses == (Defense(), own), "--set"


@pytest.mark.parametrize("kind", ATTACK_KINDS)
def test_no_command_changes_a_default_of_an_attack(kind: str) -> None:
    config = configure(None, {"attacks": [kind]}, scenario=AUDIT_SCENARIO)
    completed = complete(config, defenses_named=False)
    assert all(is_own(each) for each in (*completed.attacks, *completed.defenses))


def test_what_nobody_names_has_its_own_strength(tmp_path: Path) -> None:
    for options in ({"data": "cifar10"}, {"model": "mlp"}, {"settings": ["data.kind=cifar10"]}):
        config = complete(configure(None, options, scenario=AUDIT_SCENARIO), defenses_named=False)
        assert config.production is not None
        for track in (config, config.production):
            assert all(is_own(each) for each in (*track.attacks, *track.defenses))
    path = tmp_path / "mine.toml"
    path.write_text(SCENARIO)
    config = complete(configure(path, {}), defenses_named=False)
    assert all(is_own(each) for each in (*config.attacks, *config.defenses))


def test_the_built_in_scenario_alone_has_settings_of_its_own() -> None:
    config = complete(configure(None, {}, scenario=AUDIT_SCENARIO), defenses_named=False)
    assert [type(each).__name__ for each in config.attacks if not is_own(each)] == ["Auto"]
    assert all(is_own(each) for each in config.attacks if isinstance(each, Control))
    assert all(map(is_own, config.defenses))


@pytest.mark.parametrize("kind", KINDS)
def test_a_defense_is_named_with_what_makes_it_strong(kind: str) -> None:
    own = DEFENSES[kind]()
    text = defense_words(kind, settings_of(own))
    assert re.fullmatch(rf"{kind} \([a-z_0-9]+ .+\)", text)
    assert len(text) <= 80
    assert "{" not in text
    usual = words._USUAL.get(kind, {})
    assert usual.items() <= settings_of(own).items(), "what goes without saying is the default"


@pytest.mark.parametrize("kind", KINDS)
def test_no_changed_setting_goes_without_saying(kind: str) -> None:
    own: Any = DEFENSES[kind]()
    for field in fields(own):
        value = getattr(own, field.name)
        if isinstance(value, bool):
            other: object = not value
        elif isinstance(value, int | float):
            other = value / 2 if isinstance(value, float) and value else value + 1
        else:
            continue
        try:
            changed = replace(own, **{field.name: other})
        except ValueError:
            continue  # other settings do not allow it
        name = f"{kind}({field.name}={other})"
        assert field.name in defense_words(name, settings_of(changed))


def bare_names(text: str) -> list[str]:
    """Places where one of the defenses is named without its settings; identifiers and options are no names."""
    return [
        text[max(0, match.start() - 60) : match.end() + 40]
        for kind, whole in SHOWN.items()
        for match in re.finditer(rf"(?<![\w./=-]){kind}(?![\w.=(/-])", text)
        if not text[match.start() :].startswith(whole)
    ]


def joined(text: str) -> str:
    """Text in one line, as it was before a terminal broke it."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All that a trade-off, its report and training say, by name."""
    folder = tmp_path_factory.mktemp("strength")
    config, run = folder / "small.toml", folder / "run"
    parts = SMALL.split("[[defense]]")[0] + "[[defense]]\nkind = 'lrp'\n[[defense]]\nkind = 'minmax'\n"
    parts += "[[defense]]\nkind = 'dp_sgd'\nclip_norm = 2.0\n[[attack]]" + SMALL.split("[[attack]]", 1)[1]
    config.write_text(parts.replace("trials = 2", "trials = 1\nattack_round = 1"))

    def called(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.output
        return joined(result.output)

    found = {
        "dry run": called("audit", str(config), "--dry-run"),
        "tradeoff": called("tradeoff", str(config), "--workers", "0", "--out", str(run)),
        "train": called("train", str(config), "--defense", "minmax", "--workers", "1", "--out", str(folder / "train")),
    }
    for kind in ("md", "latex"):
        found[kind] = called("report", str(run), "--format", kind).replace("\\_", "_")
    page = re.sub(
        r"<pre.*?</pre>|<style.*?</style>|<script.*?</script>", "", (run / "report.html").read_text(), flags=re.S
    )
    found["page"] = joined(Markup(page).striptags())
    found["labels"] = joined(" | ".join(re.findall(r'(?:aria-label|data-title|data-tip)="([^"]*)"', page)))
    found["junit"] = (run / "junit.xml").read_text()
    found["sarif"] = " | ".join(re.findall(r'"text": "(.*)"', (run / "sarif.json").read_text()))
    return found


def test_every_line_table_card_and_page_names_a_defense_with_its_settings(outputs: dict[str, str]) -> None:
    for name, text in outputs.items():
        shown = SHOWN.values() if name not in ("train", "labels") else [SHOWN["minmax"]]  # lrp cannot be trained here
        assert all(whole in text for whole in shown), name
        assert bare_names(text) == [], name


def test_a_name_without_settings_would_be_found() -> None:
    assert bare_names("1 of 3 with lrp, lrp (spread 1)") != []
    assert bare_names("--defense=lrp lrp.csdlg.t000 runs/lrp") == []


def test_a_card_of_the_leaderboard_names_its_settings() -> None:
    cards: Iterable[Any] = [made_card("noise"), made_card("noise", defense_settings={"noise_std": 0.2})]
    text = joined(Markup(render_leaderboard(list(cards))).striptags())
    assert "noise (noise_std 0.1)" in text
    assert "noise (noise_std 0.2)" in text
