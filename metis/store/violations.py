"""A broken rule, and the shape of the database in which it was found.

Pure: values, and one function of a connection.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import apsw

LATEST_MS = 253_402_300_799_999
"""The latest time that is taken for one, in milliseconds: the end of the year 9999,
beyond which nothing can show it as a date."""

HEALED = "healed, once nobody else has the file open"
"""What is done about a damaged file: whoever opens it does it (metis.store.healing)."""


class Kind(enum.StrEnum):
    """Which rule is broken, in the order in which repair mends what can be mended.

    An index first, because everything else is read through it; counters last,
    because everything else changes them.
    """

    FILE = "file"
    INDEX = "index"
    REFERENCE = "reference"
    BLOCK = "block"
    ADDRESS = "address"
    OUTSIDE = "outside"
    ROW = "row"
    TIME = "time"
    TWICE = "twice"
    COOLING = "cooling"
    RESERVED = "reserved"
    DELETING = "deleting"
    OVERLAP = "overlap"
    WINDOW = "window"
    FILLED = "filled"
    NOTE = "note"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule, broken in one place.

    Attributes:
      kind: which rule.
      words: where and how; names block, address, owner and values.
      mend: what repair does about it ("deleted"); empty when it leaves it alone.
      table: where the row stands, for repair.
      row_id: which row; 0 for none.
      value: what repair puts there, or which of several things it does.
      is_warning: whether the original may have done it in its ordinary work.
    """

    kind: Kind
    words: str
    mend: str = ""
    table: str = ""
    row_id: int = 0
    value: str | int = ""
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """What a database has of ours.

    Attributes:
      with_tables: the head of a query (WITH ...) in which `blocks` and `rows` are
        the two tables with all columns, NULL where the file lacks them.
      is_original: whether the original made the file.
      has_windows: whether parts of blocks may have been filled by themselves.
    """

    with_tables: str
    is_original: bool
    has_windows: bool

    @classmethod
    def of(cls, connection: apsw.Connection) -> Shape:
        """The shape of a database of this version."""
        text: dict[str, str] = dict(
            connection.execute("SELECT name, coalesce(sql, '') FROM sqlite_schema")
        )
        # A column that was added to a table stands behind its last constraint.
        made = text.get("cidr_blocks", "")
        is_original = "seeded_ips" not in made.partition("UNIQUE")[0]
        return cls(
            f"WITH blocks AS ({_select(connection, 'cidr_blocks', _BLOCK_COLUMNS)}),"
            f" rows AS ({_select(connection, 'ip_addresses', _ROW_COLUMNS)}) ",
            is_original,
            "metis_windows" in text,
        )


_BLOCK_COLUMNS = (
    "id", "cidr", "network", "ip_family", "total_ips", "allocated_ips", "state",
    "created_at", "updated_at", "seeded_ips",
)  # fmt: skip

_ROW_COLUMNS = (
    "id", "address", "cidr_block_id", "container_id", "pod_name", "pod_namespace",
    "interface_name", "is_allocated", "release_at", "allocated_at", "updated_at",
    "allocation_id", "sort_key", "given_at",
)  # fmt: skip


def _select(connection: apsw.Connection, table: str, columns: tuple[str, ...]) -> str:
    present = {
        name
        for (name,) in connection.execute(
            "SELECT name FROM pragma_table_info(?)", (table,)
        )
    }
    listed = (
        name if name in present else f"NULL AS {name}" for name in columns
    )  # names of this module
    return f"SELECT {', '.join(listed)} FROM {table}"  # noqa: S608  # as above
