"""The look through a whole database, when a daemon opens it.

What is wrong with the file is damage (`metis.store.healing`); what blocks count of
their rows is corrected.

Pure: synchronous functions of a connection. Logs what it corrects.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import apsw

log = logging.getLogger("metis.store")

_ALL_RULES = (
    "UPDATE cidr_blocks SET updated_at = 0",
    "UPDATE ip_addresses SET container_id = '', updated_at = 0",
    "DELETE FROM cidr_blocks",
    "DELETE FROM ip_addresses",
    "INSERT INTO ip_addresses DEFAULT VALUES",
    "INSERT INTO metis_former_owners DEFAULT VALUES",
    "INSERT INTO metis_windows DEFAULT VALUES",
)
"""What SQLite compiles all triggers and references for. It keeps them as text, which
its check of the file does not look at, and without them no row can be changed."""

_TEXTS = {
    "sqlite_schema": "name, sql",
    "cidr_blocks": "cidr, network, ip_family, state",
    "ip_addresses": (
        "address, container_id, interface_name, pod_name, pod_namespace,"
        " allocation_id, boot_id, netns_path"
    ),
    "metis_boot": "boot_id",
    "metis_deleted_owners": "network, container_id, interface_name",
    "metis_former_owners": "container_id, interface_name, pod_name, pod_namespace",
    "metis_history": (
        "network, address, container_id, interface_name, pod_name, pod_namespace,"
        " reason"
    ),
}
"""Columns of text."""

_TAKEN = """min(cidr_block_id), max(cidr_block_id),
count(*) FILTER (WHERE is_allocated = TRUE)"""
"""What is counted of rows of addresses while their texts are read."""

_ROWS_AT_ONCE = 1024
"""Rows that are read in one piece. Row by row takes Python longer than SQLite, and all
at once needs memory that the kernel has to clear: 16 MB for 100,000 addresses."""

_FIRST_ROWID, _LAST_ROWID = -(2**63), 2**63 - 1


def examine(writer: apsw.Connection, now_ms: int, path: str) -> str:
    """Look through a whole database, and correct its counters.

    SQLite's own check of every page, row and index, and what that leaves out: 0.13 s
    for 100,000 addresses, a quarter of it for the latter.

    Args:
      writer: open on it, not in a transaction.
      now_ms: the stored time.
      path: the database.

    Returns:
      What is wrong with it, in words; empty for nothing.
    """
    problems = [
        str(line)
        for (line,) in writer.execute("PRAGMA integrity_check(3)")
        if line != "ok"
    ]
    if problems:
        return "; ".join(" ".join(problem.split()) for problem in problems)
    try:
        for statement in _ALL_RULES:
            writer.execute(f"EXPLAIN {statement}").fetchall()
    except apsw.SQLError as error:
        return f"its triggers or references cannot be run: {error}"
    taken: Counter[int] = Counter()
    with writer:  # one snapshot
        for table, columns in _TEXTS.items():
            try:
                _read(writer, table, columns, taken)
            except UnicodeDecodeError as error:
                return f"a text in {table} is none: {error.reason}"
        counters: Any = writer.execute("SELECT id, allocated_ips FROM cidr_blocks")
        are_right = all(count == taken[block_id] for block_id, count in counters)
    if not are_right:
        _correct_counters(writer, now_ms, path)
    return ""


def _read(
    connection: apsw.Connection, table: str, columns: str, taken: Counter[int]
) -> None:
    """Read every text of a table; of addresses, count the allocated ones by block.

    Raises:
      UnicodeDecodeError: a text is none.
    """
    counted = _TAKEN if table == "ip_addresses" else "NULL, NULL, 0"
    # SQLite does not look at what its texts are; apsw does, when it hands them over.
    # The spaces keep apart what would be a whole character together.
    query = (
        f"SELECT {counted}, group_concat(concat_ws(' ', {columns}), ' ')"  # noqa: S608  # names of this module
        f" FROM {table} WHERE rowid BETWEEN ? AND ?"
    )
    for piece in _pieces(connection, table):
        rows: Any = connection.execute(query, piece)
        for lowest, highest, count, _ in rows:
            if lowest != highest:
                taken.update(_taken_by_block(connection, piece))
            elif lowest is not None:
                taken[lowest] += count


def _pieces(connection: apsw.Connection, table: str) -> Iterator[tuple[int, int]]:
    """First and last rowids that divide a table into pieces."""
    query = f"SELECT rowid FROM {table} WHERE rowid >= ? ORDER BY rowid"  # noqa: S608  # names of this module
    first = _FIRST_ROWID
    while first <= _LAST_ROWID:
        rows = connection.execute(
            f"{query} LIMIT 1 OFFSET ?", (first, _ROWS_AT_ONCE - 1)
        ).fetchall()
        last = cast("int", rows[0][0]) if rows else _LAST_ROWID
        yield first, last
        first = last + 1


def _taken_by_block(
    connection: apsw.Connection, piece: tuple[int, int]
) -> dict[int, int]:
    """What `_TAKEN` counts, where the rows are of several blocks."""
    rows: Any = connection.execute(
        "SELECT cidr_block_id, count(*) FROM ip_addresses"
        " WHERE rowid BETWEEN ? AND ? AND is_allocated = TRUE GROUP BY 1",
        piece,
    )
    return dict(rows)


def _correct_counters(writer: apsw.Connection, now_ms: int, path: str) -> None:
    """Correct what blocks count, by the rows that there are now."""
    # Here, because hardly ever anything is wrong with them.
    from metis.store import rebuilding

    writer.execute("BEGIN IMMEDIATE")
    wrong = rebuilding.recount(writer, now_ms)
    writer.execute("COMMIT")
    for text in wrong:
        log.error("database %s was corrected: %s", path, text)
