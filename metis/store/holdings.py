"""The addresses that owners hold, and how a row gets an owner and loses it.

The statements that move a row between the states that `metis.store.sql` lists;
who gets which row is decided there.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import apsw

from metis.model import Allocation, Family, Owner, Pod
from metis.store import claims, history, seeding
from metis.store.blocks import Block, canonical


@dataclass(frozen=True, slots=True)
class Held:
    """A row of ip_addresses that somebody holds."""

    row_id: int
    block_id: int
    allocated_at: int
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Residence:
    """Where an owner lives: evidence, later, of whether it still does.

    Attributes:
      boot_id: the kernel's id of the boot in which it got its address.
      netns_path: of its network namespace; empty where nobody told.
    """

    boot_id: str = ""
    netns_path: str = ""


NOWHERE = Residence()

NOBODYS = """is_allocated = FALSE, container_id = NULL, interface_name = NULL,
  pod_name = NULL, pod_namespace = NULL, allocated_at = NULL, given_at = NULL,
  allocation_id = NULL, boot_id = NULL, netns_path = NULL"""
"""What to SET of a row that is nobody's any more."""

_TAKE_BACK = f"""
UPDATE ip_addresses SET {NOBODYS}, release_at = ?, updated_at = ? WHERE id = ?
"""  # noqa: S608  # made of constants


def held_rows(connection: apsw.Connection, owner: Owner) -> list[Held]:
    """All that an owner holds, IPv4 first."""
    rows = connection.execute(
        "SELECT b.ip_family, a.id, b.id, a.address, b.cidr,"
        " coalesce(a.allocated_at, 0), coalesce(a.allocation_id, '')"
        " FROM ip_addresses AS a"
        " CROSS JOIN cidr_blocks AS b ON b.id = a.cidr_block_id"
        " WHERE a.container_id = ? AND a.interface_name = ?"
        " AND a.is_allocated = TRUE AND b.network = ?",
        (owner.container_id, owner.interface_name, owner.network),
    )
    return [
        Held(
            row_id,
            block_id,
            allocated_at,
            Allocation(Family(family), address, canonical(cidr), allocation_id),
        )
        for family, row_id, block_id, address, cidr, allocated_at, allocation_id in (
            sorted(rows)
        )
    ]


def give(
    connection: apsw.Connection,
    now_ms: int,
    owner: Owner,
    pod: Pod,
    allocation_id: str,
    block: Block,
    row_id: int,
    address: str,
    residence: Residence = NOWHERE,
) -> Allocation:
    """Make an owner the owner of a free row."""
    connection.execute(
        "UPDATE ip_addresses SET is_allocated = TRUE, container_id = ?, "
        "interface_name = ?, pod_name = ?, pod_namespace = ?, "
        "release_at = NULL, allocated_at = ?5, given_at = ?5, updated_at = ?5, "
        "allocation_id = ?, boot_id = ?, netns_path = ? WHERE id = ?",
        (
            owner.container_id,
            owner.interface_name,
            pod.name or None,
            pod.namespace or None,
            now_ms,
            allocation_id,
            residence.boot_id or None,
            residence.netns_path or None,
            row_id,
        ),
    )
    seeding.count(connection, now_ms, block.id, 1)
    return Allocation(block.range.family, address, block.range.cidr, allocation_id)


def renew(
    connection: apsw.Connection,
    now_ms: int,
    row: Held,
    allocation_id: str,
    residence: Residence = NOWHERE,
) -> Allocation:
    """Let the last call that asked for it be the one that may give it back.

    It counts as allocated now, so that nothing which was known before this call
    (a list for garbage collection, a DEL that was kept) takes it from its caller.
    Its owner lives where this call says. Where that is nowhere, the former place is
    forgotten: a container that was started again has another.
    """
    connection.execute(
        "UPDATE ip_addresses SET allocated_at = ?1, allocation_id = ?2,"
        " updated_at = ?1, boot_id = ?3, netns_path = ?4"
        " WHERE id = ?5",
        (
            now_ms,
            allocation_id,
            residence.boot_id or None,
            residence.netns_path or None,
            row.row_id,
        ),
    )
    return replace(row.allocation, allocation_id=allocation_id)


def take_back(
    connection: apsw.Connection,
    now_ms: int,
    rows: Sequence[Held],
    cooldown_ms: int,
    reason: str,
) -> None:
    """Make rows nobody's; they rest for the cooldown.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      rows: what is taken back.
      cooldown_ms: how long it rests, in milliseconds.
      reason: why, for `metis.store.history`.
    """
    release_at = now_ms + cooldown_ms
    history.record(connection, now_ms, [row.row_id for row in rows], reason)
    for row in rows:
        claims.remember(connection, row.row_id, release_at)
        connection.execute(_TAKE_BACK, (release_at, now_ms, row.row_id))
        seeding.count(connection, now_ms, row.block_id, -1)
