"""`leaktight docs`: the pages of the documentation that this version came with."""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

import leaktight
from leaktight.core.errors import LeaktightError, UsageError, suggestion

_LINK = re.compile(r"\[([^\]\n]+)\]\((?!https?:)([^)#\s]*)(?:#[^)\s]*)?\)")
_LISTED = re.compile(r"^- \[(\S+)\.md\]\(\S+\): (.*)$", re.MULTILINE)
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def command(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="A page; without it, all are listed.")] = None,
    path: Annotated[bool, typer.Option("--path", help="Print where the file is, instead of its text.")] = False,
) -> None:
    """Print a page of the documentation, or list the pages.

    Example: leaktight docs audit
    """
    from leaktight.cli.console import print_table

    pages = topics()
    if topic is None and not path:
        print_table(("topic", "about"), list(_about(pages).items()))
        return
    if topic is None:
        typer.echo(str(_folder()))
        return
    name = topic.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        raise UsageError(f"there is no page {topic!r}; {suggestion(name, pages)}")
    if path:
        typer.echo(str(pages[name]))
    else:
        _print(readable(pages[name].read_text(encoding="utf-8"), name, pages))


def topics() -> dict[str, Path]:
    """The files of all pages, by topic."""
    folder = _folder()
    pages = sorted(folder.rglob("*.md"), key=lambda page: (len(page.parts), page))
    if not pages:
        raise LeaktightError(f"expected the pages of the documentation in {folder}, got none; install leaktight again")
    return {page.relative_to(folder).with_suffix("").as_posix(): page for page in pages}


def _folder() -> Path:
    """Where the pages are: in the package, or beside the sources if they are used where they lie."""
    package = Path(leaktight.__file__).parent
    return package / "docs" if (package / "docs").is_dir() else package.parents[1] / "docs"


def _about(pages: dict[str, Path]) -> dict[str, str]:
    """What each page is about: its line in the index, or its title."""
    listed = dict(_LISTED.findall(pages["index"].read_text(encoding="utf-8")))
    titles = {name: page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, page in pages.items()}
    return {name: listed.get(name, title) for name, title in titles.items()}


def readable(text: str, topic: str, pages: dict[str, Path]) -> str:
    """A page whose links to other pages are commands that print them; links into the sources are words alone.

    >>> readable("See [audit.md](audit.md#flags) and [its code](../src).", "index", {"audit": Path()})
    'See `leaktight docs audit` and its code.'
    """

    def shown(link: re.Match[str]) -> str:
        words, target = link.groups()
        name = _joined(topic, target)
        if name not in pages or not target:
            return f"{words.removeprefix('../')} of the source" if words.startswith("../") else words
        call = f"`leaktight docs {name}`"
        return call if words.endswith(".md") else f"{words} ({call})"

    return "".join(part if part.startswith("```") else _LINK.sub(shown, part) for part in _FENCED.split(text))


def _joined(topic: str, target: str) -> str:
    """The topic that a link on a page leads to."""
    parts: list[str] = []
    for part in (PurePosixPath(topic).parent / target).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts).removesuffix(".md")


def _print(text: str) -> None:
    """The page as it looks best: laid out on a terminal, plain in a pipe."""
    if not sys.stdout.isatty():
        typer.echo(text.encode(), nl=False)  # bytes, so that a pipe without UTF-8 does not raise
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))
