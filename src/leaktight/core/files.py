"""Names and atomic writing of files, and removal of what writing left behind and of secrets in a command line."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from leaktight.core.errors import MachineError
from leaktight.core.faults import remedy

_PARTIAL = ".partial-"
_SECRET = re.compile(r"^(--set=)?\s*secret_seed\s*=")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file atomically: a crash leaves the old content or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content

    def fill(temporary: Path) -> None:
        temporary.write_bytes(data)

    replace_atomically(path, fill)


def write_private(path: Path, content: bytes | str) -> None:
    """Write a file atomically that only its owner can read, as is its folder, if that is made."""
    data = content.encode() if isinstance(content, str) else content

    def fill(temporary: Path) -> None:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)

    replace_atomically(path, fill, private=True)


def make_private_folder(folder: Path) -> None:
    """Make a folder for its owner alone. One that exists keeps its permissions."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def remove_partial(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove what killed processes left of files that they were writing in this folder and those below.

    names: only files of these names, in this folder alone, where other processes may be writing others; None: all.
    Assumes: no other process is writing these files; the caller holds the lock of the folder.
    """
    for left in list(folder.glob(f"{_PARTIAL}*") if names is not None else folder.rglob(f"{_PARTIAL}*")):
        inside = {path.name for path in left.iterdir()} if left.is_dir() and not left.is_symlink() else set()
        if names is None or (inside and inside <= set(names)):
            shutil.rmtree(left, ignore_errors=True)


def replace_atomically(path: Path, fill: Callable[[Path], None], *, private: bool = False) -> None:
    """Write a file atomically: `fill` writes a temporary one in the same folder, which then replaces `path`.

    private: make a missing folder for its owner alone.
    """
    try:
        if private:
            make_private_folder(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_PARTIAL) as folder:
            temporary = Path(folder) / path.name
            fill(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise MachineError(f"cannot write {path}: {reason}; {remedy(error)}") from error


def _sync_folder(folder: Path) -> None:
    """Write out the names in a folder: after a power failure a client must not have forgotten what it answered."""
    if os.name == "nt":  # folders cannot be opened there
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP):  # a file system that cannot
            raise


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command that may be written down: the key of a replay is kept in secret.key alone.

    >>> without_secrets(["leaktight", "audit", "--set", "secret_seed=12ab", "--set=secret_seed=12ab", "--json"])
    ['leaktight', 'audit', '--json']
    """
    shown: list[str] = []
    for word in words:
        if _SECRET.search(word):
            if shown and shown[-1] == "--set":
                shown.pop()
            continue
        shown.append(word)
    return shown


def slug(name: str) -> str:
    """The name with other characters than letters, digits, "_", "." and "-" replaced, for ids and file names.

    >>> slug("noise(std=0.1)")
    'noise-std-0.1'
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-")
