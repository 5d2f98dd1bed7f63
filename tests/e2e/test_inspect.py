"""`leaktight inspect` on an update that a plain PyTorch script made, which knows nothing of Leaktight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NETWORK = """
import torch
from torch import nn

def build():
    act = nn.Sigmoid
    net = nn.Sequential(
        nn.Conv2d(1, 12, 5, stride=2, padding=2), act(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2), act(),
        nn.Conv2d(12, 12, 5, padding=2), act(),
        nn.Flatten(), nn.Linear(12 * 4 * 4, 5),
    )
    return net
"""

SCRIPT = """
import numpy as np
import torch
from PIL import Image
from torch import nn
from net import build

torch.manual_seed(3)
net = build()
for parameter in net.parameters():
    nn.init.uniform_(parameter, -0.5, 0.5)
torch.save(net.state_dict(), "before.pt")

rows, columns = np.mgrid[0:16, 0:16]
picture = (127 + 60 * np.sin(rows / 2) + 60 * np.cos(columns / 3)).astype(np.uint8)
Image.fromarray(picture).save("truth.png")
image = torch.tensor(picture, dtype=torch.float32)[None, None] / 255
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
nn.functional.cross_entropy(net(image), torch.tensor([3])).backward()
optimizer.step()
torch.save(net.state_dict(), "after.pt")
"""

MODEL = ["--model", "net:build", "--before", "before.pt", "--shape", "1,16,16"]
QUICK = ["--attack", "csdlg", "--set", "attack.iterations=60", "--workers", "1"]


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "LEAKTIGHT_DATA": str(folder / "data"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def inspect(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run(["-m", "leaktight", "inspect", *MODEL, *arguments], folder)


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture")
    (folder / "net.py").write_text(NETWORK)
    (folder / "train.py").write_text(SCRIPT)
    assert "leaktight" not in NETWORK + SCRIPT
    done = run(["train.py"], folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_picture_behind_a_foreign_update_is_found(capture: Path) -> None:
    settings = ["--local", "learning_rate=0.1", *QUICK]
    known = ["--after", "after.pt", "--truth", "truth.png", "--out", "with-truth"]
    done = inspect(*settings, *known, "--json", folder=capture)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    (cell,) = [cell for cell in summary["cells"] if cell["role"] == "attack"]
    assert cell["labels"] == [3]
    assert cell["psnr"]["mean"] > 30
    assert cell["ssim"]["mean"] > cell["control"]["ssim"] + 0.3
    (verdict,) = summary["verdicts"]
    assert (verdict["verdict"], verdict["defense"]) == ("reconstructed", "captured update")
    assert summary["flags"] == []
    run_folder = capture / "with-truth"
    files = {path.name for path in run_folder.iterdir()} - {".lock"}
    assert files == {
        "command.txt",
        "config.toml",
        "digests.json",
        "environment.json",
        "images",
        "junit.xml",
        "report.html",
        "sarif.json",
        "summary.json",
        "trials.jsonl",
    }
    assert "The update leaks training data." in (run_folder / "report.html").read_text()

    before = (run_folder / "trials.jsonl").read_bytes()
    again = inspect(*settings, *known, "--json", "--resume", folder=capture)
    assert json.loads(again.stdout)["cells"] == summary["cells"]
    assert (run_folder / "trials.jsonl").read_bytes() == before


def test_without_the_truth_nothing_is_claimed(capture: Path) -> None:
    done = inspect("--after", "after.pt", *QUICK, "--out", "blind", folder=capture)
    assert done.returncode == 0, done.stderr
    assert "cannot conclude" in done.stdout
    told = " ".join(done.stdout.split())
    assert "nothing can be scored; look at the pictures" in told
    assert "Labels read from the update: 3." in told
    (line,) = map(json.loads, (capture / "blind" / "trials.jsonl").read_text().splitlines())
    assert set(line["scores"].values()) == {None}
    assert line["loss"] < 0.1 * line["first_loss"]
    assert line["images"]["truth"] is None
    assert (capture / "blind" / line["images"]["guess"]).is_file()
    page = (capture / "blind" / "report.html").read_text()
    assert "cannot be judged by this run" in page
    assert 'alt="Reconstruction' in page
    assert 'alt="Original' not in page


def test_a_pickle_with_code_in_it_is_refused_and_not_run(capture: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch sprung",)

    torch.save({"weight": Trap()}, capture / "trap.pt")
    done = inspect("--after", "trap.pt", *QUICK, folder=capture)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "refused trap.pt: it is a pickle that names posix.system, and could run code" in line
    assert not (capture / "sprung").exists()
    assert not (capture / "runs").exists()


def test_what_does_not_fit_is_named_in_one_line(capture: Path) -> None:
    done = inspect("--after", "before.pt", *QUICK, folder=capture)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "before.pt and before.pt are equal: nothing to attack" in done.stderr
    done = inspect("--update", "after.pt", *QUICK, folder=capture)
    assert done.returncode == 2
    assert "--kind" in done.stderr
