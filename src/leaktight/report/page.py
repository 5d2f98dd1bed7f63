"""The content of a run's page: verdicts with evidence, the matrix of attacks and defenses, pictures, ledger, flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from leaktight.report.pictures import Album, Pair
from leaktight.report.runs import Run
from leaktight.report.words import METRICS, Level, attack_words, counted, fact_name, ledger_value, listed
from leaktight.results.schema import UNDEFENDED, VARIES, Cell, Flag, Summary, Threat, Trial, Verdict, Word, leaks_when

MOST = 0.5
"""The least share of leaked trials for an attack to count as working, as in the audit's verdicts."""

_SENTENCES: Mapping[Word, str] = {
    "leaks": "leaks training data",
    "partly": "leaks training data in part",
    "cannot-conclude": "cannot be judged by this run",
    "not-found": "showed no leak to these attacks",
}
"""From the most severe verdict to the least."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a verdict's chart. kind: "this" attack, its "positive" control or the "negative" control."""

    kind: str
    label: str
    cell: Cell

    @property
    def share(self) -> float | None:
        """The length of the bar: SSIM of the most leaking trial, clipped to [0, 1]."""
        worst = self.cell.worst_of("ssim")
        return None if worst is None else min(max(worst, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class Card:
    """A verdict and its evidence."""

    verdict: Verdict
    level: Level
    attacker: str
    bars: tuple[Bar, ...]
    pair: Pair | None


@dataclass(frozen=True)
class Column:
    """A column of the matrix: an attack and its threat model."""

    attack: str
    adaptive: bool
    role: str
    threat: Threat


@dataclass(frozen=True, kw_only=True)
class MatrixField:
    """A field of the matrix. doubtful: nothing leaked, but the attack also fails without a defense."""

    column: Column
    cell: Cell | None
    level: Level
    doubtful: bool = False
    anchor: str | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The pictures of one attack on one defense. total: how many there are, shown or not."""

    anchor: str
    column: Column
    cell: Cell
    level: Level
    pairs: tuple[Pair, ...]
    total: int


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that the template shows."""

    run: Run
    headline: str
    tally: tuple[tuple[Word, tuple[str, ...]], ...]
    cards: tuple[Card, ...]
    attackers: dict[Threat, str]
    columns: tuple[Column, ...]
    matrix: tuple[tuple[str, tuple[MatrixField, ...]], ...]
    gallery: tuple[tuple[str, tuple[Group, ...]], ...]
    metrics: tuple[str, ...]
    controls: frozenset[str]
    ledger: tuple[tuple[str, str, str], ...]
    flags: tuple[tuple[Flag, tuple[Flag, ...]], ...]
    failed: tuple[Trial, ...] = field(default=())

    @property
    def flag_anchors(self) -> dict[str, str]:
        return {first.code: f"flag-{number}" for number, (first, _) in enumerate(self.flags, start=1)}


def build_page(run: Run) -> Page:
    """The page of a run, from its result files alone."""
    summary = run.summary
    columns = columns_of(summary.cells)
    defenses = defenses_of(summary)
    cells = {(cell.defense, column_of(cell)): cell for cell in summary.cells}
    undefended = undefended_of(summary.cells)
    album = Album(run.path, len(summary.cells) + len(summary.verdicts), run.trials)
    groups: dict[str, list[Group]] = {defense: [] for defense in defenses}
    for defense in defenses:
        for column in columns:
            cell = cells.get((defense, column))
            if cell is None:
                continue
            pairs, total = album.pairs(run.trials_of(cell))
            if pairs:
                level, _ = level_of(cell, undefended.get(column.attack))
                anchor = f"images-{sum(map(len, groups.values())) + 1}"
                groups[defense].append(
                    Group(anchor=anchor, column=column, cell=cell, level=level, pairs=tuple(pairs), total=total)
                )
    verdicts = sorted(summary.verdicts, key=lambda entry: defenses.index(entry.defense))
    anchors = {(group.cell.defense, group.column): group.anchor for shown in groups.values() for group in shown}
    return Page(
        run=run,
        headline=headline(run),
        tally=tally_of(summary.verdicts),
        cards=tuple(_card(verdict, run, album) for verdict in verdicts),
        attackers=attackers_of(summary),
        columns=columns,
        matrix=tuple(
            (defense, tuple(_entry(cells.get((defense, column)), column, undefended, anchors) for column in columns))
            for defense in defenses
        ),
        gallery=tuple((defense, tuple(shown)) for defense, shown in groups.items() if shown),
        metrics=metrics_of(summary.cells),
        controls=controls_of(summary.cells),
        ledger=tuple(
            (key, fact_name(key), _ledger_text(key, value, run.trials)) for key, value in summary.ledger.facts().items()
        ),
        flags=_flags_by_code(summary.flags),
        failed=tuple(trial for trial in run.trials if trial.status == "failed"),
    )


def column_of(cell: Cell) -> Column:
    return Column(cell.attack, cell.adaptive, cell.role, cell.threat)


def columns_of(cells: Sequence[Cell]) -> tuple[Column, ...]:
    """Attacks in the order of the run, then negative controls."""
    columns = dict.fromkeys(column_of(cell) for cell in cells)
    return tuple(sorted(columns, key=lambda column: column.role == "control"))


def defenses_of(summary: Summary) -> tuple[str, ...]:
    """All defenses, the undefended update first."""
    names = dict.fromkeys([cell.defense for cell in summary.cells] + [entry.defense for entry in summary.verdicts])
    return tuple(sorted(names, key=lambda name: name != UNDEFENDED))


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


def undefended_of(cells: Sequence[Cell]) -> dict[str, Cell]:
    """The undefended cell of each attack, by its name; an adaptive attack has the same name as the plain one."""
    return {cell.attack: cell for cell in cells if cell.defense == UNDEFENDED and cell.role == "attack"}


def level_of(cell: Cell, undefended: Cell | None) -> tuple[Level, bool]:
    """The colour of a field, and whether it is doubtful because the attack also fails without a defense.

    undefended: the same attack without a defense; None if it was not run, so that the attack may not work at all.
    """
    if cell.role == "control":
        return "control", False
    if cell.success_rate is None or not cell.done:
        return "unknown", False
    if cell.success_rate >= MOST:
        return "leaks", False
    if cell.leaked:
        return "partly", False
    if undefended is None:
        return "cannot-conclude", False
    doubtful = (undefended.success_rate or 0) < MOST
    return ("cannot-conclude" if doubtful else "not-found"), doubtful


def headline(run: Run) -> str:
    """The result in one sentence, as the verdicts state it."""
    if not run.finished:
        done = sum(trial.status == "done" for trial in run.trials)
        return f"Not finished: {counted(done, 'trial')} so far, and no verdict yet."
    found = _most_severe(run.summary.verdicts)
    if not found:
        return "No verdict was given."
    defended = [verdict for defense, verdict in found.items() if defense != UNDEFENDED]
    subject = "Without a defense, the update" if UNDEFENDED in found else "The update"
    verdict = found[UNDEFENDED] if UNDEFENDED in found else min(defended, key=_severity)
    return f"{subject} {_SENTENCES[verdict]}."


def tally_of(verdicts: Sequence[Verdict]) -> tuple[tuple[Word, tuple[str, ...]], ...]:
    """The defenses of each verdict, the most severe first; a defense has the verdict of its strongest attacker."""
    found = _most_severe(verdicts)
    found.pop(UNDEFENDED, None)
    return tuple(
        (verdict, tuple(name for name, given in found.items() if given == verdict))
        for verdict in sorted(dict.fromkeys(found.values()), key=_severity)
    )


def _most_severe(verdicts: Sequence[Verdict]) -> dict[str, Word]:
    found: dict[str, Word] = {}
    for entry in sorted(verdicts, key=lambda entry: _severity(entry.verdict)):
        found.setdefault(entry.defense, entry.verdict)
    return found


def _severity(verdict: Word) -> int:
    return list(_SENTENCES).index(verdict)


def _card(entry: Verdict, run: Run, album: Album) -> Card:
    trial = next((trial for trial in run.trials if trial.id == entry.trial_id), None)
    return Card(
        verdict=entry,
        level=entry.verdict,
        attacker=attackers_of(run.summary)[entry.threat],
        bars=tuple(bar for bar in _bars(entry, run.summary.cells, trial) if bar.cell.scores.keys() & {"ssim", "psnr"}),
        pair=album.most_leaking(trial) if trial else None,
    )


def _bars(entry: Verdict, cells: Sequence[Cell], trial: Trial | None) -> list[Bar]:
    """The strongest attack on the defense, the same attack without a defense, and the best negative control."""
    attacks = [cell for cell in cells if cell.role == "attack" and cell.attack == entry.worst_attack]
    mine = [cell for cell in attacks if cell.defense == entry.defense]
    mine.sort(key=lambda cell: trial is None or trial.id not in cell.trial_ids)  # the cell of the most leaking trial
    bars = []
    if mine:
        label = f"{attack_words(mine[0].attack, mine[0].adaptive)}: the strongest attack tried"
        bars.append(Bar(kind="this", label=label, cell=mine[0]))
        bare = [cell for cell in attacks if cell.defense == UNDEFENDED]
        if entry.defense != UNDEFENDED and bare:
            bars.append(Bar(kind="positive", label=f"{bare[0].attack} without a defense", cell=bare[0]))
    controls = [cell for cell in cells if cell.role == "control"]
    controls = [cell for cell in controls if cell.defense == entry.defense] or controls
    if controls:
        best = min(controls, key=_leak_key)
        bars.append(Bar(kind="negative", label=f"{best.attack}, ignores the update", cell=best))
    return bars


def _leak_key(cell: Cell) -> float:
    for metric in ("psnr", "ssim", "mse"):
        if (worst := cell.worst_of(metric)) is not None:
            return -worst if leaks_when(metric, {}) == "high" else worst
    return 0.0


def _entry(
    cell: Cell | None, column: Column, undefended: dict[str, Cell], anchors: dict[tuple[str, Column], str]
) -> MatrixField:
    if cell is None:
        return MatrixField(column=column, cell=None, level="unknown")
    level, doubtful = level_of(cell, undefended.get(column.attack))
    return MatrixField(
        column=column, cell=cell, level=level, doubtful=doubtful, anchor=anchors.get((cell.defense, column))
    )


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
