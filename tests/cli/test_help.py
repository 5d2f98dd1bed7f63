"""`--help` of every command: an example that works, all parameters explained, and 80 columns."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.main
from tests.conftest import DATA_ROOT
from tests.here import Here
from typer.core import TyperGroup

import leaktight
from leaktight.api.leaderboard import add
from leaktight.cli.app import app
from leaktight.results.card import read_cards

QUICK = {
    "audit": ["--dry-run"],
    "tradeoff": ["--dry-run"],
    "train": ["--dry-run"],
    "inspect": ["--dry-run"],
    "generator train": ["--epochs", "1", "--force"],
    "data": ["--verify", "--data-root", str(DATA_ROOT)],
}
"""What makes the example of a command short, or keeps it from downloading."""

NET = """
from torch import nn


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
"""


def commands(group: TyperGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


TREE = typer.main.get_command(app)
assert isinstance(TREE, TyperGroup)
COMMANDS = list(commands(TREE))


def examples(text: str) -> list[str]:
    """The commands under the heading of examples."""
    found = re.search(r"^Examples?:\n((?:  .*\n)+)", text, re.MULTILINE)
    return [line.strip() for line in found[1].splitlines()] if found else []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small audit, every client of which holds one example, as cards need."""
    folder = tmp_path_factory.mktemp("help") / "run"
    leaktight.audit(
        data={"kind": "digits", "size": 8},
        partition={"kind": "iid", "clients": 1437, "validation": 0.0},
        model={"kind": "lenet_zhu", "init": "wide", "activation": "sigmoid"},
        local={"epochs": 1, "batch_size": 1, "learning_rate": 0.1},
        federation={"rounds": 1, "per_round": 2},
        attacks=[{"kind": "csdlg", "iterations": 2}],
        defenses=["compression"],
        trials=1,
        settings=["audit.metrics=[]", "audit.local.samples=1", "audit.local.batch_size=1", "audit.local.epochs=1"],
        out=folder,
    )
    return folder


@pytest.fixture
def card(run: Path, tmp_path: Path) -> str:
    """The card in a folder with all files that examples name."""
    (tmp_path / "net.py").write_text(NET)
    torch.save({"1.weight": torch.zeros(10, 784), "1.bias": torch.zeros(10)}, tmp_path / "a.pt")
    torch.save({"1.weight": torch.ones(10, 784), "1.bias": torch.ones(10)}, tmp_path / "b.pt")
    for name in ("audit-001", "audit-002"):
        shutil.copytree(run, tmp_path / "runs" / name)
    add([run], tmp_path / "leaderboard")
    np.savez(tmp_path / "g.npz", t000=np.zeros((1, 1, 8, 8), np.float32))
    return read_cards(tmp_path / "leaderboard")[0].file


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_and_explains_what_it_takes(here: Here, command: tuple[str, ...]) -> None:
    here.monkeypatch.setenv("COLUMNS", "80")
    code, text, _ = here(*command, "--help")
    assert code == 0
    assert examples(text)
    assert max(map(len, text.splitlines())) <= 80
    listed = text[re.search(r"^(Arguments|Options):$", text, re.MULTILINE).start() :]  # type: ignore[union-attr]
    rows = re.findall(r"^  (\S.*)\n( {4,}\S)?", listed, re.MULTILINE)
    assert [row for row, below in rows if not re.search(r"\S {2,}\S", row) and not below] == [], "no explanation"
    assert not re.search(r"<\w+>|INTEGER|None|\\\[", text)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_examples_work(here: Here, card: str, command: tuple[str, ...]) -> None:
    if command == ("data",) and not DATA_ROOT.is_dir():
        pytest.skip("the example downloads a data set, and there is none to verify")
    _, text, _ = here(*command, "--help")
    for example in examples(text):
        words = shlex.split(example.partition(">>")[0].replace("CARD.json", card))
        named = next((name for name in QUICK if words[1 : 1 + len(name.split())] == name.split()), "")
        code, _, error = here(*words[1:], *QUICK.get(named, []))
        assert code == 0, f"{example}: {error}"


def test_parsing_errors_are_one_line_with_one_suggestion(here: Here) -> None:
    assert here("audti") == (2, "", "leaktight: there is no command 'audti'; did you mean 'audit'?\n")
    said = "leaktight: audit: there is no option --trails; did you mean '--trials'?\n"
    assert here("audit", "--trails", "3") == (2, "", said)
    assert here("inspect")[2].startswith("leaktight: inspect: expected --model ")
    assert here("list", "a", "b", "c")[2].startswith("leaktight: list: expected fewer arguments, got also c; see ")
    assert here("train", "--workers", "0")[2].startswith("leaktight: train: expected --workers N, but ")


def test_completion_is_switched_on(here: Here) -> None:
    here.monkeypatch.setenv("_LEAKTIGHT_COMPLETE", "complete_bash")
    here.monkeypatch.setenv("COMP_WORDS", "leaktight au")
    here.monkeypatch.setenv("COMP_CWORD", "1")
    assert here()[1].split() == ["audit"]
