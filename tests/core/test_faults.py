from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
import torch

from leaktight.core.errors import (
    CheckpointError,
    DownloadError,
    LeaktightError,
    MachineError,
    ModelError,
    UsageError,
)
from leaktight.core.faults import fault_of, raise_fault
from leaktight.core.files import remove_partial, write_atomically
from leaktight.core.inputs import Images
from leaktight.core.rng import Rng
from leaktight.models.initialise import build_model
from leaktight.models.small import Mlp


def of_system(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/there/file")


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (of_system(errno.ENOSPC), r"No space left on device \(/there/file\); free space"),
        (of_system(errno.EFBIG), "File too large .*ulimit -f"),
        (of_system(errno.EMFILE), "ulimit -n"),
        (of_system(errno.EIO), "check the disk"),
        (MemoryError(), "out of memory; free memory or use fewer --workers"),
        (RuntimeError("unable to allocate shared memory(shm): No space left on device (28)"), "No space left"),
        (RuntimeError("can't start new thread"), "fewer --workers"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "free memory"),
        (BrokenProcessPool("A process in the process pool was terminated abruptly"), "free memory"),
        (caused(UsageError("my function failed"), MemoryError()), "out of memory"),
        (caused(LeaktightError("cannot save"), caused(ValueError(), of_system(errno.EDQUOT))), "free space"),
        (MachineError("a worker process died"), "died"),
        (CheckpointError("damaged"), "damaged"),
        (DownloadError("no network"), "no network"),
    ],
)
def test_a_fault_of_the_machine_is_told_with_a_remedy(error: Exception, told: str) -> None:
    with pytest.raises(LeaktightError, match=told) as caught:
        raise_fault(error)
    assert not isinstance(caught.value, UsageError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "workers send it"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("singular"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "weights.pt"),
        PermissionError(errno.EACCES, "Permission denied"),
        LeaktightError("no guess"),
        UsageError("expected labels"),
        caused(LeaktightError("no guess"), ValueError("singular")),
        RuntimeError("shape mismatch"),
        SystemExit(0),
        ValueError("the replay buffer is out of memory slots"),
        KeyError("No space left on device"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000000 bytes."),
        MemoryError("Unable to allocate 3.64 PiB for an array with shape (22627417, 22627417)"),
        caused(LeaktightError("no guess"), MemoryError("Unable to allocate 3.64 PiB for an array")),
    ],
)
def test_an_error_of_the_method_is_no_fault(error: BaseException) -> None:
    assert fault_of(error) is None
    raise_fault(error)


@pytest.mark.parametrize("asked", ["you tried to allocate 1048576 bytes", "Unable to allocate 1.00 MiB for an array"])
def test_memory_that_the_machine_has_and_refuses_is_a_fault(asked: str) -> None:
    assert isinstance(fault_of(RuntimeError(f"can't allocate memory: {asked}")), MachineError)
    assert isinstance(fault_of(MemoryError(asked)), MachineError)


@pytest.mark.parametrize("ask", [torch.empty, np.empty])
def test_memory_that_no_machine_has_is_an_error_of_who_asks_for_it(ask: Callable[[int], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        ask(1 << 50)
    assert fault_of(caught.value) is None


def test_causes_that_go_round_in_a_circle_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert fault_of(first) is None


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = tmp_path / "images" / "a.png"
    write_atomically(kept, b"png")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "run"
    for left in (folder / ".partial-1", folder / "training" / "none" / ".partial-2"):
        left.mkdir(parents=True)
        (left / "half").write_bytes(b"half")
    (folder / ".partial-link").symlink_to(elsewhere)
    (folder / "model.partial-1").write_bytes(b"mine")
    remove_partial(folder)
    assert sorted(path.name for path in folder.rglob("*")) == [".partial-link", "model.partial-1", "none", "training"]
    assert kept.exists()
    assert elsewhere.exists()


def test_a_network_that_gets_no_memory_is_a_fault_if_the_machine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")

    monkeypatch.setattr(Mlp, "build", refused)
    with pytest.raises(ModelError, match="more memory than there is") as caught:
        build_model(Mlp(), Images(1, 8, 8), 10, rng=Rng(0))
    assert isinstance(fault_of(caught.value), MachineError)
