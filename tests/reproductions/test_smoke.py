"""Every recipe runs at the scale `smoke`: no trial fails, and its table has numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from leaktight.reproductions.recipe import read_recipe, reproducible
from leaktight.reproductions.reproduce import reproduce
from leaktight.reproductions.run import Reproduced
from leaktight.results.store import read_trials

REPRESENTATIVE = {
    "adadefense-table-1",
    "adadefense-table-3",
    "agic-figure-6",
    "agic-table-3",
    "agic-table-4",
    "agic-table-5",
    "fedboosting-figure-4-2",
    "fedboosting-figure-4-3",
    "fedboosting-figure-4-4",
    "fedboosting-table-4-1",
    "fedboosting-table-4-2",
    "fedboosting-table-4-3",
    "fedkl-table-5-1",
    "fedkl-table-5-2",
    "fedkl-table-5-3",
    "grnn-figure-3-4",
    "grnn-table-3-12",
    "lrp-figure-5",
    "lrp-table-1",
    "lrp-table-2",
    "outpost-table-1",
}
"""A third of the recipes, with runs of every kind, which are quick; the others are slow tests."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that recipes share their runs."""
    return tmp_path_factory.mktemp("reproduce")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.slow) for name in reproducible()]
)
def test_a_recipe_runs(name: str, root: Path) -> None:
    made = Reproduced(read_recipe(name), "smoke", root)
    result = reproduce(made)
    assert result is not None
    assert len(result.claims) == len(made.recipe.claims)
    assert any(entry.number for entry in result.entries)
    for job in made.jobs:
        if job.part.command == "audit":
            assert not [trial.error for trial in read_trials(job.path).values() if trial.error]


def test_a_third_of_the_recipes_runs_in_every_test() -> None:
    assert set(reproducible()) >= REPRESENTATIVE
    assert 3 * len(REPRESENTATIVE) >= len(reproducible())
