from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from leaktight.attacks.labels.rules import Geng, Yin
from leaktight.attacks.presets.csdlg import CsDlg
from leaktight.attacks.presets.dlg import Dlg
from leaktight.attacks.presets.inverting_gradients import InvertingGradients
from leaktight.config.settings import load_config
from leaktight.config.tables import SCENARIO
from leaktight.config.toml import kind_of
from leaktight.core.errors import ConfigError
from leaktight.core.protocols import Defense
from leaktight.core.threat import Knowledge
from leaktight.core.training import Cosine, LocalTraining
from leaktight.crypto.paillier import Paillier
from leaktight.data.embedded import Digits, Faces
from leaktight.data.joined import Joined
from leaktight.data.partition import Dirichlet, Shards
from leaktight.defenses.ada_lrp import AdaLrp
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.stack import Stack
from leaktight.fl.aggregators import FedAvg, ServerAdam
from leaktight.fl.consent import Consent
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.fedboosting import FedBoosting, NoisyFusion


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_without_a_file_the_built_in_scenario_is_used(tmp_path: Path) -> None:
    assert load_config() == load_config(write(tmp_path, SCENARIO)) == load_config(write(tmp_path, ""))
    assert isinstance(load_config().data, Digits)


def test_the_resolved_config_gives_itself_again(tmp_path: Path) -> None:
    text = """
    seed = 7
    [partition]
    kind = "dirichlet"
    alpha = 0.3
    [local]
    schedule = {kind = "cosine", final = 0.1}
    [federation]
    aggregator = {kind = "server_adam", learning_rate = 0.02}
    [threat]
    knows = ["labels", "defense"]
    """
    config = load_config(write(tmp_path, text))
    assert load_config(write(tmp_path, config.to_toml())) == config
    assert isinstance(config.partition, Dirichlet)
    assert config.local.schedule == Cosine(final=0.1)
    assert config.aggregator == ServerAdam(learning_rate=0.02)
    assert config.threat.knows == {Knowledge.LABELS, Knowledge.DEFENSE}


SPREAD = "[[defense]]\nkind = 'lrp'\nspread = 0.5\n[[defense]]\nkind = 'ada_lrp'"


def test_several_defenses_are_alternatives_and_for_training_a_stack(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SPREAD))
    assert config.defenses == (Lrp(spread=0.5), AdaLrp())
    assert config.defense == Stack(parts=config.defenses)
    assert load_config(write(tmp_path, config.to_toml())) == config


def test_a_stack_may_be_written_as_one_defense(tmp_path: Path) -> None:
    text = "[defense]\nkind = 'stack'\nparts = ['lrp', {kind = 'stack', parts = [{kind = 'ada_lrp', zeta = 0.1}]}]"
    config = load_config(write(tmp_path, text))
    assert config.defense == Stack(parts=(Lrp(), Stack(parts=(AdaLrp(zeta=0.1),))))
    assert config.defenses == (config.defense,)
    assert load_config(write(tmp_path, config.to_toml())) == config


def test_without_a_defense_there_is_the_identity(tmp_path: Path) -> None:
    assert load_config().defenses == (Defense(),)
    assert load_config().defense == Defense()
    assert load_config().attacks == ()


def test_defenses_by_name_take_the_place_of_those_of_the_file_and_keep_their_settings(tmp_path: Path) -> None:
    path = write(tmp_path, SPREAD)
    assert load_config(path, defenses=["lrp"]).defense == Lrp(spread=0.5)
    assert load_config(path, defenses=["ada_lrp", "lrp"]).defenses == (AdaLrp(), Lrp(spread=0.5))
    assert load_config(path, defenses=["none"]).defense == Defense()
    assert load_config(None, ["defense.spread=0.1"], defenses=["lrp"]).defense == Lrp(spread=0.1)


def test_an_entry_of_a_list_is_overridden_by_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, SPREAD)
    assert load_config(path, ["defense.1.zeta=0.5"]).defenses == (Lrp(spread=0.5), AdaLrp(zeta=0.5))
    assert load_config(path, ["defense.0.kind=none"]).defenses == (Defense(), AdaLrp())
    with pytest.raises(ConfigError, match=r"\[defense\] needs kind"):
        load_config(path, ["defense.2.zeta=0.5"])


def test_parts_are_what_their_owner_says_they_are(tmp_path: Path) -> None:
    text = "[data]\nkind = 'joined'\nparts = ['digits', {kind = 'faces', size = 32}]\nshared_labels = false\n"
    config = load_config(write(tmp_path, text + "[defense]\nkind = 'stack'\nparts = ['lrp']"))
    assert config.data == Joined(parts=(Digits(), Faces(size=32)), shared_labels=False)
    assert config.defense == Stack(parts=(Lrp(),))
    assert load_config(write(tmp_path, config.to_toml())) == config


def test_attacks_are_composed_in_the_config(tmp_path: Path) -> None:
    text = """
    [[attack]]
    kind = "inverting_gradients"
    iterations = 40
    labels = {kind = "geng"}
    [[attack]]
    kind = "csdlg"
    labels = "yin"
    """
    config = load_config(write(tmp_path, text))
    assert config.attacks == (InvertingGradients(iterations=40, labels=Geng()), CsDlg(labels=Yin()))
    assert load_config(write(tmp_path, config.to_toml())) == config
    single = load_config(write(tmp_path, "[attack]\nkind = 'dlg'"))
    assert single.attacks == (Dlg(),)
    assert load_config(write(tmp_path, single.to_toml())) == single


def test_a_users_model_survives_the_round_trip(tmp_path: Path) -> None:
    config = load_config(None, ["model.kind=my.module:build"])
    assert load_config(write(tmp_path, config.to_toml())) == config


def test_overrides_are_toml_values_or_plain_words() -> None:
    config = load_config(None, ["local.batch_size=4", "partition.clients=7", "federation.aggregator=fedavg", "seed=3"])
    assert config.local.batch_size == 4
    assert config.partition == Shards(clients=7, shards_per_client=2)
    assert config.aggregator == FedAvg()
    assert config.seed == 3


def test_another_kind_starts_from_its_own_defaults() -> None:
    assert load_config(None, ["partition.kind=dirichlet"]).partition == Dirichlet()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = ", "is not TOML"),
        ("[data]\nkind = 'digit'", r"\[data\] unknown kind 'digit'; did you mean 'digits'\?"),
        ("[model]\nkind = 'lenet_zu'", r"\[model\] unknown kind 'lenet_zu'; did you mean 'lenet_zhu'\?"),
        ("[local]\nlearning_rat = 0.1", r"\[local\] unknown key 'learning_rat'; did you mean 'learning_rate'\?"),
        ("[lokal]\nepochs = 1", r"unknown table 'lokal'; did you mean 'local'\?"),
        ("[local]\nlearning_rate = -0.1", r"\[local\] expected learning_rate > 0, got -0.1"),
        ("[local]\nlearning_rate = nan", r"\[local\] expected learning_rate > 0, got nan"),
        ("[local]\nbatch_size = 0", r"\[local\] expected batch_size >= 1, got 0"),
        ("[local]\nbatch_size = 'many'", r"local.batch_size: .*integer.*got 'many'"),
        ("[local]\nsamples = 4\nbatch_size = 8", r"batch_size 8 > samples 4"),
        ("[local]\noptimizer = 'rmsprop'", r"local.optimizer: .*'sgd' or 'adam'.*got 'rmsprop'"),
        ("[local]\nschedule = 'cosin'", r"\[local.schedule\] unknown kind 'cosin'; did you mean 'cosine'\?"),
        ("[model]\nkind = 'mlp'\nmode = 'training'", r"model.mode: .*got 'training'"),
        ("[threat]\nknows = ['label']", r'threat.knows: .*got \["label"\]'),
        ("[partition]\nclients = 0", r"\[partition\] expected clients >= 1, got 0"),
        ("[data]\nkind = 'arrays'", r"\[data\] needs path"),
        ("[federation]\naggregater = 'fedavg'", r"unknown key 'aggregater'; did you mean 'aggregator'\?"),
        ("data = 3", r"expected a table \[data\], got 3"),
        ("defense = 3", r"expected a table \[defense\] with a kind, got 3"),
        ("defense = []", r"expected at least one table \[\[defense\]\], got an empty list"),
        ("[[defense]]\nkind = 'lrp'\n[[defense]]\nspread = 0.5", r"\[defense\] needs kind"),
        ("[[defense]]\nkind = 'lpr'", r"\[defense\] unknown kind 'lpr'; did you mean 'lrp'\?"),
        ("[defense]\nkind = 'lrp'\nspread = 2.0", r"\[defense\] expected spread in \[0, 1\], got 2.0"),
        ("[defense]\nkind = 'stack'\nparts = ['digits']", r"\[defense.parts\] unknown kind 'digits'"),
        ("[defense]\nkind = 'stack'\nparts = []", r"\[defense\] expected at least one defense in parts, got none"),
        ("[defense]\nkind = 'stack'\nparts = 'lrp'", r"defense.parts: expected a list of tables, got 'lrp'"),
        ("[defense]\nkind = 'stack'", r"\[defense\] needs parts"),
        ("[attack]\nkind = 'dgl'", r"\[attack\] unknown kind 'dgl'; did you mean 'dlg'\?"),
        ("[attack]\nkind = 'dlg'\nlabels = 'yn'", r"\[attack.labels\] unknown kind 'yn'; did you mean 'yin'\?"),
        ("[attack]\nkind = 'dlg'\nlabels = ['yin']", r'expected a table \[attack.labels\] with a kind, got \["yin"\]'),
        ("[attack]\nkind = 'dlg'\niterations = 0", r"\[attack\] expected iterations"),
        ("[local]\nschedule = 3", r"expected a table \[local.schedule\] with a kind, got 3"),
    ],
)
def test_bad_configs_are_named_with_file_table_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_bad_override_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing.toml"):
        load_config(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match=r"expected --set table\.key=value, got 'seed'"):
        load_config(None, ["seed"])


def test_kinds_are_found_by_class() -> None:
    assert kind_of(Digits()) == "digits"
    assert kind_of(LocalTraining()) is None, "a part of ours that is no method"
    assert kind_of(object()) == "builtins:object"


def test_an_aggregator_around_another_survives_the_way_to_toml_and_back(tmp_path: Path) -> None:
    path = tmp_path / "encrypted.toml"
    path.write_text(
        """
        [federation.aggregator]
        kind = "encrypted"
        cipher = {kind = "paillier", key_bits = 3072}
        of = {kind = "fedboosting", variant = "code", fusion = {kind = "noisy", own = [0.7, 0.8]}}
        """
    )
    config = load_config(path)
    expected = Encrypted(
        of=FedBoosting(variant="code", fusion=NoisyFusion(own=(0.7, 0.8))), cipher=Paillier(key_bits=3072)
    )
    assert config.aggregator == expected
    path.write_text(config.to_toml())
    assert load_config(path) == config
    with pytest.raises(ConfigError, match=r"\[federation\.aggregator\] expected of to be a linear"):
        load_config(path, ["federation.aggregator.of={kind='encrypted'}"])
    with pytest.raises(ConfigError, match="at least 2048, got 1024"):
        load_config(path, ["federation.aggregator.cipher.key_bits=1024"])


def test_what_clients_insist_on_is_a_table() -> None:
    config = load_config(None, ["consent.max_epsilon=3.5", "consent.max_rounds=4"])
    assert config.consent == Consent(max_epsilon=3.5, max_rounds=4)
    assert "[consent]" not in load_config().to_toml()
    assert tomllib.loads(config.to_toml())["consent"] == {"max_epsilon": 3.5, "max_rounds": 4, "max_repeats": 0}
    with pytest.raises(ConfigError, match="consent"):
        load_config(None, ["consent.max_epsilon=-1"])


def test_the_secret_seed_is_read_and_never_written() -> None:
    config = load_config(None, [f"secret_seed={'ab' * 32}"])
    assert config.key == bytes.fromhex("ab" * 32)
    assert "ab" * 32 not in config.to_toml() + repr(config)
    with pytest.raises(ConfigError, match="expected 64 hexadecimal digits, got 3 characters; copy it"):
        load_config(None, ["secret_seed=abc"])
