"""Where a run's results go, who computes them, and the call that it came from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from leaktight.core.errors import UsageError
from leaktight.core.files import write_atomically
from leaktight.engines.cluster import run_on_ray
from leaktight.engines.tasks import Runner, run_locally
from leaktight.results.folder import RunFolder, latest_folder, next_folder

RUNS = Path("runs")
PRELOAD = "leaktight.audit.preload"


def run_path(command: str, record: str, out: Path | str | None, *, resume: bool) -> Path:
    """Where a run's results go: where the caller says, else the newest run to resume, else a new folder below runs/."""
    if out is not None:
        return Path(out)
    return latest_folder(RUNS, command, record) if resume else next_folder(RUNS, command)


def parse_workers(workers: int | str | None) -> tuple[Runner, int | None]:
    """Who runs the trials, and how many processes train: a number, "ray", or "ray://host:port"."""
    local = partial(run_locally, preload=PRELOAD)
    if workers is None:
        return local, None
    text = str(workers)
    if text == "ray" or text.startswith("ray://"):
        return partial(run_on_ray, address=None if text == "ray" else text), None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"expected workers to be a number of processes, ray or ray://host:port, got {text!r}")
    return partial(local, workers=int(text)), int(text)


def called(folder: RunFolder, call: str) -> str:
    """The call that began the run; `call` for a new one."""
    file = folder.path / "command.txt"
    if not file.exists():
        write_atomically(file, call + "\n")
    return file.read_text().strip()
