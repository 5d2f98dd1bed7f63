"""`leaktight.reproduce`: runs a recipe, and writes its result, figure and page."""

from __future__ import annotations

import json
from collections.abc import Callable

from leaktight.audits.run import Watcher
from leaktight.core.files import make_private_folder, write_atomically
from leaktight.reproductions.figure import draw
from leaktight.reproductions.page import section
from leaktight.reproductions.result import Reproduction
from leaktight.reproductions.run import Job, Reproduced


def reproduce(
    made: Reproduced,
    *,
    workers: int | str | None = 0,
    watcher: Watcher | None = None,
    shard: tuple[int, int] = (1, 1),
    begins: Callable[[int, Job], None] = lambda number, job: None,
) -> Reproduction | None:
    """Run what is left of a recipe, write its result, and return it; None while runs of other shards are missing.

    shard: (2, 3) for the second of three machines that share the folder. workers: as in `leaktight.audit`.
    begins: called with the number of a run among those of the recipe, and the run.
    """
    place, number = shard
    watcher = watcher or Watcher()
    busy = []
    for each, job in list(enumerate(made.jobs, 1))[place - 1 :: number]:
        begins(each, job)
        if not job.run(workers=workers, watcher=watcher, wait=False):
            busy.append(job)
    for job in busy:  # another process was at it: wait, and do what it left
        job.run(workers=workers, watcher=watcher)
    if not all(job.done for job in made.jobs):
        return None
    result, figure = made.result(), draw(made)
    make_private_folder(made.folder)
    write_atomically(made.folder / "result.json", json.dumps(result.document(), indent=1))
    if figure is not None:
        write_atomically(made.folder / "figure.png", figure)
    write_atomically(made.folder / "page.md", section(result, None if figure is None else "figure.png"))
    return result
