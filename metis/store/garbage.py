"""Addresses whose owners are gone though nobody gave them back.

A runtime knows which containers it has; what others hold is garbage (CNI
specification, section 2, "GC"). Who they are is read first, which holds up
nobody; then they are taken back in steps, and each is looked at again.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import apsw

from metis.errors import InvalidRequest
from metis.model import Allocation, Owner
from metis.store import deletions
from metis.store.holdings import held_rows, take_back

COLLECTED = "garbage collected"
"""Reason of an end for the history: the runtime's GC did not name the owner."""


def owners_besides(
    connection: apsw.Connection,
    _: int,
    network: str,
    kept: Set[tuple[str, str]],
    taken_at: int,
) -> list[Owner]:
    """Who holds addresses of a network though a list does not name it.

    Args:
      connection: a reader will do.
      network: name of the network.
      kept: container id and interface name of all that is on the list.
      taken_at: when the list was taken, in stored time; what was allocated later
        is nobody's fault.
    """
    rows = connection.execute(
        "SELECT DISTINCT a.container_id, a.interface_name FROM ip_addresses AS a"
        " CROSS JOIN cidr_blocks AS b ON b.id = a.cidr_block_id"
        " WHERE a.container_id > '' AND a.is_allocated = TRUE AND b.network = ?"
        " AND coalesce(a.allocated_at, 0) <= ?"
        " ORDER BY a.container_id, a.interface_name",
        (network, taken_at),
    )
    return [
        Owner(network, *row)
        for row in rows
        if row not in kept and _is_one_of_ours(network, *row)
    ]


def _is_one_of_ours(network: str, container_id: str, interface_name: str) -> bool:
    """Whether these make an owner. The original lets in some that no list can name.

    Nothing is known of those, so they keep what they have, and hinder nobody.
    """
    try:
        Owner(network, container_id, interface_name)
    except InvalidRequest:
        return False
    return True


def collect(
    connection: apsw.Connection,
    now_ms: int,
    owners: Sequence[Owner],
    taken_at: int,
    cooldown_ms: int,
    reason: str = COLLECTED,
) -> list[tuple[Owner, Allocation]]:
    """Take back what owners held when a list without them was taken.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      owners: whose addresses.
      taken_at: when the list was taken, in stored time.
      cooldown_ms: as for `release`.
      reason: what the history says.

    Returns:
      Who had which address.
    """
    collected = []
    for owner in owners:
        rows = [
            row for row in held_rows(connection, owner) if row.allocated_at <= taken_at
        ]
        if rows:
            take_back(connection, now_ms, rows, cooldown_ms, reason)
            deletions.record(connection, now_ms, owner, taken_at)
        collected += [(owner, row.allocation) for row in rows]
    return collected
