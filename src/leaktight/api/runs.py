"""What audits, inspections and training share: the folder, the workers, the recorded call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from leaktight.config.settings import Config
from leaktight.core.errors import UsageError
from leaktight.core.files import write_atomically
from leaktight.results.differences import Table, read_record
from leaktight.results.folder import Grow, RunFolder, latest_folder, next_folder, require_free, started_folders
from leaktight.results.store import read_text
from leaktight.results.verify import require_unchanged
from leaktight.runtime.cluster import Ray
from leaktight.runtime.executor import Executor
from leaktight.runtime.processes import Alone, Processes

Check = Callable[[object, Table, Table], list[str]]
"""By what a run grows, given its folder and both records; an error that names settings if it may not."""

RUNS = Path("runs")
PRELOAD = (  # modules that trials import late: for matching, traced graphs
    "scipy.optimize",
    "torch._functorch.compile_utils",
    "torch.fx.experimental.proxy_tensor",
)


def run_path(command: str, record: str, out: Path | str | None, *, resume: bool) -> Path:
    """The folder of a run: `out` if given, else the newest run to resume, else a new folder in runs/."""
    if out is not None:
        return Path(out)
    return latest_folder(RUNS, command, record) if resume else next_folder(RUNS, command)


def newest_run(command: str, out: Path | str | None) -> Path | None:
    """The run that a call with `resume` goes on with: that in `out`, else the newest one in runs/; None without one."""
    if out is not None:
        return Path(out) if RunFolder(Path(out)).started else None
    return next(iter(started_folders(RUNS, command)), None)


def continued(
    command: str, out: Path | str | None, resolve: Callable[[Path | None], Config]
) -> tuple[Config, Path | None]:
    """The settings of a call with `resume`, and the run that it goes on with; None for a new one in `out`.

    resolve: makes the settings on top of those of a run, or of none. Without `out` this is the newest run with exactly
    these settings, else the newest run.
    """
    newest = newest_run(command, out)
    if out is not None or newest is None:
        return resolve(newest), newest
    with suppress(UsageError):
        alone = resolve(None)
        return alone, latest_folder(RUNS, command, alone.to_toml())
    return resolve(newest), newest


def held_tables(path: Path) -> Table:
    """The settings of the run in this folder."""
    config = RunFolder(path).config
    return read_record(read_text(config), config)


def continues(
    path: Path,
    config_text: str,
    check: Check,
    *,
    resume: bool,
    fits: Callable[[Path], None] = lambda path: None,
) -> list[str]:
    """By what the run in `path` grows with these settings; UsageError if it cannot go on. Nothing is written.

    check, fits: as in `growing`.
    """
    folder = RunFolder(path)
    require_free(folder, resume=resume)
    if not folder.started:
        return []
    same = read_text(folder.config) == config_text
    words = [] if same else check(path, held_tables(path), read_record(config_text, "the new settings"))
    require_unchanged(path)
    fits(path)
    return words


def growing(
    check: Check,
    call: str = "",
    *,
    fits: Callable[[Path], None] = lambda path: None,
    tell: Callable[[list[str]], None] = lambda words: None,
) -> Grow:
    """How a run grows. check: by what, given the folder and both records, or raises an error that names settings.

    call: what asks for it. fits: raises an error if finished trials would be left out. tell: is told by what it grows.
    """

    def grow(folder: RunFolder, config_text: str) -> None:
        words = continues(folder.path, config_text, check, resume=True, fits=fits)
        folder.grow(config_text, call)  # withdraws the old digest with the old settings
        tell(words)

    return grow


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
        return Processes(most, PRELOAD), most
    text = str(workers)
    if text == "ray" or text.startswith("ray://"):
        return Ray(None if text == "ray" else text), None
    if not text.isdigit():
        raise UsageError(f"expected workers to be a number of processes, ray or ray://host:port, got {text!r}")
    number = int(text)
    return Processes(number, PRELOAD) if number else Alone(), number


def recorded_call(folder: RunFolder, call: str) -> str:
    """The call that started the run, and those that let it grow, in one line; `call` for a new run."""
    if not folder.calls:
        write_atomically(folder.command, call + "\n")
    return " && ".join(folder.calls)
