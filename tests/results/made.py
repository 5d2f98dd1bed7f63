"""Results that are made up, for tests of whoever reads or judges them. Fields that are not given are harmless."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from leaktight.results.schema import (
    SCHEMA_VERSION,
    Cell,
    DefenseCost,
    Final,
    Leak,
    Ledger,
    Record,
    Role,
    Round,
    Summary,
    Threat,
    TradeoffRow,
    TrainingSummary,
    Trial,
)

R = TypeVar("R", bound=Record)

THREAT = Threat(server="curious", sees="client", knows=("batch_size", "labels"))
KNOWING = Threat(server="curious", sees="client", knows=("batch_size", "defense", "labels"))
"""The attacker who also knows the defense."""


CRASHED: dict[str, Any] = {"status": "failed", "error": "out of memory", "scores": {}, "rank": None}
"""The changes that make a trial a failed one."""


def changed(record: R, **changes: Any) -> R:
    """The record with other fields, checked."""
    return type(record).model_validate({**record.document(), **changes})


def made_trial(
    defense: str = "none",
    attack: str = "csdlg",
    trial: int = 0,
    *,
    ssim: Sequence[float | None] = (0.5,),
    psnr: Sequence[float | None] | None = None,
    role: Role = "attack",
    round_index: int = 0,
    place: int | None = None,
    **changes: Any,
) -> Trial:
    """A trial with these scores. PSNR is low unless given. place: among 99 decoys; no decoys if None."""
    adaptive = bool(changes.get("adaptive", False))
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "id": f"{defense}.{attack}{'.adaptive' if adaptive else ''}.t{trial:03d}.r{round_index:03d}",
        "attack": attack,
        "attack_settings": {},
        "role": role,
        "defense": defense,
        "defense_settings": {},
        "adaptive": adaptive,
        "trial": trial,
        "round": round_index,
        "client": f"client-{trial:03d}",
        "seed": 0,
        "status": "done",
        "error": None,
        "threat": THREAT,
        "ledger": Ledger(labels="given", mode="train"),
        "scores": {"psnr": psnr or [5.0] * len(ssim), "mse": [0.1] * len(ssim), "ssim": ssim},
        "rank": None if place is None else {"place": place, "decoys": 99},
        "label_accuracy": None,
        "loss": 0.1,
        "first_loss": 1.0,
        "update_changed": defense != "none",
        "model_accuracy": None,
        "seconds": 1.0,
        "images": None,
    }
    return Trial.model_validate(fields | changes)


def panel(
    leaking: float = 0.95, defended: float = 0.3, *, trials: int = 20, blind: float = 0.25, **changes: Any
) -> list[Trial]:
    """A good evaluation: an attack that works without a defense and not with one, and a control for every victim.

    leaking, defended: SSIM of the two. Above 0.6 guesses pick out their victims among decoys, below they do not.
    """
    return [
        made
        for trial in range(trials)
        for defense, score in (("none", leaking), ("noise", defended))
        for made in (
            made_trial(defense, "csdlg", trial, ssim=[score + 0.001 * trial], place=place_by(score, trial), **changes),
            made_trial(defense, "mean_image", trial, ssim=[blind], role="control"),
        )
    ]


def in_production() -> list[Trial]:
    """The undefended trials of `panel` in the production track, in which nothing is found."""
    return [
        changed(
            each,
            id=f"production.{each.id}",
            track="production",
            scores={"ssim": [0.3], "psnr": [9.0]},
            rank={"place": place_by(0.3, each.trial), "decoys": 99},
        )
        for each in panel()
        if each.defense == "none"
    ]


def place_by(score: float, trial: int) -> int:
    """1 for a score above 0.6, otherwise places that are spread evenly over 1 to 100."""
    return 1 if score > 0.6 else (37 * trial + 50) % 100 + 1


def made_cell(**changes: Any) -> Cell:
    """A cell of four trials of csdlg without a defense."""
    fields: dict[str, Any] = {"attack": "csdlg", "role": "attack", "defense": "none", "adaptive": False}
    fields |= {"threat": THREAT, "trials": 4, "failed": 0}
    return Cell.model_validate(fields | changes)


def made_summary(*cells: Cell, **changes: Any) -> Summary:
    return Summary.model_validate({"schema_version": SCHEMA_VERSION, "run": "runs/made", "cells": cells, **changes})


def made_row(name: str, leak: float | None, accuracy: float | None, seconds: float | None = 1.0) -> TradeoffRow:
    """A row of a trade-off. leak: the SSIM of the most leaking trial."""
    worst = Leak(metric="ssim", worst=leak, average=leak, attack="csdlg", psnr=20.0)
    return TradeoffRow(
        defense=name, leak=worst, accuracy=accuracy, seconds_per_round=seconds, cost_share=0.0, on_front=False
    )


def made_training(accuracy: float | None, seconds: Sequence[float]) -> TrainingSummary:
    """A training run whose rounds took these times."""
    return TrainingSummary(
        schema_version=SCHEMA_VERSION,
        run="runs/made",
        rounds=tuple(
            Round(round=at, seconds=each, bytes_up=1, bytes_down=1, clients=1, learning_rate=0.1)
            for at, each in enumerate(seconds, start=1)
        ),
        final=Final(accuracy=accuracy, loss=0.5),
        defense=DefenseCost(kind="none", share_of_time=0.1, seconds_per_step=0.1),
        seconds=sum(seconds),
        model_digest="",
    )
