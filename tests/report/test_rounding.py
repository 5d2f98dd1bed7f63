"""One number has one rounding: on the terminal, on the page, in tables, in cards and in the sentences of JSON files."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from decimal import Decimal

import pytest
from rich.console import Console
from tests.report.made_run import MadeRun
from tests.report.reading import Page
from tests.results.made import made_training

from leaktight.audits.judge.answer import answer
from leaktight.audits.judge.cells import gather
from leaktight.audits.judge.checks import Evidence, raise_flags
from leaktight.audits.judge.summary import cell_of
from leaktight.audits.judge.tradeoff import Scored, make_row, weigh
from leaktight.audits.judge.verdict import Panel
from leaktight.cli.audit_display import print_audit, trial_words
from leaktight.cli.inspect_display import print_inspection
from leaktight.report.html import write_report
from leaktight.report.judgements import chance_words
from leaktight.report.latex import to_latex
from leaktight.report.run_cards import attacker_of
from leaktight.report.runs import Run, load_run
from leaktight.report.tables import to_markdown
from leaktight.report.words import number, percent
from leaktight.results.schema import Cell, Summary

SCORED = Scored(4321, 0.1)
ACCURACY = {"none": 0.93149, "gaussian_noise": 0.74251, "outpost": 0.92549, "precode": 0.90251}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with the summary that the judge makes of its trials."""
    made = MadeRun(tmp_path_factory.mktemp("runs") / "audit-001").add_all()
    cells = gather(made.trials)
    panel = Panel(cells, 0.15)
    raised = raise_flags(Evidence(panel))
    verdicts = panel.verdicts()
    rows = [
        make_row(name, {}, cells, made_training(reached, [1.234, 1.3]), SCORED) for name, reached in ACCURACY.items()
    ]
    weighed = weigh(rows, verdicts, SCORED)
    summary = made.summary().model_copy(
        update={
            "cells": tuple(cell_of(cell, panel, raised) for cell in cells),
            "verdicts": tuple(verdicts),
            "flags": tuple(each.flag for each in raised),
            "tradeoff": weighed,
            "answer": answer(verdicts, cells, weighed),
        }
    )
    (made.path / "summary.json").write_text(json.dumps(summary.document()))
    return load_run(made.path)


def terminal(summary: Summary) -> str:
    buffer = io.StringIO()
    print_audit(summary, Console(file=buffer, width=200))
    return buffer.getvalue()


def inspected(summary: Summary) -> str:
    buffer = io.StringIO()
    print_inspection(summary, Console(file=buffer, width=200))
    return buffer.getvalue()


def sentences(value: object) -> Iterator[str]:
    """The texts of a JSON document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from sentences(each)
    elif isinstance(value, list):
        for each in value:
            yield from sentences(each)


@pytest.fixture(scope="module")
def printed(judged: Run) -> dict[str, str]:
    page = Page(write_report(judged.path).read_text())
    document = {name: value for name, value in judged.summary.document().items() if name != "run"}
    return {
        "terminal": terminal(judged.summary),
        "inspection": inspected(judged.summary),
        "progress": "\n".join(re.sub(r"\(.*?s\)", "", trial_words(each)) for each in judged.trials),
        "page": page.text("main"),
        "JSON": "\n".join(sentences(document)),
        "markdown": to_markdown([judged]),
        "latex": to_latex([judged]),
    }


def tokens(text: str) -> set[str]:
    """The numbers of a text as they are written, the signs aside; whole numbers are counts and settings."""
    return set(re.findall(r"(?<![\w.])\d+\.\d+(?!\w|\.\d)", text))


def roundings(value: float, among: set[str]) -> set[str]:
    """Those numbers that are this value, rounded to some number of digits of which it has at least two."""
    exact = Decimal(abs(value))
    close = {each for each in among if abs(Decimal(each) - exact) <= Decimal(5).scaleb(-1 - _digits(each))}
    return {each for each in close if len(each.replace(".", "").lstrip("0")) >= 2}


def _digits(token: str) -> int:
    return len(token.partition(".")[2])


def figures(summary: Summary) -> Iterator[tuple[str, str, float]]:
    """What a number is of, the only text that it may have, and the number."""
    for cell in summary.cells:
        where = f"{cell.attack} on {cell.defense}"
        for metric in ("psnr", "ssim"):
            score = cell.scores[metric]
            values = (score.mean, *(score.ci95 or ()), score.worst, cell.control.get(metric))
            for value in values:
                if value is not None:
                    yield f"{metric} of {where}", number(value, metric, unit=False), value
        for test in (cell.identification, cell.label_reading):
            if test is not None and test.corrected >= 0.001:
                yield f"chance of {where}", chance_words(test.corrected).removesuffix(" %"), 100 * test.corrected
    for name, value in ACCURACY.items():
        yield f"accuracy of {name}", percent(value).removesuffix(" %"), 100 * value


def others_of(run: Run) -> Iterator[str]:
    """The texts of other numbers, which may look like one of those above: errors of cells, scores of examples."""
    for cell in run.summary.cells:
        score = cell.scores["mse"]
        yield from (number(each, "mse") for each in (score.mean, *(score.ci95 or ()), score.worst))
    for trial in run.trials:
        yield from (number(each, metric, unit=False) for metric in trial.scores for each in trial.scores[metric] or ())


@pytest.mark.parametrize("where", ["terminal", "inspection", "progress", "page", "JSON", "markdown", "latex"])
def test_a_number_is_printed_with_one_rounding(judged: Run, printed: dict[str, str], where: str) -> None:
    found = tokens(printed[where])
    allowed = {text.lstrip("−") for _, text, _ in figures(judged.summary)} | set(others_of(judged))
    for what, text, value in figures(judged.summary):
        others = roundings(value, found) - {text.lstrip("−")}
        assert others <= allowed, f"{what}: {value} is printed as {others}, expected {text}"


def attacks(summary: Summary) -> list[Cell]:
    return [cell for cell in summary.cells if cell.role == "attack"]


@pytest.mark.parametrize("where", ["terminal", "page", "markdown", "latex"])
def test_every_cell_is_printed(judged: Run, printed: dict[str, str], where: str) -> None:
    found = tokens(printed[where])
    for cell in attacks(judged.summary):
        for metric in ("psnr", "ssim"):
            score = cell.scores[metric]
            for value in (score.mean, *(score.ci95 or ())):
                assert number(value, metric, unit=False).lstrip("−") in found, f"{metric} of {cell.attack}"
    for value in ACCURACY.values():
        assert percent(value).removesuffix(" %") in found


def test_the_table_of_the_terminal_has_mean_and_interval(judged: Run, printed: dict[str, str]) -> None:
    for cell in attacks(judged.summary):
        for metric in ("psnr", "ssim"):
            score = cell.scores[metric]
            mean, *ends = (number(each, metric, unit=False) for each in (score.mean, *(score.ci95 or ())))
            assert f"{mean} [{','.join(ends)}]" in printed["terminal"]


def test_a_card_of_the_leaderboard_rounds_when_it_is_read(judged: Run) -> None:
    """Rounding twice would give another number: 34.3497 is 34.350 with three digits, and then 34.4."""
    cell = attacks(judged.summary)[0]
    score = cell.scores["psnr"].model_copy(update={"mean": 34.3497, "worst": 34.3497})
    own = [trial for trial in judged.trials if trial.id in cell.trial_ids]
    found = attacker_of(cell.with_scores({"psnr": score}), own, word=None, run="")
    assert number(found.psnr.mean, "psnr") == number(34.3497, "psnr") == "34.3 dB"
    best = max(value for trial in own for value in trial.scores["psnr"] or () if value is not None)
    assert found.worst == best


def test_the_same_share_is_not_written_in_two_ways(judged: Run, printed: dict[str, str]) -> None:
    numbers = Page((judged.path / "report.html").read_text()).text("numbers")
    for cell in attacks(judged.summary):
        assert f"{cell.leaked} of {cell.judged}" in numbers
        assert f"{cell.leaked} of {cell.judged}" in printed["terminal"]
        assert f"{cell.leaked} of {cell.judged}" in printed["markdown"]
