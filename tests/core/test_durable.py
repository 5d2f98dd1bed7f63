"""A file that was written is there after a power failure, not only after a killed process."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from leaktight.core.files import write_atomically, write_private


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be opened")
@pytest.mark.parametrize("write", [write_atomically, write_private])
def test_the_folder_is_written_out_after_the_file_has_its_name(
    write: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, real = tmp_path / "state", [], os.fsync

    def fsync(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        synced.append((kind, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(path, b"answers")  # type: ignore[operator]
    assert synced == [("file", False), ("folder", True)]
