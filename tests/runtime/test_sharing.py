"""Workers get large values by shared memory, or by files where that is too small."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.runtime.test_processes import Sum

from leaktight.core.errors import MachineError
from leaktight.core.types import Broadcast, Examples
from leaktight.runtime import processes
from leaktight.runtime.executor import in_order
from leaktight.runtime.processes import Processes
from leaktight.runtime.sharing import in_file

PROJECT = Path(__file__).parents[2]
SCRIPT = """
import sys
from tests.runtime.test_sharing import shared_sums
from leaktight.core.errors import MachineError

if __name__ == "__main__":
    try:
        print(shared_sums(number=int(sys.argv[1])))
    except MachineError as error:
        print(error)
"""
WANTED = [[100.5, 101.5], [101.5, 102.5]]


def shared_sums(number: int = 100) -> list[list[float]]:
    """Sums by two workers in two rounds, of examples and models of `number` values."""
    examples = Examples(torch.ones(number, 1, 1, 1, dtype=torch.uint8), torch.zeros(number, dtype=torch.long))
    found = []
    with Processes(2).start(Sum(examples)) as workers:
        for start in (0.5, 1.5):
            model = Broadcast({"w": torch.full((number,), start)}, {}, 0)
            done = in_order(workers.run([(place, model) for place in range(2)], shared=[model]))
            assert all(len(each) == number for each in done)
            found.append([float(each[-1]) - number + 100 for each in done])
    return found


@pytest.fixture(autouse=True)
def main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_worker", {})


@pytest.fixture
def no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)


@pytest.mark.usefixtures("no_shared_memory")
def test_files_take_the_place_of_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert shared_sums() == WANTED
    assert not list(tmp_path.glob("leaktight-*")), "the files have no names"


@pytest.mark.usefixtures("no_shared_memory")
def test_no_place_at_all_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    with pytest.raises(MachineError, match=r"cannot share 100 bytes .* /dev/null .* --workers 0"):
        shared_sums()


@pytest.fixture
def with_small_shm(tmp_path: Path) -> Callable[[str, int], str]:
    """Runs the script with /dev/shm of this size, as in a container."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(size: str, number: int) -> str:
        inside = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", inside, "sh", sys.executable, str(script), str(number)]
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no own mounts for this user")
    return run


def test_a_small_shm_is_enough(with_small_shm: Callable[[str, int], str]) -> None:
    assert with_small_shm("256k", 1_000_000) == str(WANTED)


def test_a_shm_without_room_for_a_lock_is_a_clear_error(with_small_shm: Callable[[str, int], str]) -> None:
    told = with_small_shm("8k", 100)
    assert told == (
        "cannot start worker processes: No space left on device; free space in /dev/shm, or use --workers 0"
    )


def test_tensors_in_a_file_are_the_same_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tensors = {
        "b": torch.arange(7, dtype=torch.int64),
        "a": torch.rand(3, 5, dtype=torch.float64).T,
        "none": torch.empty(0, 2),
        "one": torch.tensor(2.5),
        "few": torch.tensor([True, False, True]),
    }
    found = in_file(tensors)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert not list(tmp_path.iterdir())
    assert in_file({}) == {}
    assert in_file({"none": torch.empty(0)})["none"].shape == (0,)
    found["one"] += 1  # as one may with any tensor
    assert float(found["one"]) == 3.5


def test_a_full_disk_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(
        MachineError, match=r"cannot keep 400 bytes of an update in .* \(No space left on device\).*per_round"
    ):
        in_file({"w": torch.ones(100)})
