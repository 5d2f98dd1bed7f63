"""`leaktight train` as a user runs it: in a process of its own."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.here import Here
from tests.seeds import replayed

from leaktight.results.folder import RunFolder

QUICK = ["--set", "federation.rounds=3", "--set", "local.epochs=1"]


def leaktight(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leaktight", *arguments],
        cwd=folder,
        env={**os.environ, "LEAKTIGHT_DATA": str(folder / "data"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_json_is_all_that_stdout_holds(tmp_path: Path) -> None:
    done = leaktight("train", *QUICK, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert [row["round"] for row in summary["rounds"]] == [1, 2, 3]
    assert "digits: 1438 of 1438 training examples on 20 clients" in done.stderr
    run = tmp_path / summary["run"]
    files = {path.name for path in run.iterdir()} - {".lock"}
    assert files == {
        "config.toml",
        "environment.json",
        *(f"{kind}-0000{number}.state" for kind in ("checkpoint", "clients") for number in (1, 2, 3)),
        "model.safetensors",
        "secret.key",
        "summary.json",
        "curve.png",
        "holdings.png",
    }
    again = leaktight("train", *QUICK, "--json", "--resume", folder=tmp_path)
    assert json.loads(again.stdout)["model_digest"] == summary["model_digest"]


def test_a_terminal_user_gets_a_table_and_the_paths(tmp_path: Path) -> None:
    done = leaktight("train", *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "final accuracy" in done.stdout
    assert "runs/train-001/curve.png" in done.stdout


def test_a_users_own_model_is_found_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, pixels, classes):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(pixels, classes)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x.flatten(1))\n"
        "def build(shape, num_classes):\n"
        "    return Net(shape[0] * shape[1] * shape[2], num_classes)\n"
    )
    done = leaktight("train", *QUICK, "--set", "model.kind=mine:build", "--workers", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "final accuracy" in done.stdout


def test_the_pooled_reference_has_one_participant(tmp_path: Path) -> None:
    done = leaktight("train", *QUICK, "--centralised", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {row["clients"] for row in json.loads(done.stdout)["rounds"]} == {1}


def write_idx(path: Path, magic: int, shape: tuple[int, ...], payload: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(struct.pack(f">I{len(shape)}I", magic, *shape) + payload))


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A data root with a tiny MNIST of 20 images."""
    folder = tmp_path / "data" / "mnist"
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", 2051, (20, 28, 28), bytes(20 * 784))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", 2049, (20,), bytes(range(10)) * 2)
    return folder


def test_the_recipe_of_words_gives_each_client_its_own_source(here: Here) -> None:
    code, _, told = here("train", "recipe:fedboosting-figure-4-4", "--dry-run", "--set", "data.examples=50")
    assert code == 0, told
    assert "rendered_words: 80 of 80 training examples on 2 clients" in told
    assert re.search(r"client-000-synth90k-like +38 +2\n", told)
    assert re.search(r"client-001-synthtext-like +38 +2", told)


def test_bad_usage_is_one_line_and_exit_code_two(tmp_path: Path, here: Here, mnist: Path) -> None:
    (tmp_path / "broken.toml").write_text("[data\n")
    cases = {
        "unknown dataset": (["--set", "data.kind=digit"], "did you mean 'digits'?"),
        "unknown model": (["--set", "model.kind=lenet"], "did you mean 'lenet_zhu'?"),
        "unknown key": (["--set", "local.learningrate=1"], "did you mean 'learning_rate'?"),
        "not TOML": (["broken.toml"], "is not TOML"),
        "missing config": (["none.toml"], "cannot read none.toml"),
        "negative rate": (["--set", "local.learning_rate=-1"], "expected learning_rate > 0, got -1"),
        "batch over data": (["--set", "local.batch_size=500"], "batch_size 500 >"),
        "too many clients": (["--set", "partition={kind='iid', clients=5000}"], "5000"),
        "empty partition": (["--set", "partition={kind='by_source'}"], "choose another partition"),
        "missing data": (["--set", "data.kind=cifar10"], "leaktight data cifar10"),
        "per_round": (["--set", "federation.per_round=30"], "per_round 30 > 20 clients"),
        "user model": (["--set", "model.kind=nowhere:build"], "nowhere"),
    }
    for name, (arguments, message) in cases.items():
        code, out, errors = here("train", "--dry-run", *arguments)
        assert code == 2, (name, errors)
        assert message in errors, name
        assert out == "", name
        assert len(errors.strip().splitlines()) == 1, (name, errors)
    assert not (tmp_path / "runs").exists(), "nothing half-written"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: write_idx(folder / "train-images-idx3-ubyte.gz", 2051, (20, 28, 28), bytes(99)), "got only 99"),
        (lambda folder: write_idx(folder / "train-images-idx3-ubyte.gz", 2049, (20,), bytes(20)), "magic"),
        (lambda folder: write_idx(folder / "train-labels-idx1-ubyte.gz", 2049, (20,), b"\x0b" * 20), "labels in 0..9"),
    ],
    ids=["truncated", "magic", "label"],
)
def test_damaged_data_is_named(here: Here, mnist: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(mnist)
    code, _, errors = here("train", "--dry-run", "--set", "data.kind=mnist")
    assert code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1, errors


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    found = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_run_ends_in_the_same_model(tmp_path: Path, kills: int) -> None:
    moments = replayed(5).public_numpy()
    changes = (f"federation.rounds={4 * kills}", "local.epochs=2", f"secret_seed={'ab' * 32}")
    settings = [word for change in changes for word in ("--set", change)]
    whole = leaktight("train", *settings, "--json", "--out", "whole", folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    cut = RunFolder(tmp_path / "cut")
    command = [sys.executable, "-m", "leaktight", "train", *settings, "--out", "cut", "--resume", "--json"]
    for _ in range(kills):
        before = cut.checkpoints
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if cut.checkpoints != before:
                break
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 10
        while children_of(process) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not children_of(process), "a worker outlived the process that started it"
    resumed = leaktight(*command[3:], folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["model_digest"] == json.loads(whole.stdout)["model_digest"]


def test_the_key_of_a_replay_is_in_one_file_which_its_owner_alone_can_read(tmp_path: Path) -> None:
    key = bytes(range(100, 132))
    done = leaktight("train", *QUICK, "--set", f"secret_seed={key.hex()}", "--json", "--out", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    holding = [
        path.name
        for path in (tmp_path / "run").iterdir()
        if key in path.read_bytes() or key.hex().encode() in path.read_bytes()
    ]
    assert holding == ["secret.key"]
    assert (tmp_path / "run" / "secret.key").stat().st_mode & 0o777 == 0o600
    assert key.hex() not in done.stdout + done.stderr
    again = leaktight("train", *QUICK, "--set", f"secret_seed={key.hex()}", "--json", "--out", "again", folder=tmp_path)
    other = leaktight("train", *QUICK, "--json", "--out", "other", folder=tmp_path)
    digests = [json.loads(each.stdout)["model_digest"] for each in (done, again, other)]
    assert digests[0] == digests[1] != digests[2], "the key replays a run, the seed alone does not"


def test_interrupting_leaves_a_run_to_resume_and_says_how(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "leaktight", "train", "--out", "run", "--set", "federation.rounds=500"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        folder = RunFolder(tmp_path / "run")
        deadline = time.monotonic() + 60
        while not folder.checkpoints and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume --out run" in errors
    assert "Traceback" not in errors


def test_stacked_defenses_and_what_they_cost_are_shown(here: Here) -> None:
    one_round = ["--set", "federation.rounds=1", "--set", "local.epochs=1", "--workers", "1"]
    stacked = ["--defense", "clipping", "--defense", "noise", "--set", "defense.1.noise_std=0.001"]
    code, out, errors = here("train", *one_round, *stacked, "--out", "shown")
    assert code == 0, errors
    assert "round accuracy loss train loss seconds defense up down clients" in " ".join(errors.split())
    assert "defense clipping (clip_norm 4) + noise (noise_std 0.001): " in out
    assert re.search(r": \d+\.\d % of local training time, \d+\.\d\d ms a step; ", out)
    assert "noise.noise_std 0.001" in out
    code, out, _ = here("train", *one_round, *stacked, "--out", "shown", "--resume", "--json")
    figures = json.loads(out)["defense"]
    assert figures.keys() == {
        "kind",
        "settings",
        "share_of_time",
        "seconds_per_step",
        "clipping.clip_rate",
        "clipping_seconds",
        "noise.noise_std",
        "noise_seconds",
    }
    assert here("train", "--defense", "nois", "--dry-run")[2].strip().endswith("did you mean 'noise'?")


def test_the_catalogue_is_listed(here: Here) -> None:
    code, out, _ = here("list", "models", "--json")
    assert code == 0
    names = {entry["name"] for entry in json.loads(out)["entries"]}
    assert {"lenet_zhu", "resnet18", "crnn"} <= names
    assert here("list", "modells")[0] == 2


def test_data_says_what_is_there_and_what_to_put_where(here: Here, mnist: Path) -> None:
    code, out, _ = here("data", "--json")
    assert code == 0
    states = {entry["name"]: entry["state"] for entry in json.loads(out)["sources"]}
    assert states["mnist"] == "present"
    code, _, errors = here("data", "mnist")
    assert code == 2
    assert "train-images-idx3-ubyte.gz" in errors
    assert "--force" in errors
    assert states["cifar10"] == "missing"
    code, _, errors = here("data", "imagenet")
    assert code == 2
    assert str(mnist.parent / "imagenet") in errors
    assert here("data", "mnits")[2].strip().endswith("did you mean 'mnist'?")
