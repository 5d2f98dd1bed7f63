"""`[threat] preset`: a threat model by name, and the keys beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.audits.scenes import SMALL, small_config

from leaktight.api.scenario import configure
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.config.settings import Config, load_config
from leaktight.config.tables import AUDIT_SCENARIO
from leaktight.core.errors import ConfigError
from leaktight.core.threat import Knowledge, ThreatModel


def threat(folder: Path, lines: str, *overrides: str) -> ThreatModel:
    path = folder / "run.toml"
    path.write_text(f"[threat]\n{lines}\n")
    return load_config(path, overrides).threat


def test_a_preset_alone(tmp_path: Path) -> None:
    assert threat(tmp_path, 'preset = "aggregate_observer"') == ThreatModel.preset("aggregate_observer")


def test_keys_beside_a_preset_replace_its_own(tmp_path: Path) -> None:
    made = threat(tmp_path, 'preset = "malicious_server"\nknows = ["labels"]')
    assert made == ThreatModel(server="malicious", knows=frozenset({Knowledge.LABELS}))
    made = threat(tmp_path, 'preset = "diagnostic"\nsees = "aggregate"')
    assert made.knows == ThreatModel.preset("diagnostic").knows
    assert made.sees == "aggregate"


def test_a_preset_replaces_the_table_below_it(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    assert Knowledge.LABELS in load_config(path).threat.knows
    assert load_config(path, ["threat.preset=curious_server"]).threat == ThreatModel.preset("curious_server")
    assert load_config(None, ["threat.preset=eavesdropper"], scenario=AUDIT_SCENARIO).threat.knows == frozenset()


def test_the_built_in_audit_is_diagnostic_and_its_facts_can_be_changed() -> None:
    assert load_config(None, scenario=AUDIT_SCENARIO).threat == ThreatModel.preset("diagnostic")
    changed = load_config(None, ["threat.knows=['batch_size']"], scenario=AUDIT_SCENARIO)
    assert changed.threat.knows == {Knowledge.BATCH_SIZE}


def test_the_record_has_the_facts(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[threat]\npreset = "server_with_public_data"\n')
    config = load_config(path)
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "again.toml").threat == config.threat
    assert 'knows = [\n    "batch_size",\n    "buffers",' in config.to_toml()


def test_python_takes_a_name() -> None:
    config = configure(None, {"threat": "malicious_server"}, scenario=AUDIT_SCENARIO)
    assert isinstance(config, Config)
    assert config.threat == ThreatModel.preset("malicious_server")


def test_attacks_do_without_what_they_are_not_told(tmp_path: Path) -> None:
    told, untold, blind = (
        small_config(tmp_path, f"threat.preset={name}").attacks[0]
        for name in ("diagnostic", "curious_server", "eavesdropper")
    )
    assert isinstance(told, CsDlg)
    assert isinstance(untold, CsDlg)
    assert isinstance(blind, CsDlg)
    assert (told.labels_from, told.local) == ("given", "simulate")
    assert (untold.labels_from, untold.local) == ("inferred", "simulate")
    assert (blind.labels_from, blind.local) == ("inferred", "one_batch")
    own = small_config(tmp_path, "threat.preset=curious_server", "attack.0.labels={kind='given'}").attacks[0]
    assert own.labels_from == "given", "what is named is kept"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('preset = "curious"', "threat.preset: unknown threat 'curious'; .*curious_server"),
        ("preset = 3", "threat.preset: "),
        ('preset = "a:b"', "threat"),
        ('presets = "diagnostic"', r"\[threat\] unknown key 'presets'; did you mean 'preset'"),
    ],
)
def test_a_wrong_preset_is_an_error_that_names_it(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        threat(tmp_path, line)
