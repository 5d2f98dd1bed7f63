"""From the lines of `trials.jsonl` to `summary.json`: cells, verdicts, flags, the common ledger, leakage over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from leaktight.audit.cells import LEAKED_IF, Cell, Line, gather
from leaktight.audit.checks import Evidence, Flag, raise_flags
from leaktight.audit.ledger import common_ledger
from leaktight.audit.statistics import Interval
from leaktight.audit.verdict import verdicts

SCHEMA_VERSION = 1


def summarise(lines: Sequence[Line], *, seed: int, facts: Mapping[str, str]) -> dict[str, Any]:
    """All that follows from the trials, which are in the order of the plan. facts: see `checks.Evidence`."""
    cells = gather(lines, seed)
    flags = raise_flags(Evidence(cells, facts))
    return {
        "schema_version": SCHEMA_VERSION,
        "cells": [cell_row(cell, flags) for cell in cells],
        "leaked_if": LEAKED_IF,
        "verdicts": [asdict(verdict) for verdict in verdicts(cells)],
        "flags": [flag.plain() for flag in flags],
        "ledger": common_ledger([line["ledger"] for line in lines if line["role"] == "attack" and line["ledger"]]),
        "over_time": over_time(lines, seed),
    }


def cell_row(cell: Cell, flags: Sequence[Flag]) -> dict[str, Any]:
    metrics = list(dict.fromkeys(name for line in cell.done for name in line["scores"]))
    labels = cell.label_accuracy()
    known = [line["label_accuracy"] for line in cell.done if line["label_accuracy"] is not None]
    return {
        "attack": cell.attack,
        "role": cell.role,
        "defense": cell.defense,
        "adaptive": cell.adaptive,
        "threat": dict(cell.threat),
        "trials": len(cell.lines),
        "failed": len(cell.lines) - len(cell.done),
        **{name: _figure(cell, name) for name in dict.fromkeys(["psnr", "mse", "ssim", "lpips_alex", *metrics])},
        "label_accuracy": None if labels is None else _score(labels, max(known)),
        "success_rate": cell.success_rate if cell.role == "attack" else None,
        "control": {metric: cell.control(metric) for metric in ("psnr", "ssim")},
        "seconds": sum(line["seconds"] for line in cell.lines) / len(cell.lines),
        "flags": list(dict.fromkeys(flag.check.code for flag in flags if flag.finding.concerns(cell))),
        "trial_ids": [line["id"] for line in cell.lines],
    }


def over_time(lines: Sequence[Line], seed: int) -> list[dict[str, Any]] | None:
    """Leakage and accuracy by round, where several rounds were attacked."""
    rounds = sorted({line["round"] for line in lines})
    if len(rounds) < 2:
        return None
    rows = []
    for round_index in rounds:
        for cell in gather([line for line in lines if line["round"] == round_index], seed):
            if cell.role != "attack" or not cell.done:
                continue
            rows.append(
                {
                    "defense": cell.defense,
                    "attack": cell.attack,
                    "adaptive": cell.adaptive,
                    "round": round_index,
                    "accuracy": cell.lines[0]["model_accuracy"],
                    "psnr": _figure(cell, "psnr"),
                    "ssim": _figure(cell, "ssim"),
                    "success_rate": cell.success_rate,
                    "trials": len(cell.done),
                }
            )
    return sorted(rows, key=lambda row: (str(row["defense"]), str(row["attack"]), int(str(row["round"]))))


def _figure(cell: Cell, metric: str) -> dict[str, Any] | None:
    interval, worst = cell.interval(metric), cell.most_leaking(metric)
    if interval is None or worst is None:
        return None
    return _score(interval, cell.values(metric)[worst])


def _score(interval: Interval, worst: float) -> dict[str, Any]:
    return {"mean": interval.mean, "ci95": [interval.low, interval.high], "worst": worst}
