"""What must hold in a database, whatever was done to it, and whether it does.

Each rule that is broken is a `Violation`, which says in words where, and what
`metis.store.repair` does about it. The original breaks some of the rules in its
ordinary work: it lets blocks overlap, keeps host bits, gives gateways to pods and
rows to addresses outside a block. Where it may have done so, that is a warning:
addresses are given safely beside it, and repair leaves it alone.

This module looks at the file and its tables; blocks and the rows of addresses are
those of `metis.store.block_rules` and `metis.store.row_rules`.

Pure: synchronous functions of a connection; they write nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import apsw

from metis.store import block_rules, row_rules
from metis.store.violations import HEALED, LATEST_MS, Kind, Shape, Violation

MOST_OF_SQLITE = 100
"""Most findings of SQLite's own check that are read: its default."""

_INDEX = re.compile(r"row \d+ missing from index|wrong # of entries in index")
"""What SQLite says of an index that does not match its table: it can be made anew."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What `examine` found.

    Attributes:
      blocks: how many CIDR blocks there are.
      addresses: how many addresses have a row.
      violations: the rules that are broken.
      warnings: what the original may have done, in its ordinary work.
    """

    blocks: int
    addresses: int
    violations: tuple[Violation, ...]
    warnings: tuple[Violation, ...]


def examine(connection: apsw.Connection, now_ms: int | None = None) -> Findings:
    """Look at every rule, in one read transaction unless one has begun already.

    Args:
      connection: to a database of this version, complete or not: the original's
        lacks columns and tables of ours. A reader will do.
      now_ms: the stored time; None where this boot's clock is not fixed yet, and
        nothing can be said about what is cooling or in the future.

    Raises:
      apsw.Error: the file cannot be read at all.
    """
    begun = connection.in_transaction
    if not begun:
        connection.execute("BEGIN")
    try:
        return _examine(connection, now_ms)
    finally:
        if not begun and connection.in_transaction:
            connection.execute("ROLLBACK")


def violations(
    connection: apsw.Connection, now_ms: int | None = None
) -> list[Violation]:
    """The rules that are broken; see `examine`."""
    return list(examine(connection, now_ms).violations)


def _examine(connection: apsw.Connection, now_ms: int | None) -> Findings:
    found = list(_sqlite_findings(connection))
    blocks = addresses = 0
    try:
        shape = Shape.of(connection)
        blocks = _count(connection, "cidr_blocks")
        addresses = _count(connection, "ip_addresses")
        found += _dangling(connection)
        found += block_rules.broken(connection, shape, now_ms)
        found += row_rules.broken(connection, shape, now_ms)
        found += _broken_notes(connection)
    except apsw.CorruptError as error:
        # SQLite has named the damage above, as a rule; the rest cannot be read.
        found.append(
            Violation(Kind.FILE, f"not everything can be read: {error}", HEALED)
        )
    return Findings(
        blocks,
        addresses,
        tuple(one for one in found if not one.is_warning),
        tuple(one for one in found if one.is_warning),
    )


def _count(connection: apsw.Connection, table: str) -> int:
    query = f"SELECT count(*) FROM {table}"  # noqa: S608  # a name of this module
    return cast("int", connection.execute(query).fetchall()[0][0])


def _sqlite_findings(connection: apsw.Connection) -> Iterator[Violation]:
    """What SQLite finds wrong with the file."""
    rows = connection.execute(f"PRAGMA integrity_check({MOST_OF_SQLITE})")
    for (text,) in rows:
        for line in str(text).splitlines():
            if _INDEX.search(line):
                yield Violation(Kind.INDEX, line, "made anew out of its table")
            elif line != "ok" and not line.startswith("*** in database"):
                yield Violation(Kind.FILE, line, HEALED)


def _dangling(connection: apsw.Connection) -> Iterator[Violation]:
    """Rows that refer to rows which do not exist."""
    rows = connection.execute("PRAGMA foreign_key_check")
    for table, row_id, parent, _ in rows:
        words = f"row {row_id} of {table} refers to a row of {parent} that is not there"
        mend = "deleted"
        if table == "ip_addresses":
            query = "SELECT address, container_id FROM ip_addresses WHERE id = ?"
            address, container_id = connection.execute(query, (row_id,)).fetchall()[0]
            words = f"address {address} belongs to a block that is not there"
            if container_id:
                words += f", and container {container_id} has it"
                mend = ""
        yield Violation(Kind.REFERENCE, words, mend, table=table, row_id=row_id or 0)


def _broken_notes(connection: apsw.Connection) -> Iterator[Violation]:
    """What is wrong in the tables of ours, of which an older file lacks some."""
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    for table in {"metis_boot", "metis_caution"} & names:
        count = _count(connection, table)
        if count > 1:
            yield Violation(
                Kind.NOTE,
                f"{table} has {count} rows in place of one",
                "reduced to the last",
                table=table,
            )
    for table, fault, words, mend in _NOTES:
        if table not in names:
            continue
        query = f"SELECT rowid, * FROM {table} WHERE {fault}"  # noqa: S608  # see below
        for row in connection.execute(query):
            yield Violation(
                Kind.NOTE,
                f"row {row[0]} of {table} {words}: {row[1:]}",
                mend,
                table=table,
                row_id=row[0],
            )


_NOTES = (
    (
        "metis_caution",
        f"typeof(until_ms) <> 'integer' OR until_ms NOT BETWEEN 0 AND {LATEST_MS}",
        "has no time",
        "deleted",
    ),
    (
        "metis_former_owners",
        f"container_id = '' OR release_at NOT BETWEEN 0 AND {LATEST_MS}",
        "names nobody, or no time",
        "deleted",
    ),
    (
        "metis_deleted_owners",
        f"container_id = '' OR deleted_at NOT BETWEEN 0 AND {LATEST_MS}",
        "names nobody, or no time",
        "deleted",
    ),
    (
        "metis_history",
        "given_at > ended_at",
        "ended before it began",
        "made to begin when it ended",
    ),
    (
        "metis_history",
        "container_id = '' OR reason = ''"
        f" OR coalesce(given_at, 0) NOT BETWEEN 0 AND {LATEST_MS}"
        f" OR ended_at NOT BETWEEN 0 AND {LATEST_MS}",
        "names nobody, no reason or no time",
        "deleted",
    ),
)
"""(table, condition on a bad row, what is wrong with it, what repair does)."""
