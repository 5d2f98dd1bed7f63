"""What audits, inspections and training share: the folder, the workers, the recorded call."""

from __future__ import annotations

from pathlib import Path

from leaktight.core.errors import UsageError
from leaktight.core.files import write_atomically
from leaktight.results.folder import RunFolder, latest_folder, next_folder
from leaktight.runtime.cluster import Ray
from leaktight.runtime.executor import Executor
from leaktight.runtime.processes import Alone, Processes

RUNS = Path("runs")
_PRELOAD = (  # modules that trials import late: for scores, matching, traced graphs
    "scipy.optimize",
    "torch._functorch.compile_utils",
    "torch.fx.experimental.proxy_tensor",
    "torchmetrics.functional.image",
)


def run_path(command: str, record: str, out: Path | str | None, *, resume: bool) -> Path:
    """The folder of a run: `out` if given, else the newest run to resume, else a new folder in runs/."""
    if out is not None:
        return Path(out)
    return latest_folder(RUNS, command, record) if resume else next_folder(RUNS, command)


def require_resumed(*, resume: bool, retry_failed: bool) -> None:
    """Raise UsageError if failed trials of a new run are to be repeated."""
    if retry_failed and not resume:
        raise UsageError("--retry-failed repeats trials of an earlier run; add --resume")


def parse_workers(workers: int | str | None, most: int | None = None) -> tuple[Executor, int | None]:
    """The executor of trials and the number of training processes (None: one per core) for an option `workers`.

    workers: a number of processes (0: this one), None for `most`, "ray", or "ray://host:port". most: None for one per
    core.
    """
    if workers is None:
        return Processes(most, _PRELOAD), most
    text = str(workers)
    if text == "ray" or text.startswith("ray://"):
        return Ray(None if text == "ray" else text), None
    if not text.isdigit():
        raise UsageError(f"expected workers to be a number of processes, ray or ray://host:port, got {text!r}")
    number = int(text)
    return Processes(number, _PRELOAD) if number else Alone(), number


def recorded_call(folder: RunFolder, call: str) -> str:
    """The call that started the run; `call` for a new run."""
    if not folder.command.exists():
        write_atomically(folder.command, call + "\n")
    return folder.command.read_text().strip()
