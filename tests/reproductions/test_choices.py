"""Rows and columns choose trials by the settings of a method, and metrics of trials as publications print them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from leaktight.audits.plan import named
from leaktight.reproductions.measure import from_audit
from leaktight.reproductions.recipe import read_recipe
from leaktight.reproductions.run import Reproduced
from leaktight.results.schema import SCHEMA_VERSION, Trial

NOISES = [{"noise_std": 0.1, "distribution": "gaussian"}, {"noise_std": 0.01, "distribution": "gaussian"}]


def trial(number: int, defense: str, settings: Mapping[str, object], ssim: list[float]) -> Trial:
    return Trial.model_validate(
        {
            "schema_version": SCHEMA_VERSION,
            "id": f"{defense}.{number}",
            "attack": "dlg",
            "role": "attack",
            "defense": defense,
            "defense_settings": settings,
            "adaptive": False,
            "trial": number,
            "round": 0,
            "client": "0",
            "seed": 0,
            "threat": {"server": "curious", "sees": "client", "knows": []},
            "seconds": 1.0,
            "scores": {"ssim": ssim},
            "label_accuracy": 0.75,
            "first_loss": 5.0,
            "loss": 0.5,
        }
    )


def both() -> list[Trial]:
    names = named(["noise"] * 2, NOISES)
    scores = [[0.1, 0.3, 0.2, 0.0], [0.9, 0.9, 0.1, 0.9]]
    return [trial(0, name, settings, ssim) for name, settings, ssim in zip(names, NOISES, scores, strict=True)]


@pytest.mark.parametrize(("noise_std", "ssim"), [(0.1, 0.15), (0.01, 0.7)])
def test_two_methods_of_a_kind_are_told_apart_by_their_settings(noise_std: float, ssim: float) -> None:
    choice = {"attack": "dlg", "defense": {"kind": "noise", "noise_std": noise_std}, "metric": "ssim"}
    assert from_audit(both(), choice) == {"victim 0": pytest.approx(ssim)}
    assert from_audit(both(), {**choice, "defense": {"kind": "outpost", "noise_std": noise_std}}) == {}


@pytest.mark.parametrize(
    ("metric", "value"),
    [("ssim >= 0.2", 0.5), ("ssim <= 0.2", 0.75), ("label_accuracy %", 75.0), ("ssim >= 0.2 %", 50.0), ("loss", 0.5)],
)
def test_metrics_of_a_trial(metric: str, value: float) -> None:
    choice = {"attack": "dlg", "defense": {"kind": "noise", "noise_std": 0.1}, "metric": metric}
    assert from_audit(both(), choice) == {"victim 0": pytest.approx(value)}


def test_a_row_and_a_column_that_both_name_a_part_choose_the_part_of_both_names() -> None:
    recipe = read_recipe("grnn-table-3-6")
    place = next(each for each in recipe.places() if each.row == "GRNN LeNet LFW" and each.column == "8")
    assert recipe.choice(place)["part"] == "LeNet LFW 8"


def test_an_audit_has_only_the_defenses_that_its_recipe_names(tmp_path: Path) -> None:
    job = Reproduced(read_recipe("grnn-table-3-12"), "smoke", tmp_path).jobs[0]
    assert [each.name for each in job.planned.experiment.defenses] == ["none"]  # type: ignore[union-attr]
