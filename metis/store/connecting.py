"""Connections to a database file: how one is opened, made ours, and closed.

SQLite's errors become one of `metis.errors` here (`translated`).

May touch: the file, through SQLite, and its mode; after a boot, it asks whether there
are the network namespaces that are named in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

import apsw

from metis.clock import Clock, StoredClock
from metis.errors import StoreBusy, StoreDamaged, StoreError, StoreUnavailable
from metis.store import reboot, schema, seeding

BUSY_TIMEOUT_MS = 1000
"""How long SQLite waits for another process's write lock, in milliseconds.

Longer than any write of ours takes, and short enough that a call behind a
process which was stopped inside its transaction can be answered, and retried,
several times within the 10 s that a CNI client gives it.
"""

_WAL_ATTEMPTS = 10
"""Tries to change the journal mode. Each but the last waits for the lock of whoever
was faster, so two suffice where nobody is unlucky twice."""

EMPTY_AT_BOOT = ("/run/", "/var/run/")
"""Where runtimes have the network namespaces of their containers, in memory. No look
there waits for a disk or for another machine."""

_ALL_PAGES = -1
"""What `apsw.Backup.step` takes for all that is left."""

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


def make_directory(path: str) -> None:
    """Make the directory of a database where it is missing; see that it will do.

    Raises:
      StoreUnavailable: it cannot be made or written, or something else stands in
        place of the database.
    """
    directory = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(directory, mode=_DIRECTORY_MODE, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(
            f"directory {directory!r} of the database cannot be made: {error.strerror}"
        ) from None
    if os.path.lexists(path) and not os.path.isfile(path):
        raise StoreUnavailable(
            f"database {path!r} cannot be opened: it is not a regular file"
        )
    if os.path.exists(path) and not os.access(
        path, os.R_OK | os.W_OK, effective_ids=True
    ):
        raise StoreUnavailable(
            f"database {path!r} cannot be opened: the file is read-only"
        )
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise StoreUnavailable(
            f"database {path!r} cannot be opened: directory {directory!r} is not "
            "writable (Permission denied), and SQLite keeps its write-ahead log there"
        )


def connect(path: str, flags: int) -> apsw.Connection:
    """Open a connection to a file that is there."""
    connection = apsw.Connection(path, flags=flags)
    # Before anything else: every other statement may meet another process's lock.
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    # Plans do not depend on bound values, so that SQLite does not plan a statement
    # anew whenever it is bound anew: that halves the cost of an allocation.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    return connection


def close(connection: apsw.Connection) -> None:
    """Close a connection; what cannot be folded back now stays in the log."""
    with contextlib.suppress(apsw.Error):
        connection.close()


def prepare(
    writer: apsw.Connection, clock: Clock, cooldown_ms: int, synchronous: str
) -> StoredClock:
    """Make a database ours if it may be, and fix the clock of stored times."""
    if writer.readonly("main"):
        raise StoreUnavailable("the file is read-only")
    complete = schema.check_compatible(writer)
    seeding.register(writer)
    enter_wal_mode(writer)
    writer.pragma("synchronous", synchronous)
    writer.pragma("foreign_keys", True)
    try:
        boot_id = clock.boot_id()
    except OSError as error:
        raise StoreUnavailable(
            f"the boot of this machine is not known, without which owners of a former "
            f"one cannot be told: {error.filename}: {error.strerror}"
        ) from None
    offset_ms = schema.clock_offset(writer, boot_id) if complete else None
    if offset_ms is None:
        writer.execute("BEGIN IMMEDIATE")
        if complete:
            reboot.keep(writer, boot_id, _outlives_no_boot)
        offset_ms = schema.prepare(
            writer,
            boot_id=boot_id,
            boottime_ms=clock.boottime_ms(),
            walltime_ms=clock.walltime_ms(),
            cooldown_ms=cooldown_ms,
        )
        writer.execute("COMMIT")
        # The file by itself has to say which boot it is of: if its log were lost, it
        # would be one of a former boot, of which nobody is left to be robbed.
        with contextlib.suppress(apsw.Error):
            writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    keep_private(writer.filename)
    return StoredClock(clock, offset_ms)


def _outlives_no_boot(path: str) -> bool:
    """Whether a path is there, in a place that is empty when a machine has booted."""
    return path.startswith(EMPTY_AT_BOOT) and os.path.lexists(path)


def keep_private(path: str) -> None:
    """Take from others what they may do with a database that somebody else made.

    SQLite gives the files beside it the database's own mode. A mode is changed by
    name, which takes no descriptor, and never to allow more.
    """
    for name in (path, f"{path}-wal", f"{path}-shm"):
        with contextlib.suppress(OSError):  # absent, or not ours to change
            mode = os.lstat(name).st_mode
            if stat.S_ISREG(mode) and stat.S_IMODE(mode) & ~_FILE_MODE:
                os.chmod(name, stat.S_IMODE(mode) & _FILE_MODE)


def copy_pages(source: apsw.Connection, target: apsw.Connection) -> None:
    """Copy every page of a database into another, by SQLite's backup.

    Raises:
      OSError: there is no room for them.
      apsw.Error: one cannot be read, or not be written.
    """
    with target.backup("main", source, "main") as backup:
        try:
            backup.step(_ALL_PAGES)
        except apsw.FullError:
            # Not the source's, and SQLite's words for it are "not an error".
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None


def flush(path: str) -> int:
    """Have a closed file, or a directory, on the disk; its size in bytes.

    Raises:
      OSError: that cannot be done.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def enter_wal_mode(writer: apsw.Connection) -> None:
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
