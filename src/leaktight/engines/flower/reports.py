"""What a node's client measures about itself: a file beside its private state, for the node's own eyes.

A simulation, which runs all nodes in folders of its own, reads them as the judge of the experiment; a deployed server
cannot.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from leaktight.core.files import write_private


def write_report(folder: Path, client: str, round_index: int, figures: Mapping[str, float]) -> None:
    """Keep the figures of a client's last round. round_index: from 0."""
    write_private(_path(folder, client), json.dumps({"round": round_index + 1, "figures": dict(figures)}, indent=1))


def read_reports(folder: Path, clients: Iterable[str], round_index: int) -> dict[str, dict[str, float]]:
    """The figures of those clients whose last round was this one."""
    reports = {}
    for client in clients:
        path = _path(folder, client)
        held = json.loads(path.read_text()) if path.exists() else {}
        if held.get("round") == round_index + 1:
            reports[client] = held["figures"]
    return reports


def _path(folder: Path, client: str) -> Path:
    return folder / f"{client}.report.json"
