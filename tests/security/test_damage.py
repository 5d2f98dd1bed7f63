"""State on disk that was damaged is refused before anything of it is used, with a remedy."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.damage import flipped
from tests.here import Here

QUICK = ("--set", "federation.rounds=3", "--set", "local.epochs=1", "--workers", "1", "--out", "run")
SETTINGS = ("attack.iterations=2", "audit.attack_round=1", "federation={rounds=2, per_round=2}", "local.epochs=1")
AUDIT = ["--trials", "1", "--workers", "0", "--out", "run", "--attack", "dlg"]
AUDIT += [word for each in SETTINGS for word in ("--set", each)]


def newest(folder: Path, kind: str) -> Path:
    return max(path for path in folder.rglob(f"{kind}*") if path.suffix in (".state", ".safetensors"))


@pytest.mark.parametrize("kind", ["checkpoint", "clients"])
def test_a_flipped_bit_of_a_checkpoint_is_refused(here: Here, tmp_path: Path, kind: str) -> None:
    code, out, errors = here("train", *QUICK, "--json")
    assert code == 0, errors
    digest = json.loads(out)["model_digest"]
    path = newest(tmp_path / "run", kind)
    for place in flipped(path):
        code, out, errors = here("train", *QUICK, "--json", "--resume")
        said = errors.strip().splitlines()[-1]
        assert (code, out) == (1, ""), place
        assert "is damaged" in said, place
        assert "--from-round 3" in said, place
        assert "Traceback" not in errors
    code, out, errors = here("train", *QUICK, "--json", "--resume")
    assert (code, json.loads(out)["model_digest"]) == (0, digest)
    path.write_bytes(path.read_bytes()[:-1])
    code, out, errors = here("train", *QUICK, "--json", "--resume", "--from-round", "3")
    assert (code, json.loads(out)["model_digest"]) == (0, digest), "the remedy helps"


def test_a_flipped_bit_of_an_audits_state_is_refused(here: Here, tmp_path: Path) -> None:
    code, _, errors = here("audit", *AUDIT)
    assert code == 0, errors
    remedy = "is damaged.*; remove run/training/outpost to train it again, and add --resume"
    for kind in ("round-", "checkpoint", "clients"):
        for place in flipped(newest(tmp_path / "run", kind)):
            code, out, errors = here("audit", *AUDIT, "--resume")
            assert (code, out) == (1, ""), (kind, place)
            assert re.search(remedy, errors.strip().splitlines()[-1]), errors
    shutil.rmtree(tmp_path / "run" / "training" / "outpost")
    assert here("audit", *AUDIT, "--resume")[0] == 0, "the remedy helps"
