"""Lists as tables. Text of others is made printable."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from objectcache_operations.admin.printable import printable

if TYPE_CHECKING:
    from rich.table import Table


def table_of(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> Table:
    """A table without lines; columns named in `right` hold numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        if column in right:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def facts_of(rows: Iterable[tuple[str, str]], name_cells: int) -> Table:
    """A row for each name and what is so, without a head; names are as wide as given at least."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=name_cells)
    for name, fact in rows:
        table.add_row(Text(name, style="bold"), Text(fact))
    return table


def date_text(unix_s: float | None, none: str = "never") -> str:
    """Such as "2026-11-21 18:04", in UTC."""
    return none if unix_s is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(unix_s))
