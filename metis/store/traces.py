"""What the files of a database tell before SQLite looks at them.

A process that is killed leaves the write-ahead log and the log's index ("-shm"). In
the index stands how long the log was at the last commit (SQLite's WAL-mode file
format, section 1.3 and 2), so a log that is shorter now, or another one, or gone,
has lost commits that were answered; SQLite by itself would take what is there for
all that there ever was.

After a reboot none of this counts: the index is not written to the disk with the
log, and nobody is alive who could be wronged.

May touch: the files, by plain reads, and a copy of the database that is none (a
second name of the same file). So only whoever is alone at it may look
(`metis.store.opening`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import apsw

from metis.errors import (
    StoreBusy,
    StoreDamaged,
    StoreIncompatible,
    StoreUnavailable,
)
from metis.store import arrival, connecting, pages, schema

_INDEX_SIZE = 136
_INDEX_VERSION = 3007000
_INDEX_HEADER = 48
_OWN_CHECKSUM = 40
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}
"""What file systems without hard links say (link(2))."""

_FILE_ID = slice(68, 72)

_MOST_LOG_BYTES = 256 * 2**20
"""Largest log that is read into memory; it is folded into the file at 4 MiB."""


@dataclass(frozen=True, slots=True)
class Traces:
    """What is wrong; all empty for nothing.

    Attributes:
      damage: why the file must not be opened as it is.
      lost: why commits are missing, though the file is sound.
      log_is_foreign: whether the log is not this database's.
    """

    damage: str = ""
    lost: str = ""
    log_is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class _Index:
    """The index of a log, as the last commit left it.

    Attributes:
      frames: how many frames the log has.
      folded: how many of them are in the file.
      folding: as far as this one, some are.
      salts: of the log, as its header has them.
    """

    frames: int
    folded: int
    folding: int
    salts: bytes


def look(path: str, boot_id: str) -> Traces:
    """Look at a database that is there, and that nobody has open.

    Args:
      path: the database.
      boot_id: the kernel's id of the present boot.

    Raises:
      OSError: the files cannot be read.
      StoreUnavailable: the disk is full, or fails; nothing is known of the files.
      StoreBusy: somebody keeps a lock.
    """
    if not may_be_ours(path):
        return Traces()  # it will be refused
    has_log = _size(f"{path}-wal") > pages.LOG_HEADER
    wrong = arrival.what_is_wrong(path)
    if wrong and not (has_log and _begins(path)):  # its end may be in the log
        return Traces(wrong)
    if not has_log and not os.path.exists(f"{path}-shm"):
        return Traces()
    return _look_at_log(path, boot_id, has_log)


def may_be_ours(path: str) -> bool:
    """Whether a file that SQLite cannot read is not one of another version.

    What does not even begin as a database, in the place of ours, was ours.

    Raises:
      OSError: it cannot be read.
    """
    version = int.from_bytes(_header(path)[60:64], "big")
    return not _begins(path) or version in (0, schema.SCHEMA_VERSION)


@contextlib.contextmanager
def second_name(path: str) -> Iterator[str]:
    """Another name of a database and its log, under which it may be read.

    What SQLite makes beside it is removed; the originals keep every byte.

    Raises:
      OSError: the names cannot be made.
    """
    name = f"{path}.salvage"
    _remove(name)
    try:
        link(path, name)
        with contextlib.suppress(FileNotFoundError):
            link(f"{path}-wal", f"{name}-wal")
        yield name
    finally:
        _remove(name)


def link(path: str, name: str) -> None:
    """Give a file a second name, or a copy where the file system has no such thing.

    Raises:
      FileNotFoundError: there is no file.
      OSError: neither can be made.
    """
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        import shutil

        try:
            shutil.copyfile(path, name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)  # a part of it
            raise


def forget_second_name(path: str) -> None:
    """Remove the other name where somebody was killed who had made it."""
    if os.path.lexists(f"{path}.salvage"):
        _remove(f"{path}.salvage")


def read_bytes(path: str) -> bytes:
    """What is in a file; nothing where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_LOG_BYTES)
    except FileNotFoundError:
        return b""


def _header(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(arrival.HEADER_SIZE)


def _begins(path: str) -> bool:
    """Whether a file begins as a database does."""
    header = _header(path)
    return len(header) == arrival.HEADER_SIZE and header.startswith(arrival.MAGIC)


def _look_at_log(path: str, boot_id: str, has_log: bool) -> Traces:
    """Compare the log with its index."""
    try:
        recovered, of_boot = _recovered(path)
    except apsw.Error as error:
        told = connecting.translated(error, f"database {path!r} cannot be read")
        if isinstance(told, StoreBusy | StoreUnavailable):
            raise told from None  # so is the disk, and the file may be as it should
        return Traces(f"it cannot be read: {error}")
    except UnicodeDecodeError:
        return Traces("it cannot be read: its schema is no text")
    except StoreIncompatible:
        return Traces()  # it will be refused
    except StoreDamaged as damage:
        return Traces(str(damage))
    if of_boot not in (None, boot_id):
        return Traces()
    raw = read_bytes(f"{path}-shm")
    index = _index(raw)
    if index is None:
        if not raw and has_log and _has_effect(path):
            return Traces(
                "its log came without an index, so nobody knows whose log it is"
            )
        return Traces()  # whoever had it open last was killed while it made the index
    if index.frames == 0:  # the log began anew; what it holds is old
        if has_log and _has_effect(path):
            return Traces("its log is not its own", log_is_foreign=True)
        return Traces()
    missing = index.frames - recovered
    if has_log and (_salts(path) != index.salts or _is_of_another_file(path)):
        return Traces("its log is not its own", log_is_foreign=True)
    if missing <= 0 or (recovered == 0 and index.folded == index.frames):
        return Traces()
    lost = f"the last {missing} of {index.frames} pages of its log are gone"
    if index.folding > recovered and not (
        recovered == 0 and index.folded == index.folding
    ):
        return Traces(f"{lost}, some of which the file has")
    return Traces(lost=lost)


def _recovered(path: str) -> tuple[int, str | None]:
    """How many frames of the log SQLite takes, and whose boot the clock is of.

    Raises:
      apsw.Error: SQLite cannot read the database.
      StoreIncompatible: it is not one that we may touch.
    """
    with second_name(path) as name:
        connection = connecting.connect(name, apsw.SQLITE_OPEN_READONLY)
        try:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            schema.check_compatible(connection)
            of_boot = None
            with contextlib.suppress(apsw.SQLError):  # the original has no clock
                for (value,) in connection.execute("SELECT boot_id FROM metis_boot"):
                    of_boot = str(value)
            # Its own index, which it has just made: nobody else's lock is lost.
            index = _index(read_bytes(f"{name}-shm"))
        finally:
            connecting.close(connection)
    return (0 if index is None else index.frames), of_boot


def _index(raw: bytes) -> _Index | None:
    """Read an index; None when it is none."""
    if len(raw) < _INDEX_SIZE:
        return None
    for start in (0, _INDEX_HEADER):  # two copies; the first is the older one
        header = raw[start : start + _INDEX_HEADER]
        version, is_made = struct.unpack_from("=I", header)[0], header[12]
        if version == _INDEX_VERSION and is_made and _is_whole(header):
            frames: int = struct.unpack_from("=I", header, 16)[0]
            folded: int = struct.unpack_from("=I", raw, 96)[0]
            folding: int = struct.unpack_from("=I", raw, 128)[0]
            return _Index(frames, folded, max(folded, folding), header[32:40])
    return None


def _is_whole(header: bytes) -> bool:
    """Whether a copy of the index's header has the checksum that it says."""
    first = second = 0
    words = struct.unpack_from("=10I", header)
    for one, two in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + two + first) & 0xFFFFFFFF
    return bool(struct.pack("=II", first, second) == header[_OWN_CHECKSUM:])


def _salts(path: str) -> bytes:
    with open(f"{path}-wal", "rb") as file:
        return file.read(pages.LOG_HEADER)[16:24]


def _has_effect(path: str) -> bool:
    """Whether the log holds a page that the file has otherwise, or not at all."""
    newest = pages.pages_of_log(read_bytes(f"{path}-wal"))
    with open(path, "rb") as file:
        for number, page in newest.items():
            file.seek((number - 1) * len(page))
            if file.read(len(page)) != page:
                return True
    return False


def _is_of_another_file(path: str) -> bool:
    """Whether the log holds the first page of a file that is not this one.

    Each file that we make has a random number there (SQLite's application id).
    """
    logged = pages.pages_of_log(read_bytes(f"{path}-wal")).get(1)
    return logged is not None and logged[_FILE_ID] != _header(path)[_FILE_ID]


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _remove(name: str) -> None:
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name + suffix)
