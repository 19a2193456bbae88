"""How a block gets its rows: in batches, inside SQLite, the same for both families.

One row an address would cost seconds for a large block, and more memory than a
node has for an IPv6 one, so a block has rows only as far as they were needed:
`cidr_blocks.seeded_ips` is the offset of the first address without one.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

from typing import cast

import apsw

from metis.model import CIDRBlock

FIRST_STEP = 256
"""Rows of the first batch: a /24 is whole at once, as the original has it."""

LARGEST_STEP = 4096
"""Rows of the largest batch: about 20 ms, a pause that no caller notices."""

ROTATION = 65_536
"""Rows up to which a block prefers a fresh address to the one free for longest.

With more, pods that come and go would fill the disk with the addresses of a /64
one by one; with so many, an address rests for 18 hours at a pod a second.
"""

_INSERT = """
    WITH RECURSIVE step (place) AS (
      SELECT ?1 UNION ALL SELECT place + 1 FROM step WHERE place + 1 < ?2)
    INSERT INTO ip_addresses (address, cidr_block_id, updated_at)
    SELECT metis_address(?3, place), ?4, ?5 FROM step WHERE TRUE
    ON CONFLICT (address, cidr_block_id) DO NOTHING
"""


def register(connection: apsw.Connection) -> None:
    """Teach a connection the SQL function that seeding needs."""

    def address(*arguments: object) -> str:
        cidr, offset = arguments
        return CIDRBlock.parse(str(cidr)).address_at(cast("int", offset))

    connection.create_scalar_function("metis_address", address, 2, deterministic=True)


def extend(
    connection: apsw.Connection,
    now_ms: int,
    block_id: int,
    block: CIDRBlock,
    seeded_ips: int | None,
) -> int | None:
    """Give a block its next batch of rows, reserved ones marked and counted.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      block_id: the row of cidr_blocks.
      block: its range.
      seeded_ips: its column of that name.

    Returns:
      The new `seeded_ips`, or None when every address has its row already.
    """
    start = frontier(connection, block_id, block, seeded_ips)
    if start >= block.size:
        return None
    stop = min(start + min(max(start, FIRST_STEP), LARGEST_STEP), block.size)
    connection.execute(_INSERT, (start, stop, block.cidr, block_id, now_ms))
    for offset in block.reserved_offsets:
        reserve(connection, now_ms, block_id, block.address_at(offset))
    connection.execute(
        "UPDATE cidr_blocks SET seeded_ips = ?, updated_at = ? WHERE id = ?",
        (stop, now_ms, block_id),
    )
    return stop


def frontier(
    connection: apsw.Connection,
    block_id: int,
    block: CIDRBlock,
    seeded_ips: int | None,
) -> int:
    """The offset of the first address of a block that has no row.

    That is `seeded_ips`, although single addresses above it have rows when they
    were asked for by name. The original does not keep the column: where it alone
    has seeded, upwards and without gaps, the end is searched in O(log n) look-ups.
    """
    if seeded_ips is not None:
        return seeded_ips
    if not _has_row(connection, block_id, block, 0):
        return 0
    low, step = 0, 1
    while low + step < block.size and _has_row(connection, block_id, block, low + step):
        low, step = low + step, step * 2
    high = min(low + step, block.size)
    while high - low > 1:
        middle = (low + high) // 2
        if _has_row(connection, block_id, block, middle):
            low = middle
        else:
            high = middle
    return high


def reserve(
    connection: apsw.Connection, now_ms: int, block_id: int, address: str
) -> None:
    """Set an address aside that no pod may get, if its row is there and free."""
    connection.execute(
        "UPDATE ip_addresses SET is_allocated = TRUE, container_id = '', "
        "release_at = NULL, updated_at = ? "
        "WHERE address = ? AND cidr_block_id = ? AND is_allocated = FALSE",
        (now_ms, address, block_id),
    )
    count(connection, now_ms, block_id, connection.changes())


def count(
    connection: apsw.Connection, now_ms: int, block_id: int, difference: int
) -> None:
    """Add to the number of allocated rows that a block keeps; never below 0."""
    connection.execute(
        "UPDATE cidr_blocks SET allocated_ips = max(allocated_ips + ?, 0), "
        "updated_at = ? WHERE id = ?",
        (difference, now_ms, block_id),
    )


def _has_row(
    connection: apsw.Connection, block_id: int, block: CIDRBlock, offset: int
) -> bool:
    found = connection.execute(
        "SELECT 1 FROM ip_addresses WHERE address = ? AND cidr_block_id = ?",
        (block.address_at(offset), block_id),
    )
    return found.fetchone() is not None
