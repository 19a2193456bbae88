"""The look through a whole database, when a daemon opens it.

What is wrong with the file is damage (`metis.store.healing`); what blocks count of
their rows is corrected.

Pure: synchronous functions of a connection. Logs what it corrects.
"""

from __future__ import annotations

import logging

import apsw

from metis.store import rebuilding

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


def examine(writer: apsw.Connection, now_ms: int, path: str) -> str:
    """Look through a whole database, and correct its counters.

    SQLite's own check of every page, row and index, and what that leaves out: 0.2 s
    for 100,000 addresses.

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
    for table, columns in _TEXTS.items():
        # All in one piece, because SQLite does not look at what its texts are.
        query = f"SELECT group_concat(concat({columns}), '') FROM {table}"  # noqa: S608  # names of this module
        try:
            writer.execute(query).fetchall()
        except UnicodeDecodeError as error:
            return f"a text in {table} is none: {error.reason}"
    writer.execute("BEGIN IMMEDIATE")
    wrong = rebuilding.recount(writer, now_ms)
    writer.execute("COMMIT")
    for text in wrong:
        log.error("database %s was corrected: %s", path, text)
    return ""
