"""A page of the documentation, laid out for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markdown import Markdown, TableElement
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


class WholeTable(TableElement):
    """A table, of which no word is cut: where the columns are too narrow, each row is a block of its own."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            fits = not isinstance(table, Table) or _share_out(table, console, options)
            yield table if fits else Group(*self._blocks())

    def _blocks(self) -> Iterator[Padding]:
        """Of each row: its first cell, and below it the other cells beside the heads of their columns."""
        heads = [cell.content for cell in self.header.row.cells] if self.header and self.header.row else []
        for row in self.body.rows if self.body else ():
            yield Padding(_block(heads, [cell.content for cell in row.cells]), (1, 0, 0, 1))


class Page(Markdown):
    """A page in Markdown whose tables are whole at every width."""

    elements = {**Markdown.elements, "table_open": WholeTable}  # noqa: RUF012 (as in the class above)


def _share_out(table: Table, console: Console, options: ConsoleOptions) -> bool:
    """Give each column the width of its longest word and a share of the rest; False if that is too wide."""
    wide = options.update(width=10**4)
    found = [
        [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)] for column in table.columns
    ]
    least = [max(each.minimum for each in cells) for cells in found]
    more = [max(each.maximum for each in cells) - low for cells, low in zip(found, least, strict=True)]
    free = options.max_width - Measurement.get(console, wide, table).minimum
    if 0 <= free < sum(more):
        for column, low, rest in zip(table.columns, least, more, strict=True):
            column.width = low + rest * free // sum(more)
    return free >= 0


def _block(heads: Sequence[Text], cells: Sequence[Text]) -> Group:
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(overflow="fold", style="markdown.table.header")
    rows.add_column(overflow="fold")
    for head, cell in zip(heads[1:], cells[1:], strict=False):
        if cell.plain.strip():
            rows.add_row(head, _left(cell))
    title = _left(cells[0])
    title.stylize("bold")
    return Group(title, Padding(rows, (0, 0, 0, 2)))


def _left(cell: Text) -> Text:
    text = cell.copy()
    text.justify = "left"
    return text
