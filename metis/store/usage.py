"""How the addresses of a network are spent, and when the next one is free.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

import apsw

from metis.errors import PoolExhausted
from metis.model import Family, IPUsage
from metis.store import seeding
from metis.store.blocks import Block, read_blocks, ready


def usage(
    connection: apsw.Connection,
    now_ms: int,
    network: str,
    family: Family,
    position: int = 1,
) -> IPUsage:
    """How the addresses of a family are spent on a network.

    Args:
      connection: a reader will do.
      now_ms: the stored time.
      network: name of the network.
      family: the family.
      position: which address that becomes free `next_free_ms` is to tell: 1 the
        next one, 2 the one after it. Addresses that are free now come first, as
        free at `now_ms`. Only Ready blocks count for it.

    Returns:
      The counts over all blocks of the network, and the time.
    """
    blocks = read_blocks(connection, network, family)
    owned, cooling, reserved = _spent(connection, now_ms, blocks)
    ends: list[int] = []
    for block in ready(blocks):
        rows = connection.execute(
            "SELECT max(coalesce(release_at, 0), ?) FROM ip_addresses"
            " WHERE cidr_block_id = ? AND is_allocated = FALSE"
            " ORDER BY release_at, id LIMIT ?",
            (now_ms, block.id, position),
        )
        ends.extend(end for (end,) in rows)
        start = seeding.frontier(connection, block.id, block.range, block.seeded_ips)
        reserved_above = sum(o >= start for o in block.range.reserved_offsets)
        unseeded = block.range.size - start - reserved_above
        ends.extend([now_ms] * min(unseeded, position))
    ends.sort()
    next_free_ms = ends[position - 1] if len(ends) >= position else None
    return IPUsage(owned, cooling, reserved, next_free_ms)


def shortage(
    connection: apsw.Connection, now_ms: int, network: str, family: Family
) -> PoolExhausted:
    """What to tell a caller for whom nothing was free at `now_ms`.

    The next free time lies after `now_ms`: what looks free now is an address that
    may not be given, and no reason to try again.
    """
    blocks = read_blocks(connection, network, family)
    owned, cooling, reserved = _spent(connection, now_ms, blocks)
    ends = [
        _number(
            connection,
            "SELECT min(release_at) FROM ip_addresses WHERE cidr_block_id = ?"
            " AND is_allocated = FALSE AND release_at > ?",
            block.id,
            now_ms,
        )
        for block in ready(blocks)
    ]
    next_free_ms = min((end for end in ends if end is not None), default=None)
    return PoolExhausted(
        network,
        family,
        owned=owned,
        cooling=cooling,
        reserved=reserved,
        next_free_ms=next_free_ms,
        wait_ms=None if next_free_ms is None else next_free_ms - now_ms,
    )


def _spent(
    connection: apsw.Connection, now_ms: int, blocks: list[Block]
) -> tuple[int, int, int]:
    """(owned, cooling, reserved) addresses of blocks; only Ready ones cool."""
    allocated = sum(block.allocated_ips for block in blocks)
    reserved = sum(
        _number(
            connection,
            "SELECT count(*) FROM ip_addresses WHERE container_id = ''"
            " AND is_allocated = TRUE AND cidr_block_id = ?",
            block.id,
        )
        or 0
        for block in blocks
    )
    cooling = sum(
        _number(
            connection,
            "SELECT count(*) FROM ip_addresses WHERE cidr_block_id = ?"
            " AND is_allocated = FALSE AND release_at > ?",
            block.id,
            now_ms,
        )
        or 0
        for block in ready(blocks)
    )
    return max(allocated - reserved, 0), cooling, reserved


def _number(connection: apsw.Connection, query: str, *values: int) -> int | None:
    (value,) = connection.execute(query, values).fetchall()[0]
    return None if value is None else int(value)
