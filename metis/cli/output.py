"""Tables on stdout, page by page: aligned for people, or JSON for programs."""

from __future__ import annotations

import datetime
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import click

COLUMN_GAP = "   "

NULL = "NULL"
"""What stands where nothing is set."""

output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="A table for people, or a JSON array of objects.",
)


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows of a table: text all through, as many values as headers."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


async def print_pages(pages: AsyncIterator[Page], output: str) -> None:
    """Print pages of one table as they come.

    Args:
      pages: at least one, which may be empty. All have the same headers.
      output: "table" or "json", as `output_option` gives it.
    """
    if output == "json":
        await _print_json(pages)
    else:
        await _print_table(pages)


def shown_time(ms: int) -> str:
    """Milliseconds since the Unix epoch in RFC 3339; NULL for 0."""
    if ms == 0:
        return NULL
    moment = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def _print_json(pages: AsyncIterator[Page]) -> None:
    separator = "["
    async for page in pages:
        for row in page.rows:
            record = dict(zip(page.headers, row, strict=True))
            click.echo(f"{separator}\n  {json.dumps(record)}", nl=False)
            separator = ","
    click.echo("[]" if separator == "[" else "\n]")


async def _print_table(pages: AsyncIterator[Page]) -> None:
    """Print aligned columns; a later page may widen a column but never narrow it."""
    widths: list[int] = []
    async for page in pages:
        lines = [list(row) for row in page.rows]
        if not widths:
            lines.insert(0, [header.upper() for header in page.headers])
            widths = [0] * len(page.headers)
        for line in lines:
            widths = [max(w, len(cell)) for w, cell in zip(widths, line, strict=True)]
        for line in lines:
            cells = (cell.ljust(w) for cell, w in zip(line, widths, strict=True))
            click.echo(COLUMN_GAP.join(cells).rstrip())
