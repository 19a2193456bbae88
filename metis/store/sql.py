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

import math
from collections.abc import Sequence

import apsw

from metis.errors import InvalidRequest, PoolExhausted
from metis.model import (
    Allocation,
    CIDRBlock,
    Family,
    Owner,
    Pod,
    Wanted,
)
from metis.store import claims, seeding
from metis.store.blocks import (
    Block,
    canonical,
    has_block,
    insert_block,
    read_blocks,
    ready,
)
from metis.store.usage import shortage

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
    nothing and a call whose other half was missing adds only that. An address to
    which it has a claim (`metis.store.claims`) comes before the next free one.

    Args:
      connection: with a transaction begun; an error leaves it to be rolled back.
      now_ms: the stored time.
      owner: who gets them.
      wanted: one entry a family.
      pod: kept with the rows for people.

    Returns:
      One allocation for each entry of `wanted`, in its order.

    Raises:
      InvalidRequest: nothing is wanted, a block overlaps another in part, or an
        address is requested that the owner can never get.
      AddressTaken: a requested address is another owner's.
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
            _check_held(found[want.family], want)
            continue
        blocks = read_blocks(connection, owner.network, want.family)
        if want.block is not None and not has_block(blocks, owner.network, want.block):
            insert_block(connection, now_ms, owner.network, want.block)
            blocks = read_blocks(connection, owner.network, want.family)
        picked = _claimed(connection, now_ms, owner, blocks, want) or _pick(
            connection, now_ms, owner.network, blocks
        )
        if picked is not None:
            found[want.family] = _give(connection, now_ms, owner, pod, *picked)
        else:
            shortages.append(shortage(connection, now_ms, owner.network, want.family))
    if shortages:
        raise max(shortages, key=_wait_for)
    return tuple(found[want.family] for want in wanted)


def assured(
    connection: apsw.Connection, now_ms: int, owner: Owner, wanted: Sequence[Wanted]
) -> frozenset[Family]:
    """Families for which a call need not wait behind others.

    What an owner holds, asks for by name or has a claim to can be nobody else's,
    and a block that the network does not have yet brings addresses of its own.

    Args:
      connection: a reader will do.
      now_ms: the stored time.
      owner: who calls.
      wanted: what it asks for.
    """
    families = {allocation.family for allocation in held(connection, owner)}
    for want in wanted:
        blocks = read_blocks(connection, owner.network, want.family)
        is_new = want.block not in (None, *(block.range for block in blocks))
        if is_new or _has_claim(connection, now_ms, owner, blocks, want):
            families.add(want.family)
    return frozenset(families)


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
    release_at = now_ms + cooldown_ms
    for row_id, block_id, _ in rows:
        connection.execute(
            "UPDATE ip_addresses SET is_allocated = FALSE, container_id = NULL, "
            "interface_name = NULL, pod_name = NULL, pod_namespace = NULL, "
            "allocated_at = NULL, release_at = ?, updated_at = ? WHERE id = ?",
            (release_at, now_ms, row_id),
        )
        claims.remember(connection, row_id, owner, release_at)
        seeding.count(connection, now_ms, block_id, -1)
    return tuple(allocation for _, _, allocation in rows)


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
        (row_id, block_id, Allocation(Family(family), address, canonical(cidr)))
        for family, row_id, block_id, address, cidr in sorted(rows)
    ]


def _check_held(held_already: Allocation, want: Wanted) -> None:
    """Refuse an owner that holds an address and asks for another by name."""
    if want.address not in (None, held_already.address):
        raise InvalidRequest(
            f"address {want.address!r} is requested, but the owner holds "
            f"{held_already.address!r}: release that one first"
        )


def _claimed(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    blocks: list[Block],
    want: Wanted,
) -> tuple[Block, int, str] | None:
    """(block, row id, address) to which the owner has a claim, if there is one."""
    if want.address is not None:
        return claims.find_requested(connection, now_ms, owner, blocks, want.address)
    return claims.find_former(connection, now_ms, owner, blocks)


def _has_claim(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    blocks: list[Block],
    want: Wanted,
) -> bool:
    """Whether `_claimed` would find an address, or refuse the one asked for."""
    if want.address is not None:
        return True
    return claims.find_former(connection, now_ms, owner, blocks) is not None


def _give(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    pod: Pod,
    block: Block,
    row_id: int,
    address: str,
) -> Allocation:
    """Make an owner the owner of a free row."""
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


def _pick(
    connection: apsw.Connection, now_ms: int, network: str, blocks: list[Block]
) -> tuple[Block, int, str] | None:
    """(block, row id, address) of the next address; None when none is free."""
    for block in ready(blocks):
        overlapping = [
            other.range
            for other in blocks
            if other is not block and other.range.overlaps(block.range)
        ]
        picked = _pick_from(connection, now_ms, network, block, overlapping)
        if picked is not None:
            return block, *picked
    return None


def _pick_from(
    connection: apsw.Connection,
    now_ms: int,
    network: str,
    block: Block,
    overlapping: list[CIDRBlock],
) -> tuple[int, str] | None:
    """(row id, address) of the next address of a block, None when none is free."""
    query = _FIRST_FREE_OF_OVERLAPPING if overlapping else _FIRST_FREE
    bound = (block.id, network, now_ms) if overlapping else (block.id,)
    seeded_ips = block.seeded_ips
    while True:
        row = connection.execute(query, bound).fetchone()
        row_id, address, release_at = row or (0, "", math.inf)
        grows = (seeded_ips or 0) < seeding.ROTATION
        if release_at is not None and (grows or release_at > now_ms):
            stop = seeding.extend(connection, now_ms, block.id, block.range, seeded_ips)
            if stop is not None:
                seeded_ips = stop
                continue
            if release_at > now_ms:
                return None
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


def _wait_for(found: PoolExhausted) -> float:
    return math.inf if found.wait_ms is None else found.wait_ms
