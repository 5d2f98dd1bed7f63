from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from leaktight.runtime import allocator

PAGES = """
import resource
from leaktight.runtime.allocator import keep_freed
if {kept}:
    assert keep_freed()
def churn():
    for _ in range(5):
        [bytearray(1 << 24) for _ in range(4)]
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Allocates and frees four times sixteen megabytes, and counts the pages that the system had to provide again."""


def faults(kept: bool) -> int:
    run = subprocess.run([sys.executable, "-c", PAGES.format(kept=kept)], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_is_kept() -> None:
    assert faults(kept=True) < 1000 < faults(kept=False)


@pytest.mark.parametrize("error", [OSError("no such library"), TypeError("Windows"), AttributeError("mallopt")])
def test_with_another_c_library_nothing_happens(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def missing(name: str | None) -> object:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not allocator.keep_freed()
    allocator.give_back()
