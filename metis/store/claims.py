"""Addresses to which an owner has a claim: the one it asks for, the one it had.

Whoever names an address gets that one or is told why not. Whoever comes back
while the address that it gave up is still cooling gets it again: the cooldown
keeps it from others, and podman rewires a running container by a DEL and an ADD.

Where addresses are sticky, the same goes for a pod that comes back under its
names in a new container, until somebody else has got the address.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

from typing import cast

import apsw

from metis.errors import AddressTaken, InvalidRequest
from metis.model import Owner, Pod, Wanted
from metis.store.blocks import Block, block_of, ready
from metis.store.picking import Picked


def remember(connection: apsw.Connection, row_id: int, release_at: int) -> None:
    """Note who has an address, and for which pod, as it is about to be given back.

    Args:
      connection: with a transaction begun.
      row_id: the row of ip_addresses, still with its owner.
      release_at: the end of its cooldown. It ties the note to this release: the
        original, which may use the row meanwhile, does not clear notes.
    """
    connection.execute(
        "INSERT INTO metis_former_owners"
        " SELECT id, container_id, interface_name, ?, pod_name, pod_namespace"
        " FROM ip_addresses WHERE id = ?"
        " ON CONFLICT (address_id) DO UPDATE SET container_id = excluded.container_id,"
        " interface_name = excluded.interface_name, release_at = excluded.release_at,"
        " pod_name = excluded.pod_name, pod_namespace = excluded.pod_namespace",
        (release_at, row_id),
    )


def find_former(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    blocks: list[Block],
    want: Wanted,
    pod: Pod | None = None,
) -> Picked | None:
    """The address that an owner gave back and that is still cooling.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      owner: who comes back.
      blocks: those of the network and family in question.
      want: what it asks for; from elsewhere it gets nothing.
      pod: the owner's, when it is to get what any container of it gave back from
        this interface last, though the cooldown may have ended.
    """
    rows = connection.execute(
        "SELECT a.cidr_block_id, a.id, a.address FROM metis_former_owners AS former"
        " CROSS JOIN ip_addresses AS a ON a.id = former.address_id"
        " WHERE former.container_id = ? AND former.interface_name = ?"
        " AND a.is_allocated = FALSE AND a.release_at = former.release_at"
        " AND a.release_at > ?",
        (owner.container_id, owner.interface_name, now_ms),
    ).fetchall()
    rows.sort()
    if pod is not None and pod.name:
        rows += connection.execute(
            "SELECT a.cidr_block_id, a.id, a.address FROM metis_former_owners AS former"
            " CROSS JOIN ip_addresses AS a ON a.id = former.address_id"
            " WHERE former.pod_namespace IS ? AND former.pod_name = ?"
            " AND former.interface_name = ?"
            " AND a.is_allocated = FALSE AND a.release_at = former.release_at"
            " ORDER BY former.release_at DESC, a.id",
            (pod.namespace or None, pod.name, owner.interface_name),
        ).fetchall()
    if not rows:
        return None
    by_id = {block.id: block for block in ready(blocks)}
    for block_id, row_id, address in cast("list[tuple[int, int, str]]", rows):
        block = by_id.get(block_id)
        if (
            block is not None
            and _may_be_given(block, want, address)
            and not _is_spent_elsewhere(
                connection, now_ms, owner.network, block, address
            )
        ):
            return block, row_id, address
    return None


def find_requested(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    blocks: list[Block],
    want: Wanted,
    address: str,
) -> Picked:
    """The address that an owner asks for by name.

    A row is made for it when its block has not been filled so far, and a block
    when the network does not have that of its range.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      owner: who asks.
      blocks: those of the network and family in question.
      want: what it asks for.
      address: which address it must be, in canonical form.

    Raises:
      InvalidRequest: it is in no block of the network or no range of the set, or
        one that no pod may have.
      AddressTaken: somebody else holds it, or it cools after somebody else.
    """
    block = _block_with(connection, now_ms, owner.network, blocks, want, address)
    connection.execute(
        "INSERT INTO ip_addresses (address, cidr_block_id, updated_at, release_at)"
        " VALUES (?, ?, ?, (SELECT until_ms FROM metis_caution WHERE until_ms > ?3))"
        " ON CONFLICT (address, cidr_block_id) DO NOTHING",
        (address, block.id, now_ms),
    )
    row = connection.execute(
        "SELECT a.id, a.is_allocated, coalesce(a.release_at, 0) - ?,"
        " former.container_id, former.interface_name, a.container_id"
        " FROM ip_addresses AS a LEFT JOIN metis_former_owners AS former"
        " ON former.address_id = a.id AND former.release_at = a.release_at"
        " WHERE a.address = ? AND a.cidr_block_id = ?",
        (now_ms, address, block.id),
    ).fetchall()[0]
    row_id, is_allocated, rest_ms = (int(value or 0) for value in row[:3])
    if is_allocated and row[5] == "":
        raise InvalidRequest(
            f"address {address!r} of network {owner.network!r} is set aside as the "
            "gateway of another configuration: ask for one that pods may have"
        )
    if is_allocated or _is_spent_elsewhere(
        connection, now_ms, owner.network, block, address
    ):
        raise AddressTaken(
            f"address {address!r} of network {owner.network!r} is held by another owner"
        )
    if rest_ms > 0 and row[3:5] != (owner.container_id, owner.interface_name):
        raise AddressTaken(
            f"address {address!r} of network {owner.network!r} is cooling after "
            f"another owner: it is free in {rest_ms / 1000:.1f} s"
        )
    return block, row_id, address


def _may_be_given(block: Block, want: Wanted, address: str) -> bool:
    """Whether an address of a block is for pods, and of the ranges that are wanted.

    The original gives some that are not, and others may be gateways by now.
    """
    offset = block.range.offset_of(address)
    if offset is None:
        return False
    if want.ranges is None:
        return not block.range.is_reserved(offset)
    return any(
        one.block == block.range and one.contains(offset)
        for one in want.ranges.alternatives
    )


def _block_with(
    connection: apsw.Connection,
    now_ms: int,
    network: str,
    blocks: list[Block],
    want: Wanted,
    address: str,
) -> Block:
    """The block from which a requested address may be given."""
    if want.ranges is not None:
        one = want.ranges.range_for(address)
        one.check_for_pods(address)
        block = block_of(connection, now_ms, network, blocks, one.block, replacing=True)
        if ready([block]):
            return block
    for block in ready(blocks) if want.ranges is None else ():
        offset = block.range.offset_of(address)
        if offset is None:
            continue
        if block.range.is_reserved(offset):
            raise InvalidRequest(
                f"address {address!r} is the network, gateway or broadcast address of "
                f"{block.range.cidr}: ask for one that pods may have"
            )
        return block
    ranges = ", ".join(block.range.cidr for block in ready(blocks))
    raise InvalidRequest(
        f"address {address!r} is in no CIDR block of network {network!r}: "
        f"it must be in one of {ranges or 'its blocks, of which there are none'}"
    )


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
