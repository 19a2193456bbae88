"""A time in which nothing is given that might be somebody's without our knowing.

When records were lost, an address without an owner may be in use all the same. It
rests for one cooldown, as if it had just been released: who really has it is found
meanwhile, or its traffic has ended. That counts for addresses without a row, too;
`metis.store.seeding` looks here when it makes one.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

import apsw


def begin(connection: apsw.Connection, now_ms: int, until_ms: int) -> None:
    """Let no address without an owner be given before a time.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      until_ms: the stored time until which they rest. Where a longer rest has
        begun already, that one stands.
    """
    until_ms = max(until_ms, until(connection))
    connection.execute("DELETE FROM metis_caution")
    connection.execute("INSERT INTO metis_caution VALUES (?)", (until_ms,))
    connection.execute(
        "UPDATE ip_addresses SET release_at = ?1, updated_at = ?2"
        " WHERE is_allocated = FALSE AND coalesce(release_at, 0) < ?1"
        # Such a block gives nothing, and is gone once nothing of it cools.
        " AND cidr_block_id NOT IN"
        " (SELECT id FROM cidr_blocks WHERE state = 'Deleting')",
        (until_ms, now_ms),
    )


def until(connection: apsw.Connection) -> int:
    """The stored time until which addresses without an owner rest; 0 for never."""
    row = connection.execute(  # damage may have brought the rows of another table here
        "SELECT max(until_ms) FROM metis_caution WHERE typeof(until_ms) = 'integer'"
    ).fetchone()
    return 0 if row is None or row[0] is None else int(row[0])
