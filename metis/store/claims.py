"""Addresses to which an owner has a claim: the one it asks for, the one it had.

Whoever names an address gets that one or is told why not. Whoever comes back
while the address that it gave up is still cooling gets it again: the cooldown
keeps it from others, and podman rewires a running container by a DEL and an ADD.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

from typing import cast

import apsw

from metis.errors import AddressTaken, InvalidRequest
from metis.model import Owner
from metis.store.blocks import Block, ready


def remember(
    connection: apsw.Connection, row_id: int, owner: Owner, release_at: int
) -> None:
    """Note who gave an address back.

    Args:
      connection: with a transaction begun.
      row_id: the row of ip_addresses.
      owner: who had it.
      release_at: the end of its cooldown. It ties the note to this release: the
        original, which may use the row meanwhile, does not clear notes.
    """
    connection.execute(
        "INSERT INTO metis_former_owners VALUES (?, ?, ?, ?) "
        "ON CONFLICT (address_id) DO UPDATE SET container_id = excluded.container_id, "
        "interface_name = excluded.interface_name, release_at = excluded.release_at",
        (row_id, owner.container_id, owner.interface_name, release_at),
    )


def find_former(
    connection: apsw.Connection, now_ms: int, owner: Owner, blocks: list[Block]
) -> tuple[Block, int, str] | None:
    """The address that an owner gave back and that is still cooling.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      owner: who comes back.
      blocks: those of the network and family in question.

    Returns:
      (block, row id, address), or None when there is none.
    """
    rows = connection.execute(
        "SELECT a.cidr_block_id, a.id, a.address FROM metis_former_owners AS former"
        " CROSS JOIN ip_addresses AS a ON a.id = former.address_id"
        " WHERE former.container_id = ? AND former.interface_name = ?"
        " AND a.is_allocated = FALSE AND a.release_at = former.release_at"
        " AND a.release_at > ?",
        (owner.container_id, owner.interface_name, now_ms),
    ).fetchall()
    by_block = {block_id: (row_id, address) for block_id, row_id, address in rows}
    for block in ready(blocks) if by_block else ():
        if block.id not in by_block:
            continue
        row_id, address = cast("tuple[int, str]", by_block[block.id])
        if not _is_spent_elsewhere(connection, now_ms, owner.network, block, address):
            return block, row_id, address
    return None


def find_requested(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    blocks: list[Block],
    address: str,
) -> tuple[Block, int, str]:
    """The address that an owner asks for by name.

    A row is made for it when its block has not been filled so far.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      owner: who asks.
      blocks: those of the network and family in question.
      address: in canonical form.

    Returns:
      (block, row id, address).

    Raises:
      InvalidRequest: it is in no block of the network, or a reserved one.
      AddressTaken: somebody else holds it, or it cools after somebody else.
    """
    for block in ready(blocks):
        offset = block.range.offset_of(address)
        if offset is not None:
            break
    else:
        ranges = ", ".join(block.range.cidr for block in ready(blocks))
        raise InvalidRequest(
            f"address {address!r} is in no CIDR block of network {owner.network!r}: "
            f"it must be in one of {ranges or 'its blocks, of which there are none'}"
        )
    if block.range.is_reserved(offset):
        raise InvalidRequest(
            f"address {address!r} is the network, gateway or broadcast address of "
            f"{block.range.cidr}: ask for one that pods may have"
        )
    connection.execute(
        "INSERT INTO ip_addresses (address, cidr_block_id, updated_at)"
        " VALUES (?, ?, ?) ON CONFLICT (address, cidr_block_id) DO NOTHING",
        (address, block.id, now_ms),
    )
    row = connection.execute(
        "SELECT a.id, a.is_allocated, coalesce(a.release_at, 0) - ?,"
        " former.container_id, former.interface_name FROM ip_addresses AS a"
        " LEFT JOIN metis_former_owners AS former"
        " ON former.address_id = a.id AND former.release_at = a.release_at"
        " WHERE a.address = ? AND a.cidr_block_id = ?",
        (now_ms, address, block.id),
    ).fetchall()[0]
    row_id, is_allocated, rest_ms = (int(value or 0) for value in row[:3])
    if is_allocated or _is_spent_elsewhere(
        connection, now_ms, owner.network, block, address
    ):
        raise AddressTaken(
            f"address {address!r} of network {owner.network!r} is held by another owner"
        )
    if rest_ms > 0 and row[3:] != (owner.container_id, owner.interface_name):
        raise AddressTaken(
            f"address {address!r} of network {owner.network!r} is cooling after "
            f"another owner: it is free in {rest_ms / 1000:.1f} s"
        )
    return block, row_id, address


def _is_spent_elsewhere(
    connection: apsw.Connection, now_ms: int, network: str, block: Block, address: str
) -> bool:
    """Whether somebody has an address from another block, or it cools there.

    Blocks overlap only where the original made them.
    """
    found = connection.execute(
        "SELECT 1 FROM ip_addresses AS other"
        " CROSS JOIN cidr_blocks AS b ON b.id = other.cidr_block_id"
        " WHERE other.address = ? AND other.cidr_block_id <> ? AND b.network = ?"
        " AND (other.is_allocated = TRUE OR other.release_at > ?)",
        (address, block.id, network, now_ms),
    )
    return found.fetchone() is not None
