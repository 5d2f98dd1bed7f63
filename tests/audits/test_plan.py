from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.audits.scenes import small_config, small_experiment

from leaktight.attacks.labels.rules import Geng
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.idlg import IdlgAttack
from leaktight.audits.plan import Experiment, named
from leaktight.audits.settings import AuditSettings
from leaktight.config.audit import build_experiment, build_tracks
from leaktight.config.scenario import load_data
from leaktight.core.errors import UsageError
from leaktight.core.protocols import Defense
from leaktight.core.threat import Knowledge, ThreatModel
from leaktight.core.types import RoundTrace
from leaktight.engines import inprocess


def test_ids_are_stable_and_more_trials_only_add_to_them(tmp_path: Path) -> None:
    few, same, more = (small_experiment(tmp_path, f"audit.trials={number}") for number in (2, 2, 3))
    ids = [spec.id for spec in few.trials]
    assert ids == [spec.id for spec in same.trials]
    assert ids == [spec.id for spec in more.trials][: len(ids)]
    assert len(set(ids)) == len(ids) == 8
    assert ids[0] == "none.csdlg.t000.r000"


def played(experiment: Experiment, defense: Defense, trial: int) -> RoundTrace:
    traces: list[RoundTrace] = []
    federation = experiment.attacked_federation(defense, trial)
    inprocess.run(federation, workers=1, until=1, record=traces.append)
    return traces[0]


def test_a_trial_has_the_same_victim_and_network_behind_every_defense(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path)
    none, noise = (each.value for each in experiment.defenses)
    victim = experiment.victim(0)
    plain, defended, other = played(experiment, none, 0), played(experiment, noise, 0), played(experiment, none, 1)
    truth = plain.clients[victim].truth.examples
    assert torch.equal(truth.inputs, defended.clients[victim].truth.examples.inputs)
    assert len(truth) == 1
    for name, tensor in plain.broadcast.params.items():
        assert torch.equal(tensor, defended.broadcast.params[name])
        assert not torch.equal(tensor, other.broadcast.params[name]), "an untrained network is drawn for each trial"
    assert victim != experiment.victim(1)


def test_a_network_from_a_file_is_the_same_for_every_trial(tmp_path: Path) -> None:
    model = small_experiment(tmp_path).federation.trainer.model
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    experiment = small_experiment(tmp_path, f"model.init='{tmp_path / 'weights.pt'}'")
    one, other = (experiment.attacked_federation(Defense(), trial).trainer.model for trial in (0, 1))
    for left, right, stored in zip(one.parameters(), other.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)
        assert torch.equal(left, stored)


def test_victims_share_a_compilation_where_their_networks_are_alike(tmp_path: Path) -> None:
    """PRECODE's network is another one, so that its victims share nothing with those of plain networks."""
    experiment = small_experiment(tmp_path, "defense=[{kind='noise'}, {kind='precode'}, {kind='clipping'}]")
    attack = next(each for each in experiment.attacks if each.role == "attack")
    victims = {each.name: experiment.victims_of(attack, each) for each in experiment.defenses}
    assert victims == {"none": 6, "noise": 6, "clipping": 6, "precode": 2}


def test_targets_are_taken_in_turn(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "audit.targets=['client-002', 'client-000']", "audit.trials=3")
    assert [experiment.victim(trial) for trial in range(3)] == ["client-002", "client-000", "client-002"]


def test_a_sum_is_of_the_victim_and_as_many_others_as_a_round_has(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "threat.sees='aggregate'")
    members = experiment.attacked_federation(Defense(), 0).server.drawn
    assert members is not None
    assert len(set(members)) == 2
    assert experiment.victim(0) in members


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["audit.attack_round=3"], "got round 3 of 3"),
        (["audit.targets=['client-9']"], "did you mean 'client-00"),
        (["audit.local={samples=500, batch_size=500}"], "batch_size 500"),
        (["audit.metrics=['ssimm']"], "did you mean 'ssim'?"),
        (["audit.every=1", "audit.attack_round=1"], "either attack_round or every"),
        (["audit.trial=1"], "did you mean 'trials'?"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        small_experiment(tmp_path, *overrides)


def test_names_tell_methods_of_a_kind_apart() -> None:
    assert named(["a", "b"], [{}, {}]) == ["a", "b"]
    with pytest.raises(UsageError, match="listed twice"):
        named(["a", "a"], [{"x": 1}, {"x": 1}])


def test_attacked_rounds() -> None:
    assert AuditSettings().rounds(10) == (0,)
    assert AuditSettings(attack_round=(5, 2)).rounds(10) == (2, 5)
    assert AuditSettings(every=4).rounds(9) == (0, 4, 8)


def test_who_knows_what(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    experiment = build_experiment(config, *load_data(config), adaptive=False)
    attack, control = experiment.attacks
    base = ThreatModel(knows=frozenset({Knowledge.LABELS}))
    assert attack.threat(base) == base
    told = {Knowledge.LABELS, Knowledge.BATCH_SIZE, Knowledge.PUBLIC_DATA}
    assert control.threat(base).knows == told
    assert control.threat(ThreatModel(knows=frozenset())).knows == told, "labels, also where the attacker has none"
    assert replace(attack, against="noise").threat(base).knows == {Knowledge.LABELS, Knowledge.DEFENSE}
    for finds_labels in (Dlg(), IdlgAttack(), CsDlg(labels=Geng())):
        assert not replace(attack, value=finds_labels).threat(base).knows, "what it reads it has read"


@pytest.mark.parametrize(("iterations", "name"), [(1, "csdlg"), (7, "csdlg(iterations=7)")])
def test_an_attack_in_production_is_shown_to_work_with_its_own_settings(
    tmp_path: Path, iterations: int, name: str
) -> None:
    more = f"""
    [[production.attack]]
    kind = "csdlg"
    iterations = {iterations}
    backend = "eager"
    """
    experiment, production = build_tracks(small_config(tmp_path, more=more), adaptive=False)
    assert production is not None
    (own,) = [each for each in production.attacks if each.role == "attack"]
    (control,) = [each for each in experiment.attacks if each.name == name]
    assert own.name == name
    assert control.settings == own.settings
    assert control.meets("none")
