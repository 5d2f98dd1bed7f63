"""Links between the pages lead somewhere, and the map has every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.pages import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in _LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def test_the_map_has_every_page() -> None:
    linked = {path for path, _ in _LINK.findall((ROOT / "docs/index.md").read_text())}
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"index.md"} <= linked


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/flow.svg", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(page: str) -> None:
    text = re.sub(r"(defenses|presets)/my_\w+\.py", "", (ROOT / page).read_text())  # what a contributor would add
    named = set(re.findall(r"\b(?:\w+/)+\w+\.(?:py|toml)\b", text))
    assert named
    assert [each for each in named if not any((base / each).exists() for base in (ROOT, ROOT / "src/leaktight"))] == []
