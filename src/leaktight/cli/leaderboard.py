"""`leaktight leaderboard`, and its commands `add`, `updates` and `submit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from leaktight.cli.help import Command, Group

if TYPE_CHECKING:
    from click import Context

FOLDER = Path("leaderboard")
PAGE = "page"
HELP = """The leaderboard of defenses: check its cards and write its page, or add to it.

Example: leaktight leaderboard leaderboard --out leaderboard.html
"""

CardFile: TypeAlias = Annotated[Path, typer.Argument(metavar="CARD", help="A card of a leaderboard, a JSON file.")]
To: TypeAlias = Annotated[Path, typer.Option("--to", help="The folder of the leaderboard.")]


class WithPage(Group):
    """A group whose command `page` may be left out: `leaktight leaderboard [FOLDER] [--out FILE]`."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [PAGE, *args])


app = typer.Typer(cls=WithPage, help=HELP)


@app.command(PAGE, cls=Command)
def page(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The folder of the cards.")] = FOLDER,
    out: Annotated[Path, typer.Option(help="The file of the page.")] = Path("leaderboard.html"),
) -> None:
    """Check every card and write the page; the command that runs if none is named.

    Example: leaktight leaderboard page leaderboard --out leaderboard.html
    """
    from leaktight.core.files import write_atomically
    from leaktight.report.board import render_leaderboard
    from leaktight.results.card import read_cards

    cards = read_cards(folder)
    write_atomically(out, render_leaderboard(cards))
    typer.echo(f"{len(cards)} cards are as they were written; leaderboard: {out}")


@app.command(cls=Command)
def add(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished audits or trade-offs.")],
    to: To = FOLDER,
) -> None:
    """Make or update cards from finished runs whose digests verify; the closest guesses are kept.

    Example: leaktight leaderboard add runs/audit-001
    """
    from leaktight.api.leaderboard import add as add_runs
    from leaktight.report.words import counted

    files = add_runs(runs, to)
    typer.echo(f"{counted(len(set(files)), 'card')} written to {to}")


@app.command(cls=Command)
def updates(
    card: CardFile,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("updates"),
) -> None:
    """Write fresh updates of a card's victims, as an attacker sees them.

    Example: leaktight leaderboard updates leaderboard/CARD.json --out updates
    """
    from leaktight.api.leaderboard import updates as write_updates

    folders = write_updates(card, out)
    typer.echo(f"{len(folders)} updates written to {out}")


@app.command(cls=Command)
def submit(
    card: CardFile,
    guesses: Annotated[Path, typer.Argument(metavar="GUESSES", help="A .safetensors, .npz or .pt file of images.")],
    attack: Annotated[str, typer.Option(help="The name of the attack.")],
    by: Annotated[str, typer.Option(help="Who made the guesses.")],
    code: Annotated[str, typer.Option(help="Where the code of the attack is.")] = "",
    adaptive: Annotated[bool, typer.Option("--adaptive/--naive", help="Whether the attack knows the defense.")] = True,
) -> None:
    """Score guesses for the victims of a card, and add them to it.

    Example: leaktight leaderboard submit leaderboard/CARD.json g.npz --attack mine --by me
    """
    from leaktight.api.leaderboard import submit as submit_guesses

    found = submit_guesses(card, guesses, attack=attack, by=by, code=code, adaptive=adaptive)
    mine = next(each for each in found.attackers if (each.attack, each.by) == (attack, by))
    beats = "the closest of the card" if mine.worst == found.worst else f"the closest of the card has {found.worst} dB"
    typer.echo(f"closest guess {mine.worst} dB, {mine.reconstructed} of {mine.victims} victims reconstructed; {beats}")
