"""The CIDR blocks of a network, as the database has them.

A network may have several blocks, used oldest first; within one network no two
of them share an address. Blocks that the original made break that rule, and are
not always written in canonical form, so ranges are compared parsed.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import apsw

from metis.errors import InvalidRequest
from metis.model import CIDRBlock, Family
from metis.ranges import AddressSet

READY = "Ready"
"""The state in which a block gives addresses; the other two do not."""

DRAINING = "Draining"
DELETING = "Deleting"


@dataclass(frozen=True, slots=True)
class Block:
    """A row of cidr_blocks whose range could be read."""

    id: int
    range: CIDRBlock
    state: str
    allocated_ips: int
    seeded_ips: int | None


def read_blocks(
    connection: apsw.Connection, network: str, family: Family
) -> list[Block]:
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
        Block(block_id, block_range, state, allocated_ips, seeded_ips)
        for block_id, cidr, state, allocated_ips, seeded_ips in rows
        if (block_range := parsed(cidr)) is not None and block_range.family is family
    ]


def ready(blocks: list[Block]) -> list[Block]:
    """The blocks that give addresses."""
    return [block for block in blocks if block.state == READY]


def blocks_of(blocks: list[Block], ranges: AddressSet) -> list[Block]:
    """Those of the blocks that a set of ranges takes its addresses from."""
    wanted = {one.block for one in ranges.alternatives}
    return [block for block in blocks if block.range in wanted]


def has_block(blocks: list[Block], network: str, wanted: CIDRBlock) -> bool:
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


def block_of(
    connection: apsw.Connection,
    now_ms: int,
    network: str,
    blocks: list[Block],
    wanted: CIDRBlock,
    *,
    replacing: bool = False,
) -> Block:
    """The block of a range; it is added to the network, and to `blocks`, if new.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      network: name of the network.
      blocks: those of the network and family.
      wanted: the range.
      replacing: whether a new block takes the place of those that it overlaps,
        once nothing of them is held or cooling: a configuration that names its
        subnets in full may make one larger or smaller.

    Raises:
      InvalidRequest: it overlaps another of the network in part.
    """
    for block in blocks:
        if block.range is wanted or block.range == wanted:  # as a rule, it is
            return block
    if replacing:
        _drop_idle(connection, now_ms, [b for b in blocks if b.range.overlaps(wanted)])
    add_block(connection, now_ms, network, wanted)
    blocks[:] = read_blocks(connection, network, wanted.family)
    return next(block for block in blocks if block.range == wanted)


def add_block(
    connection: apsw.Connection, now_ms: int, network: str, block: CIDRBlock
) -> None:
    """Let a network be served from a block; nothing happens when it is already.

    Raises:
      InvalidRequest: the block overlaps another of the network in part.
    """
    if not has_block(read_blocks(connection, network, block.family), network, block):
        insert_block(connection, now_ms, network, block)


def insert_block(
    connection: apsw.Connection, now_ms: int, network: str, block: CIDRBlock
) -> None:
    """Add a block of which the network has no part."""
    connection.execute(
        "INSERT INTO cidr_blocks (cidr, network, ip_family, total_ips, allocated_ips,"
        " state, created_at, updated_at, seeded_ips)"
        " VALUES (?, ?, ?, ?, 0, ?, ?, ?, 0)",
        (block.cidr, network, block.family, block.total_ips, READY, now_ms, now_ms),
    )


def _drop_idle(connection: apsw.Connection, now_ms: int, blocks: list[Block]) -> None:
    """Remove those of the blocks of which nobody holds anything and nothing cools."""
    for block in blocks:
        connection.execute(
            "DELETE FROM cidr_blocks WHERE id = ?1 AND NOT EXISTS ("
            "SELECT 1 FROM ip_addresses WHERE cidr_block_id = ?1"
            " AND (is_allocated = TRUE AND container_id <> '' OR release_at > ?2))",
            (block.id, now_ms),
        )


@functools.lru_cache(maxsize=1024)  # as many blocks as a node will ever serve
def parsed(cidr: str) -> CIDRBlock | None:
    """The range of a row's cidr column, None when it is none."""
    try:
        return CIDRBlock.parse(cidr)
    except InvalidRequest:
        return None


def canonical(cidr: str) -> str:
    """A row's cidr column as it should have been written."""
    block_range = parsed(cidr)
    return cidr if block_range is None else block_range.cidr
