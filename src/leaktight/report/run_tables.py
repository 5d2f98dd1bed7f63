"""The tables of one run as rows of text. No table mixes tracks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leaktight.report.cards import one_a_defense
from leaktight.report.judgements import (
    chance_words,
    chosen_words,
    leaked_share,
    tracks_of,
    valid_trials,
    verdict_words,
)
from leaktight.report.page import attackers_of, controls_of, metrics_of
from leaktight.report.words import (
    MISSING,
    attack_words,
    defense_name,
    fact,
    interval,
    metric_words,
    number,
    percent,
    seconds,
    tradeoff_names,
)
from leaktight.results.schema import Cell, Score, Significance, Summary, Threat, Track


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of text. text_columns: the number of left columns with words; the others have figures.

    prose: the last column has sentences.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int
    note: str = ""
    prose: bool = False


def run_tables(summary: Summary) -> list[TextTable]:
    """The tables of the run: verdicts and leakage of each track, then cost and leakage over time."""
    attackers = attackers_of(summary)
    tables = []
    for track in tracks_of(summary):
        tables += [_verdicts(summary, track, attackers), _leakage(summary, track, attackers)]
        tables += [_ensembles(summary, track)]
    return [table for table in (*tables, _tradeoff(summary), _time(summary)) if table.rows]


def titled(title: str, track: Track, tracks: Sequence[Track]) -> str:
    """The title of a table of one track. tracks: those of the run; without another, diagnostic goes without saying.

    >>> titled("Leakage", "diagnostic", ["diagnostic"]), titled("Leakage", "production", ["diagnostic", "production"])
    ('Leakage', 'Leakage, production')
    """
    return title if tuple(tracks) == ("diagnostic",) else f"{title}, {track}"


def attack_name(cell: Cell) -> str:
    """The name of an attack in tables."""
    return attack_words(cell.attack, cell.adaptive) + (" (control)" if cell.role == "control" else "")


def metric_header(metric: str) -> str:
    words = metric_words(metric)
    return f"{words.label} ({words.unit})" if words.unit else words.label


def mean_words(score: Score | None, metric: str) -> str:
    """A mean with its 95 % interval, without the unit."""
    if score is None:
        return MISSING
    span = interval(score, metric)
    return number(score.mean, metric, unit=False) + (f" ({span})" if span else "")


def _verdicts(summary: Summary, track: Track, attackers: dict[Threat, str]) -> TextTable:
    many = len(attackers) > 1
    header = ("Defense", *(["Attacker"] if many else []), "Verdict", "Victims", "Because")
    rows = tuple(
        (
            defense_name(summary, entry.defense, track),
            *([attackers[entry.threat]] if many else []),
            verdict_words(entry.verdict, summary.schema_version),
            fact(entry.victims),
            f"{entry.because} {entry.advice}".strip(),
        )
        for entry in one_a_defense(summary)
        if entry.track == track
    )
    title = titled("Verdicts", track, tracks_of(summary))
    return TextTable(title=title, header=header, rows=rows, text_columns=len(header), prose=True)


def _leakage(summary: Summary, track: Track, attackers: dict[Threat, str]) -> TextTable:
    cells = [cell for cell in summary.cells if cell.track == track]
    metrics, controls, many = metrics_of(cells), controls_of(cells), len(attackers) > 1
    tests = any(cell.identification or cell.label_reading for cell in cells)
    header = ["Defense", "Attack", *(["Attacker"] if many else []), "Trials", "Valid"]
    header += ["Leaked" if summary.schema_version == 1 else "Reconstructed"]
    header += ["Picked out by chance", "Labels by chance"] if tests else []
    for metric in metrics:
        header += [metric_header(metric), "worst", *(["without the update"] if metric in controls else [])]
    rows = []
    for cell in cells:
        row = [defense_name(summary, cell.defense, track), attack_name(cell)]
        row += [attackers.get(cell.threat, MISSING)] if many else []
        row += [str(cell.trials), str(valid_trials(cell)), leaked_share(cell)]
        row += [_chance(cell.identification), _chance(cell.label_reading)] if tests else []
        for metric in metrics:
            row += _figures(cell, metric, controlled=metric in controls)
        rows.append(tuple(row))
    return TextTable(
        title=titled("Leakage", track, tracks_of(summary)),
        header=tuple(header),
        rows=tuple(rows),
        text_columns=3 if many else 2,
        note="Mean over valid trials, 95 % interval in brackets; worst: the most leaking trial"
        + ("; without the update: the best negative control on the same victims" if controls else "")
        + ("; by chance: how often a guess without the update would do as well, after correction." if tests else "."),
    )


def _ensembles(summary: Summary, track: Track) -> TextTable:
    header = ("Defense", "Attack", "Chosen by its own evidence", "PSNR of the answer", "PSNR if the truth had chosen")
    rows = tuple(
        (
            defense_name(summary, cell.defense, track),
            attack_name(cell),
            chosen_words(cell),
            number(cell.mean_of("psnr"), "psnr"),
            number(cell.oracle.get("psnr"), "psnr"),
        )
        for cell in summary.cells
        if cell.track == track and cell.chosen
    )
    return TextTable(
        title=titled("Ensembles", track, tracks_of(summary)),
        header=header,
        rows=rows,
        text_columns=3,
        note="No attacker can choose by the truth; the last column shows what a better choice could gain.",
    )


def _chance(test: Significance | None) -> str:
    return MISSING if test is None else chance_words(test.corrected)


def _figures(cell: Cell, metric: str, *, controlled: bool) -> Sequence[str]:
    found = [mean_words(cell.scores.get(metric), metric), number(cell.worst_of(metric), metric, unit=False)]
    return [*found, number(cell.control.get(metric), metric, unit=False)] if controlled else found


def _tradeoff(summary: Summary) -> TextTable:
    rows = summary.tradeoff.rows if summary.tradeoff else ()
    return TextTable(
        title="Cost",
        header=("Defense", "Strongest attack", "Leakage", "PSNR (dB)", "Accuracy", "Time a round", "On the front"),
        rows=tuple(
            (
                name,
                row.leak.attack or MISSING,
                f"{metric_words(row.leak.metric).label} {number(row.leak.worst, row.leak.metric)}",
                number(row.leak.psnr, "psnr", unit=False),
                percent(row.accuracy),
                seconds(row.seconds_per_round),
                "yes" if row.on_front else "no",
            )
            for row, name in zip(rows, tradeoff_names(rows), strict=True)
        ),
        text_columns=2,
        note="Leakage is that of the most leaking trial.",
    )


def _time(summary: Summary) -> TextTable:
    return TextTable(
        title="Leakage over time",
        header=("Defense", "Attack", "Round", "PSNR (dB)", "SSIM", "Accuracy", "Trials"),
        rows=tuple(
            (
                defense_name(summary, moment.defense),
                attack_words(moment.attack, moment.adaptive),
                str(moment.round),
                mean_words(moment.scores.get("psnr"), "psnr"),
                mean_words(moment.scores.get("ssim"), "ssim"),
                percent(moment.accuracy),
                fact(moment.trials),
            )
            for moment in summary.over_time or ()
        ),
        text_columns=2,
    )
