"""`leaktight docs`, and every text that names a page."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.here import Here

import leaktight
from leaktight.cli import docs
from leaktight.cli.pages import Page
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


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_whole_pages_that_fit_it(width: int) -> None:
    """No word of a table is cut: names of settings and threat models are to be copied."""
    pages = docs.topics()
    for topic, page in pages.items():
        text, stream = docs.readable(page.read_text(), topic, pages), io.StringIO()
        Console(width=width, file=stream).print(Page(text))
        shown = stream.getvalue()
        assert max(map(len, shown.splitlines())) <= width, topic
        assert shown.count("\N{HORIZONTAL ELLIPSIS}") <= text.count("\N{HORIZONTAL ELLIPSIS}"), topic
        assert not any(line.startswith(("# ", "|---")) for line in shown.splitlines()), topic


def test_a_table_that_is_too_wide_is_shown_row_by_row() -> None:
    stream = io.StringIO()
    table = "| kind | settings | acts on |\n|---|---|---|\n| `dp_sgd` | `noise_multiplier`, `delta` | |\n"
    Console(width=32, file=stream).print(Page(table))
    assert [line.rstrip() for line in stream.getvalue().splitlines() if line.strip()] == [
        " dp_sgd",
        "   settings  noise_multiplier,",
        "             delta",
    ]


def test_what_it_cannot_find_is_suggested(here: Here) -> None:
    assert here("docs", "audti") == (2, "", "leaktight: there is no page 'audti'; did you mean 'audit'?\n")
    assert here("docs", "docs/audit.md")[0] == 0
    assert Path(here("docs", "audit", "--path")[1].strip()).read_text().startswith("# The audit")


def test_the_list_has_every_page_and_says_what_it_is_about(here: Here) -> None:
    _, text, _ = here("docs")
    assert all(re.search(rf"^{topic}\s+\S", text, re.MULTILINE) for topic in docs.topics())
