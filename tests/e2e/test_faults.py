"""Faults of a real `leaktight audit`, in a process of its own: quick forms of the campaign in bench/faults."""

from __future__ import annotations

import errno
import os
import signal
import sys

import pytest
from bench.faults.audit_scene import Scene
from bench.faults.audits import (
    Campaign,
    damaged,
    disk_full,
    file_limit,
    killed,
    no_shm,
    small_shm,
    terminated,
    two_processes,
    worker_killed,
)
from bench.faults.commands import own_mounts
from bench.faults.count import Count

from leaktight.cli import app
from leaktight.core.errors import LeakFoundError, MachineError, StoppedError, UsageError

mounts = pytest.mark.skipif(not own_mounts(), reason="no own mounts for this user")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(Scene(tmp_path_factory.mktemp("faults"), workers=0))
    made.begin()
    return made


@pytest.fixture(scope="module")
def parallel(campaign: Campaign) -> Campaign:
    """The same, by two worker processes."""
    return Campaign(Scene(campaign.scene.folder), undisturbed=campaign.undisturbed, seconds=campaign.seconds)


def assert_held(count: Count) -> None:
    assert count.held == count.tried, count.note


def test_sigterm_ends_a_run_with_one_line_and_resuming_gives_the_same(campaign: Campaign) -> None:
    assert_held(terminated(campaign, 1))


def test_a_limit_of_file_sizes_ends_a_run_with_one_line_and_resuming_gives_the_same(campaign: Campaign) -> None:
    assert_held(file_limit(campaign, (60_000,)))


@mounts
def test_a_full_disk_ends_a_run_with_one_line_and_resuming_gives_the_same(campaign: Campaign) -> None:
    assert_held(disk_full(campaign, ("340k",)))


def test_a_damaged_line_is_refused_and_the_remedy_works(campaign: Campaign) -> None:
    assert_held(damaged(campaign, 1))


@pytest.mark.slow
def test_kills_and_second_processes(parallel: Campaign) -> None:
    assert_held(killed(parallel, 3))
    assert_held(worker_killed(parallel, "training, no defense: round 1", "while a defense is trained", 1))
    assert_held(worker_killed(parallel, "1 of 10:", "while attacking", 1))
    assert_held(two_processes(parallel))


@mounts
@pytest.mark.slow
def test_small_shared_memory(parallel: Campaign) -> None:
    assert_held(small_shm(parallel))
    assert_held(no_shm(parallel))


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (MachineError("a worker process died; use fewer"), 1, "leaktight: a worker process died; use fewer"),
        (MemoryError(), 1, "leaktight: out of memory; free memory or use fewer --workers"),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded", "runs/x"),
            1,
            "leaktight: Disk quota exceeded (runs/x); free space or choose another folder",
        ),
        (StoppedError("SIGTERM"), 1, "leaktight: ended by SIGTERM; what is done is kept, continue with --resume"),
        (UsageError("expected a file"), 2, "leaktight: expected a file"),
        (LeakFoundError("leaks"), 3, "leaktight: leaks"),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as caught:
        app.main()
    assert (caught.value.code, capsys.readouterr().err) == (code, f"{line}\n")


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(app, "app", fail)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="a defect"):
        app.main()


def test_signals_that_somebody_else_handles_are_left_alone() -> None:
    """As under `nohup`, which ignores SIGHUP."""
    before = signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with app._stopped_by("SIGHUP", "SIGTERM", "SIGNONE"):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            with pytest.raises(StoppedError, match="SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "what it was before"
    finally:
        for number, handler in zip((signal.SIGHUP, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
