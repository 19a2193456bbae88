"""The SQLite wrapper over anyio: one writer, a pool of readers, threads for waiting.

`open_database` makes or opens the file; after that nothing else may ever open
it by hand, because closing any descriptor of a file drops all locks that the
process holds on it (POSIX). What is damaged is healed first (`metis.store.healing`).
Every apsw and operating system error leaves this
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
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import anyio.to_thread
import apsw

from metis.clock import Clock, StoredClock
from metis.errors import (
    MetisError,
    StoreBusy,
    StoreDamaged,
    StoreUnavailable,
)
from metis.store import arrival, connecting, opening
from metis.store.arrival import Evidence, Patient
from metis.store.connecting import translated
from metis.store.opening import Attendance
from metis.store.transactions import Work, run_group, run_read

T = TypeVar("T")

SLOW_GROUP_SECONDS = 0.05
"""A group that takes longer in the event loop's thread has met a slow disk: a full
one takes about 3 ms, a step of 4,096 new rows 20."""

CAUTIOUS_GROUPS = 1000
"""Groups that run in a worker thread after a slow one, before another is tried in
the event loop's thread."""

CHECKPOINT_PAGES = 4000
"""Pages in the write-ahead log, 16 MiB, after which they are folded into the file, and
again after as many more.

It is done here, and not by SQLite inside of a commit, because it waits for the disk:
14 ms for 1000 pages, which is SQLite's own default, 8 ms for 20 and 19 ms for 4000,
nearly all of it for two flushes. Others write meanwhile. What they write is left for
the next time, and so the log never begins anew as long as they do."""

LONG_LOG_PAGES = 3 * CHECKPOINT_PAGES
"""Pages in the log, 48 MiB, from which it is made to begin anew: as soon as it has been
folded once more, no group is written until what has come meanwhile is folded as well.
That takes 8 ms, of which not one call in a hundred knows: a DEL in a group of 32 writes
three pages and by itself 11."""

LONGEST_LOG_PAGES = 4 * CHECKPOINT_PAGES
"""Pages in the log after which all of it is folded before anything else is written:
whoever should have done so meanwhile has not come to it, or could not."""

READERS = 2
"""Read-only connections: a long listing leaves one for everybody else."""


@dataclass(slots=True)
class Database:
    """An open database: what `open_database` returns.

    Attributes:
      path: the file, for messages.
      clock: the clock of stored times.
      healed: whether it was damaged or gone, and is made anew.
    """

    path: str
    clock: StoredClock
    _writer: apsw.Connection
    _readers: collections.deque[apsw.Connection]
    _attendance: Attendance
    _identity: tuple[int, int]
    healed: bool = False
    _write_limiter: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(1)
    )
    _read_limiter: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(READERS)
    )
    _fold_limiter: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(1)
    )
    _folder: apsw.Connection | None = None
    _flushes: bool = False
    _cautious_groups: int = 0
    _wal_pages: int = 0
    _fold_at: int = CHECKPOINT_PAGES
    _checkpoint_at: int = LONGEST_LOG_PAGES
    _is_long: anyio.Event = field(default_factory=anyio.Event)

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
        by `connecting.BUSY_TIMEOUT_MS` and the work itself.

        Returns:
          For each request what it returned, or the exception that it raised:
          then its own writes were undone, and those of the others stand.

        Raises:
          StoreDamaged: somebody has removed the file, or put another in its place.
            Closing it puts it back where nothing is.
          StoreError: nothing of the group was written.
        """
        answers = self.write_at_once(group)
        if answers is None and self._wal_pages >= self._checkpoint_at:
            await anyio.to_thread.run_sync(self._checkpoint, limiter=self._fold_limiter)
            answers = self.write_at_once(group)
        if answers is None:
            self._cautious_groups = max(self._cautious_groups - 1, 0)
            answers = await anyio.to_thread.run_sync(
                run_group, self._writer, self.clock, group, limiter=self._write_limiter
            )
            self._look_at_log()
        return answers

    def write_at_once(self, group: Sequence[Work[object]]) -> list[object] | None:
        """Do what `write` says, if nothing has to be waited for.

        Returns:
          The answers; None when nothing was written because something has to be.

        Raises:
          StoreError: as `write`.
        """
        if not self._is_in_place():  # a microsecond
            raise StoreDamaged(
                f"database {self.path!r} was removed or replaced while it is open"
            )
        is_log_full = self._wal_pages >= self._checkpoint_at
        if self._flushes or self._cautious_groups or is_log_full:
            return None
        start = time.monotonic()
        self._writer.set_busy_timeout(0)
        try:
            answers = run_group(self._writer, self.clock, group)
        except StoreBusy:
            return None
        finally:
            self._writer.set_busy_timeout(connecting.BUSY_TIMEOUT_MS)
            if time.monotonic() - start > SLOW_GROUP_SECONDS:
                self._cautious_groups = CAUTIOUS_GROUPS
        self._look_at_log()
        return answers

    async def read(self, work: Work[T]) -> T:
        """Run a request that writes nothing on one of the readers.

        Raises:
          StoreError: SQLite's answer, translated; or whatever `work` raises.
        """
        return await anyio.to_thread.run_sync(
            self._read, work, limiter=self._read_limiter
        )

    async def keep_log_short(self) -> None:
        """Fold the log into the file, while it is written to, whenever it is long.

        To be run beside those who write, until it is cancelled.
        """
        while True:
            await self._is_long.wait()
            self._is_long = anyio.Event()
            await anyio.to_thread.run_sync(self._fold, limiter=self._fold_limiter)
            if self._wal_pages >= LONG_LOG_PAGES:
                self._checkpoint_at = self._wal_pages  # little of it is left

    async def aclose(self) -> None:
        """Close every connection, the writer last: it folds the WAL back."""
        for _ in range(READERS):  # once all are ours, no read is running
            await self._read_limiter.acquire_on_behalf_of(object())
        await anyio.to_thread.run_sync(self._close, limiter=self._write_limiter)

    def _is_in_place(self) -> bool:
        """Whether the open file still has its name, and is not written to in vain."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def _read(self, work: Work[T]) -> T:
        connection = self._readers.pop()
        try:
            return run_read(connection, self.clock, work)
        finally:
            self._readers.append(connection)

    def _note_wal_pages(
        self, _connection: apsw.Connection, _name: str, pages: int
    ) -> int:
        """Take note of the log's length after a commit."""
        if pages < self._wal_pages:  # it has begun anew
            self._fold_at = CHECKPOINT_PAGES
            self._checkpoint_at = LONGEST_LOG_PAGES
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def _look_at_log(self) -> None:
        """Have the log folded when it is long."""
        if self._wal_pages >= self._fold_at:
            self._fold_at = self._wal_pages + CHECKPOINT_PAGES
            self._is_long.set()

    def _fold(self) -> None:
        """Fold the log into the file, by a connection that writes nothing.

        What cannot be folded now is so after the next pages, or by `_checkpoint`.
        """
        with contextlib.suppress(apsw.Error):
            if self._folder is None:
                if not self._is_in_place():
                    return
                self._folder = connecting.connect(self.path, apsw.SQLITE_OPEN_READWRITE)
            self._folder.pragma("user_version")  # who has read nothing knows no log
            self._folder.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _checkpoint(self) -> None:
        """Fold the log into the file, as far as no reader needs it; nobody writes.

        What fails is tried again when the log has grown by as much: until then
        everything is in the log, and no request is the worse for it.
        """
        self._checkpoint_at = self._wal_pages + CHECKPOINT_PAGES
        with contextlib.suppress(apsw.Error):
            self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _close(self) -> None:
        if not os.path.exists(self.path):
            from metis.store import missing

            missing.put_back(self._writer, self.path)
        for connection in (*self._readers, self._folder, self._writer):
            if connection is not None:
                connecting.close(connection)
        self._attendance.leave()


async def open_database(
    path: str,
    *,
    clock: Clock,
    cooldown_ms: int,
    synchronous: str,
    thorough: bool = False,
    evidence: Evidence | None = None,
    patience: float | None = None,
) -> Database:
    """Open the database of a path; make it when it does not exist, heal it if need be.

    Args:
      path: the file. Its directory is made (0700) when it is missing.
      clock: where raw time comes from.
      cooldown_ms: the longest cooldown after a boot, in milliseconds.
      synchronous: SQLite's setting, "NORMAL" or "FULL".
      thorough: whether the whole file is looked through, or damage is left to be
        found by whoever comes across it.
      evidence: asked who must have an address, when records are missing.
      patience: how long to wait for others who open it, in seconds; by default as
        long as they may take.

    Raises:
      StoreIncompatible: a newer version or a database of something else; it was
        left as it is.
      StoreUnavailable: the file or its directory cannot be read and written, or
        it is damaged while others have it open.
      StoreBusy: another process kept a lock for long.
    """
    return await anyio.to_thread.run_sync(
        functools.partial(
            connect,
            path,
            clock,
            cooldown_ms,
            synchronous,
            thorough=thorough,
            evidence=evidence,
            patience=patience,
        )
    )


def connect(
    path: str,
    clock: Clock,
    cooldown_ms: int,
    synchronous: str,
    *,
    thorough: bool = False,
    evidence: Evidence | None = None,
    patience: float | None = None,
) -> Database:
    """Do what `open_database` says, in the calling thread."""
    connecting.make_directory(path)
    path = os.path.realpath(path)  # one name, beside which all the others are
    patient = Patient(path, clock, cooldown_ms, evidence)
    arrival.refuse_stranger(path)
    attendance = opening.enter(path, seconds=patience)
    try:
        healed, lost = _look(patient, attendance)
        if not (attendance.alone and (thorough or lost)):
            attendance.admit_others()
        try:
            database = _open(patient, attendance, synchronous, thorough, lost)
        except StoreDamaged:
            attendance.leave()
            attendance = opening.enter(path, alone=True, seconds=patience)
            database, healed = _open_healed(patient, attendance, synchronous)
        attendance.admit_others()
    except BaseException:
        attendance.leave()
        raise
    database.healed = healed
    return database


def _look(patient: Patient, attendance: Attendance) -> tuple[bool, str]:
    """See to it that there is a database; see `healing.look_closely`."""
    if arrival.is_at_rest(patient.path, attendance):
        return False, ""
    # Here, as below, because it takes a plugin longer than all of its call.
    from metis.store import healing

    return healing.look_closely(patient)


def _open_healed(
    patient: Patient, attendance: Attendance, synchronous: str
) -> tuple[Database, bool]:
    """Open a damaged database alone; whether it was we who healed it."""
    from metis.store import healing, traces

    healed, lost = _look(patient, attendance)
    try:  # whoever was here before may have done it
        return _open(patient, attendance, synchronous, True, lost), healed
    except StoreDamaged as error:
        if not traces.may_be_ours(patient.path):
            raise
        healing.heal(patient, str(error))
    return _open(patient, attendance, synchronous, False, ""), True


def _open(
    patient: Patient,
    attendance: Attendance,
    synchronous: str,
    thorough: bool,
    lost: str,
) -> Database:
    """Open a database that is there."""
    path = patient.path
    # The last connection to close folds what a crash left in the WAL into the
    # file, which a database that is not ours, or is damaged, must be spared.
    left_wal = False
    with contextlib.suppress(OSError):  # as a rule, there is none
        left_wal = os.path.getsize(f"{path}-wal") > 0
    connections: list[apsw.Connection] = []
    try:
        writer = connecting.connect(path, apsw.SQLITE_OPEN_READWRITE)
        connections.append(writer)
        stored = connecting.prepare(
            writer, patient.clock, patient.cooldown_ms, synchronous
        )
        if thorough:
            from metis.store import examining

            if wrong := examining.examine(writer, stored.now_ms(), path):
                raise StoreDamaged(wrong)
        if lost:
            from metis.store import healing

            healing.see_to_lost_commits(patient, writer, stored.now_ms(), lost)
        for _ in range(READERS):
            reader = connecting.connect(path, apsw.SQLITE_OPEN_READONLY)
            connections.append(reader)
        file = os.stat(path)
    except (apsw.Error, MetisError, OSError, UnicodeDecodeError) as error:
        for connection in reversed(connections):
            if left_wal:
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            connecting.close(connection)
        what = f"database {path!r} cannot be opened"
        if isinstance(error, apsw.Error):
            raise translated(error, what) from error
        if isinstance(error, UnicodeDecodeError):
            raise StoreDamaged(f"{what}: it holds text that is none") from error
        if isinstance(error, OSError):  # it was there a moment ago
            raise StoreUnavailable(f"{what}: {error.strerror}") from error
        raise type(error)(f"{what}: {error}") from None
    return Database(
        path,
        stored,
        writer,
        collections.deque(connections[1:]),
        attendance,
        (file.st_dev, file.st_ino),
        _flushes=synchronous != "NORMAL",
    )
