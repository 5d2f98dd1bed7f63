"""What a run was before it grew: `history.json`, one entry for every summary or config that was replaced."""

from __future__ import annotations

from pathlib import Path

from leaktight.results.schema import Record, parse
from leaktight.results.store import read_file

HISTORY = "history.json"


class Stage(Record):
    """A run before it grew. command: the calls up to then. trials: the finished ones. digest: of its summary.

    digest: None if the run had not come to a summary, so that nobody had seen one.
    """

    config: str
    command: str = ""
    trials: int
    digest: str | None = None


class History(Record):
    """All stages of a run before the present one, the first one first."""

    stages: tuple[Stage, ...] = ()

    def with_stage(self, stage: Stage) -> History:
        """The history with this stage at its end, once."""
        return self if stage in self.stages else History(stages=(*self.stages, stage))

    def looks(self, trials: int) -> int:
        """How often a summary of fewer than `trials` trials was written."""
        return len({stage.trials for stage in self.stages if stage.digest is not None and stage.trials < trials})


def read_history(folder: Path) -> History:
    """The history of a run; empty if it never grew."""
    return parse(History, read_file(folder / HISTORY) or b"{}", str(folder / HISTORY))
