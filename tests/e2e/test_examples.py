from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


WORDS = ["data.examples=30", "local.epochs=1", "federation.rounds=2", "model.width=2", "model.units=4"]
SMALLER = {
    "decision_boundary": ["--set", "data.examples=400", "--set", "federation.rounds=1"],
    "text_recognition": ["--batch-sizes", "8", "--epochs", "1", "2", *(f"--set={change}" for change in WORDS)],
}
SAYS = {
    "one_round": "the attacker's update",
    "decision_boundary": "boundaries: decision-boundary.png",
    "text_recognition": "curves: text-recognition/curves.png",
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path), *SMALLER.get(path.stem, [])])
    runpy.run_path(str(path), run_name="__main__")
    assert SAYS[path.stem] in capsys.readouterr().out


def test_words_are_not_learnt_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEAKTIGHT_DATA", str(tmp_path / "none"))
    path = EXAMPLES / "text_recognition.py"
    small = ["--batch-sizes", "8", "--epochs", "1", *(f"--set={change}" for change in WORDS)]

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [str(path), *small, *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().err

    assert "FedBoosting 1E8B" in run()
    assert "after round" not in run()
    assert "FedAvg 1E8B" in run("--set", "local.learning_rate=0.01")
    kept = json.loads((tmp_path / "text-recognition" / "fedavg-1E8B.json").read_text())
    assert [len(accuracies) for accuracies in kept["accuracy"].values()] == [2]
