"""The examples of a documentation page, run in their order in one folder.

A block of Python or TOML whose first line is `# some/file.py` is that file; other Python is run, all of a page's in one
namespace. In a block of `sh` every line is a command; those of `leaktight` and of `python` are run, those that install
are not.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from leaktight.cli.app import main

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\S+\.(?:py|toml))\n")
_INSTALLS = ("pip install ", "make ", "git clone ", "cd ")


@dataclass(frozen=True)
class Block:
    """A fenced block. language: the word after the fence. more: what follows it on that line. start: of its text."""

    language: str
    more: str
    text: str
    start: int

    @property
    def file(self) -> str | None:
        """The file that the block is, if its first line says so."""
        named = _FILE.match(self.text) if self.language in ("python", "toml") else None
        return named[1] if named else None

    @property
    def commands(self) -> list[list[str]]:
        """The commands of `leaktight` in a block of sh, each without its first word."""
        return [each[1:] for each in self.calls if each[0] == "leaktight"]

    @property
    def calls(self) -> list[list[str]]:
        """The commands of a block of sh, without those that install."""
        lines = self.text.replace("\\\n", " ").splitlines() if self.language == "sh" else []
        words = [shlex.split(line, comments=True) for line in lines if not line.startswith(_INSTALLS)]
        for each in words:
            assert not each or each[0] in ("leaktight", "python"), f"no command that can be tested: {shlex.join(each)}"
        return [each for each in words if each]


def fenced(page: str) -> list[Block]:
    found = _FENCE.finditer((ROOT / page).read_text())
    return [Block(each[1], each[2].strip(), each[3], each.start(3)) for each in found]


def example(page: str, holding: str) -> str:
    """The one block of Python on a page that holds these words."""
    [text] = [block.text for block in fenced(page) if block.language == "python" and holding in block.text]
    return text


def blocks(page: str) -> list[Block]:
    """The blocks of a page whose examples are all run; `text` is output."""
    found = fenced(page)
    unknown = {block.language for block in found} - {"python", "toml", "sh", "text"}
    assert not unknown, f"{page} has blocks that nothing runs: {unknown}"
    return found


def run_page(page: str, folder: Path, extra: Sequence[str] = ()) -> None:
    """Run all blocks of a page in this folder. extra: options for every command of `leaktight`."""
    run_blocks(blocks(page), folder, extra)


def run_blocks(found: Sequence[Block], folder: Path, extra: Sequence[str] = ()) -> None:
    names: dict[str, object] = {"__name__": "page"}
    with _inside(folder):
        for block in found:
            if block.file is not None:
                write_file(block, folder)
            elif block.language == "python":
                exec(compile(block.text, "page", "exec"), names)
            for program, *arguments in block.calls:
                if program == "leaktight":
                    run_command([*arguments, *extra])
                else:
                    runpy.run_path(arguments[0], run_name="__main__")


def write_file(block: Block, folder: Path) -> None:
    """Write the file that a block is."""
    assert block.file is not None
    (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
    (folder / block.file).write_text(block.text)


def run_command(arguments: list[str]) -> None:
    """`leaktight` with these arguments, in this process; fails the test unless it ends well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["leaktight", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code in (0, None), f"leaktight {shlex.join(arguments)} ended with {ended.value.code}"


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Make this the current folder, and forget its modules afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                    del sys.modules[name]
