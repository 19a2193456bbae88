"""Who is at a database: two kernel locks beside it, of which the files say nothing.

  <db>.opening   held alone while a process opens the database; the next one waits
  <db>.users     shared by all who have it open, from before until after SQLite has

Whoever holds `opening` and gets `users` alone is the only one at the database, in
this process too. Only then may its files be looked at by plain reads, whose end
would drop the locks that SQLite holds in this process (POSIX), and only then may
they be moved. What the two files contain means nothing; the kernel frees a lock
with its holder, so none is ever left behind.

May touch: those two files, and for programs other than metis SQLite's own lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from metis.errors import StoreBusy, StoreUnavailable

OPENING, USERS = ".opening", ".users"
"""Suffixes of the two files."""

OPENING_SECONDS = 4.0
"""How long somebody else may take to open the database, in seconds. Opening takes
milliseconds, a daemon's look at a large database 0.4 s, and healing one about two;
a client's patience is 10 s."""

_SHORTEST_PAUSE = 0.001
_LONGEST_PAUSE = 0.032
"""Seconds between two tries, doubled from the one to the other: hundreds of plugins
that start at once should not spend the processors on trying."""

_FILE_MODE = 0o600

_SQLITE_FIRST_LOCK = 0x40000002
_SQLITE_LOCKS = 510
"""Bytes that every connection of SQLite to a database in WAL mode keeps locked,
shared (SQLite's os.h: SHARED_FIRST, SHARED_SIZE)."""

_SQLITE_INDEX_LOCK = 128
"""The byte of the log's index that each of them keeps locked, shared, as well (SQLite's
os_unix.c: UNIX_SHM_DMS)."""


class Attendance:
    """One's presence at a database; made by `enter`.

    Attributes:
      path: the database.
      alone: whether nobody else may come, and nobody else is there.
    """

    def __init__(self, path: str, opening: int, users: int, *, alone: bool) -> None:
        self.path = path
        self.alone = alone
        self._opening: int | None = opening
        self._users: int | None = users

    def admit_others(self) -> None:
        """Let others open the database as well; ours is open, or about to be."""
        if self._users is not None and self.alone:
            # Not atomic, and need not be: who takes `users` alone has `opening`.
            fcntl.flock(self._users, fcntl.LOCK_SH)
        self.alone = False
        if self._opening is not None:
            os.close(self._opening)
            self._opening = None

    def leave(self) -> None:
        """Be there no more; everything of the database is closed."""
        for descriptor in (self._users, self._opening):
            if descriptor is not None:
                os.close(descriptor)
        self._users = self._opening = None
        self.alone = False


def enter(
    path: str, *, alone: bool = False, seconds: float | None = None
) -> Attendance:
    """Come to a database that is about to be opened.

    Until `Attendance.admit_others` nobody else can, so that has to follow soon.

    Args:
      path: the database, which need not exist; its directory does.
      alone: whether to wait until nobody else is there.
      seconds: how long to wait for others, OPENING_SECONDS by default.

    Raises:
      StoreBusy: somebody has been opening it for as long.
      StoreUnavailable: others have it open and stay, or a lock cannot be made.
    """
    seconds = OPENING_SECONDS if seconds is None else seconds
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as undo:
        opening = _open(path + OPENING)
        undo.callback(os.close, opening)
        if not _lock(opening, fcntl.LOCK_EX, deadline, path):
            raise StoreBusy(
                f"another process has been opening database {path!r} for {seconds:g} s"
            )
        users = _open(path + USERS)
        undo.callback(os.close, users)
        is_alone = _lock(users, fcntl.LOCK_EX, deadline if alone else 0.0, path)
        if alone and not (is_alone and _others_leave(path, deadline)):
            raise StoreUnavailable(
                f"database {path!r} is damaged, and others still have it open: it is "
                "moved aside when they have closed it"
            )
        if not is_alone:  # nobody holds it alone while we hold `opening`
            fcntl.flock(users, fcntl.LOCK_SH)
        undo.pop_all()
        return Attendance(path, opening, users, alone=is_alone)


def _open(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, _FILE_MODE)
    except OSError as error:
        raise StoreUnavailable(
            f"lock {path!r} of the database cannot be opened: {error.strerror}"
        ) from None


def _lock(descriptor: int, kind: int, deadline: float, path: str) -> bool:
    """Try to lock until a time has come, once at least.

    Raises:
      StoreUnavailable: the file system of the database has no such locks.
    """
    pause = _SHORTEST_PAUSE
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() + pause > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        except OSError as error:
            raise StoreUnavailable(
                f"database {path!r} cannot be locked: {error.strerror}: put it on a "
                "file system that knows flock"
            ) from None
        else:
            return True


def _others_leave(path: str, deadline: float) -> bool:
    """Whether those who know nothing of our locks leave in time.

    As a rule it is `metis check` or `backup`, which read for a moment.
    """
    while not is_unattended(path):
        if time.monotonic() + _LONGEST_PAUSE > deadline:
            return False
        time.sleep(_LONGEST_PAUSE)
    return True


def is_unattended(path: str) -> bool:
    """Whether no program that knows nothing of our locks has the database open.

    To be asked when alone. Neither an original daemon nor this process itself, by
    a connection that is not of `metis.store.database`, may lose a lock because the
    files are looked at.
    """
    try:
        log_index = os.stat(f"{path}-shm")
    except OSError:
        return True  # who has a database in WAL mode open has this one, too
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed
            if os.path.samestat(os.fstat(int(name)), log_index):
                return False
    held, size, first = path, _SQLITE_LOCKS, _SQLITE_FIRST_LOCK
    if not os.path.exists(path):  # deleted, perhaps while somebody has it open
        held, size, first = f"{path}-shm", 1, _SQLITE_INDEX_LOCK
    try:
        descriptor = os.open(held, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True  # it is not there, or not ours to move; whoever tries will see
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, size, first)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
