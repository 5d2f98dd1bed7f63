"""docs/results/adaptive.md and its figure, from the cards of the leaderboard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from leaktight.core.files import replace_atomically, write_atomically
from leaktight.report.board import attacker_cells, setting_words, share_words
from leaktight.report.standings import Board, boards_of
from leaktight.report.words import counted, defense_words
from leaktight.results.card import Attacker, Card, read_cards

PICTURE = "adaptive.png"
NAIVE, KNOWING = "#0b5fa5", "#b3541e"

HEAD = """# Naive against adaptive

Every defense of the catalogue at its default settings, attacked by csDLG (L-BFGS, float64, labels known as a set) by an
attacker who does not know the defense and by one who does ([adaptive.md](../adaptive.md)), with the same settings of
the search for all defenses. PSNR in dB is the mean over victims (of the mean over a batch) with its 95 % interval;
*reconstructed* is the judge's count ([verdicts.md](../verdicts.md)). Victims are test images, drawn by seed 16;
the settings of the search were chosen on others: on CIFAR-10 with wide weights and in batches of 4 (but MNIST with
default weights) up to 16 iterations of 20 evaluations (14 at batch 4) after 4 for images of half the size, elsewhere
40 (30 at batch 4) without these; with four local steps up to 10 after 4, and all 24 orders of the labels over the steps
compared by the attack's own loss. `python -m bench adaptive render` makes this page from the cards of the
[leaderboard](../leaderboard.md), which hold every score, the configs and the digests of the runs
(`python -m bench adaptive`). A dash: no trial was valid, as the own loss of the search did not fall by a hundredth;
with default weights most of a gradient is the same for every image. Where no attacker knows a defense after several
steps, the cell says why. **Not measured: batches of 4 in four local steps but for no defense and clipping**, as 16
images come out at 12 dB on average without any defense (at 3 to 5 dB where a wrong order of their labels was chosen:
of five tuning batches one failed, with 5.4 dB and a loss of 2e-4, and had 14.7 dB and 2e-11 with the true order), and
FedKL on MNIST with wide weights in batches of 4, where solving its equations takes minutes a victim.
At batch 1 with default weights the rows of FedKL and OUTPOST are older than their present attackers, which reach more
([adaptive.md](../adaptive.md)).
"""


def write_page(folder: Path, page: Path) -> Path:
    """Write the page and, beside it, the figure."""
    boards = [board for board in boards_of(read_cards(folder)) if board.setting.data.get("kind") != "digits"]
    _draw(boards, page.parent / PICTURE)
    parts = [HEAD, f"![PSNR by defense without and with knowledge of it, one panel for each setting]({PICTURE})\n"]
    write_atomically(page, "\n".join([*parts, *(_table(board) for board in boards)]))
    return page


def _table(board: Board) -> str:
    cards = [row.card for row in board.rows]
    victims = max((each.victims for card in cards for each in card.attackers), default=0)
    faults = sum(each.faults for card in cards for each in card.attackers)
    rows = "\n".join(_row(card) for card in cards)
    blind = max((card.blind for card in cards if card.blind is not None), default=None)
    notes = [f"{counted(victims, 'victim')} for each attacker"]
    notes += [f"the closest guess without the update has {blind:.1f} dB"] if blind is not None else []
    notes += [f"{counted(faults, 'guess').replace('guesss', 'guesses')} not valid and not counted"] if faults else []
    return f"""## {setting_words(board.setting, short=True)}

{"; ".join(notes)}.

| defense | does not know it | reconstructed | knows it | reconstructed | closest guess |
|---|---|---|---|---|---|
{rows}
"""


def _row(card: Card) -> str:
    naive, knowing = card.strongest(adaptive=False), card.strongest(adaptive=True)
    closest = "–" if card.worst is None else f"{card.worst:.1f} dB"
    last = share_words(knowing) if knowing else card.no_adaptive or "–"
    cells = (_figure(naive), share_words(naive), _figure(knowing), last, closest)
    return f"| {defense_words(card.defense)} | {' | '.join(cells)} |"


def _figure(attacker: Attacker | None) -> str:
    mean, ends = attacker_cells(attacker)
    return f"{mean} [{ends}]" if ends else mean


def _draw(boards: Sequence[Board], picture: Path) -> None:
    """A panel for each setting: for each defense two points with intervals."""
    columns = min(4, len(boards))
    lines = -(-len(boards) // columns)
    names = list(dict.fromkeys(row.card.defense for board in boards for row in board.rows))
    figure = Figure(figsize=(3.4 * columns + 1.0, (0.23 * len(names) + 0.9) * lines), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for panel, board in zip(panels, boards, strict=False):
        for shift, colour, adaptive in ((-0.17, NAIVE, False), (0.17, KNOWING, True)):
            found = {row.card.defense: row.card.strongest(adaptive=adaptive) for row in board.rows}
            points = [(names.index(name) + shift, each) for name, each in found.items() if each is not None]
            panel.errorbar(
                [each.psnr.mean for _, each in points],
                [place for place, _ in points],
                xerr=_ends(each for _, each in points),
                fmt="o",
                color=colour,
                markersize=3.5,
                linewidth=1,
                label="knows the defense" if adaptive else "does not know it",
            )
        panel.set_title(setting_words(board.setting, short=True), fontsize=8)
        panel.set_yticks(range(len(names)), [defense_words(name) for name in names], fontsize=7)
        panel.tick_params(axis="x", labelsize=7)
        panel.grid(axis="x", linewidth=0.4, alpha=0.6)
    for panel in panels[len(boards) :]:
        panel.set_visible(False)
    panels[0].invert_yaxis()
    figure.supxlabel("PSNR (dB), mean over victims and 95 % interval", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8)
    replace_atomically(picture, lambda temporary: figure.savefig(temporary))


def _ends(attackers: Iterable[Attacker]) -> list[list[float]]:
    """Lengths of the intervals below and above the means."""
    low, high = [], []
    for each in attackers:
        mean = each.psnr.mean or 0.0
        ends = each.psnr.ci95 or (mean, mean)
        low.append(max(0.0, mean - (ends[0] if ends[0] is not None else mean)))
        high.append(max(0.0, (ends[1] if ends[1] is not None else mean) - mean))
    return [low, high]
