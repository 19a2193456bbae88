"""How the addresses of a network are spent, and when the next one is free.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import apsw

from metis.errors import PoolExhausted
from metis.model import Family, IPUsage, Wanted
from metis.ranges import AddressRange, AddressSet
from metis.store import caution, seeding
from metis.store.blocks import Block, blocks_of, read_blocks, ready

_IN_WINDOW = " AND sort_key IS NOT NULL AND sort_key >= ? AND sort_key <= ?"
"""A condition on the rows of a window, in the terms of its index."""

_NEXT_END = (
    "SELECT min(release_at) FROM ip_addresses"
    " WHERE cidr_block_id = ? AND is_allocated = FALSE AND release_at > ?"
)

_FREE_ROWS = (
    "SELECT count(*) FROM ip_addresses WHERE cidr_block_id = ? AND is_allocated = FALSE"
)

_FREE = (
    "SELECT max(coalesce(release_at, 0), ?), address FROM ip_addresses"
    " WHERE cidr_block_id = ? AND is_allocated = FALSE"
)
_FREE_ENDS = _FREE + " ORDER BY release_at, id"
_FREE_ENDS_OF_WINDOW = _FREE + _IN_WINDOW + " ORDER BY release_at, sort_key"


def usage(
    connection: apsw.Connection,
    now_ms: int,
    network: str,
    family: Family,
    position: int = 1,
    ranges: AddressSet | None = None,
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
      ranges: where the addresses are to come from, in place of all blocks.

    Returns:
      The counts over all blocks of the network, or those of the ranges, and the
      time, which is exactly that of the ranges.
    """
    blocks = read_blocks(connection, network, family)
    rest_ends = max(caution.until(connection), now_ms)
    ends: list[int] = []
    if ranges is None:
        for block in ready(blocks):
            ends += _whole_ends(
                connection,
                now_ms,
                rest_ends,
                block,
                position,
                block.range.reserved_offsets,
            )
    else:
        for one in ranges.alternatives:
            ends += _range_ends(connection, now_ms, rest_ends, blocks, one, position)
        blocks = blocks_of(blocks, ranges)
    ends.sort()
    if len(ends) >= position:
        next_free_ms: int | None = ends[position - 1]
    else:  # while it rests, a network may have no block yet, and gets it then
        next_free_ms = rest_ends if rest_ends > now_ms else None
    return IPUsage(*_spent(connection, now_ms, blocks), next_free_ms)


def capacity(
    connection: apsw.Connection, now_ms: int, network: str
) -> dict[Family, IPUsage]:
    """How the addresses of every family are spent that a network has blocks of."""
    return {
        family: usage(connection, now_ms, network, family)
        for family in Family
        if read_blocks(connection, network, family)
    }


def shortage(
    connection: apsw.Connection, now_ms: int, network: str, want: Wanted, place: int
) -> PoolExhausted:
    """What to tell a caller for whom nothing was free at `now_ms`.

    The next free time lies after `now_ms`: what looks free now is an address that
    may not be given, and no reason to try again.

    Args:
      connection: as for `usage`, like the next two.
      now_ms: the stored time.
      network: name of the network.
      want: what could not be given.
      place: where it stands in the request.
    """
    blocks = read_blocks(connection, network, want.family)
    if want.ranges is not None:
        blocks = blocks_of(blocks, want.ranges)
    owned, cooling, reserved = _spent(connection, now_ms, blocks)
    ends = [
        end
        for block in ready(blocks)
        for condition, values in _parts(block, want.ranges)
        if (
            end := _number(
                connection,
                _NEXT_END + condition,
                block.id,
                now_ms,
                *values,
            )
        )
        is not None
    ]
    rest_ends = caution.until(connection)
    if rest_ends > now_ms:
        ends.append(rest_ends)
    next_free_ms = min(ends, default=None)
    return PoolExhausted(
        network,
        want.family,
        owned=owned,
        cooling=cooling,
        reserved=reserved,
        next_free_ms=next_free_ms,
        wait_ms=None if next_free_ms is None else next_free_ms - now_ms,
        place=place,
        ranges="" if want.ranges is None else str(want.ranges),
    )


def _whole_ends(
    connection: apsw.Connection,
    now_ms: int,
    rest_ends: int,
    block: Block,
    position: int,
    reserved: Sequence[int],
) -> list[int]:
    """When the first `position` free addresses of a whole block are free.

    What has no row yet is free at `rest_ends`, which is now as a rule.
    """
    ends = _free_ends(connection, now_ms, block, position, reserved)
    start = seeding.frontier(connection, block.id, block.range, block.seeded_ips)
    if start >= block.range.size:
        return ends
    free = _number(connection, _FREE_ROWS, block.id) or 0
    without_row = sum(
        not seeding.has_row(connection, block.id, block.range, offset)
        for offset in reserved
    )
    # Rows above `start` are those of windows, or were asked for by name.
    unseeded = block.range.size - block.allocated_ips - free - without_row
    return ends + [rest_ends] * min(max(unseeded, 0), position)


def _range_ends(
    connection: apsw.Connection,
    now_ms: int,
    rest_ends: int,
    blocks: list[Block],
    one: AddressRange,
    position: int,
) -> list[int]:
    """The same for a range, of which the network may have no block yet.

    What a part of a block has no row for counts as free now, though somebody who
    was served from the whole block may have it: the next attempt finds out.
    """
    block = next((block for block in blocks if block.range == one.block), None)
    if block is None:
        size = sum(last - first + 1 for first, last in one.windows)
        return [rest_ends] * min(size, position)
    if not ready([block]):
        return []
    if one.is_whole:
        return _whole_ends(
            connection, now_ms, rest_ends, block, position, one.reserved_offsets
        )
    ends = []
    for first, last in one.windows:
        keys = one.block.address_at(first), one.block.address_at(last)
        ends += _free_ends(connection, now_ms, block, position, (), *keys)
        seeded = seeding.window_frontier(connection, block.id, *keys)
        ends += [rest_ends] * min(last - first + 1 - seeded, position)
    return ends


def _free_ends(
    connection: apsw.Connection,
    now_ms: int,
    block: Block,
    position: int,
    reserved: Sequence[int],
    *window: str,
) -> list[int]:
    """When the first `position` rows of a block, or a window of it, are free.

    The original leaves rows free that no pod gets: reserved or outside the block.
    """
    rows = connection.execute(
        _FREE_ENDS_OF_WINDOW if window else _FREE_ENDS,
        (now_ms, block.id, *map(seeding.key_of, window)),
    )
    ends = (
        end
        for end, address in rows
        if block.range.offset_of(address) not in (None, *reserved)
    )
    return list(itertools.islice(ends, position))


def _parts(
    block: Block, ranges: AddressSet | None
) -> Iterator[tuple[str, tuple[bytes, ...]]]:
    """The parts of a block that are asked about: a condition and its values."""
    if ranges is None:
        yield "", ()
        return
    for one in ranges.alternatives:
        if one.block != block.range:
            continue
        if one.is_whole:
            yield "", ()
            return
        for window in one.windows:
            first, last = map(one.block.address_at, window)
            yield _IN_WINDOW, (seeding.key_of(first), seeding.key_of(last))


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


def _number(
    connection: apsw.Connection, query: str, *values: int | bytes
) -> int | None:
    (value,) = connection.execute(query, values).fetchall()[0]
    return None if value is None else int(value)
