"""Which address, and for whom: the rules of allocation as SQL.

Every function is synchronous, takes a connection and the stored time in
milliseconds, and runs inside a transaction that the caller has begun, so its
writes stand or fall as one. Pure: no clock, no thread, no commit.

A row of `ip_addresses` is in one of four states:

  never used  is_allocated FALSE, release_at NULL
  cooling     is_allocated FALSE, release_at in the future; free once it passed
  owned       is_allocated TRUE, container_id names the owner
  reserved    is_allocated TRUE, container_id empty

and `cidr_blocks.allocated_ips` counts the last two. A block gets its rows in
batches, from the network address upwards, when the rows it has do not suffice
(see `metis.store.seeding`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import apsw

from metis.errors import InvalidRequest, PoolExhausted
from metis.model import (
    Allocation,
    CIDRBlock,
    Family,
    IPUsage,
    Owner,
    Pod,
    Wanted,
)
from metis.store import seeding

READY = "Ready"
"""The state in which a block gives addresses; Draining and Deleting do not."""

_FIRST_FREE = """
    SELECT id, address, release_at FROM ip_addresses AS a
    WHERE cidr_block_id = ?1 AND is_allocated = FALSE
    ORDER BY release_at, id LIMIT 1
"""
"""The head of metis_ip_addresses_by_release: never used, else free for longest."""

_FIRST_FREE_OF_OVERLAPPING = """
    SELECT id, address, release_at FROM ip_addresses AS a
    WHERE cidr_block_id = ?1 AND is_allocated = FALSE
      AND NOT EXISTS (
        SELECT 1 FROM ip_addresses AS other
        JOIN cidr_blocks AS block ON block.id = other.cidr_block_id
        WHERE other.address = a.address AND other.cidr_block_id <> ?1
          AND block.network = ?2
          AND (other.container_id <> '' OR other.release_at > ?3))
    ORDER BY release_at, id LIMIT 1
"""
"""The same where the original let blocks overlap: an address that somebody holds
in another block of the network, or that cools there, is passed over."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A row of cidr_blocks whose range could be read."""

    id: int
    range: CIDRBlock
    state: str
    allocated_ips: int
    seeded_ips: int | None


def held(connection: apsw.Connection, owner: Owner) -> tuple[Allocation, ...]:
    """What an owner holds, whatever the state of its block; IPv4 first."""
    return tuple(allocation for _, _, allocation in _held_rows(connection, owner))


def allocate(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    wanted: Sequence[Wanted],
    pod: Pod,
) -> tuple[Allocation, ...]:
    """Give an owner the addresses that it asks for.

    What it holds already is answered as it is, so a repeated call changes
    nothing and a call whose other half was missing adds only that.

    Args:
      connection: with a transaction begun; an error leaves it to be rolled back.
      now_ms: the stored time.
      owner: who gets them.
      wanted: one entry a family.
      pod: kept with the rows for people.

    Returns:
      One allocation for each entry of `wanted`, in its order.

    Raises:
      InvalidRequest: nothing is wanted, or a block overlaps another in part.
      PoolExhausted: a family has nothing free; of two such families, the one
        that stays so for longer.
    """
    if not wanted or len({want.family for want in wanted}) < len(wanted):
        raise InvalidRequest(
            f"{[str(want.family) for want in wanted]} is wanted: "
            "ask for one address of ipv4, one of ipv6, or one of each"
        )
    found = {a.family: a for _, _, a in reversed(_held_rows(connection, owner))}
    shortages = []
    for want in wanted:
        if want.family in found:
            continue
        blocks = _blocks(connection, owner.network, want.family)
        if want.block is not None and not _has(blocks, owner.network, want.block):
            _insert_block(connection, now_ms, owner.network, want.block)
            blocks = _blocks(connection, owner.network, want.family)
        taken = _take(connection, now_ms, owner, blocks, pod)
        if taken is not None:
            found[want.family] = taken
        else:
            shortages.append(_shortage(connection, now_ms, owner.network, want.family))
    if shortages:
        raise max(shortages, key=_wait_for)
    return tuple(found[want.family] for want in wanted)


def release(
    connection: apsw.Connection, now_ms: int, owner: Owner, cooldown_ms: int
) -> tuple[Allocation, ...]:
    """Take back all that an owner holds; it rests for the cooldown.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      owner: whose addresses.
      cooldown_ms: rest in milliseconds before another owner may get them.

    Returns:
      What was released; empty when nothing was held, which is no error.
    """
    rows = _held_rows(connection, owner)
    for row_id, block_id, _ in rows:
        connection.execute(
            "UPDATE ip_addresses SET is_allocated = FALSE, container_id = NULL, "
            "interface_name = NULL, pod_name = NULL, pod_namespace = NULL, "
            "allocated_at = NULL, release_at = ?, updated_at = ? WHERE id = ?",
            (now_ms + cooldown_ms, now_ms, row_id),
        )
        seeding.count(connection, now_ms, block_id, -1)
    return tuple(allocation for _, _, allocation in rows)


def add_block(
    connection: apsw.Connection, now_ms: int, network: str, block: CIDRBlock
) -> None:
    """Let a network be served from a block; nothing happens when it is already.

    Raises:
      InvalidRequest: the block overlaps another of the network in part.
    """
    if not _has(_blocks(connection, network, block.family), network, block):
        _insert_block(connection, now_ms, network, block)


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
    blocks = _blocks(connection, network, family)
    owned, cooling, reserved = _spent(connection, now_ms, blocks)
    ends: list[int] = []
    for block in _ready(blocks):
        rows = connection.execute(
            "SELECT max(coalesce(release_at, 0), ?) FROM ip_addresses"
            " WHERE cidr_block_id = ? AND is_allocated = FALSE"
            " ORDER BY release_at, id LIMIT ?",
            (now_ms, block.id, position),
        )
        ends.extend(end for (end,) in rows)
        unseeded = block.range.size - seeding.frontier(
            connection, block.id, block.range, block.seeded_ips
        )
        ends.extend([now_ms] * min(unseeded, position))
    ends.sort()
    next_free_ms = ends[position - 1] if len(ends) >= position else None
    return IPUsage(owned, cooling, reserved, next_free_ms)


def _held_rows(
    connection: apsw.Connection, owner: Owner
) -> list[tuple[int, int, Allocation]]:
    """(row id, block id, allocation) of all that an owner holds, IPv4 first."""
    rows = connection.execute(
        "SELECT b.ip_family, a.id, b.id, a.address, b.cidr FROM ip_addresses AS a"
        " CROSS JOIN cidr_blocks AS b ON b.id = a.cidr_block_id"
        " WHERE a.container_id = ? AND a.interface_name = ?"
        " AND a.is_allocated = TRUE AND b.network = ?",
        (owner.container_id, owner.interface_name, owner.network),
    )
    return [
        (row_id, block_id, Allocation(Family(family), address, _canonical(cidr)))
        for family, row_id, block_id, address, cidr in sorted(rows)
    ]


def _has(blocks: list[_Block], network: str, wanted: CIDRBlock) -> bool:
    """Whether a range is among the blocks of a network.

    Raises:
      InvalidRequest: it is not, but overlaps one of them.
    """
    if any(block.range == wanted for block in blocks):
        return True
    for block in blocks:
        if block.range.overlaps(wanted):
            raise InvalidRequest(
                f"CIDR block {wanted.cidr!r} overlaps {block.range.cidr!r} of network "
                f"{network!r}: use that block, or one that shares no address with it"
            )
    return False


def _insert_block(
    connection: apsw.Connection, now_ms: int, network: str, block: CIDRBlock
) -> None:
    connection.execute(
        "INSERT INTO cidr_blocks (cidr, network, ip_family, total_ips, allocated_ips,"
        " state, created_at, updated_at, seeded_ips)"
        " VALUES (?, ?, ?, ?, 0, ?, ?, ?, 0)",
        (block.cidr, network, block.family, block.total_ips, READY, now_ms, now_ms),
    )


def _blocks(connection: apsw.Connection, network: str, family: Family) -> list[_Block]:
    """The blocks of a network, oldest first.

    Leaves out what the original let in and nobody can serve from: ranges that
    do not parse, or are of the other family (IPv4-mapped ones).
    """
    rows = connection.execute(
        "SELECT id, cidr, state, allocated_ips, seeded_ips FROM cidr_blocks"
        " WHERE network = ? AND ip_family = ? ORDER BY id",
        (network, family),
    )
    return [
        _Block(block_id, parsed, state, allocated_ips, seeded_ips)
        for block_id, cidr, state, allocated_ips, seeded_ips in rows
        if (parsed := _parsed(cidr)) is not None and parsed.family is family
    ]


def _ready(blocks: list[_Block]) -> list[_Block]:
    return [block for block in blocks if block.state == READY]


def _take(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    blocks: list[_Block],
    pod: Pod,
) -> Allocation | None:
    """Make an owner the owner of the next address; None when none is free."""
    for block in _ready(blocks):
        overlapping = [
            other.range
            for other in blocks
            if other is not block and other.range.overlaps(block.range)
        ]
        picked = _pick(connection, now_ms, owner.network, block, overlapping)
        if picked is None:
            continue
        row_id, address = picked
        connection.execute(
            "UPDATE ip_addresses SET is_allocated = TRUE, container_id = ?, "
            "interface_name = ?, pod_name = ?, pod_namespace = ?, "
            "release_at = NULL, allocated_at = ?, updated_at = ? WHERE id = ?",
            (
                owner.container_id,
                owner.interface_name,
                pod.name or None,
                pod.namespace or None,
                now_ms,
                now_ms,
                row_id,
            ),
        )
        seeding.count(connection, now_ms, block.id, 1)
        return Allocation(block.range.family, address, block.range.cidr)
    return None


def _pick(
    connection: apsw.Connection,
    now_ms: int,
    network: str,
    block: _Block,
    overlapping: list[CIDRBlock],
) -> tuple[int, str] | None:
    """(row id, address) of the next address of a block, None when none is free."""
    query = _FIRST_FREE_OF_OVERLAPPING if overlapping else _FIRST_FREE
    bound = (block.id, network, now_ms) if overlapping else (block.id,)
    seeded_ips = block.seeded_ips
    while True:
        row = connection.execute(query, bound).fetchone()
        if row is None or row[2] is not None:  # no never-used row is left
            seeded = seeding.extend(
                connection, now_ms, block.id, block.range, seeded_ips
            )
            if seeded is not None:
                seeded_ips = seeded
                continue
        if row is None or (row[2] or 0) > now_ms:
            return None
        row_id, address, _ = row
        if not _is_refused(address, block.range, overlapping):
            return row_id, address
        seeding.reserve(connection, now_ms, block.id, address)


def _is_refused(address: str, block: CIDRBlock, overlapping: list[CIDRBlock]) -> bool:
    """Whether a free row may never be given, though it looks free.

    Rows of the original can lie outside their block or be reserved by our rule;
    where its blocks overlap, an address must be reserved in none of them.
    """
    offset = block.offset_of(address)
    if offset is None or block.is_reserved(offset):
        return True
    return any(
        (offset := other.offset_of(address)) is not None and other.is_reserved(offset)
        for other in overlapping
    )


def _shortage(
    connection: apsw.Connection, now_ms: int, network: str, family: Family
) -> PoolExhausted:
    """What to tell a caller for whom nothing is free."""
    blocks = _blocks(connection, network, family)
    owned, cooling, reserved = _spent(connection, now_ms, blocks)
    ends = [
        _number(
            connection,
            "SELECT min(release_at) FROM ip_addresses WHERE cidr_block_id = ?"
            " AND is_allocated = FALSE AND release_at > ?",
            block.id,
            now_ms,
        )
        for block in _ready(blocks)
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
    connection: apsw.Connection, now_ms: int, blocks: list[_Block]
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
        for block in _ready(blocks)
    )
    return allocated - reserved, cooling, reserved


def _number(connection: apsw.Connection, query: str, *values: int) -> int | None:
    (value,) = connection.execute(query, values).fetchall()[0]
    return None if value is None else int(value)


def _wait_for(shortage: PoolExhausted) -> float:
    return math.inf if shortage.wait_ms is None else shortage.wait_ms


@functools.lru_cache(maxsize=1024)  # as many blocks as a node will ever serve
def _parsed(cidr: str) -> CIDRBlock | None:
    try:
        return CIDRBlock.parse(cidr)
    except InvalidRequest:
        return None


def _canonical(cidr: str) -> str:
    parsed = _parsed(cidr)
    return cidr if parsed is None else parsed.cidr
