"""Whether a file is our database, and how it becomes one.

A database has a version (SQLite's `user_version`). This module serves version 1,
that of the original; 0 with nothing in it is a new file. Everything else is
refused before anything is written.

Pure: synchronous functions of a connection and of the times they are told. Runs
in the thread that owns the connection, and reads schema.sql and additions.sql
from the package.
"""

from __future__ import annotations

import importlib.resources
from typing import cast

import apsw

from metis.errors import StoreDamaged, StoreIncompatible
from metis.store import reboot

SCHEMA_VERSION = 1
"""The only `user_version` served: the original's."""

_REQUIRED_COLUMNS = {
    "cidr_blocks": {
        "id", "cidr", "network", "ip_family", "total_ips", "allocated_ips",
        "state", "created_at", "updated_at",
    },
    "ip_addresses": {
        "id", "address", "cidr_block_id", "container_id", "pod_name",
        "pod_namespace", "interface_name", "is_allocated", "release_at",
        "allocated_at", "updated_at",
    },
}  # fmt: skip
"""Columns without which a file of version 1 is somebody else's."""

_ADDED = {
    "metis_ip_addresses_by_release",
    "metis_ip_addresses_by_key",
    "metis_windows",
    "metis_cidr_blocks_by_network",
    "metis_boot",
    "metis_former_owners",
    "metis_former_owners_by_owner",
    "metis_former_owners_by_pod",
    "metis_deleted_owners",
    "metis_history",
    "metis_ip_addresses_of_another",
    "metis_ip_addresses_of_nobody",
    "metis_caution",
}
"""What additions.sql makes."""

_ADDED_COLUMNS = {
    "cidr_blocks": {"seeded_ips": "INTEGER"},
    "ip_addresses": {
        "allocation_id": "TEXT",
        "sort_key": "BLOB",
        "boot_id": "TEXT",
        "netns_path": "TEXT",
        "given_at": "INTEGER",
    },
    "metis_former_owners": {"pod_name": "TEXT", "pod_namespace": "TEXT"},
}
"""Columns of ours, which an older file may lack."""


def check_compatible(connection: apsw.Connection) -> bool:
    """Look whether the database is one that this version may touch.

    Writes nothing. One read transaction, so that a database which another
    process is just making is seen whole or not at all.

    Returns:
      True when it lacks nothing; False when `prepare` has something to make.

    Raises:
      StoreIncompatible: a newer version, or a database of something else.
      StoreDamaged: ours, which no longer says so.
    """
    connection.execute("BEGIN")
    try:
        return _is_complete(connection)
    finally:
        if connection.in_transaction:  # SQLite may have ended it upon an error
            connection.execute("ROLLBACK")


def prepare(
    connection: apsw.Connection,
    *,
    boot_id: str,
    boottime_ms: int,
    walltime_ms: int,
    cooldown_ms: int,
) -> int:
    """Make what the database lacks, and fix this boot's clock.

    To be called inside a write transaction, so that of many processes one does
    it. After a boot what its predecessors gave is free, no cooldown lasts longer
    than the configured one, and nothing was allocated in the future: nobody knows
    how long the machine was off, or what its wall clock said before.

    Args:
      connection: open, with a write transaction begun.
      boot_id: names this boot (`metis.clock.Clock.boot_id`).
      boottime_ms: milliseconds since boot.
      walltime_ms: milliseconds since the Unix epoch.
      cooldown_ms: the configured cooldown in milliseconds.

    Returns:
      What to add to the boot-time clock to get stored time, in milliseconds.

    Raises:
      StoreIncompatible: as `check_compatible`.
    """
    if not _is_complete(connection):
        if _version(connection) == 0:
            connection.execute(_script("schema.sql"))
        for table, column, kind in _missing_columns(connection):
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
        connection.execute(_script("additions.sql"))
    offset_ms = walltime_ms - boottime_ms
    reboot.adopt(connection, boot_id, booted_ms=offset_ms)
    known = clock_offset(connection, boot_id)
    if known is not None:
        return known
    connection.execute("DELETE FROM metis_boot")
    connection.execute("DELETE FROM metis_deleted_owners")  # of a former boot
    # Nobody is left for whose sake addresses rest, and its end is by another clock.
    connection.execute("DELETE FROM metis_caution")
    connection.execute("INSERT INTO metis_boot VALUES (?, ?)", (boot_id, offset_ms))
    connection.execute(  # first: a note counts while it says what its row says
        "UPDATE metis_former_owners SET release_at = ?1 WHERE release_at > ?1"
        " AND release_at IS"
        " (SELECT release_at FROM ip_addresses WHERE id = address_id)",
        (walltime_ms + cooldown_ms,),
    )
    connection.execute(
        "UPDATE ip_addresses SET release_at = ?1, updated_at = ?2 "
        "WHERE is_allocated = FALSE AND release_at > ?1",
        (walltime_ms + cooldown_ms, walltime_ms),
    )
    connection.execute(
        "UPDATE ip_addresses SET allocated_at = ?1, updated_at = ?2 "
        "WHERE is_allocated = TRUE AND allocated_at > ?2",
        (offset_ms, walltime_ms),
    )
    reboot.release(connection, walltime_ms, boot_id)
    return offset_ms


def clock_offset(connection: apsw.Connection, boot_id: str) -> int | None:
    """The clock offset of a boot in milliseconds, None when it is not fixed.

    Raises:
      StoreDamaged: it is no number.
    """
    row = connection.execute(
        "SELECT offset_ms FROM metis_boot WHERE boot_id = ?", (boot_id,)
    ).fetchone()
    if row is None:
        return None
    if not isinstance(row[0], int):
        raise StoreDamaged(f"the offset of its clock is {row[0]!r}: no number")
    return row[0]


def _is_complete(connection: apsw.Connection) -> bool:
    version = _version(connection)
    if version not in (0, SCHEMA_VERSION):
        raise StoreIncompatible(
            f"its schema has version {version}, this metis serves version "
            f"{SCHEMA_VERSION}: use the metis that wrote it; the file was left as it is"
        )
    names = {
        row[0]
        for row in connection.execute(
            "SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite!_%' ESCAPE '!'"
        )
    }
    if version == 0:
        if names and all(
            required <= _columns(connection, table)
            for table, required in _REQUIRED_COLUMNS.items()
        ):
            raise StoreDamaged("it has our tables, and has lost its schema version")
        if names:
            raise StoreIncompatible(
                f"it is a database of something else (it holds {min(names)!r} and "
                "has no schema version): name another path; the file was left as it is"
            )
        return False
    for table, required in _REQUIRED_COLUMNS.items():
        missing = required - _columns(connection, table)
        if missing:
            raise StoreIncompatible(
                "it is a database of something else (version "
                f"{version}, but no {table}.{min(missing)}): name another path; "
                "the file was left as it is"
            )
    return names >= _ADDED and not _missing_columns(connection)


def _missing_columns(connection: apsw.Connection) -> list[tuple[str, str, str]]:
    """(table, column, type) of what the tables that are there lack of ours."""
    return [
        (table, column, kind)
        for table, columns in _ADDED_COLUMNS.items()
        if (present := _columns(connection, table))
        for column, kind in columns.items()
        if column not in present
    ]


def _version(connection: apsw.Connection) -> int:
    return cast("int", connection.pragma("user_version"))


def _columns(connection: apsw.Connection, table: str) -> set[str]:
    rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
    return {str(row[0]) for row in rows}


def _script(name: str) -> str:
    return (importlib.resources.files("metis.store") / name).read_text("utf-8")
