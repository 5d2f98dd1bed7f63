"""Cards of a real run, fresh updates of its victims, and guesses for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.here import Here
from torch import Tensor

import leaktight
from leaktight.api.leaderboard import Scene, add, submit, updates
from leaktight.core.errors import LeaktightError, UsageError
from leaktight.results.card import Card, read_card, read_cards

SETTINGS = ("audit.trials=2", "audit.metrics=[]", "audit.local.samples=1", "audit.local.batch_size=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trade-off of two victims and one round; every client holds one example."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    leaktight.tradeoff(
        data={"kind": "digits", "size": 8},
        partition={"kind": "iid", "clients": 1437, "validation": 0.0},
        model={"kind": "lenet_zhu", "init": "wide", "activation": "sigmoid"},
        local={"epochs": 1, "batch_size": 1, "learning_rate": 0.1},
        federation={"rounds": 1, "per_round": 2},
        attacks=[{"kind": "csdlg", "iterations": 2}, "mean_image"],
        defenses=["compression"],
        settings=[*SETTINGS, "audit.local.epochs=1"],
        out=folder,
    )
    return folder


@pytest.fixture
def board(run: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "leaderboard"
    add([run], folder)
    return folder


def card_of(board: Path, defense: str) -> tuple[Path, Card]:
    (card,) = [each for each in read_cards(board) if each.defense == defense]
    return board / card.file, card


def truth_of(card: Card) -> dict[str, Tensor]:
    """The true images of a card's victims, computed from the scenario alone."""
    experiment = Scene.of(card).experiment
    shares = [experiment.federation.shares[experiment.victim(number)] for number in range(2)]
    return {
        f"t{number:03d}": experiment.federation.examples.batch(slice(share.start, share.validation)).inputs
        for number, share in enumerate(shares)
    }


def test_a_run_becomes_cards(board: Path, run: Path) -> None:
    _, card = card_of(board, "compression")
    summary = json.loads((run / "summary.json").read_text())
    assert [each.adaptive for each in card.attackers] == [False, True]
    assert card.attackers[0].run == summary["digest"]
    assert card.attackers[0].worst == max(c["psnr"]["worst"] for c in summary["cells"] if _naive(c))
    assert (card.setting.batch_size, card.setting.local_steps, card.setting.num_examples) == (1, 1, 1)
    assert card.utility is not None
    assert card.utility.plain_accuracy == summary["tradeoff"]["rows"][0]["accuracy"]
    assert card.utility.bytes_up == card.utility.plain_bytes_up
    assert card.claims
    assert card.sources[0].config == (run / "config.toml").read_text()


def _naive(cell: dict[str, object]) -> bool:
    return (cell["defense"], cell["role"], cell["adaptive"]) == ("compression", "attack", False)


def test_adding_a_run_twice_changes_nothing(board: Path, run: Path) -> None:
    before = read_cards(board)
    add([run], board)
    assert read_cards(board) == before


def test_a_run_that_was_changed_is_refused(run: Path, tmp_path: Path, here: Here) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    file = copy / "trials.jsonl"
    file.write_text(file.read_text().replace('"psnr": [', '"psnr": [1', 1))
    code, _, err = here("leaderboard", "add", "copy")
    assert code == 2
    assert "was changed after it was written" in err
    assert not (tmp_path / "leaderboard").exists()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(tmp_path, monkeypatch, capsys)


def test_an_inspection_is_no_run_of_a_leaderboard(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    gradient = {name: torch.ones_like(tensor) for name, tensor in model.named_parameters()}
    asked = {"update": gradient, "kind": "gradient", "shape": (1, 4, 4), "attacks": "linear_inversion"}
    leaktight.inspect(model, dict(model.state_dict()), **asked, out=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is an inspection of one update; name the folder of an audit"):
        add([tmp_path / "run"], tmp_path / "board")


def test_updates_of_the_victims_are_fresh(board: Path, tmp_path: Path) -> None:
    file, card = card_of(board, "compression")
    first, again = updates(file, tmp_path / "a"), updates(file, tmp_path / "b")
    assert [each.name for each in first] == [*card.sources[0].victims]
    sent = safetensors.torch.load_file(first[0] / "update.safetensors")
    assert sent.keys() <= safetensors.torch.load_file(first[0] / "before.safetensors").keys()
    assert all(torch.equal(each, sent[name]) for name, each in _loaded(again[0]).items())  # nothing random here
    assert json.loads((first[0] / "facts.json").read_text())["examples"] == 1


def _loaded(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "update.safetensors")


def test_guesses_that_beat_a_row_change_it(board: Path, tmp_path: Path, here: Here) -> None:
    file, card = card_of(board, "compression")
    guesses = tmp_path / "guesses.safetensors"
    safetensors.torch.save_file({name: 0.999 * image for name, image in truth_of(card).items()}, guesses)
    code, out, err = here("leaderboard", "submit", str(file), str(guesses), "--attack", "mine", "--by", "me")
    assert (code, err) == (0, "")
    assert "2 of 2 victims reconstructed" in out
    (mine,) = [each for each in read_card(file).attackers if each.by == "me"]
    assert mine.worst is not None
    assert mine.worst > 60
    assert (mine.adaptive, mine.word) == (True, "reconstructed")
    assert read_card(file).word == "reconstructed"


def test_guesses_that_ignore_the_update_find_nothing(board: Path, tmp_path: Path) -> None:
    file, card = card_of(board, "none")
    guesses = tmp_path / "guesses.safetensors"
    safetensors.torch.save_file({"t000": torch.full((1, 1, 8, 8), 0.3)}, guesses)
    found = submit(file, guesses, attack="grey", by="me", adaptive=False)
    (mine,) = [each for each in found.attackers if each.by == "me"]
    assert (mine.victims, mine.reconstructed, mine.word) == (1, 0, None)
    assert found.word == card.word


@pytest.mark.parametrize(
    ("name", "guess", "message"),
    [
        ("t009", torch.zeros(1, 1, 8, 8), "expected guesses named as the victims, t000, t001"),
        ("t000", torch.zeros(1, 3, 8, 8), r"expected floats of shape \(N, 1, 8, 8\)"),
        ("t000", torch.zeros(1, 1, 8, 8, dtype=torch.uint8), "got torch.uint8"),
        ("t000", torch.zeros(0, 1, 8, 8), "t000: expected at least one guess of finite pixels, got none"),
        ("t000", torch.full((1, 1, 8, 8), torch.nan), "expected at least one guess of finite pixels, got NaN or inf"),
    ],
)
def test_bad_guesses_are_refused(board: Path, tmp_path: Path, name: str, guess: Tensor, message: str) -> None:
    file, before = card_of(board, "compression")
    guesses = tmp_path / "guesses.safetensors"
    safetensors.torch.save_file({name: guess}, guesses)
    with pytest.raises(UsageError, match=message):
        submit(file, guesses, attack="mine", by="me")
    assert read_card(file) == before


def test_a_file_without_guesses_is_refused(board: Path, tmp_path: Path) -> None:
    file, before = card_of(board, "compression")
    safetensors.torch.save_file({}, tmp_path / "none.safetensors")
    with pytest.raises(LeaktightError, match=r"none\.safetensors"):
        submit(file, tmp_path / "none.safetensors", attack="mine", by="me")
    assert read_card(file) == before


def test_a_card_outside_of_its_leaderboard_takes_no_guesses(board: Path, tmp_path: Path) -> None:
    file, _ = card_of(board, "compression")
    copy = Path(shutil.copy(file, tmp_path / "card.json"))
    with pytest.raises(UsageError, match="in its place in a leaderboard"):
        submit(copy, tmp_path / "guesses.npz", attack="mine", by="me")
