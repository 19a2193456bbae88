"""The two tables as people see them: filtered, in pages, as text.

A filter is `column=value AND column=value`. Column names are looked up in the
lists below and values are bound, so nothing of the caller's text ever becomes
SQL. Pages follow the id (keyset), so a page costs the same wherever it stands,
and rows that come and go in between move no others.

Pure: synchronous functions of a connection.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import apsw

from metis.errors import InvalidRequest
from metis.model import TablePage

PAGE_BYTES = 3 * 1024 * 1024
"""Most bytes of a page on the wire: gRPC messages end at 4 MiB, and headers,
framing and the token need far less than the difference."""

_VALUE_BYTES = 4
"""Protobuf's share of a value below 2 MiB: one byte of tag, three of length."""

_ROW_BYTES = 5
"""Protobuf's share of a row below 256 MiB: one byte of tag, four of length."""

_MOST_TERMS = 64
"""Most terms of a filter: far more than there are columns, and far fewer than the
1,000 at which SQLite refuses an expression."""

_NULL = "NULL"

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

Value: TypeAlias = str | int | float | bytes | None
"""What SQLite answers and what is bound."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a column's values are shown, and read back from a filter."""

    example: str
    show: Callable[[Value], str]
    read: Callable[[str], Value]


def _show_text(value: Value) -> str:
    return str(value)


def _show_boolean(value: Value) -> str:
    return "true" if value else "false"


def _show_time(value: Value) -> str:
    try:
        moment = _EPOCH + datetime.timedelta(milliseconds=int(value or 0))
    except (ValueError, OverflowError):  # not a time: show what is there
        return str(value)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _read_integer(text: str) -> Value:
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise OverflowError
    return number


def _read_boolean(text: str) -> Value:
    return {"true": 1, "1": 1, "false": 0, "0": 0}[text.lower()]


def _read_time(text: str) -> Value:
    if text.isdecimal():
        return _read_integer(text)
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return (moment - _EPOCH) // datetime.timedelta(milliseconds=1)


_TEXT = _Kind("default", _show_text, str)
_INTEGER = _Kind("1", _show_text, _read_integer)
_BOOLEAN = _Kind("true", _show_boolean, _read_boolean)
_TIME = _Kind("2026-01-31T12:00:00.000Z", _show_time, _read_time)


@dataclass(frozen=True, slots=True)
class _Table:
    """A listing: its source, the column of its id, and its columns in order."""

    source: str
    id_column: str
    columns: dict[str, tuple[str, _Kind]]


_BLOCKS = _Table(
    "cidr_blocks AS b",
    "b.id",
    {
        "id": ("b.id", _INTEGER),
        "cidr": ("b.cidr", _TEXT),
        "network": ("b.network", _TEXT),
        "ip_family": ("b.ip_family", _TEXT),
        "total_ips": ("b.total_ips", _INTEGER),
        "allocated_ips": ("b.allocated_ips", _INTEGER),
        "state": ("b.state", _TEXT),
        "created_at": ("b.created_at", _TIME),
        "updated_at": ("b.updated_at", _TIME),
    },
)

_ADDRESSES = _Table(
    "ip_addresses AS a CROSS JOIN cidr_blocks AS b ON b.id = a.cidr_block_id",
    "a.id",
    {
        "id": ("a.id", _INTEGER),
        "address": ("a.address", _TEXT),
        "cidr": ("b.cidr", _TEXT),
        "network": ("b.network", _TEXT),
        "container_id": ("a.container_id", _TEXT),
        "interface_name": ("a.interface_name", _TEXT),
        "pod_name": ("a.pod_name", _TEXT),
        "pod_namespace": ("a.pod_namespace", _TEXT),
        "is_allocated": ("a.is_allocated", _BOOLEAN),
        "release_at": ("a.release_at", _TIME),
        "allocated_at": ("a.allocated_at", _TIME),
        "updated_at": ("a.updated_at", _TIME),
        "cidr_block_id": ("a.cidr_block_id", _INTEGER),
    },
)


def list_blocks(
    connection: apsw.Connection, filter_text: str, page_size: int, page_token: str
) -> TablePage:
    """One page of the CIDR blocks.

    Args:
      connection: a reader will do.
      filter_text: `column=value AND ...`, or empty for every row. A value is a
        word or stands in quotes; the bare word NULL is SQL's NULL. Times are
        RFC 3339 or milliseconds since the epoch.
      page_size: most rows of the page; 0 for as many as PAGE_BYTES hold, which
        bounds every page.
      page_token: `next_token` of the page before, empty for the first.

    Raises:
      InvalidRequest: one of the three cannot be read; names what would be right.
    """
    return _page(connection, _BLOCKS, filter_text, page_size, page_token)


def list_addresses(
    connection: apsw.Connection, filter_text: str, page_size: int, page_token: str
) -> TablePage:
    """One page of the addresses, each with the range and network of its block.

    Args, Raises: as `list_blocks`.
    """
    return _page(connection, _ADDRESSES, filter_text, page_size, page_token)


def _page(
    connection: apsw.Connection,
    table: _Table,
    filter_text: str,
    page_size: int,
    page_token: str,
) -> TablePage:
    if page_size < 0:
        raise InvalidRequest(
            f"page size is {page_size}: it must be a number of rows, "
            "or 0 for as many as fit"
        )
    if page_token and not re.fullmatch(r"[0-9]{1,18}", page_token):
        raise InvalidRequest(
            f"page token is {page_token[:64]!r}: it must be the one that came "
            "with the page before"
        )
    conditions = [f"{table.id_column} > ?"]
    values: list[Value] = [int(page_token or 0)]
    for name, value in parse_filter(filter_text, table.columns):
        conditions.append(f"{table.columns[name][0]} IS ?")
        values.append(value)
    # Nothing below but names and operators of this module; values are bound.
    query = (
        f"SELECT {', '.join(column for column, _ in table.columns.values())} "  # noqa: S608
        f"FROM {table.source} WHERE {' AND '.join(conditions)} "
        f"ORDER BY {table.id_column} LIMIT ?"
    )
    values.append(page_size + 1 if page_size else -1)
    return _fill(connection.execute(query, values), table, page_size)


def _fill(
    rows: Iterable[tuple[Value, ...]], table: _Table, page_size: int
) -> TablePage:
    kinds = [kind for _, kind in table.columns.values()]
    page: list[tuple[str, ...]] = []
    size, last_id, next_token = 0, "", ""
    for row in rows:
        texts = tuple(
            _NULL if value is None else kind.show(value)
            for value, kind in zip(row, kinds, strict=True)
        )
        size += _ROW_BYTES + sum(len(text.encode()) + _VALUE_BYTES for text in texts)
        if page and (size > PAGE_BYTES or len(page) == page_size):
            next_token = last_id
            break
        page.append(texts)
        last_id = texts[0]
    return TablePage(tuple(table.columns), tuple(page), next_token)


_TERM = re.compile(
    r"""\s*(?P<column>[^\s=]+)\s*=\s*"""
    r"""(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<bare>[^\s'"]+))"""
    r"""(?:\s+(?P<and>AND)(?=\s)|\s*\Z)""",
    re.IGNORECASE,
)


def parse_filter(
    text: str, columns: dict[str, tuple[str, _Kind]]
) -> list[tuple[str, Value]]:
    """Read a filter as (column, value) pairs, all of which a row must match.

    Raises:
      InvalidRequest: bad syntax, an unknown column, or a value of another kind.
    """
    pairs: list[tuple[str, Value]] = []
    position = 0
    more = bool(text.strip())
    while more:
        term = _TERM.match(text, position)
        if term is None:
            raise InvalidRequest(
                f"filter cannot be read at {text[position : position + 64].strip()!r}: "
                "write column=value AND column='other value'"
            )
        name = term["column"].lower()
        if name not in columns:
            raise InvalidRequest(
                f"filter names {term['column'][:64]!r}, which is no column: "
                f"use one of {', '.join(columns)}"
            )
        pairs.append((name, _filter_value(name, columns[name][1], term)))
        if len(pairs) > _MOST_TERMS:
            raise InvalidRequest(f"filter has more than {_MOST_TERMS} terms: use fewer")
        position = term.end()
        more = term["and"] is not None
    return pairs


def _filter_value(name: str, kind: _Kind, term: re.Match[str]) -> Value:
    bare = term["bare"]
    if bare is not None and bare.upper() == _NULL:
        return None
    text = bare or term["single"] or term["double"] or ""
    try:
        return kind.read(text)
    except (ValueError, KeyError, OverflowError):
        raise InvalidRequest(
            f"filter value {text[:64]!r} does not suit {name}: "
            f"write it like {name}={kind.example}"
        ) from None
