"""`leaktight.inspect`: attacks on a captured update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Required, TypedDict, Unpack

from torch import Tensor, nn

from leaktight.api.runs import growing, parse_workers, recorded_call, require_resumed, run_path
from leaktight.api.scenario import Method, require_keywords
from leaktight.audits.run import Watcher
from leaktight.config.capture import CaptureRequest
from leaktight.config.growth import check_inspection
from leaktight.config.inspect import Prepared, prepare
from leaktight.config.tables import Table
from leaktight.core.protocols import Attack, Defense
from leaktight.core.training import LocalTraining
from leaktight.core.types import Mode
from leaktight.inspections.files import Tensors
from leaktight.inspections.run import run_inspection
from leaktight.results.folder import open_run
from leaktight.results.forecast import Forecast, Problem
from leaktight.results.schema import Summary
from leaktight.results.verify import require_unchanged


@dataclass(frozen=True)
class PlannedInspection:
    """An inspection that is ready to run."""

    prepared: Prepared

    def folder(self, out: Path | str | None = None, *, resume: bool = False) -> Path:
        """The folder of its results; see `run_path`."""
        return run_path("inspect", self.prepared.record, out, resume=resume)

    def forecast(self, workers: int | str | None = 0) -> Forecast:
        """How long the attacks take and how much memory, by a moment of each; and what to change."""
        from leaktight.api.forecast import forecast_inspection  # not needed for a run

        return forecast_inspection(self.prepared.inspection, self.prepared.facts, workers)

    def doubts(self, workers: int | str | None = 0) -> Sequence[Problem]:
        """Why the run may not end; empty for a plan that seems short."""
        from leaktight.api.forecast import doubts_of_inspection

        return doubts_of_inspection(self.prepared.inspection, workers)

    def run(
        self,
        path: Path,
        *,
        resume: bool = False,
        workers: int | str | None = 0,
        retry_failed: bool = False,
        watcher: Watcher | None = None,
        call: str = "",
    ) -> Summary:
        """Run the missing attacks in the folder `path`, write the report, and return the summary."""
        executor, _ = parse_workers(workers, self.prepared.inspection.most_processes)
        require_resumed(resume=resume, retry_failed=retry_failed)
        call = call or "leaktight.inspect() in Python"
        grow = growing(check_inspection, call, tell=(watcher or Watcher()).grows)
        with open_run(path, self.prepared.record, resume=resume, clients=False, grow=grow) as folder:
            require_unchanged(folder.path)
            summary = run_inspection(
                self.prepared.inspection,
                folder,
                executor=executor,
                scenario=self.prepared.facts,
                command=recorded_call(folder, call),
                retry_failed=retry_failed,
                watcher=watcher,
            )
            from leaktight.report.html import write_report  # slow to import, and only needed now
            from leaktight.report.machines.decision import write_decision

            write_decision(folder.path)
            write_report(folder.path)
        return summary


class Capture(TypedDict, total=False):
    """What is known about a captured update, besides the network and the model that the client received.

    after: the model that the client sent back; or update: its change, of kind "delta" (after minus before) or
    "gradient". shape: (C, H, W) of one image. classes: their number (default: the rows of the last layer).
    mean, std: normalisation of images in [0, 1] before the network. mode: of batch normalisation and dropout, "train"
    (default) or "eval". batch_size: examples behind the update (default 1). labels: if the attacker knows them.
    local: the local training, such as {"learning_rate": 0.1, "epochs": 1}. attacks: objects or kinds. truth: the true
    images (N, C, H, W) in [0, 1], or a file, for scoring. decoys: images like these, to compare guesses with: a tensor,
    a file, a folder or a data set. defenses: what the client did to the update, which the attacker then knows; objects
    or kinds. settings: overrides, "table.key=value". device: where attacks run, "cpu" (default),
    "auto", "cuda", "cuda:1" or "mps".
    """

    shape: Required[Sequence[int]]
    after: Tensors | None
    update: Tensors | None
    kind: Literal["delta", "gradient"] | None
    classes: int | None
    mean: Sequence[float]
    std: Sequence[float]
    mode: Mode | None
    batch_size: int | None
    labels: Sequence[int] | None
    local: LocalTraining | Table
    attacks: Sequence[Attack | Method] | Attack | str
    truth: Tensor | Path | str | None
    decoys: Tensor | Path | str | None
    defenses: Sequence[Defense | Method] | Defense | str
    settings: Sequence[str]
    device: str


def plan(model: str | nn.Module, before: Tensors, **capture: Unpack[Capture]) -> PlannedInspection:
    """Read and check everything; nothing is attacked."""
    require_keywords(capture, Capture)
    return PlannedInspection(prepare(CaptureRequest(model=model, before=before, **capture)))


def inspect(
    model: str | nn.Module,
    before: Tensors,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    workers: int | str | None = 0,
    retry_failed: bool = False,
    watcher: Watcher | None = None,
    **capture: Unpack[Capture],
) -> Summary:
    """Attack a captured update, and return the summary: what can be reconstructed from it.

    model: the network, or a kind ("resnet20", "package.module:function"). before: the model that the client received.
    capture: shape, after or update with kind, labels, truth ...; see `leaktight.api.inspect.Capture`.
    out, resume, workers, retry_failed, watcher: as in `leaktight.audit` (the default folder is runs/inspect-NNN).
    """
    planned = plan(model, before, **capture)
    return planned.run(
        planned.folder(out, resume=resume), resume=resume, workers=workers, retry_failed=retry_failed, watcher=watcher
    )
