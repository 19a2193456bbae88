"""What a database that is broken, or lost, still tells.

Sources, from the best to the poorest; any of them that says that an address has an
owner is believed, since an owner too many is found out later and one too few is two
pods with one address:

  read        what SQLite reads, table by table, as far as it can
  index rows  owner and address of a row, out of two indexes, where the row is gone
  scan        rows out of the bare pages, whatever is wrong with the rest

`metis.store.rebuilding` makes a new database of it, and of what else the node knows.
Each value is looked at before it is believed, through `metis.model`.

Pure: synchronous functions of a connection, or of bytes. They write nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import apsw

from metis.errors import InvalidRequest
from metis.model import (
    CIDRBlock,
    Family,
    checked_name,
    format_address,
    parse_address,
)
from metis.store import pages
from metis.store.blocks import READY

_STATES = (READY, "Draining", "Deleting")
_LATEST_MS = 2**53
"""No stored time is later: the year 287396."""

_ROW_COLUMNS = (
    "id", "address", "cidr_block_id", "container_id", "pod_name", "pod_namespace",
    "interface_name", "is_allocated", "release_at", "allocated_at", "updated_at",
    "allocation_id", "sort_key", "boot_id", "netns_path", "given_at",
)  # fmt: skip
"""Of ip_addresses, in the order in which every program makes or adds them."""

_BLOCK_COLUMNS = ("id", "cidr", "network", "ip_family", "total_ips", "allocated_ips",
                  "state")  # fmt: skip
_DELETED_COLUMNS = ("network", "container_id", "interface_name", "deleted_at")
_FORMER_COLUMNS = ("address_id", "container_id", "interface_name", "release_at",
                   "pod_name", "pod_namespace")  # fmt: skip
_HISTORY_COLUMNS = ("network", "address", "container_id", "interface_name", "pod_name",
                    "pod_namespace", "given_at", "ended_at", "reason")  # fmt: skip


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A row of cidr_blocks."""

    network: str
    range: CIDRBlock
    state: str = READY


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row of ip_addresses; None is NULL, or what could not be believed.

    `container_id` is empty where the address is reserved or nobody's.
    """

    id: int
    block_id: int
    address: str
    container_id: str = ""
    interface_name: str = ""
    pod_name: str | None = None
    pod_namespace: str | None = None
    is_allocated: bool = False
    release_at: int | None = None
    allocated_at: int | None = None
    allocation_id: str | None = None
    boot_id: str | None = None
    netns_path: str | None = None
    given_at: int | None = None


@dataclass(slots=True)
class Found:
    """What one source tells.

    Attributes:
      source: what it is, for the log.
      blocks: by their id.
      rows: by their id.
      boot: the boot whose clock it has, and that clock's offset.
      deleted: rows of metis_deleted_owners, without the id.
      former: rows of metis_former_owners.
      history: rows of metis_history, without the id.
      problems: what could not be read.
    """

    source: str
    blocks: dict[int, FoundBlock] = field(default_factory=dict)
    rows: dict[int, FoundRow] = field(default_factory=dict)
    boot: tuple[str, int] | None = None
    deleted: list[tuple[Any, ...]] = field(default_factory=list)
    former: list[tuple[Any, ...]] = field(default_factory=list)
    history: list[tuple[Any, ...]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def owners(self) -> int:
        """How many addresses have an owner by it."""
        return sum(bool(row.container_id) for row in self.rows.values())


def read(connection: apsw.Connection, source: str = "the file") -> Found:
    """Read a database as far as SQLite can.

    Args:
      connection: to a database of this version or of the original.
      source: what it is, for the log.
    """
    found = Found(source)
    for row in _table(connection, found, "cidr_blocks", _BLOCK_COLUMNS):
        _note_block(found, row)
    for row in _table(connection, found, "ip_addresses", _ROW_COLUMNS):
        _note_row(found, row)
    for values in _table(connection, found, "metis_boot", ("boot_id", "offset_ms")):
        _note_boot(found, tuple(values.values()))
    for table, columns, kept in (
        ("metis_deleted_owners", _DELETED_COLUMNS, found.deleted),
        ("metis_former_owners", _FORMER_COLUMNS, found.former),
        ("metis_history", _HISTORY_COLUMNS, found.history),
    ):
        for values in _table(connection, found, table, columns):
            _note_plain(found, kept, tuple(values.values()))
    _read_indexes(connection, found)
    return found


def scan(image: bytes, log: bytes = b"", source: str = "the bare pages") -> Found:
    """Read the bare pages of a database, whatever is wrong with it.

    Args:
      image: the file.
      log: its write-ahead log; empty for none.
      source: what it is, for the log.
    """
    found = Found(source)
    for rowid, values in pages.rows(image, pages.pages_of_log(log)):
        kind = _shape(values)
        if kind == "ip_addresses":
            named = dict(zip(_ROW_COLUMNS, values, strict=False))
            _note_row(found, named | {"id": rowid})
        elif kind == "cidr_blocks":
            named = dict(zip(_BLOCK_COLUMNS, values, strict=False))
            _note_block(found, named | {"id": rowid})
        elif kind == "metis_boot":
            _note_boot(found, values)
        elif kind == "metis_deleted_owners":
            _note_plain(found, found.deleted, values[1:])
        elif kind == "metis_history":
            _note_plain(found, found.history, values[1:])
    return found


def _table(
    connection: apsw.Connection, found: Found, table: str, columns: Sequence[str]
) -> Iterable[dict[str, Any]]:
    """The rows of a table as far as they can be read, absent columns as None."""
    try:
        present = {
            str(name)
            for (name,) in connection.execute(
                "SELECT name FROM pragma_table_info(?)", (table,)
            )
        }
        if not present:
            return
        listed = ", ".join(one if one in present else "NULL" for one in columns)
        query = f"SELECT {listed} FROM {table}"  # noqa: S608  # names of this module
        for row in connection.execute(query):
            yield dict(zip(columns, row, strict=True))
    except (apsw.Error, UnicodeDecodeError) as error:
        found.problems.append(f"{table} cannot be read to its end: {error}")


def _read_indexes(connection: apsw.Connection, found: Found) -> None:
    """Add blocks and owners whose rows are gone, by what indexes say of them."""
    for row_id, cidr, network in _covered(
        connection, found, "cidr_blocks", ("cidr", "network")
    ):
        if row_id not in found.blocks:
            _note_block(found, {"id": row_id, "cidr": cidr, "network": network})
    owners = {
        row_id: (container, interface)
        for row_id, container, interface in _covered(
            connection, found, "ip_addresses", ("container_id", "interface_name")
        )
    }
    missing = {
        row_id
        for row_id in owners
        if row_id not in found.rows or not found.rows[row_id].container_id
    }
    for row_id, address, block_id in _covered(
        connection, found, "ip_addresses", ("address", "cidr_block_id")
    ):
        row = found.rows.get(row_id)
        if row is not None and row.container_id and row.address != address:
            _note_second_address(found, row, address)
        elif row_id in missing:
            container, interface = owners[row_id]
            _note_row(
                found,
                {
                    "id": row_id,
                    "address": address,
                    "cidr_block_id": block_id,
                    "container_id": container,
                    "interface_name": interface,
                    "is_allocated": 1,
                },
            )


def _note_second_address(found: Found, row: FoundRow, address: object) -> None:
    """Let an owner have both addresses where its row and the index disagree.

    One of the two is damaged, and may be another's by that: without a time, an owner
    yields to one of whom nothing is in doubt.
    """
    with contextlib.suppress(InvalidRequest, ValueError):
        other = replace(
            row, id=-row.id, address=_canonical(_text(address)), allocated_at=None
        )
        if other.address != row.address:
            found.rows[row.id] = replace(row, allocated_at=None)
            found.rows[other.id] = other


def _covered(
    connection: apsw.Connection, found: Found, table: str, columns: tuple[str, str]
) -> list[tuple[int, Any, Any]]:
    """Row ids and two columns of a table, out of the index that has both."""
    rows: list[tuple[int, Any, Any]] = []
    try:
        for (name,) in connection.execute(
            "SELECT name FROM pragma_index_list(?) WHERE partial = 0", (table,)
        ).fetchall():
            indexed = connection.execute(
                "SELECT name FROM pragma_index_info(?) ORDER BY seqno", (name,)
            ).fetchall()
            if tuple(column for (column,) in indexed) != columns:
                continue
            quoted = str(name).replace('"', '""')
            query = (
                f"SELECT id, {columns[0]}, {columns[1]} FROM {table}"  # noqa: S608  # names of this module, and one of the schema, quoted
                f" INDEXED BY \"{quoted}\" WHERE {columns[0]} > ''"
            )
            for row in connection.execute(query):
                rows.append(row)  # noqa: PERF402  # those before an error count
    except (apsw.Error, UnicodeDecodeError) as error:
        found.problems.append(f"an index of {table} cannot be read: {error}")
    return rows


def _shape(values: Sequence[pages.Value]) -> str:
    """Which table a row without a name is of; empty for none that matters."""
    if (
        len(values) >= 11
        and isinstance(values[1], str)
        and isinstance(values[2], int)
        and values[0] is None
        and values[7] in (0, 1)
    ):
        return "ip_addresses"
    kinds = "".join(
        "t" if isinstance(value, str) else "i" if isinstance(value, int) else "-"
        for value in values
    )
    if kinds.startswith("-ttt") and len(kinds) >= 9 and values[3] in tuple(Family):
        return "cidr_blocks"
    if kinds == "ti" and values[0] not in ("ip_addresses", "cidr_blocks"):
        return "metis_boot"  # the other table of that shape is sqlite_sequence
    if kinds == "-ttti":
        return "metis_deleted_owners"
    if len(kinds) == 10 and kinds.startswith("-tttt") and kinds.endswith("it"):
        return "metis_history"
    return ""


def _note_block(found: Found, row: Mapping[str, Any]) -> None:
    try:
        network = checked_name("network", _text(row["network"]))
        block = CIDRBlock.parse(_text(row["cidr"]))
    except InvalidRequest as error:
        found.problems.append(f"a block makes no sense: {error}")
        return
    state = row.get("state")
    state = state if state in _STATES else READY
    if isinstance(row["id"], int):
        found.blocks[row["id"]] = FoundBlock(network, block, state)


def _note_row(found: Found, row: Mapping[str, Any]) -> None:
    """Keep a row if it can be believed, and says more than a new one would."""
    if not row["is_allocated"] and row.get("release_at") is None:
        return
    row_id, block_id = row["id"], row["cidr_block_id"]
    try:
        if not isinstance(row_id, int) or not isinstance(block_id, int):
            raise InvalidRequest(f"row {row_id!r} of block {block_id!r}")
        address = _canonical(_text(row["address"]))
        container = interface = ""
        if row["is_allocated"] and row["container_id"]:
            container = checked_name("container id", _text(row["container_id"]))
            interface = checked_name("interface name", _text(row["interface_name"]))
    except (InvalidRequest, ValueError) as error:
        found.problems.append(f"a row of ip_addresses makes no sense: {error}")
        return
    found.rows[row_id] = FoundRow(
        row_id,
        block_id,
        address,
        container,
        interface,
        _name(row.get("pod_name")) if container else None,
        _name(row.get("pod_namespace")) if container else None,
        bool(row["is_allocated"]),
        _time(row.get("release_at")) if not row["is_allocated"] else None,
        _time(row.get("allocated_at")) if container else None,
        _name(row.get("allocation_id")) if container else None,
        _name(row.get("boot_id")) if container else None,
        _name(row.get("netns_path")) if container else None,
        _time(row.get("given_at")) if container else None,
    )


def _note_boot(found: Found, values: Sequence[object]) -> None:
    boot_id, offset_ms = values
    if _name(boot_id) and _time(offset_ms) is not None:
        found.boot = str(boot_id), int(str(offset_ms))


def _note_plain(
    found: Found, kept: list[tuple[Any, ...]], values: Sequence[object]
) -> None:
    """Keep a row of a table whose columns are short texts and times."""
    if all(
        value is None or _time(value) is not None or _name(value) is not None
        for value in values
    ):
        kept.append(tuple(values))
    else:
        found.problems.append("a note makes no sense")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{value!r:.64} is not a text")
    return value


def _name(value: object) -> str | None:
    """A text that may be a name or empty, else None."""
    try:
        return checked_name("name", _text(value), required=False)
    except InvalidRequest:
        return None


def _time(value: object) -> int | None:
    is_time = type(value) is int and 0 <= value <= _LATEST_MS
    return value if is_time else None  # type: ignore[return-value]  # an int, then


def _canonical(address: str) -> str:
    """An address as it should be written.

    Raises:
      ValueError: it is none.
    """
    family = Family.of(address)
    return format_address(family, parse_address(family, address))
