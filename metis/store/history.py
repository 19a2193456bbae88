"""Who had which address, from when to when, and why it ended.

An ownership is written down when it ends; until then it is a row of ip_addresses.
So an allocation pays nothing for its history, and a release one INSERT. The record
is for people: no rule looks at it, and it is bounded by age and by number.

Pure: synchronous functions of a connection, inside the caller's transaction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import apsw

from metis.errors import InvalidRequest
from metis.ranges import parse_any_address

KEPT_MS = 30 * 24 * 3600 * 1000
"""How long an entry is kept, in milliseconds: a month, in which somebody asks who
had the address of an old log line."""

MOST_ENTRIES = 100_000
"""Most entries: of a node that deletes a pod every half minute for a month, and
some 20 MiB."""

PAGE_SIZE = 500
"""Most entries of a page, some 100 KiB on the wire."""

LATEST_MS = 2**63 - 1
"""The highest number that SQLite has."""

_PRUNED_EVERY = 16
_PRUNED_AT_ONCE = 32
"""Of so many new entries one looks at so many of the oldest: two each, so that their
number shrinks."""

RECORD_WHERE = """
INSERT INTO metis_history (network, address, container_id, interface_name, pod_name,
  pod_namespace, given_at, ended_at, reason)
SELECT b.network, a.address, a.container_id, coalesce(a.interface_name, ''),
  a.pod_name, a.pod_namespace, min(coalesce(a.given_at, a.allocated_at), :now_ms),
  :now_ms, :reason
FROM ip_addresses AS a CROSS JOIN cidr_blocks AS b ON b.id = a.cidr_block_id
WHERE """
"""Writes down that the ownerships end which a condition selects, in terms of `a`. None
begins after its end: the original's wall clock may have been ahead."""

_RECORD_ONE = RECORD_WHERE + "a.id = :row_id"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which entries are asked for: those with everything that is set.

    Attributes:
      address: in any spelling.
      network: name of the network.
      container_id: of the owner.
      pod_name: of the owner's pod.
      pod_namespace: of the owner's pod.
      at_ms: only ownerships that lasted at this stored time; None for any.

    Raises:
      InvalidRequest: the address cannot be read, or there is no such time.
    """

    address: str = ""
    network: str = ""
    container_id: str = ""
    pod_name: str = ""
    pod_namespace: str = ""
    at_ms: int | None = None

    def __post_init__(self) -> None:
        if self.address:
            _, canonical = parse_any_address("address", self.address)
            object.__setattr__(self, "address", canonical)
        if self.at_ms is not None and self.at_ms > LATEST_MS:
            raise InvalidRequest(
                f"time is {self.at_ms}: it must be in milliseconds since 1970, "
                f"up to {LATEST_MS}"
            )


@dataclass(frozen=True, slots=True)
class Entry:
    """One ownership of one address; times are stored times in milliseconds.

    Attributes:
      network: name of the network, and so on as in `metis.model.Owner`.
      given_at: None where it is not known, as with the original's.
      ended_at: None while it lasts.
      reason: why it ended; empty while it lasts.
    """

    network: str
    address: str
    container_id: str
    interface_name: str
    pod_name: str
    pod_namespace: str
    given_at: int | None
    ended_at: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries, latest first, and where the next page begins (empty: nowhere)."""

    entries: tuple[Entry, ...]
    next_token: str = ""


def record(
    connection: apsw.Connection, now_ms: int, row_ids: Sequence[int], reason: str
) -> None:
    """Write down that ownerships end now; entries that are too old make room.

    Args:
      connection: with a transaction begun.
      now_ms: the stored time.
      row_ids: rows of ip_addresses, still with their owners.
      reason: why they end, in a few words: "deleted".
    """
    for row_id in row_ids:
        connection.execute(
            _RECORD_ONE, {"now_ms": now_ms, "reason": reason, "row_id": row_id}
        )
        if (latest := connection.last_insert_rowid()) % _PRUNED_EVERY == 0:
            connection.execute(
                "DELETE FROM metis_history WHERE id IN"
                " (SELECT id FROM metis_history ORDER BY id LIMIT ?)"
                " AND (ended_at < ? OR id <= ?)",
                (_PRUNED_AT_ONCE, now_ms - KEPT_MS, latest - MOST_ENTRIES),
            )


def select(
    connection: apsw.Connection,
    selection: Selection,
    page_size: int = 0,
    page_token: str = "",
) -> Page:
    """One page of ownerships: those that last, then those that ended, latest first.

    Args:
      connection: a reader will do.
      selection: which.
      page_size: most entries of the page; 0 for PAGE_SIZE, which bounds it.
      page_token: `next_token` of the page before, empty for the first.

    Raises:
      InvalidRequest: the size or the token cannot be read.
    """
    if page_size < 0:
        raise InvalidRequest(f"page size is {page_size}: it must be 0 or more")
    if not re.fullmatch(r"([01]-[0-9]{1,18})?", page_token):
        raise InvalidRequest(
            f"page token is {page_token[:64]!r}: it must be the one that came "
            "with the page before"
        )
    size = min(page_size or PAGE_SIZE, PAGE_SIZE)
    part, _, last_id = (page_token or "2-0").partition("-")
    rows: list[tuple[Any, ...]] = connection.execute(
        _SELECT,
        {
            "part": int(part),
            "id": int(last_id),
            "address": selection.address or None,
            "network": selection.network or None,
            "container_id": selection.container_id or None,
            "pod_name": selection.pod_name or None,
            "pod_namespace": selection.pod_namespace or None,
            "at_ms": selection.at_ms,
            "limit": size + 1,
        },
    ).fetchall()
    entries = tuple(Entry(*row[2:]) for row in rows[:size])
    if len(rows) <= size:
        return Page(entries)
    return Page(entries, f"{rows[size - 1][0]}-{rows[size - 1][1]}")


_SELECT = """
SELECT * FROM (
  SELECT 1 AS part, a.id AS id, b.network AS network, a.address AS address,
    a.container_id AS container_id, coalesce(a.interface_name, ''),
    coalesce(a.pod_name, '') AS pod_name,
    coalesce(a.pod_namespace, '') AS pod_namespace,
    coalesce(a.given_at, a.allocated_at) AS given_at, NULL AS ended_at, ''
  FROM ip_addresses AS a CROSS JOIN cidr_blocks AS b ON b.id = a.cidr_block_id
  WHERE a.is_allocated = TRUE AND a.container_id > ''
  UNION ALL
  SELECT 0, id, network, address, container_id, interface_name,
    coalesce(pod_name, ''), coalesce(pod_namespace, ''), given_at, ended_at, reason
  FROM metis_history
)
WHERE (part, id) < (:part, :id)
  AND (:address IS NULL OR address = :address)
  AND (:network IS NULL OR network = :network)
  AND (:container_id IS NULL OR container_id = :container_id)
  AND (:pod_name IS NULL OR pod_name = :pod_name)
  AND (:pod_namespace IS NULL OR pod_namespace = :pod_namespace)
  AND (:at_ms IS NULL OR (coalesce(given_at, 0) <= :at_ms
    AND (ended_at IS NULL OR :at_ms < ended_at)))
ORDER BY part DESC, id DESC LIMIT :limit
"""
"""Where the last page ended, as (part, id), the next one goes on."""
