"""The records of a database file, page by page, when SQLite cannot read it as a whole.

Every leaf page of a table tells what its rows are by itself (SQLite's file format
documentation, sections 1.6 and 2.1), so one page that is broken costs the rows of
that page alone, whichever it is; the first one, with the schema, included. Pages of
the write-ahead log take the place of those in the file (section 4).

Which table a record is of is not said here; `metis.store.salvage` tells by its shape.

Pure: bytes in, values out. Nothing that they contain may do more harm than to make
no sense.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from metis.store import arrival

Value: TypeAlias = int | float | str | bytes | None

PAGE_SIZE = 4096
"""Where the header cannot tell: SQLite's default, which nobody here changes."""

LOG_HEADER = 32
FRAME_HEADER = 24
"""Bytes of the log's header, and of what stands before each page in it."""

_FIRST_PAGE_HEADER = 100
_TABLE_LEAF = 0x0D
_LEAF_HEADER = 8
_LONGEST_RECORD = 65_536
"""Bytes; ours have a few names of 1,024 at most."""

_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_LONG_VARINT = 0x80
_REAL, _ZERO, _ONE, _BLOB, _TEXT = 7, 8, 9, 12, 13


def page_size(header: bytes) -> int:
    """The page size that the first bytes of a file tell; PAGE_SIZE if none."""
    if len(header) < 18 or not header.startswith(arrival.MAGIC):
        return PAGE_SIZE
    size: int = struct.unpack_from(">H", header, 16)[0]
    size = 65_536 if size == 1 else size
    return size if size >= 512 and size & (size - 1) == 0 else PAGE_SIZE


def pages_of_log(log: bytes) -> dict[int, bytes]:
    """The newest version of each page that a write-ahead log holds.

    Of the frames from the first on that carry the log's salts, and only as far as
    the last commit. Checksums are not looked at: salvage takes what it can get.
    """
    if len(log) < LOG_HEADER:
        return {}
    size: int = struct.unpack_from(">I", log, 8)[0]
    salts = log[16:24]
    committed: dict[int, bytes] = {}
    pending: dict[int, bytes] = {}
    if size < 512 or size & (size - 1):
        return {}
    step = FRAME_HEADER + size
    for start in range(LOG_HEADER, len(log) - step + 1, step):
        number, commit = struct.unpack_from(">II", log, start)
        if log[start + 8 : start + 16] != salts:
            break
        pending[number] = log[start + FRAME_HEADER : start + step]
        if commit:
            committed |= pending
            pending = {}
    return committed


def rows(
    image: bytes, overlay: Mapping[int, bytes] | None = None
) -> Iterator[tuple[int, tuple[Value, ...]]]:
    """Every row of every table that can be read.

    Args:
      image: the file.
      overlay: pages in place of those of the file, by their number from 1.

    Returns:
      The rowid and the columns. A column that is an alias of the rowid is None.
    """
    overlay = overlay or {}
    size = page_size(overlay.get(1, image[:_FIRST_PAGE_HEADER]))
    last = max(len(image) // size, *overlay, 0)
    for number in range(1, last + 1):
        page = overlay.get(number) or image[(number - 1) * size : number * size]
        start = _FIRST_PAGE_HEADER if number == 1 else 0
        if len(page) != size or page[start] != _TABLE_LEAF:
            continue
        count: int = struct.unpack_from(">H", page, start + 3)[0]
        end = start + _LEAF_HEADER + 2 * count
        if end > size:
            continue
        for place in range(start + _LEAF_HEADER, end, 2):
            cell: int = struct.unpack_from(">H", page, place)[0]
            try:
                yield _row(page, cell, image, overlay, size)
            except (IndexError, ValueError, struct.error):
                continue


def _row(
    page: bytes, cell: int, image: bytes, overlay: Mapping[int, bytes], size: int
) -> tuple[int, tuple[Value, ...]]:
    """The row of a cell (section 1.6, "Table B-Tree Leaf Cell").

    Raises:
      ValueError, IndexError, struct.error: it makes no sense.
    """
    length, at = _varint(page, cell)
    rowid, at = _varint(page, at)
    if not 0 < length <= _LONGEST_RECORD:
        raise ValueError("no length of a record")
    whole = size - 35
    if length <= whole:
        return rowid, _record(_exactly(page[at : at + length], length))
    least = (size - 12) * 32 // 255 - 23
    local = least + (length - least) % (size - 4)
    local = local if local <= whole else least
    payload = page[at : at + local]
    following: int = struct.unpack_from(">I", page, at + local)[0]
    while following and len(payload) < length:
        first = (following - 1) * size
        more = overlay.get(following) or image[first : first + size]
        following = struct.unpack_from(">I", more)[0]
        payload += more[4:size]
    return rowid, _record(_exactly(payload[:length], length))


def _record(payload: bytes) -> tuple[Value, ...]:
    """The columns of a record (section 2.1).

    In one loop, and with the common cases first: a database has many.
    """
    header, at = _varint(payload, 0)
    if header > len(payload):
        raise ValueError("no length of a header")
    values: list[Value] = []
    body = header
    while at < header:
        kind = payload[at]
        at += 1
        if kind >= _LONG_VARINT:
            kind, at = _varint(payload, at - 1)
        start = body
        if kind == 0:
            values.append(None)
        elif kind >= _TEXT and kind % 2:
            body += (kind - _TEXT) // 2
            values.append(payload[start:body].decode(errors="replace"))
        elif kind in _INTEGER_BYTES:
            body += _INTEGER_BYTES[kind]
            values.append(int.from_bytes(payload[start:body], "big", signed=True))
        elif kind in (_ZERO, _ONE):
            values.append(kind - _ZERO)
        elif kind >= _BLOB:
            body += (kind - _BLOB) // 2
            values.append(payload[start:body])
        elif kind == _REAL:
            body += 8
            values.append(struct.unpack_from(">d", payload, start)[0])
        else:
            raise ValueError("a type that there is not")
    if body > len(payload):
        raise ValueError("it is cut")
    return tuple(values)


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ValueError("it is cut")
    return data


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A variable-length integer, and where the next byte is."""
    value = 0
    for _ in range(8):
        byte = data[at]
        at += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at
    return value << 8 | data[at], at + 1
