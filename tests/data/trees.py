"""Small folders and zips that the tests of this folder read."""

from __future__ import annotations

import zipfile
from pathlib import Path


def write(root: Path, files: dict[str, bytes], *, packed: bool = False) -> Path:
    """The files in a folder, or in a zip inside that folder."""
    root.mkdir(parents=True, exist_ok=True)
    if packed:
        with zipfile.ZipFile(root / "pack.zip", "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    else:
        for name, data in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
    return root
