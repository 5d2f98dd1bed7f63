"""Checkpoints: one file that is either the old one or the new one, never half of either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leaktight.core.errors import CheckpointError
from leaktight.core.files import write_private
from leaktight.core.tensors import pack, unpack
from leaktight.core.types import State

VERSION = 3


def save_checkpoint(path: Path, state: State) -> None:
    """Store nested state (see `core.tensors.pack`), for its owner alone: clients' secrets may be part of it."""
    write_private(path, pack({"version": VERSION, "state": state}))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `save_checkpoint` stored."""
    try:
        content = unpack(path.read_bytes())
        if content["version"] != VERSION:
            raise CheckpointError(f"{path} has version {content['version']}, expected {VERSION}; start the run anew")
        state: dict[str, Any] = content["state"]
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is not a readable checkpoint ({error}); start the run anew") from error
    return state
