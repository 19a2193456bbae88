"""The rules about the rows of addresses: their columns, their text, their owners.

Pure: synchronous functions of a connection; they write nothing.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import apsw

from metis.model import CIDRBlock, Family, format_address
from metis.store.blocks import parsed
from metis.store.violations import LATEST_MS, Kind, Shape, Violation

CLEARED = "cleared"
RELEASED = "released"
SET_TO_NOW = "set to now"
DELETED = "deleted"
"""What repair does to a row, as `Violation.mend` begins."""


def _no_time(column: str) -> str:
    return (
        f"{column} IS NOT NULL AND (typeof({column}) <> 'integer'"
        f" OR {column} NOT BETWEEN 0 AND {LATEST_MS})"
    )


_OWNED = "a.is_allocated = TRUE AND a.container_id > ''"

_FAULTS: tuple[tuple[str, Kind, str, str, str, bool], ...] = (
    (
        "a.is_allocated IS NULL OR a.is_allocated NOT IN (0, 1)",
        Kind.ROW,
        "is neither allocated nor free",
        "allocated if it has an owner, else free",
        "is_allocated",
        False,
    ),
    (
        "a.is_allocated = TRUE AND a.container_id IS NULL",
        Kind.ROW,
        "is allocated to nobody",
        RELEASED,
        "container_id",
        False,
    ),
    (
        f"{_OWNED} AND coalesce(a.interface_name, '') = ''",
        Kind.ROW,
        "has an owner without an interface",
        "",
        "interface_name",
        False,
    ),
    (
        "a.is_allocated = FALSE AND coalesce(a.container_id, a.interface_name,"
        " a.pod_name, a.pod_namespace, a.allocated_at) IS NOT NULL",
        Kind.ROW,
        "is free and names an owner, or a time since when",
        CLEARED,
        "owner",
        True,
    ),
    (
        "a.is_allocated = TRUE AND a.release_at IS NOT NULL",
        Kind.ROW,
        "is allocated and cooling at once",
        CLEARED,
        "release_at",
        True,
    ),
    (
        f"{_OWNED} AND a.allocated_at IS NULL",
        Kind.ROW,
        "was allocated at no time",
        SET_TO_NOW,
        "allocated_at",
        False,
    ),
    (
        _no_time("a.release_at"),
        Kind.TIME,
        "cools until no time",
        "made to cool once more",
        "release_at",
        False,
    ),
    (
        _no_time("a.allocated_at"),
        Kind.TIME,
        "was allocated at no time",
        SET_TO_NOW,
        "allocated_at",
        False,
    ),
    (
        _no_time("a.given_at"),
        Kind.TIME,
        "was given at no time",
        CLEARED,
        "given_at",
        False,
    ),
    (
        _no_time("a.updated_at"),
        Kind.TIME,
        "was changed at no time",
        SET_TO_NOW,
        "updated_at",
        False,
    ),
    (
        "a.allocated_at > :now_ms",
        Kind.TIME,
        "was allocated in the future",
        SET_TO_NOW,
        "allocated_at",
        True,
    ),
    (
        "a.given_at > :now_ms",
        Kind.TIME,
        "was given in the future",
        SET_TO_NOW,
        "given_at",
        False,
    ),
)
"""(condition, rule, what is wrong, what repair does, the column that it mends,
whether the original may have done it). The first that is true of a row counts; a
comparison with a stored time that is not known (NULL) is never true."""

_WHICH = " ".join(f"WHEN {fault[0]} THEN {i}" for i, fault in enumerate(_FAULTS))

_STRANGE = f"""
SELECT a.id, a.address, b.cidr, b.network, a.container_id, a.interface_name,
  b.seeded_ips IS NULL OR a.is_allocated = TRUE AND a.allocation_id IS NULL,
  CASE {_WHICH} END AS fault
FROM rows AS a LEFT JOIN blocks AS b ON b.id = a.cidr_block_id
WHERE fault IS NOT NULL
"""  # noqa: S608  # conditions of this module

_SHARED = """
SELECT b.network, a.address, a.id, b.cidr, a.container_id, a.interface_name,
  a.is_allocated,
  b.seeded_ips IS NULL OR a.container_id > '' AND a.allocation_id IS NULL
FROM (SELECT address AS text FROM ip_addresses GROUP BY text HAVING count(*) > 1)
CROSS JOIN rows AS a ON a.address = text
CROSS JOIN blocks AS b ON b.id = a.cidr_block_id
WHERE a.is_allocated = TRUE OR a.release_at > :now_ms
ORDER BY b.network, a.address, coalesce(a.allocated_at, 0) DESC, a.id DESC
"""
"""Addresses that stand in several blocks and are spent in one of them or more."""


@dataclass(slots=True)
class _Span:
    """What the rows of a block are held against, and what was counted of them."""

    id: int
    range: CIDRBlock
    network: str
    seeded_ips: int | None
    is_original: bool
    windows: list[tuple[bytes, bytes, int]]
    filled: int = 0
    keyed: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.range.cidr} of network {self.network!r}"


def broken(
    connection: apsw.Connection, shape: Shape, now_ms: int | None
) -> Iterator[Violation]:
    """The rules about addresses that are broken."""
    for row in connection.execute(shape.with_tables + _STRANGE, {"now_ms": now_ms}):
        row_id, address, cidr, network, container, interface, may_be_original, at = row
        _, kind, words, mend, column, tolerated = _FAULTS[at]
        is_warning = tolerated and (shape.is_original or bool(may_be_original))
        yield Violation(
            kind,
            f"address {address} of {cidr}, network {network!r}, {words}"
            f" (container {container!r}, interface {interface!r})",
            "" if is_warning else mend,
            column,
            row_id,
            is_warning=is_warning,
        )
    yield from _shared(connection, shape, now_ms)
    spans = _spans(connection, shape)
    yield from _texts(connection, shape, spans)
    for span in spans.values():
        yield from _filling(span)
        yield from _reserved(connection, span)


def _shared(
    connection: apsw.Connection, shape: Shape, now_ms: int | None
) -> Iterator[Violation]:
    """Addresses of a network that two owners have, or one while they cool."""
    rows = connection.execute(shape.with_tables + _SHARED, {"now_ms": now_ms})
    for (network, address), group in itertools.groupby(rows, lambda row: row[:2]):
        spent = list(group)
        owned = [row for row in spent if row[6] and row[4]]
        if not owned:
            continue
        keeper = owned[0]
        for _, _, row_id, cidr, container, interface, is_allocated, original in spent:
            if row_id == keeper[2]:
                continue
            if is_allocated and container:
                yield Violation(
                    Kind.TWICE,
                    f"address {address} of network {network!r} has two owners:"
                    f" container {keeper[4]!r}, interface {keeper[5]!r}, of"
                    f" {keeper[3]} asked last; container {container!r}, interface"
                    f" {interface!r}, of {cidr} has it, too",
                    f"taken from container {container!r}, interface {interface!r}",
                    row_id=row_id,
                )
                continue
            state = "reserved" if is_allocated else "cooling"
            yield Violation(
                Kind.COOLING,
                f"address {address} of network {network!r}, which container"
                f" {keeper[4]!r} has of {keeper[3]}, is {state} in {cidr}",
                is_warning=shape.is_original or bool(original) or bool(keeper[7]),
            )


def _spans(connection: apsw.Connection, shape: Shape) -> dict[int, _Span]:
    """The blocks that addresses are given from."""
    spans: dict[int, _Span] = {}
    query = "SELECT id, cidr, network, ip_family, seeded_ips FROM blocks"
    for block_id, cidr, network, family, seeded_ips in connection.execute(
        shape.with_tables + query
    ):
        block = parsed(cidr) if isinstance(cidr, str) else None
        if block is not None and block.family == family:
            is_original = shape.is_original or seeded_ips is None
            spans[block_id] = _Span(
                block_id, block, network, seeded_ips, is_original, []
            )
    if shape.has_windows:
        query = "SELECT cidr_block_id, first_key, last_key, seeded_ips"
        for block_id, *window in connection.execute(f"{query} FROM metis_windows"):
            if block_id in spans:
                spans[block_id].windows.append((window[0], window[1], window[2]))
    return spans


def _texts(
    connection: apsw.Connection, shape: Shape, spans: dict[int, _Span]
) -> Iterator[Violation]:
    """Rows that stand for no address of their block; counts the others."""
    kinds = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
    query = "SELECT id, cidr_block_id, address, sort_key FROM rows ORDER BY 2"
    rows = connection.execute(shape.with_tables + query)
    for block_id, group in itertools.groupby(rows, lambda row: row[1]):
        span = spans.get(block_id)
        if span is None:
            continue
        kind, first, size = kinds[span.range.family], span.range.first, span.range.size
        seeded, keyed = span.seeded_ips or 0, span.keyed if span.windows else None
        for row_id, _, address, sort_key in group:
            try:
                key = socket.inet_pton(kind, address)
            except (OSError, TypeError, ValueError):
                yield _odd(connection, span, row_id, Kind.ADDRESS, "is no address of")
                continue
            number = int.from_bytes(key, "big")
            offset = number - first
            if socket.inet_ntop(kind, key) != address:
                right = format_address(span.range.family, number)
                if right != address:
                    yield _respelled(span, row_id, address, right)
                    continue
            if not 0 <= offset < size:
                yield _odd(connection, span, row_id, Kind.OUTSIDE, "lies outside")
                continue
            if offset < seeded:
                span.filled += 1
            if sort_key is None:
                continue
            if sort_key != key:
                words = f"address {address} of {span} has the sort key {sort_key!r}"
                mend = f"{CLEARED}, until a range asks for it"
                yield Violation(Kind.ROW, words, mend, "sort_key", row_id)
            elif keyed is not None:
                keyed.append(offset)


def _odd(
    connection: apsw.Connection, span: _Span, row_id: int, kind: Kind, what: str
) -> Violation:
    """A row that is of no use: deleted, unless somebody has it."""
    query = "SELECT address, is_allocated, container_id, interface_name"
    address, is_allocated, container, interface = connection.execute(
        f"{query} FROM ip_addresses WHERE id = ?", (row_id,)
    ).fetchall()[0]
    words, is_owned = f"address {address!r} {what} its block {span}", False
    if is_allocated and container:
        words += f", and container {container!r}, interface {interface!r}, has it"
        is_owned = True
    mend = "" if is_owned or span.is_original else DELETED
    return Violation(kind, words, mend, DELETED, row_id, is_warning=span.is_original)


def _respelled(span: _Span, row_id: int, address: str, right: str) -> Violation:
    return Violation(
        Kind.ADDRESS,
        f"address {address!r} of {span} is written so in place of {right!r}",
        "" if span.is_original else f"written {right!r}",
        "address",
        row_id,
        right,
        span.is_original,
    )


def _filling(span: _Span) -> Iterator[Violation]:
    """What is wrong with how far a block and its windows say that they are filled."""
    size, seeded = span.range.size, span.seeded_ips
    mend = "filled anew from the first gap, as it is used"
    if seeded is not None and not 0 <= seeded <= size:
        words = f"block {span} says that {seeded} of its {size} addresses have rows"
        yield Violation(Kind.FILLED, words, mend, row_id=span.id)
    elif seeded is not None and span.filled != seeded:
        words = (
            f"block {span} says that its first {seeded} addresses have rows, and"
            f" {seeded - span.filled} have none"
        )
        yield Violation(Kind.FILLED, words, mend, row_id=span.id)
    if not span.windows:
        return
    keyed = set(span.keyed)
    for first_key, last_key, filled in span.windows:
        first, last = (
            int.from_bytes(key, "big") - span.range.first
            for key in (first_key, last_key)
        )
        inside = 0 <= first <= last < size and 0 <= filled <= last - first + 1
        if inside and all(o in keyed for o in range(first, first + filled)):
            continue
        yield Violation(
            Kind.WINDOW,
            f"block {span} says that {filled} addresses from offset {first} to {last}"
            " have rows for ranges, and some have none",
            "filled anew, as it is used",
            row_id=span.id,
            value=first_key.hex() + "-" + last_key.hex(),
        )


def _reserved(connection: apsw.Connection, span: _Span) -> Iterator[Violation]:
    """Pods that have an address which no pod may have.

    Where ranges name their gateways, pods may have the address after that of the
    network; whether one does is not known here.
    """
    for offset in span.range.reserved_offsets:
        address = span.range.address_at(offset)
        rows: Any = connection.execute(
            "SELECT id, container_id, interface_name FROM ip_addresses"
            " WHERE address = ? AND cidr_block_id = ?"
            " AND is_allocated = TRUE AND container_id > ''",
            (address, span.id),
        )
        for row_id, container, interface in rows:
            if offset == 1 and not span.is_original:
                continue
            yield Violation(
                Kind.RESERVED,
                f"address {address} of {span} is for no pod, and container"
                f" {container!r}, interface {interface!r}, has it",
                row_id=row_id,
                is_warning=span.is_original,
            )
