"""The session of docs/tutorial.md: a person installs the wheel, and runs the commands of the page in an empty folder.

`python -m tests.docs.session` runs it and writes what the commands print into the page. The blocks of `text` are never
edited by hand; `tests/slow/test_tutorial_session.py` runs the session again and compares. The rules:

- A block of `text` is what the commands of the block of `sh` before it print, on a terminal of 80 columns.
- `text 1 3-5`: of the parts between empty lines the page has these alone, with `...` for what is left out.
- Lines of progress are left out; longer lines than 80 characters are broken between words.
- Runs draw a key of their own; here it is always the same, so that the same victims are attacked.
- Two outputs are the same if their words are. Compared without line breaks, they may differ in numbers, in durations,
  in how an estimate came about, and in what the defenses cost: these depend on the machine.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.docs.pages import ROOT, Block, blocks, write_file
from tests.wheel import Installed

PAGE = "docs/tutorial.md"
COLUMNS = 80
_KEY = "import secrets; secrets.token_bytes = lambda count=32: bytes(range(count))\n"
_PROGRESS = re.compile(r"\d+ of \d+: |training, .*: round \d+ of \d+")
_UNIT = r"(?:s|min|h|(?:second|minute|hour|day)s?)"
_VARIES = {
    "<cost>": re.compile(r"(?<=Time of a client's round: ).*?(?= Accuracy was)"),
    "<basis>": re.compile(r"\b(?:a part measured|measured|as without knowledge)(?= |$)"),
    "<time>": re.compile(rf"\b[\d.]+ {_UNIT}\b(?: [\d.]+ {_UNIT}\b)*"),
    "<number>": re.compile(r"(?:< ?|fewer than )?[-−]?\d[\d.]*(?:e[-+]?\d+| × 10[⁻⁰¹²³⁴-⁹]+)?"),
}


@dataclass(frozen=True)
class Printed:
    """What a block of commands printed. block: the block of text for it. text: as the page should have it."""

    block: Block
    text: str

    @property
    def as_written(self) -> bool:
        return words(self.text) == words(self.block.text)


def words(text: str) -> list[str]:
    """What two outputs have in common, whatever the machine."""
    text = " ".join(text.split())
    for name, pattern in _VARIES.items():
        text = pattern.sub(name, text)
    return text.split()


def shown(output: str, parts: str = "") -> str:
    """An output as the page has it. parts: which of its parts, "1 3-5"; empty for all."""
    lines = [line.rstrip() for line in output.splitlines() if not _PROGRESS.match(line)]
    broken = "\n".join(
        textwrap.fill(line, COLUMNS, break_on_hyphens=False, break_long_words=False) if len(line) > COLUMNS else line
        for line in lines
    )
    found = re.split(r"\n{2,}", broken.strip("\n"))
    wanted = {number for each in parts.split() for number in _numbers(each)} or set(range(1, len(found) + 1))
    assert max(wanted) <= len(found), f"expected {max(wanted)} parts, got {len(found)}: {output}"
    kept = [part if number in wanted else "..." for number, part in enumerate(found, 1)]
    return "\n\n".join(part for part, same in groupby(kept) for _ in (same if part != "..." else [part])) + "\n"


def _numbers(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def session(folder: Path) -> Iterator[Printed]:
    """Install the wheel, and run the page in `folder`/session; what each block of commands printed."""
    installed = Installed(folder)
    (installed.packages / "key.pth").write_text(_KEY)
    place = folder / "session"
    place.mkdir()
    found = blocks(PAGE)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.file is not None:
            write_file(block, place)
        output = "".join(_run(call, place, installed) for call in block.calls)
        if after is not None and after.language == "text":
            yield Printed(after, shown(output, after.more))


def _run(call: list[str], folder: Path, installed: Installed) -> str:
    """What a command prints; it must end well."""
    variables = installed.environment | {"COLUMNS": str(COLUMNS), "PYTHONIOENCODING": "utf-8"}
    program = [str(installed.folder / "bin" / call[0]), *call[1:]]
    done = subprocess.run(
        program, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    assert done.returncode == 0, f"{call}: {done.stdout}"
    return done.stdout


def write() -> None:
    """Run the session, and write what it prints into the page."""
    text = (ROOT / PAGE).read_text()
    with tempfile.TemporaryDirectory() as folder:
        printed = list(session(Path(folder)))
    for each in reversed(printed):
        text = text[: each.block.start] + each.text + text[each.block.start + len(each.block.text) :]
    (ROOT / PAGE).write_text(text)


if __name__ == "__main__":
    write()
