"""What is secret on disk is readable by its owner alone, whatever the umask, and no leftovers stay."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.here import Here

from leaktight.core.errors import UsageError
from leaktight.fl.state import load_checkpoint
from leaktight.results.folder import RunFolder, open_run

ENCRYPTED = (
    "federation={rounds=2, per_round=2, aggregator={kind='encrypted', cipher={kind='paillier', key_bits=256, "
    "unsafe_small=true, bound=8.0}}}"
)
QUICK = ("--set", "local.epochs=1", "--set", "partition={kind='iid', clients=2}", "--set", ENCRYPTED, "--out", "run")
AUDIT = (
    "--trials",
    "1",
    "--attack",
    "dlg",
    "--set",
    "attack.iterations=2",
    "--set",
    "audit.attack_round=1",
    "--defense",
    "none",
    "--set",
    "threat.sees=aggregate",
)


@pytest.fixture(autouse=True)
def careless() -> Iterator[None]:
    """New files and folders are readable by everybody unless somebody takes care."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def secrets_of(run: RunFolder, trained: RunFolder) -> list[bytes]:
    """The key of the run, and the secret key of the cipher, in every form in which they may be written."""
    clients = load_checkpoint(trained.private(trained.all_private[-1]))["clients"]
    found = [run.key, *(state["aggregator"]["secret"] for state in clients.values())]
    return [form for each in found for form in (each, each.hex().encode(), base64.b64encode(each))]


@pytest.mark.parametrize("made", [False, True], ids=["new folder", "folder of the user"])
@pytest.mark.parametrize(
    "command", [("train", "--workers", "1"), ("audit", "--workers", "0", *AUDIT)], ids=["train", "audit"]
)
def test_secrets_are_for_their_owner_alone(here: Here, tmp_path: Path, command: tuple[str, ...], made: bool) -> None:
    run = tmp_path / "run"
    if made:
        run.mkdir(mode=0o755)
    code, _, errors = here(*command, *QUICK)
    assert code == 0, errors
    assert mode(run) == (0o755 if made else 0o700)
    trained = run if command[0] == "train" else run / "training" / "none"
    secrets = secrets_of(RunFolder(run), RunFolder(trained))
    files = [path for path in run.rglob("*") if path.is_file()]
    holding = {path for path in files if any(secret in path.read_bytes() for secret in secrets)}
    assert {path.parent for path in holding} == {run, trained}, "the search finds them"
    private = holding | {path for path in files if path.suffix in (".state", ".key")}
    assert {path.name: oct(mode(path)) for path in private if mode(path) != 0o600} == {}
    assert {oct(mode(path.parent)) for path in private if path.parent != run} <= {oct(0o700)}


def test_leftovers_are_removed_by_who_resumes_and_by_nobody_beside_a_running_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with open_run(run, "", resume=False):
        left = [
            run / ".partial-abc",
            run / "training" / "none" / ".partial-def",
            run / "flower" / "clients" / ".partial-g",
        ]
        for each in left:
            each.mkdir(parents=True)
            (each / "half.state").write_bytes(b"half")
        with pytest.raises(UsageError, match="another process is writing"), open_run(run, "", resume=True):
            pass
        assert all(each.exists() for each in left), "they may be those of the process that runs"
    with open_run(run, "", resume=True):
        assert not list(run.rglob(".partial-*"))


def test_before_a_run_begins_only_its_own_leftovers_are_removed(tmp_path: Path) -> None:
    own, others = tmp_path / ".partial-own", tmp_path / ".partial-others"
    deeper = tmp_path / "train-001" / ".partial-deeper"
    for folder, name in ((own, "config.toml"), (others, "thesis.docx"), (deeper, "config.toml")):
        folder.mkdir(parents=True)
        (folder / name).write_text("")
    with open_run(tmp_path, "", resume=False):
        assert not own.exists()
        assert others.exists()
        assert deeper.exists()
