"""All that is held, and taking it back from owners that are gone.

Between the evidence that an owner is gone and the transaction that acts on it,
time passes in which the owner may have asked again, here or in direct mode. So an
owner loses its addresses only if it still holds exactly those that were judged,
each by the same allocation.

No record of a deletion is left, as a DEL leaves one (`metis.store.deletions`): it
would refuse a call that is on its way, and nobody has said that this call is not
wanted. A container that comes back under its id (podman does that) must not fail
to start because its former life was cleaned up at that moment. If the call is
really nobody's any more, its address is held by an owner that is gone, and taken
back as this one was.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import apsw

from metis.errors import InvalidRequest
from metis.model import Family, Holding, Owner, Pod
from metis.store.holdings import held_rows, take_back

REASON = "reclaimed: {}"
"""Reason of an end for the history, with the evidence."""


Place: TypeAlias = tuple[str, str]
"""Where a listing by owner has come to: a container id and an interface."""

_FIRST: Place = ("", "")


def read_holdings(
    connection: apsw.Connection, _: int, after: Place | None, most: int
) -> tuple[list[Holding], Place | None]:
    """Addresses that somebody holds, by owner, with all that each of the owners holds.

    An owner that the original let in and that is none by our rules is left out,
    and so keeps what it has.

    Args:
      connection: a reader will do.
      after: how far the last call came; None for the first.
      most: addresses that are read at once. There are more where one owner has more.

    Returns:
      The addresses, and what to pass for the next ones; None when these are the last.
    """
    after = after or _FIRST
    while True:
        rows = _rows(connection, after, most)
        if len(rows) < most:
            return _holdings(rows), None
        cut = _place(rows[-1])  # there may be more of it
        whole = [row for row in rows if _place(row) != cut]
        if whole:
            return _holdings(whole), _place(whole[-1])
        most *= 2


def _rows(connection: apsw.Connection, after: Place, most: int) -> list[Any]:
    return connection.execute(
        "SELECT b.network, a.container_id, a.interface_name,"
        " coalesce(a.pod_name, ''), coalesce(a.pod_namespace, ''), b.ip_family,"
        " a.address, coalesce(a.allocation_id, ''), coalesce(a.allocated_at, 0),"
        " coalesce(a.boot_id, ''), coalesce(a.netns_path, '')"
        " FROM ip_addresses AS a"
        " CROSS JOIN cidr_blocks AS b ON b.id = a.cidr_block_id"
        " WHERE (a.container_id, a.interface_name) > (?, ?)"
        " AND a.container_id > '' AND a.interface_name > '' AND a.is_allocated = TRUE"
        " AND typeof(a.container_id) = 'text' AND typeof(a.interface_name) = 'text'"
        " ORDER BY a.container_id, a.interface_name, b.network, b.ip_family, a.id"
        " LIMIT ?",
        (*after, most),
    ).fetchall()


def _place(row: Sequence[Any]) -> Place:
    return row[1], row[2]


def _holdings(rows: Iterable[Any]) -> list[Holding]:
    """Rows as values; without those of owners that are none."""
    found = []
    for network, container, interface, name, namespace, family, *rest in rows:
        try:
            owner, pod = Owner(network, container, interface), Pod(name, namespace)
        except InvalidRequest:
            continue
        found.append(Holding(owner, pod, Family(family), *rest))
    return found


def reclaim(
    connection: apsw.Connection,
    now_ms: int,
    gone: Sequence[tuple[Sequence[Holding], str]],
    cooldown_ms: int,
) -> list[Holding]:
    """Take back what owners hold that are gone.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      gone: all holdings of an owner when it was judged, and the evidence in words.
      cooldown_ms: as for `sql.release`.

    Returns:
      What was taken back; of an owner that has asked again, nothing.
    """
    taken: list[Holding] = []
    for holdings, evidence in gone:
        rows = held_rows(connection, holdings[0].owner)
        held = {
            (row.allocation.address, row.allocation.allocation_id, row.allocated_at)
            for row in rows
        }
        judged = {
            (one.address, one.allocation_id, one.allocated_at) for one in holdings
        }
        if rows and held == judged:
            take_back(connection, now_ms, rows, cooldown_ms, REASON.format(evidence))
            taken += holdings
    return taken
