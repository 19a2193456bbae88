"""How a block gets its rows: in batches, inside SQLite, the same for both families.

One row an address would cost seconds for a large block, and more memory than a
node has for an IPv6 one, so a block has rows only as far as they were needed:
`cidr_blocks.seeded_ips` is the offset of the first address without one. A request
may be served from a part of a block (a window), which has its rows ahead of the
others then; `metis_windows` says how many.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from typing import cast

import apsw

from metis.model import CIDRBlock, Family, format_address, parse_address
from metis.store import caution

FIRST_STEP = 256
"""Rows of the first batch: a /24 is whole at once, as the original has it."""

LARGEST_STEP = 4096
"""Rows of the largest batch: about 20 ms, a pause that no caller notices."""

ROTATION = 65_536
"""Rows up to which a block prefers a fresh address to the one free for longest.

With more, pods that come and go would fill the disk with the addresses of a /64
one by one; with so many, an address rests for 18 hours at a pod a second.
"""

_STEP = """
    WITH RECURSIVE step (place) AS (
      SELECT ?1 UNION ALL SELECT place + 1 FROM step WHERE place + 1 < ?2),
    fresh (address) AS (SELECT """
_FRESH = {
    Family.IPV4: _STEP
    + "printf('%d.%d.%d.%d', ?3 + place >> 24, ?3 + place >> 16 & 255,"
    " ?3 + place >> 8 & 255, ?3 + place & 255) FROM step)",
    Family.IPV6: _STEP + "metis_address(?3, place) FROM step)",
}
"""The addresses from place ?1 after ?3 up to ?2, not included. SQLite makes those of
IPv4 by itself, which halves the time of a batch; it has no numbers for IPv6."""

_INSERT = """
    INSERT INTO ip_addresses (address, cidr_block_id, updated_at)
    SELECT address, ?4, ?5 FROM fresh WHERE TRUE
    ON CONFLICT (address, cidr_block_id) DO NOTHING
"""

_INSERT_WITH_KEY = """
    INSERT INTO ip_addresses (address, cidr_block_id, updated_at, sort_key)
    SELECT address, ?4, ?5, metis_key(address) FROM fresh WHERE TRUE
    ON CONFLICT (address, cidr_block_id) DO UPDATE
    SET sort_key = excluded.sort_key, updated_at = excluded.updated_at
    WHERE sort_key IS NULL
"""


def register(connection: apsw.Connection) -> None:
    """Teach a connection the SQL functions that seeding needs."""

    def address(*arguments: object) -> str:
        first, place = arguments
        family, number = _number_of(str(first))
        return format_address(family, number + cast("int", place))

    def key(*arguments: object) -> bytes:
        return key_of(str(arguments[0]))

    connection.create_scalar_function("metis_address", address, 2, deterministic=True)
    connection.create_scalar_function("metis_key", key, 1, deterministic=True)


def key_of(address: str) -> bytes:
    """The sort_key of an address."""
    is_ipv4 = Family.of(address) is Family.IPV4
    return socket.inet_pton(socket.AF_INET if is_ipv4 else socket.AF_INET6, address)


def extend(
    connection: apsw.Connection,
    now_ms: int,
    block_id: int,
    block: CIDRBlock,
    seeded_ips: int | None,
    reserved_offsets: Sequence[int] | None = None,
) -> int | None:
    """Give a block its next batch of rows, reserved ones marked and counted.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      block_id: the row of cidr_blocks.
      block: its range.
      seeded_ips: its column of that name.
      reserved_offsets: those that no pod may get; the block's own by default.

    Returns:
      The new `seeded_ips`, or None when every address has its row already, or
      those without one rest (`metis.store.caution`).
    """
    start = frontier(connection, block_id, block, seeded_ips)
    if start >= block.size or caution.until(connection) > now_ms:
        return None
    stop = min(start + _step(start), block.size)
    _insert(connection, _INSERT, start, stop, block.address_at(0), block_id, now_ms)
    if reserved_offsets is None:
        reserved_offsets = block.reserved_offsets
    for offset in reserved_offsets:
        # Once, as the batch comes; the original may have left out earlier ones.
        if start <= offset < stop or seeded_ips is None:
            reserve(connection, now_ms, block_id, block.address_at(offset))
    connection.execute(
        "UPDATE cidr_blocks SET seeded_ips = ?, updated_at = ? WHERE id = ?",
        (stop, now_ms, block_id),
    )
    return stop


def extend_window(
    connection: apsw.Connection,
    now_ms: int,
    block_id: int,
    first: str,
    last: str,
    limit: float,
) -> bool:
    """Give a part of a block its next batch of rows, each with its sort_key.

    Rows that are there already get the key alone.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      block_id: the row of cidr_blocks.
      first: the first address of the part.
      last: the last one.
      limit: how many addresses of it have rows at the most, within a batch.

    Returns:
      Whether there were more to come; False when every address, or `limit` of
      them, has its row, or those without one rest.
    """
    size = _number_of(last)[1] - _number_of(first)[1] + 1
    start = window_frontier(connection, block_id, first, last)
    if start >= min(size, limit) or caution.until(connection) > now_ms:
        return False
    stop = min(start + _step(start), size)
    _insert(connection, _INSERT_WITH_KEY, start, stop, first, block_id, now_ms)
    connection.execute(
        "INSERT INTO metis_windows VALUES (?, ?, ?, ?)"
        " ON CONFLICT (cidr_block_id, first_key, last_key)"
        " DO UPDATE SET seeded_ips = excluded.seeded_ips",
        (block_id, key_of(first), key_of(last), stop),
    )
    return True


def window_frontier(
    connection: apsw.Connection, block_id: int, first: str, last: str
) -> int:
    """How many addresses of a part of a block, from its first, have their rows."""
    row = connection.execute(
        "SELECT seeded_ips FROM metis_windows"
        " WHERE cidr_block_id = ? AND first_key = ? AND last_key = ?",
        (block_id, key_of(first), key_of(last)),
    ).fetchone()
    return 0 if row is None else int(row[0])


def set_aside(
    connection: apsw.Connection, now_ms: int, block_id: int, address: str
) -> None:
    """Reserve an address though its block has no row for it so far.

    What a pod holds already stays with it until it is released.
    """
    row = connection.execute(
        "SELECT is_allocated FROM ip_addresses WHERE address = ? AND cidr_block_id = ?",
        (address, block_id),
    ).fetchone()
    if row is None:
        connection.execute(
            "INSERT INTO ip_addresses (address, cidr_block_id, updated_at)"
            " VALUES (?, ?, ?)",
            (address, block_id, now_ms),
        )
    if row is None or not row[0]:
        reserve(connection, now_ms, block_id, address)


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
    if not has_row(connection, block_id, block, 0):
        return 0
    low, step = 0, 1
    while low + step < block.size and has_row(connection, block_id, block, low + step):
        low, step = low + step, step * 2
    high = min(low + step, block.size)
    while high - low > 1:
        middle = (low + high) // 2
        if has_row(connection, block_id, block, middle):
            low = middle
        else:
            high = middle
    return high


def keep_frontier(
    connection: apsw.Connection, now_ms: int, block_id: int, block: CIDRBlock
) -> None:
    """Note how far a block of the original has rows, before it gets one ahead.

    Afterwards its rows have gaps, and the end could not be found any more.
    """
    connection.execute(
        "UPDATE cidr_blocks SET seeded_ips = ?, updated_at = ?"
        " WHERE id = ? AND seeded_ips IS NULL",
        (frontier(connection, block_id, block, None), now_ms, block_id),
    )


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


def _insert(
    connection: apsw.Connection,
    statement: str,
    start: int,
    stop: int,
    first: str,
    block_id: int,
    now_ms: int,
) -> None:
    """Make the rows from `start` to `stop`, not included, after a first address."""
    family, number = _number_of(first)
    origin = number if family is Family.IPV4 else first
    connection.execute(
        _FRESH[family] + statement, (start, stop, origin, block_id, now_ms)
    )


def _step(start: int) -> int:
    """How many rows come after the first `start`."""
    return min(max(start, FIRST_STEP), LARGEST_STEP)


@functools.lru_cache(maxsize=64)
def _number_of(address: str) -> tuple[Family, int]:
    family = Family.of(address)
    return family, parse_address(family, address)


def has_row(
    connection: apsw.Connection, block_id: int, block: CIDRBlock, offset: int
) -> bool:
    """Whether the address at an offset has its row."""
    found = connection.execute(
        "SELECT 1 FROM ip_addresses WHERE address = ? AND cidr_block_id = ?",
        (block.address_at(offset), block_id),
    )
    return found.fetchone() is not None
