"""What is known of settings without importing a method, against the methods themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leaktight.config import fields
from leaktight.config.fields import check_tables, known_fields, written
from leaktight.core.errors import ConfigError


def test_the_file_says_what_the_methods_say() -> None:
    stored = Path(fields.__file__).with_name("fields.json").read_text()
    assert stored == written(), "write it again: python -m leaktight.config.fields"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "--attack", "dgl"], "unknown kind 'dgl'; did you mean 'dlg'?"),
        (["audit", "--set", "audits.trials=2"], "unknown table 'audits'; did you mean 'audit'?"),
        (["audit", "--set", "audit.trails=2"], "[audit] unknown key 'trails'; did you mean 'trials'?"),
        (["audit", "--set", "audit.trials=many"], "audit.trials: expected an integer or 'auto', got 'many'"),
        (["audit", "--set", "audit.trials=0"], "[audit] expected trials >= 1, got 0"),
        (["train", "--set", "local.learning_rate=0"], "[local] expected learning_rate > 0, got 0"),
        (["train", "--set", "local.schedule.kind=cosin"], "[local.schedule] unknown kind 'cosin'"),
        (["train", "--defense", "noise", "--set", "defense.noise_sd=1"], "[defense] unknown key 'noise_sd'"),
        (["audit", "--set", 'threat.knows=["label"]'], "threat.knows: expected a list of "),
        (["audit", "--set", 'audit.metrics=["psnrr"]'], "audit.metrics: unknown metric 'psnrr'; did you mean 'psnr'?"),
        (["audit", "--set", 'audit.adapted=["dgl"]'], "audit.adapted: unknown attack 'dgl'; did you mean 'dlg'?"),
        (["train", "missing.toml"], "cannot read missing.toml"),
        (["flower", "export", "new", "--set", "federation.aggregator=fedavgg"], "unknown kind 'fedavgg'"),
        (["inspect", "--model", "resnet2", "--before", "a.pt", "--shape", "1,8,8"], "unknown kind 'resnet2'"),
        (["inspect", "--model", "mlp", "--before", "a.pt", "--shape", "8,8"], "for grey images give 1,8,8"),
    ],
)
def test_errors_of_usage_come_before_torch(arguments: list[str], message: str) -> None:
    code = (
        "import sys; from leaktight.cli.app import main; "
        "import atexit; atexit.register(lambda: print('torch' in sys.modules)); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == "False\n"


@pytest.mark.parametrize("value", ["5", 5, 5.0, 1e20])
def test_what_can_be_read_as_the_type_is_left_alone(value: object) -> None:
    check_tables({"audit": {"trials": value}}, "here")


@pytest.mark.parametrize("value", [5.5, float("inf"), float("nan")])
def test_numbers_that_are_no_integers_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"audit\.trials: expected an integer or 'auto', got"):
        check_tables({"audit": {"trials": value}}, "here")


def test_own_classes_and_objects_are_left_to_the_methods() -> None:
    check_tables({"attack": [{"kind": "mine:Attack", "anything": 1}, object()], "model": object()}, "here")


def test_every_bound_is_one_that_the_class_enforces() -> None:
    bounded = [
        (family, kind, name)
        for family, kinds in known_fields().items()
        for kind, settings in kinds.items()
        for name, field in settings.items()
        if "minimum" in field or "exclusiveMinimum" in field
    ]
    assert ("attacks", "dlg", "iterations") in bounded
    assert len(bounded) > 100


def test_a_table_of_a_list_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'iteration'; did you mean 'iterations'"):
        check_tables({"attack": [{"kind": "dlg"}, {"kind": "csdlg", "iteration": 3}]}, "here")
