"""Reading a database that somebody else may have open, and leaving no trace.

A reader of a database in WAL mode needs the log and its index beside the file, and
SQLite makes them where they are missing, and leaves them. So a file at rest, which
has no log, is read as one that cannot change; whether it has changed after all is
looked at afterwards, and then it is read once more.

May touch: the file, through SQLite, which opens it for reading alone; a second name
of it, for as long as it is read.
"""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Callable, Iterator
from typing import TypeVar

import apsw

from metis.clock import Clock
from metis.errors import (
    StoreDamaged,
    StoreError,
    StoreIncompatible,
    StoreUnavailable,
)
from metis.store import arrival, connecting, opening, schema, traces
from metis.store.invariants import Findings, examine

T = TypeVar("T")

_TRIES_AT_REST = 3
"""How often a file that seems to be at rest is read before it is taken for one that
is opened and closed all the time, as by a plugin without a daemon."""


def read_file(path: str, work: Callable[[apsw.Connection], T]) -> T:
    """Run a function of a read-only connection to a database of this version.

    It may run several times, and its last answer counts.

    Args:
      path: the file.
      work: reads what it wants, in as many transactions as it likes.

    Raises:
      StoreUnavailable: there is no such file, or it cannot be read.
      StoreIncompatible: a newer version, or a database of something else.
      StoreDamaged: it is empty, or SQLite cannot make sense of it.
      StoreError: another error of SQLite.
    """
    if not os.path.isfile(path):
        what = "is not a file" if os.path.exists(path) else "does not exist"
        raise StoreUnavailable(f"database {path!r} {what}: name one that is there")
    arrival.refuse_stranger(os.path.realpath(path))
    try:
        for _ in range(_TRIES_AT_REST):
            before = _state(path)
            if before is None:
                break
            try:
                answer = _run(path, work, "&immutable=1")
            except (apsw.Error, StoreDamaged):
                if _state(path) == before:  # it is so, and not half of a change
                    raise
            else:
                if _state(path) == before:
                    return answer
        with _name_to_read(path) as name:
            return _run(name, work, "")
    except apsw.Error as error:
        what = f"database {path!r} cannot be read"
        raise connecting.translated(error, what) from error
    except (StoreDamaged, StoreIncompatible) as error:
        raise type(error)(f"database {path!r} cannot be read: {error}") from None


def check_file(path: str, clock: Clock) -> Findings:
    """Look at every invariant of a database file.

    Args:
      path: the file.
      clock: where raw time comes from.

    Raises:
      StoreError: as `read_file`.
    """
    return read_file(
        path, lambda connection: examine(connection, now(connection, clock))
    )


def now(connection: apsw.Connection, clock: Clock) -> int | None:
    """The stored time in milliseconds; None when the database knows no such boot."""
    query = "SELECT 1 FROM sqlite_schema WHERE name = 'metis_boot'"
    if connection.execute(query).fetchone() is None:
        return None
    offset_ms = schema.clock_offset(connection, clock.boot_id())
    return None if offset_ms is None else clock.boottime_ms() + offset_ms


@contextlib.contextmanager
def _name_to_read(path: str) -> Iterator[str]:
    """The name under which a file with a log is read.

    Where nobody has it open, SQLite would make the log's index anew, and what a kill
    left of that one is all that tells of lost commits (`metis.store.traces`). So it is
    read by another name then, while nobody else may come.
    """
    with contextlib.ExitStack() as stack:
        name = os.path.realpath(path)
        # Else metis never had it open, or nobody was killed.
        if os.path.exists(name + opening.USERS) and os.path.exists(f"{name}-wal"):
            with contextlib.suppress(StoreError, OSError):  # it is read all the same
                attendance = opening.enter(name)
                stack.callback(attendance.leave)
                if not (attendance.alone and opening.is_unattended(name)):
                    attendance.leave()
                else:
                    name = stack.enter_context(traces.second_name(name))
        yield name


def _run(path: str, work: Callable[[apsw.Connection], T], options: str) -> T:
    uri = f"file:{urllib.parse.quote(os.path.abspath(path))}?mode=ro{options}"
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    connection = connecting.connect(uri, flags)
    try:
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        schema.check_compatible(connection)
        if connection.pragma("user_version") == 0:
            raise StoreDamaged("it is empty")
        return work(connection)
    except UnicodeDecodeError as error:
        raise StoreDamaged(f"it holds text that is none: {error}") from None
    finally:
        connecting.close(connection)


def _state(path: str) -> tuple[int, int, int] | None:
    """What tells one state of a file at rest from another; None when it has a log."""
    if os.path.exists(f"{path}-wal"):
        return None
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size
