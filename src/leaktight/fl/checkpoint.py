"""Checkpoints: a file that is replaced as a whole, never half-written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leaktight.core.errors import CheckpointError
from leaktight.core.files import write_private
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import State

VERSION = 3


def save_checkpoint(path: Path, state: State) -> None:
    """Write nested state (see `core.tensors.pack`), readable by its owner only, as it may hold clients' secrets."""
    write_private(path, pack({"version": VERSION, "state": state}))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote."""
    try:
        content = unpack(path.read_bytes())
        if content["version"] != VERSION:
            raise CheckpointError(f"{path} has version {content['version']}, expected {VERSION}; start a new run")
        state: dict[str, Any] = content["state"]
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is not a readable checkpoint ({error}); start a new run") from error
    return state
