"""Records of deleted owners, against calls that arrive after their own end.

A runtime that gives up on an ADD sends the DEL at once, and the DEL may overtake
the ADD. So a DEL leaves a record, and an ADD that began before it, or in the
same millisecond, is refused; also after a restart, and whichever process gets
either of them. A record bars nothing that begins later.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

import apsw

from metis.errors import OwnerDeleted
from metis.model import Owner

RECORD_MS = 15 * 60 * 1000
"""How long a record is kept, in milliseconds. Runtimes give up on an ADD within 4
minutes, and nothing that they started then runs for three times as long."""

MOST_RECORDS = 65_536
"""Most records: 70 DELs a second for RECORD_MS, and some 10 MiB."""

_PRUNED_EVERY = 16
_PRUNED_AT_ONCE = 32
"""Of so many new records one looks at so many of the oldest: two each, so that their
number shrinks."""


def record(
    connection: apsw.Connection, now_ms: int, owner: Owner, deleted_at: int
) -> None:
    """Note that an owner was deleted; records that are too old make room.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      owner: who is gone.
      deleted_at: when the DEL arrived, in stored time. A later one that is noted
        already stands.
    """
    key = (owner.network, owner.container_id, owner.interface_name)
    connection.execute(
        "INSERT OR REPLACE INTO metis_deleted_owners"
        " (network, container_id, interface_name, deleted_at)"
        " VALUES (?1, ?2, ?3, max(?4, coalesce((SELECT deleted_at"
        " FROM metis_deleted_owners WHERE network = ?1 AND container_id = ?2"
        " AND interface_name = ?3), 0)))",
        (*key, deleted_at),
    )
    if (latest := connection.last_insert_rowid()) % _PRUNED_EVERY == 0:
        connection.execute(
            "DELETE FROM metis_deleted_owners WHERE id IN"
            " (SELECT id FROM metis_deleted_owners ORDER BY id LIMIT ?)"
            " AND (deleted_at < ? OR id <= ?)",
            (_PRUNED_AT_ONCE, now_ms - RECORD_MS, latest - MOST_RECORDS),
        )


def check(connection: apsw.Connection, owner: Owner, started_ms: int) -> None:
    """Refuse a call that began before its owner was deleted.

    Args:
      connection: a reader will do.
      owner: who calls.
      started_ms: when the call began, in stored time.

    Raises:
      OwnerDeleted: it did.
    """
    row = connection.execute(
        "SELECT deleted_at FROM metis_deleted_owners"
        " WHERE container_id = ? AND interface_name = ? AND network = ?",
        (owner.container_id, owner.interface_name, owner.network),
    ).fetchone()
    if row is not None and started_ms <= row[0]:
        raise OwnerDeleted(
            f"container {owner.container_id!r} was deleted from network "
            f"{owner.network!r} after this call for {owner.interface_name!r} began: "
            "a new call is served"
        )
