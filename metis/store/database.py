"""The SQLite wrapper over anyio: one writer, a pool of readers, threads for waiting.

`open_database` makes or opens the file; after that nothing else may ever open
it by hand, because closing any descriptor of a file drops all locks that the
process holds on it (POSIX). Every apsw and operating system error leaves this
module as one of `metis.errors`, with the path and the reason.

  writer   one connection; a group of requests is one transaction. It runs in the
           event loop's own thread while that does not wait, else in a worker thread
  readers  read-only connections; in WAL mode they never wait for the writer

May touch: the file, its directory, worker threads. Knows no request by name: the
functions that it runs are those of `metis.store.sql`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import apsw

from metis.clock import Clock, StoredClock
from metis.errors import (
    MetisError,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreUnavailable,
)
from metis.store import schema, seeding

T = TypeVar("T")

Work: TypeAlias = Callable[[apsw.Connection, int], T]
"""What a request does: a function of a connection and the stored time in ms."""

BUSY_TIMEOUT_MS = 1000
"""How long SQLite waits for another process's write lock, in milliseconds.

Longer than any write of ours takes, and short enough that a call behind a
process which was stopped inside its transaction can be answered, and retried,
several times within the 10 s that a CNI client gives it.
"""

SLOW_GROUP_SECONDS = 0.05
"""A group that takes longer in the event loop's thread has met a slow disk: a full
one takes about 3 ms, a step of 4,096 new rows 20."""

CAUTIOUS_GROUPS = 1000
"""Groups that run in a worker thread after a slow one, before another is tried in
the event loop's thread."""

CHECKPOINT_PAGES = 1000
"""Pages in the write-ahead log after which they are folded into the file: SQLite's
own default. It is done here because it waits for the disk (fsync)."""

_WAL_ATTEMPTS = 10
"""Tries to change the journal mode. Each but the last waits for the lock of whoever
was faster, so two suffice where nobody is unlucky twice."""

READERS = 2
"""Read-only connections: a long listing leaves one for everybody else."""

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
"""Container ids and pod names are nobody else's business."""

_BUSY = (apsw.BusyError, apsw.LockedError, apsw.ProtocolError)
_UNAVAILABLE = (
    apsw.FullError,
    apsw.IOError,
    apsw.ReadOnlyError,
    apsw.CantOpenError,
    apsw.PermissionsError,
)


@dataclass(slots=True)
class Database:
    """An open database: what `open_database` returns.

    Attributes:
      path: the file, for messages.
      clock: the clock of stored times.
    """

    path: str
    clock: StoredClock
    _writer: apsw.Connection
    _readers: collections.deque[apsw.Connection]
    _write_limiter: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(1)
    )
    _read_limiter: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(READERS)
    )
    _flushes: bool = False
    _cautious_groups: int = 0
    _wal_pages: int = 0
    _checkpoint_at: int = CHECKPOINT_PAGES

    def __post_init__(self) -> None:
        # In place of SQLite's own checkpoints, which any commit might have to do.
        self._writer.set_wal_hook(self._note_wal_pages)

    async def write(self, group: Sequence[Work[object]]) -> list[object]:
        """Run requests as one transaction.

        Handing a group to a worker thread costs more than its SQL, so it runs in
        the calling thread as long as nothing there waits: not where every commit
        is flushed to the disk, not for another process's lock, not for the disk
        after it was slow once.

        Once it runs it is not abandoned, whoever is cancelled; SQLite bounds it
        by BUSY_TIMEOUT_MS and the work itself.

        Returns:
          For each request what it returned, or the exception that it raised:
          then its own writes were undone, and those of the others stand.

        Raises:
          StoreError: nothing of the group was written.
        """
        if self._wal_pages >= self._checkpoint_at:
            await anyio.to_thread.run_sync(
                self._checkpoint, limiter=self._write_limiter
            )
        if not self._flushes and self._cautious_groups == 0:
            await anyio.lowlevel.checkpoint()
            with contextlib.suppress(StoreBusy):  # then a thread shall wait
                return self._write_at_once(group)
        self._cautious_groups = max(self._cautious_groups - 1, 0)
        return await anyio.to_thread.run_sync(
            run_group, self._writer, self.clock, group, limiter=self._write_limiter
        )

    async def read(self, work: Work[T]) -> T:
        """Run a request that writes nothing on one of the readers.

        Raises:
          StoreError: SQLite's answer, translated; or whatever `work` raises.
        """
        return await anyio.to_thread.run_sync(
            self._read, work, limiter=self._read_limiter
        )

    async def aclose(self) -> None:
        """Close every connection, the writer last: it folds the WAL back."""
        for _ in range(READERS):  # once all are ours, no read is running
            await self._read_limiter.acquire_on_behalf_of(object())
        await anyio.to_thread.run_sync(self._close, limiter=self._write_limiter)

    def _read(self, work: Work[T]) -> T:
        connection = self._readers.pop()
        try:
            return run_read(connection, self.clock, work)
        finally:
            self._readers.append(connection)

    def _write_at_once(self, group: Sequence[Work[object]]) -> list[object]:
        """Run a group without waiting for anybody's lock.

        Raises:
          StoreBusy: another process has it; nothing was written.
        """
        start = time.monotonic()
        self._writer.set_busy_timeout(0)
        try:
            return run_group(self._writer, self.clock, group)
        finally:
            self._writer.set_busy_timeout(BUSY_TIMEOUT_MS)
            if time.monotonic() - start > SLOW_GROUP_SECONDS:
                self._cautious_groups = CAUTIOUS_GROUPS

    def _note_wal_pages(
        self, _connection: apsw.Connection, _name: str, pages: int
    ) -> int:
        """Take note of the log's length after a commit."""
        if pages < self._wal_pages:  # it has begun anew
            self._checkpoint_at = CHECKPOINT_PAGES
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def _checkpoint(self) -> None:
        """Fold the log into the file, as far as no reader needs it.

        What fails is tried again when the log has grown by as much: until then
        everything is in the log, and no request is the worse for it.
        """
        self._checkpoint_at = self._wal_pages + CHECKPOINT_PAGES
        with contextlib.suppress(apsw.Error):
            self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _close(self) -> None:
        for connection in (*self._readers, self._writer):
            _close(connection)


async def open_database(
    path: str, *, clock: Clock, cooldown_ms: int, synchronous: str
) -> Database:
    """Open the database of a path; make it when it does not exist.

    Args:
      path: the file. Its directory is made (0700) when it is missing.
      clock: where raw time comes from.
      cooldown_ms: the longest cooldown after a boot, in milliseconds.
      synchronous: SQLite's setting, "NORMAL" or "FULL".

    Raises:
      StoreIncompatible: a newer version or a file of something else; it was
        left as it is.
      StoreUnavailable: the file or its directory cannot be read and written.
      StoreBusy: another process kept the write lock for BUSY_TIMEOUT_MS.
    """
    return await anyio.to_thread.run_sync(
        connect, path, clock, cooldown_ms, synchronous
    )


def connect(path: str, clock: Clock, cooldown_ms: int, synchronous: str) -> Database:
    """Do what `open_database` says, in the calling thread."""
    _make_file(path)
    # The last connection to close folds what a crash left in the WAL into the
    # file, which a database that is not ours must be spared.
    left_wal = False
    with contextlib.suppress(OSError):  # as a rule, there is none
        left_wal = os.path.getsize(f"{path}-wal") > 0
    connections: list[apsw.Connection] = []
    try:
        writer = _connect(path, apsw.SQLITE_OPEN_READWRITE)
        connections.append(writer)
        stored = _prepare(writer, clock, cooldown_ms, synchronous)
        for _ in range(READERS):
            reader = _connect(path, apsw.SQLITE_OPEN_READONLY)
            connections.append(reader)
    except (apsw.Error, MetisError) as error:
        for connection in reversed(connections):
            if left_wal:
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            _close(connection)
        what = f"database {path!r} cannot be opened"
        if isinstance(error, apsw.Error):
            raise translated(error, what) from error
        raise type(error)(f"{what}: {error}") from None
    return Database(
        path,
        stored,
        writer,
        collections.deque(connections[1:]),
        _flushes=synchronous != "NORMAL",
    )


def run_group(
    connection: apsw.Connection, clock: StoredClock, group: Sequence[Work[object]]
) -> list[object]:
    """Do what `Database.write` says, in the calling thread."""
    run = _run_alone if len(group) == 1 else _run_in_savepoint
    try:
        connection.execute("BEGIN IMMEDIATE")
        now_ms = clock.now_ms()
        answers = [run(connection, now_ms, work) for work in group]
        if connection.in_transaction:
            connection.execute("COMMIT")
    except BaseException as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if isinstance(error, apsw.Error):
            raise translated(error, "nothing was written") from error
        raise
    return answers


def run_read(connection: apsw.Connection, clock: StoredClock, work: Work[T]) -> T:
    """Do what `Database.read` says, in the calling thread."""
    try:
        connection.execute("BEGIN")
        return work(connection, clock.now_ms())
    except apsw.Error as error:
        raise translated(error, "nothing was read") from error
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def translated(error: apsw.Error, what: str) -> StoreError:
    """SQLite's error as the one of ours that tells what to do about it."""
    text = f"{what}: {error}"
    if isinstance(error, _BUSY):
        return StoreBusy(text)
    if isinstance(error, _UNAVAILABLE):
        return StoreUnavailable(text)
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return StoreDamaged(text)
    return StoreError(text)


def _run_alone(connection: apsw.Connection, now_ms: int, work: Work[object]) -> object:
    """Run the only request of a transaction; its error undoes the transaction."""
    try:
        return work(connection, now_ms)
    except Exception as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        return _answer(error)


def _run_in_savepoint(
    connection: apsw.Connection, now_ms: int, work: Work[object]
) -> object:
    """Run one request of many; its error undoes its own writes."""
    connection.execute("SAVEPOINT request")
    try:
        answer = work(connection, now_ms)
    except Exception as error:
        if not connection.in_transaction:  # SQLite undid the whole group
            raise
        connection.execute("ROLLBACK TO request")
        answer = _answer(error)
    connection.execute("RELEASE request")
    return answer


def _answer(error: Exception) -> Exception:
    if isinstance(error, apsw.Error):
        return translated(error, "nothing was written")
    return error


def _make_file(path: str) -> None:
    """Make the directory and an empty file where they are missing.

    mknod makes the file with its final mode and without a descriptor, whose
    closing would drop the locks of whoever in this process has opened it since.
    """
    directory = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(directory, mode=_DIRECTORY_MODE, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(
            f"directory {directory!r} of the database cannot be made: {error.strerror}"
        ) from None
    try:
        os.mknod(path, stat.S_IFREG | _FILE_MODE)
    except FileExistsError:
        if not os.path.isfile(path):
            raise StoreUnavailable(
                f"database {path!r} cannot be opened: it is not a regular file"
            ) from None
    except OSError as error:
        raise StoreUnavailable(
            f"database {path!r} cannot be made: {error.strerror}"
        ) from None
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise StoreUnavailable(
            f"database {path!r} cannot be opened: directory {directory!r} is not "
            "writable, and SQLite keeps its write-ahead log there"
        )


def _connect(path: str, flags: int) -> apsw.Connection:
    connection = apsw.Connection(path, flags=flags)
    # Before anything else: every other statement may meet another process's lock.
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    # Plans do not depend on bound values, so that SQLite does not plan a statement
    # anew whenever it is bound anew: that halves the cost of an allocation.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    return connection


def _close(connection: apsw.Connection) -> None:
    """Close a connection; what cannot be folded back now stays in the log."""
    with contextlib.suppress(apsw.Error):
        connection.close()


def _prepare(
    writer: apsw.Connection, clock: Clock, cooldown_ms: int, synchronous: str
) -> StoredClock:
    """Make the database ours if it may be, and fix the clock of stored times."""
    if writer.readonly("main"):
        raise StoreUnavailable("the file is read-only")
    complete = schema.check_compatible(writer)
    seeding.register(writer)
    _enter_wal_mode(writer)
    writer.pragma("synchronous", synchronous)
    writer.pragma("foreign_keys", True)
    boot_id = clock.boot_id()
    offset_ms = schema.clock_offset(writer, boot_id) if complete else None
    if offset_ms is None:
        writer.execute("BEGIN IMMEDIATE")
        offset_ms = schema.prepare(
            writer,
            boot_id=boot_id,
            boottime_ms=clock.boottime_ms(),
            walltime_ms=clock.walltime_ms(),
            cooldown_ms=cooldown_ms,
        )
        writer.execute("COMMIT")
    return StoredClock(clock, offset_ms)


def _enter_wal_mode(writer: apsw.Connection) -> None:
    """Change the journal mode, which lasts, unless it is right already.

    The change needs the file alone, and where several processes want it at once
    SQLite answers busy to one of them without waiting.
    """
    for _ in range(_WAL_ATTEMPTS):
        if writer.pragma("journal_mode") == "wal":
            return
        try:
            if writer.pragma("journal_mode", "wal") != "wal":
                raise StoreUnavailable("its file system cannot share memory (WAL mode)")
        except apsw.BusyError:
            writer.execute("BEGIN IMMEDIATE")  # waits, as the change does not
            writer.execute("ROLLBACK")
    raise apsw.BusyError("others are changing its journal mode")
