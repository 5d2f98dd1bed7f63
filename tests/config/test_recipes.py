"""Recipes are found by name, say how they are run, and are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.here import Here

from leaktight.config.recipes import about, recipes
from leaktight.config.settings import load_config


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_valid_and_says_its_command(name: str) -> None:
    load_config(Path(f"recipe:{name}"))
    text = recipes()[name].read_text()
    assert re.search(rf"^#   leaktight ((audit|train) recipe:|reproduce ){name}\b", text, re.MULTILINE)
    assert about(recipes()[name]).endswith(".")
    assert "leaktight" not in about(recipes()[name])


def test_recipes_are_listed_and_shown_whole(here: Here) -> None:
    _, text, _ = here("list", "recipes")
    assert all(name in text for name in recipes())
    _, text, _ = here("list", "recipes", "outpost-table-3")
    assert recipes()["outpost-table-3"].read_text() in text


def test_a_wrong_name_is_answered_with_the_right_one(here: Here) -> None:
    for said in ("recipe:outpost-tabel-3", "recipes/outpost-table-3.toml", "outpost-table-3"):
        code, _, error = here("audit", said, "--dry-run")
        assert code == 2
        assert "outpost-table-3" in error
        assert "recipe" in error
