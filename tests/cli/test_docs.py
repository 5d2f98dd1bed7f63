"""`leaktight docs`, and every text that names a page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.here import Here

import leaktight
from leaktight.cli import docs
from leaktight.config.catalogue import CATALOGUE
from leaktight.config.details import details

PACKAGE = Path(leaktight.__file__).parent
CHECKOUT = re.compile(r"\b(?:docs|recipes|examples|tests|bench)/[\w/-]+|\b(?:README|CONTRIBUTING|CHANGELOG)\.md")
OWN_FILE = "its README.md"
"""The file of an exported Flower project, which is written there."""


def said(file: Path) -> Iterator[str]:
    """The texts of a module, without docstrings."""
    tree = ast.parse(file.read_text())
    documented = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value


def test_no_message_names_a_file_of_the_checkout() -> None:
    texts = [text for file in PACKAGE.rglob("*.py") for text in said(file) if " " in text and OWN_FILE not in text]
    assert len(texts) > 1000
    assert [text for text in texts if CHECKOUT.search(text)] == []


@pytest.mark.parametrize("family", sorted(CATALOGUE))
def test_no_description_names_a_file_of_the_checkout(family: str) -> None:
    for name in CATALOGUE[family]:
        found = details(family, name)
        texts = [found.description, *found.notes.values(), *(setting.meaning for setting in found.settings)]
        assert [text for text in texts if CHECKOUT.search(text)] == []


def test_every_page_that_is_named_exists() -> None:
    named = {
        topic for file in PACKAGE.rglob("*.py") for topic in re.findall(r"leaktight docs ([a-z/-]+)", file.read_text())
    }
    assert {"audit", "flower-deployment"} <= named
    assert named <= set(docs.topics())


def test_links_become_commands(here: Here) -> None:
    code, text, _ = here("docs", "index")
    assert code == 0
    assert "| `leaktight docs tutorial` |" in text
    assert "`leaktight docs results/defenses`" in text
    for topic in docs.topics():
        _, text, _ = here("docs", topic)
        assert re.findall(r"\]\((?!https?:)[^)]*\.md", text) == [], topic


def test_a_terminal_gets_a_page_that_fits_it(capsys: pytest.CaptureFixture[str]) -> None:
    pages = docs.topics()
    from rich.markdown import Markdown

    console = Console(width=80, force_terminal=False)
    console.print(Markdown(docs.readable(pages["metrics"].read_text(), "metrics", pages)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.startswith(("#", "|---")) for line in lines)


def test_what_it_cannot_find_is_suggested(here: Here) -> None:
    assert here("docs", "audti") == (2, "", "leaktight: there is no page 'audti'; did you mean 'audit'?\n")
    assert here("docs", "docs/audit.md")[0] == 0
    assert Path(here("docs", "audit", "--path")[1].strip()).read_text().startswith("# The audit")


def test_the_list_has_every_page_and_says_what_it_is_about(here: Here) -> None:
    _, text, _ = here("docs")
    assert all(re.search(rf"^{topic}\s+\S", text, re.MULTILINE) for topic in docs.topics())
