from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from PIL import ImageFont
from tests.report.made_run import MadeRun
from tests.results.made import THREAT, made_cell, made_summary

from leaktight.report.comparison import compare
from leaktight.report.latex import COLUMN, GAP, latex, to_latex
from leaktight.report.runs import Run, load_run
from leaktight.report.tables import WRITERS, markdown, to_csv, to_markdown
from leaktight.results.schema import Cell, Score, Significance, Track, Verdict, Word

OLD = Path(__file__).parents[1] / "results" / "old"


@pytest.fixture(scope="module")
def runs(finished_run: Path, other_run: Path) -> list[Run]:
    return [load_run(finished_run), load_run(other_run)]


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_holds_every_figure_in_full_precision(runs: list[Run], finished_run: Path) -> None:
    rows = read(to_csv(runs[:1]))
    for cell in json.loads((finished_run / "summary.json").read_text())["cells"]:
        mine = [
            row
            for row in rows
            if (row["table"], row["defense"], row["attack"], row["adaptive"])
            == ("leakage", cell["defense"], cell["attack"], str(cell["adaptive"]).lower())
        ]
        found = {(row["metric"], row["statistic"]): float(row["value"]) for row in mine}
        for metric in ("psnr", "mse", "ssim"):
            assert found[metric, "mean"] == cell[metric]["mean"]
            assert found[metric, "worst"] == cell[metric]["worst"]
            assert [found[metric, "ci95_low"], found[metric, "ci95_high"]] == cell[metric]["ci95"]
        assert found.get(("success_rate", "mean")) == cell["success_rate"]
    assert {row["table"] for row in rows} == {"leakage", "tradeoff", "over_time"}


def test_csv_of_two_runs_gives_differences_where_both_have_a_figure(runs: list[Run]) -> None:
    rows = read(to_csv(runs))
    both = [row for row in rows if row["audit-001"] and row["audit-002"]]
    assert both
    for row in both:
        assert float(row["audit-002 minus audit-001"]) == float(row["audit-002"]) - float(row["audit-001"])
    alone = [row for row in rows if row["defense"] == "precode"]
    assert alone
    assert {row["audit-002"] + row["audit-002 minus audit-001"] for row in alone} == {""}


def test_a_comparison_names_what_else_differs(tmp_path: Path, runs: list[Run]) -> None:
    made = MadeRun(tmp_path / "audit-003")
    made.add("none", "csdlg", 0, 0.1)
    content = made.content()
    content["ledger"]["labels"] = "inferred"
    content["scenario"]["model"] = "resnet20"
    (made.path / "summary.json").write_text(json.dumps(content))
    tables = {table.title: table for table in compare([runs[0], load_run(made.path)]).tables}
    rows = {row[0]: row[1:] for row in tables["What differs between the runs"].rows}
    attackers = rows.pop("Attackers")
    assert ["and the defense (" in words for words in attackers] == [True, False]
    assert rows == {"Ledger: Labels": ("given", "inferred"), "Scenario: Model": ("lenet_zhu", "resnet20")}


def test_attackers_who_know_more_or_less_are_compared_line_by_line(tmp_path: Path) -> None:
    found = []
    for name, knows in (("blind", ["batch_size"]), ("knowing", ["batch_size", "labels"])):
        made = MadeRun(tmp_path / name)
        made.add("none", "csdlg", 0, 0.1)
        content = made.content()
        content["cells"][0]["threat"]["knows"] = content["verdicts"][0]["threat"]["knows"] = knows
        (made.path / "summary.json").write_text(json.dumps(content))
        found.append(load_run(made.path))
    tables = {table.title: table for table in compare(found).tables}
    assert [len(tables[title].rows) for title in ("Verdicts", "PSNR (dB)")] == [1, 1]
    assert tables["PSNR (dB)"].rows[0][-1] == "0.0"
    assert [row[0] for row in tables["What differs between the runs"].rows] == ["Attackers"]
    rows = read(to_csv(found))
    assert all(row["blind"] and row["knowing"] for row in rows)
    assert rows[0]["attacker"].count(" | ") == 1


def test_differences_are_of_means(runs: list[Run]) -> None:
    table = next(table for table in compare(runs).tables if table.title == "PSNR (dB)")
    assert table.header[-3:] == ("audit-001", "audit-002", "difference")
    first, second = (run.summary.cells[0].scores["psnr"].mean for run in runs)
    assert first is not None
    assert second is not None
    assert table.rows[0][-1] == f"{second - first:.1f}".replace("-", "−")
    assert ("precode", "csdlg") in {row[:2] for row in table.rows}


def test_markdown_tables_are_even_and_escaped(tmp_path: Path) -> None:
    name = "a|b_*<i>\nnext"
    made = MadeRun(tmp_path / "run", rename={"outpost": name}).add_all()
    text = to_markdown([load_run(made.finish(over_time=True))])
    assert name not in text
    assert markdown(name) in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert len(tables) == 3
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1


def environments(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """The kinds of columns and the rows of every table in LaTeX."""
    found = re.findall(r"\\begin\{tabularx\}\{\\linewidth\}\{([^\n]*)\}\n(.*?)\\end\{tabularx\}", text, re.S)
    return [
        (
            re.findall(r"p\{\d+pt\}|[Xr]", form.replace(r"\raggedright\arraybackslash", "")),
            [
                re.split(r"(?<!\\)&", line.removesuffix(r" \\"))
                for line in body.splitlines()
                if line.endswith(r" \\") and not line.startswith(r"\multicolumn")
            ],
        )
        for form, body in found
    ]


def test_latex_tables_are_even_and_escaped(tmp_path: Path) -> None:
    name = r"50%_&\{x}$#~^"
    made = MadeRun(tmp_path / "run", rename={"outpost": name}).add_all()
    text = to_latex([load_run(made.finish(tradeoff=False))])
    assert name not in text
    assert latex(name) in text.replace(r"\allowbreak ", "")
    tables = environments(text)
    assert len(tables) >= 2
    for kinds, rows in tables:
        assert {len(row) for row in rows} == {len(kinds)}
    rest = re.sub(r"\\[%&#_{}$]|\\text\w+\{\}", "", "\n".join(line for line in text.splitlines() if line[:1] != "%"))
    assert not re.search(r"[#~^%]", rest.replace("$^{-5}$", ""))


@pytest.mark.parametrize("tradeoff", [False, True])
def test_latex_tables_fit_a_column(tmp_path: Path, tradeoff: bool) -> None:
    made = MadeRun(tmp_path / "run").add_all()
    if not tradeoff:
        made.add_production()
    tables = environments(to_latex([load_run(made.finish(tradeoff=tradeoff))]))
    assert len(tables) >= 7
    for kinds, rows in tables:
        assert kinds.count("X") == 1
        assert not rows[0][kinds.index("r") if "r" in kinds else 0].strip().startswith(r"\shortstack[r]{wo")
        columns = [[cell.strip() for cell in column] for column in zip(*rows, strict=True)]
        fixed = sum(
            GAP + (float(kind[2:-3]) if kind[0] == "p" else broadest(column, lines=True))
            for kind, column in zip(kinds, columns, strict=True)
            if kind != "X"
        )
        for kind, column in zip(kinds, columns, strict=True):
            room = COLUMN - fixed - GAP if kind == "X" else float(kind[2:-3]) if kind[0] == "p" else COLUMN
            assert broadest(column, lines=kind == "r") <= room, (kind, column)


def broadest(column: list[str], *, lines: bool) -> float:
    """The points of the widest part of a column that is not broken, in Computer Modern of 8 points.

    lines: only a heading is broken, as it says; otherwise words are.
    """
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "cmr10.ttf")), 80)
    plain = [re.sub(r"\\shortstack\[r\]\{(.*)\}", r"\1", cell) for cell in column]
    parts = [part for cell in plain for part in re.split(r"\\\\" if lines else r"\\allowbreak | ", cell)]
    shown = [re.sub(r"\\(?=[_%&#{}])|[$^{}]", "", re.sub(r"\\(?:times|text\w+\{\})", "x", part)) for part in parts]
    # cmr8 is 6 % wider than cmr10 of the same size
    return max(font.getlength(part) for part in shown) / 10 * 1.0625


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        made = MadeRun(tmp_path / folder / "audit-001")
        made.add("none", "csdlg", 0, 0.1)
        paths.append(made.finish())
    assert compare([load_run(path) for path in paths]).names == tuple(str(path) for path in paths)


def test_an_unfinished_run_is_marked_in_every_form(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run")
    made.add("none", "csdlg", 0, 0.1)
    run = load_run(made.path)
    for text in (to_markdown([run]), to_latex([run])):
        assert "run is not finished" in text
    assert [row["metric"] for row in read(to_csv([run])) if row["statistic"] == "mean"] == ["psnr", "mse", "ssim"]


def cell(defense: str, track: Track, mean: float, **changes: Any) -> Cell:
    tested = Significance(victims=4, chance=0.01, corrected=0.03)
    scores = {"psnr": Score(mean=mean, ci95=(mean - 1, mean + 1), worst=mean + 1)}
    counts = {"trials": 5, "valid": 4, "victims": 4, "reconstructed": 2, "success_rate": 0.5}
    return made_cell(defense=defense, track=track, identification=tested, **counts | scores | changes)


def verdict(defense: str, track: Track, word: Word, **changes: Any) -> Verdict:
    fields: dict[str, Any] = {"defense": defense, "track": track, "threat": THREAT, "verdict": word, "because": "so."}
    return Verdict.model_validate(fields | {"victims": 4} | changes)


def two_tracks(path: Path, **changes: Any) -> Run:
    """A run of two tracks with the same attack and defenses."""
    path.mkdir()
    cells = [cell("none", "diagnostic", 30.0), cell("noise", "diagnostic", 10.0), cell("none", "production", 20.0)]
    verdicts = (
        verdict("none", "diagnostic", "reconstructed"),
        verdict("noise", "diagnostic", "nothing-found"),
        verdict("none", "production", "cannot-conclude", advice="Do more."),
    )
    summary = made_summary(*cells, verdicts=verdicts, **changes)
    (path / "summary.json").write_text(json.dumps(summary.document()))
    return load_run(path)


def test_no_table_mixes_tracks(tmp_path: Path) -> None:
    one, other = two_tracks(tmp_path / "one"), two_tracks(tmp_path / "other")
    single = {table.title: table for table in compare([one]).tables}
    assert list(single) == [
        "Verdicts, diagnostic",
        "Leakage, diagnostic",
        "Verdicts, production",
        "Leakage, production",
    ]
    assert [row[0] for row in single["Leakage, diagnostic"].rows] == ["no defense", "noise"]
    assert single["Verdicts, production"].rows == (("no defense", "Cannot conclude", "4", "so. Do more."),)
    both = {table.title: table for table in compare([one, other]).tables}
    for title in ("Verdicts", "PSNR (dB)", "Valid trials", "Reconstructed victims"):
        assert title not in both
        assert len(both[f"{title}, diagnostic"].rows) == 2
        assert len(both[f"{title}, production"].rows) == 1
    assert both["PSNR (dB), production"].rows[0][2].startswith("20.0")
    rows = read(to_csv([one]))
    means = {(row["track"], row["defense"]): row["value"] for row in rows if row["statistic"] == "ci95_low"}
    assert means == {("diagnostic", "none"): "29.0", ("diagnostic", "noise"): "9.0", ("production", "none"): "19.0"}
    assert all(two in write([one]) for two in ("diagnostic", "production") for write in WRITERS.values())


def test_tables_show_valid_trials_victims_and_tests(tmp_path: Path) -> None:
    run = two_tracks(tmp_path / "run")
    table = next(table for table in compare([run]).tables if table.title == "Leakage, diagnostic")
    shown = dict(zip(table.header, table.rows[0], strict=True))
    assert {name: shown[name] for name in table.header[2:7]} == {
        "Trials": "5",
        "Valid": "4",
        "Reconstructed": "2 of 4",
        "Picked out by chance": "3.0 %",
        "Labels by chance": "–",
    }
    found = {
        (row["metric"], row["statistic"]): row["value"] for row in read(to_csv([run])) if row["track"] == "production"
    }
    expected = {
        ("valid", "count"): "4",
        ("victims", "count"): "4",
        ("reconstructed", "count"): "2",
        ("identification", "chance"): "0.01",
        ("identification", "corrected"): "0.03",
    }
    assert {key: found[key] for key in expected} == expected


def test_one_track_goes_without_saying(runs: list[Run]) -> None:
    assert {table.title for table in compare(runs[1:]).tables} == {"Verdicts", "Leakage"}


def test_verdicts_of_earlier_versions_keep_their_words() -> None:
    run = load_run(OLD / "audit")
    verdicts = next(table for table in compare([run]).tables if table.title == "Verdicts")
    assert {row[verdicts.header.index("Verdict")] for row in verdicts.rows} <= {
        "Leaks",
        "Leaks in part",
        "No leak found by these attacks",
        "Cannot conclude",
    }
    leakage = next(table for table in compare([run]).tables if table.title == "Leakage")
    assert "Leaked" in leakage.header
