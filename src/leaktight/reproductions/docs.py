"""The pages of `docs/results`: one a publication, and an index of all claims, made from results alone."""

from __future__ import annotations

import json
from pathlib import Path

from leaktight.core.files import write_atomically
from leaktight.reproductions.page import claims_table, paper_page
from leaktight.reproductions.recipe import PAPERS, SCALES, ScaleName
from leaktight.reproductions.result import Reproduction
from leaktight.results.schema import parse
from leaktight.results.store import read_file

DATA = "reproduced"
_BEGIN, _END = "<!-- claims -->", "<!-- end of claims -->"


def collect(root: Path, to: Path, scale: ScaleName) -> list[str]:
    """Copy all results of this scale, with their figures, below the pages' folder; gives their names."""
    names = []
    for file in sorted(root.glob(f"*-{scale}/result.json")):
        result = parse(Reproduction, read_file(file) or b"", str(file))
        write_atomically(to / DATA / f"{result.recipe}.json", json.dumps(result.document(), indent=1) + "\n")
        if (figure := file.with_name("figure.png")).exists():
            write_atomically(to / DATA / f"{result.recipe}.png", figure.read_bytes())
        names.append(result.recipe)
    return names


def write_pages(to: Path) -> list[Path]:
    """Write the page of each publication that has results, and the claims into `index.md`; gives the files."""
    written = []
    for path, text in pages(to).items():
        write_atomically(path, text)
        written.append(path)
    return written


def pages(to: Path) -> dict[Path, str]:
    """What the pages should be, by file."""
    files = sorted((to / DATA).glob("*.json"))
    results = [parse(Reproduction, read_file(file) or b"", str(file)) for file in files]
    results.sort(key=lambda each: (list(PAPERS).index(each.paper), _place(each.where), SCALES.index(each.scale)))
    figures = {file.stem: f"{DATA}/{file.name}" for file in (to / DATA).glob("*.png")}
    made = {}
    for paper in PAPERS:
        own = [each for each in results if each.paper == paper]
        if own:
            made[to / f"{paper}.md"] = paper_page(paper, own, figures)
    index = to / "index.md"
    before, _, rest = index.read_text(encoding="utf-8").partition(_BEGIN)
    made[index] = f"{before}{_BEGIN}\n{claims_table(results)}\n{_END}{rest.partition(_END)[2]}"
    return made


def _place(where: str) -> list[tuple[int, str]]:
    """A key that sorts tables and figures as a reader would: Table 3.2 before Table 3.12.

    >>> sorted(["Table 3.12", "Table 3.2"], key=_place)
    ['Table 3.2', 'Table 3.12']
    """
    words = where.replace(".", " ").replace(",", " ").split()
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]
