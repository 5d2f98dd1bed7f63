"""The content of a run's page: the answer, and for each track verdicts with evidence, matrix, pictures and ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from leaktight.report.cards import Card, cards_of, one_a_defense
from leaktight.report.judgements import TRACKS, answer_lines, spending_facts, tracks_of
from leaktight.report.matrix import (
    Column,
    Group,
    MatrixField,
    column_of,
    columns_of,
    field_of,
    judged_of,
    undefended_of,
)
from leaktight.report.pictures import Album
from leaktight.report.runs import Run
from leaktight.report.words import METRICS, Level, counted, fact_name, ledger_value, listed
from leaktight.results.schema import (
    UNDEFENDED,
    VARIES,
    WORDS,
    Cell,
    Flag,
    Ledger,
    Summary,
    Threat,
    Track,
    Trial,
    Verdict,
    Word,
    common_ledger,
    severity,
)

_SENTENCES: Mapping[Word, str] = {
    "reconstructed": "leaks training data",
    "identified": "leaks training data in part",
    "labels-read": "leaks labels",
    "cannot-conclude": "cannot be judged by this run",
    "nothing-found": "showed no leak to these attacks",
}

Facts = tuple[tuple[str, str, str], ...]
"""Key, name and value of each fact."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """All of one track. note: what the track is; empty if the run has one track only. suffix: of its anchors."""

    track: Track
    note: str
    suffix: str
    tally: tuple[tuple[Word, tuple[str, ...]], ...]
    cards: tuple[Card, ...]
    columns: tuple[Column, ...]
    matrix: tuple[tuple[str, tuple[MatrixField, ...]], ...]
    gallery: tuple[tuple[str, tuple[Group, ...]], ...]
    metrics: tuple[str, ...]
    controls: frozenset[str]
    ledger: Facts

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels in the matrix, the gravest first."""
        found = {entry.level for _, entries in self.matrix for entry in entries if entry.cell}
        order: tuple[Level, ...] = (*WORDS, "control")
        return tuple(level for level in order if level in found)

    @property
    def threats(self) -> frozenset[Threat]:
        """The threat models of its attacks."""
        return frozenset(column.threat for column in self.columns if column.role == "attack")

    @property
    def tested(self) -> bool:
        """Whether any attack was tested for identification or label reading."""
        cells = [entry.cell for _, entries in self.matrix for entry in entries if entry.cell]
        return any(cell.identification or cell.label_reading for cell in cells)

    @property
    def ensembles(self) -> tuple[Cell, ...]:
        """The cells of attacks that chose between the guesses of others."""
        return tuple(entry.cell for _, entries in self.matrix for entry in entries if entry.cell and entry.cell.chosen)


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that the template shows. answer: questions and sentences; empty in files without one. tone: of the lead."""

    run: Run
    tone: Word | None
    headline: str
    answer: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]
    attackers: dict[Threat, str]
    effort: dict[str, str]
    flags: tuple[tuple[Flag, tuple[Flag, ...]], ...]
    failed: tuple[Trial, ...] = field(default=())

    @property
    def flag_anchors(self) -> dict[str, str]:
        return {first.code: f"flag-{number}" for number, (first, _) in enumerate(self.flags, start=1)}

    @property
    def earlier(self) -> bool:
        """Whether the verdicts were given by the rules of an earlier version."""
        return self.run.summary.schema_version == 1


def build_page(run: Run) -> Page:
    """The page of a run, from its result files alone."""
    summary = run.summary
    album = Album(run.path, len(summary.cells) + 2 * len(summary.verdicts), run.trials)
    tracks = tracks_of(summary)
    return Page(
        run=run,
        tone=_lead(summary),
        headline=headline(run),
        answer=tuple(answer_lines(summary.answer)) if summary.answer else (),
        parts=tuple(_part(track, run, album, several=len(tracks) > 1) for track in tracks),
        attackers=attackers_of(summary),
        effort=spending_facts(summary.spending, summary.confidence),
        flags=_flags_by_code(summary.flags),
        failed=tuple(trial for trial in run.trials if trial.status == "failed"),
    )


def _part(track: Track, run: Run, album: Album, *, several: bool) -> Part:
    summary = run.summary
    cells = [cell for cell in summary.cells if cell.track == track]
    trials = [trial for trial in run.trials if trial.track == track]
    verdicts = [entry for entry in one_a_defense(summary) if entry.track == track]
    defenses = _defenses(cells, verdicts)
    verdicts.sort(key=lambda entry: defenses.index(entry.defense))
    cards = cards_of(verdicts, trials, album)
    matrix, gallery = _matrix(defenses, cells, verdicts, run, album)
    return Part(
        track=track,
        note=TRACKS[track] if several or track == "production" else "",
        suffix="" if track == "diagnostic" or not several else f"-{track}",
        tally=tally_of(verdicts),
        cards=cards,
        columns=columns_of(cells),
        matrix=matrix,
        gallery=gallery,
        metrics=metrics_of(cells),
        controls=controls_of(cells),
        ledger=_ledger(common_ledger(trials) if several else summary.ledger, trials),
    )


def _matrix(
    defenses: Sequence[str], cells: Sequence[Cell], verdicts: Sequence[Verdict], run: Run, album: Album
) -> tuple[tuple[tuple[str, tuple[MatrixField, ...]], ...], tuple[tuple[str, tuple[Group, ...]], ...]]:
    """The rows of the matrix, and the pictures of its fields by defense."""
    columns, judged, undefended = columns_of(cells), judged_of(verdicts), undefended_of(cells)
    found = {(cell.defense, column_of(cell)): cell for cell in cells}
    rows, gallery = [], []
    for defense in defenses:
        entries, groups = [], []
        for column in columns:
            cell = found.get((defense, column))
            trials = run.trials_of(cell) if cell else []
            entry = field_of(cell, column, judged, undefended, trials)
            pairs, total = album.pairs(trials)
            if cell and pairs:
                entry = replace(entry, anchor=album.group_anchor())
                groups.append(
                    Group(
                        anchor=entry.anchor or "",
                        column=column,
                        cell=cell,
                        level=entry.level,
                        pairs=tuple(pairs),
                        total=total,
                    )
                )
            entries.append(entry)
        rows.append((defense, tuple(entries)))
        if groups:
            gallery.append((defense, tuple(groups)))
    return tuple(rows), tuple(gallery)


def _defenses(cells: Sequence[Cell], verdicts: Sequence[Verdict]) -> list[str]:
    """All defenses, the undefended update first."""
    names = dict.fromkeys([cell.defense for cell in cells] + [entry.defense for entry in verdicts])
    return sorted(names, key=lambda name: name != UNDEFENDED)


def attackers_of(*summaries: Summary) -> dict[Threat, str]:
    """A letter for each threat model of an attack; controls have none."""
    threats: dict[Threat, None] = {}
    for summary in summaries:
        threats |= dict.fromkeys(entry.threat for entry in summary.verdicts)
        threats |= dict.fromkeys(cell.threat for cell in summary.cells if cell.role == "attack")
    return {threat: _letters(number) for number, threat in enumerate(threats)}


def metrics_of(cells: Sequence[Cell]) -> tuple[str, ...]:
    """The metrics of any cell, the common ones first."""
    present = dict.fromkeys(name for cell in cells for name in cell.scores)
    return tuple(name for name in METRICS if name in present) + tuple(name for name in present if name not in METRICS)


def controls_of(cells: Sequence[Cell]) -> frozenset[str]:
    """The metrics for which any cell has a control score."""
    return frozenset(name for cell in cells for name, value in cell.control.items() if value is not None)


def headline(run: Run) -> str:
    """The result in one sentence: the first of the answer, or as the verdicts state it."""
    if not run.finished:
        done = sum(trial.status == "done" for trial in run.trials)
        return f"Not finished: {counted(done, 'trial')} so far, and no verdict yet."
    if run.summary.answer is not None:
        return run.summary.answer.leaks
    word = _lead(run.summary)
    if word is None:
        return "No verdict was given."
    bare = any(entry.defense == UNDEFENDED for entry in run.summary.verdicts)
    return f"{'Without a defense, the update' if bare else 'The update'} {_SENTENCES[word]}."


def _lead(summary: Summary) -> Word | None:
    """The gravest verdict on the undefended update, or on any if that was not attacked; None without a verdict."""
    bare = [entry.verdict for entry in summary.verdicts if entry.defense == UNDEFENDED]
    words = bare or [entry.verdict for entry in summary.verdicts]
    return min(words, key=severity, default=None)


def tally_of(verdicts: Sequence[Verdict]) -> tuple[tuple[Word, tuple[str, ...]], ...]:
    """The defenses of each verdict, the gravest first. verdicts: of one track, one for each defense."""
    found = {word: tuple(entry.defense for entry in verdicts if entry.verdict == word) for word in WORDS}
    return tuple((word, names) for word, names in found.items() if names)


def _ledger(ledger: Ledger, trials: Sequence[Trial]) -> Facts:
    return tuple((key, fact_name(key), _ledger_text(key, value, trials)) for key, value in ledger.facts().items())


def _ledger_text(key: str, value: object, trials: Sequence[Trial]) -> str:
    if value != VARIES:
        return ledger_value(key, value)
    ledgers = [trial.ledger.facts() for trial in trials]
    found = dict.fromkeys(ledger_value(key, ledger[key]) for ledger in ledgers if key in ledger)
    return f"varies: {listed(found)}" if 1 < len(found) <= 6 else VARIES


def _flags_by_code(flags: Sequence[Flag]) -> tuple[tuple[Flag, tuple[Flag, ...]], ...]:
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        groups.setdefault(flag.code, []).append(flag)
    return tuple((held[0], tuple(held)) for held in groups.values())


def _letters(number: int) -> str:
    """A label of letters for a number from 0.

    >>> _letters(0), _letters(25), _letters(26)
    ('A', 'Z', 'AA')
    """
    prefix, rest = divmod(number, 26)
    return (_letters(prefix - 1) if prefix else "") + chr(ord("A") + rest)
