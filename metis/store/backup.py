"""A copy of a database in one file, taken while others use it.

SQLite copies page by page out of one read transaction, so the copy is of one moment
and nobody waits for it. It is looked at, flushed to the disk and only then given its
name: there is a whole copy of that name, or what was there before.

May touch: the database, read-only through SQLite; the copy and its directory.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

import apsw

from metis.errors import InvalidRequest, StoreDamaged, StoreUnavailable
from metis.store import connecting
from metis.store.reading import read_file


def back_up(path: str, target: str, *, force: bool = False) -> int:
    """Copy a database into a file.

    Args:
      path: the database; a daemon may be using it.
      target: the file (0600). Nothing but it is needed to restore from it.
      force: whether to replace a file of that name.

    Returns:
      The size of the copy in bytes.

    Raises:
      InvalidRequest: the file may not be replaced.
      StoreUnavailable: the database cannot be read, or the file not be written.
      StoreIncompatible: the database is none of this version.
      StoreDamaged: the database is damaged; a copy would be, too.
    """
    _check_target(path, target, force=force)
    directory, name = os.path.split(os.path.abspath(target))
    try:
        descriptor, copy = tempfile.mkstemp(".tmp", f".{name}.", directory)
        os.close(descriptor)
        try:
            read_file(path, lambda connection: _copy(connection, copy))
            size = connecting.flush(copy)
            _check_target(path, target, force=force)
            os.rename(copy, target)
        except BaseException:
            for left in (copy, f"{copy}-journal"):
                with contextlib.suppress(OSError):
                    os.unlink(left)
            raise
        connecting.flush(directory)
    except OSError as error:
        raise StoreUnavailable(
            f"backup {target!r} cannot be written: {error.strerror}"
        ) from None
    return size


def _check_target(path: str, target: str, *, force: bool) -> None:
    if os.path.isdir(target):
        raise InvalidRequest(f"{target!r} is a directory: name a file in it")
    if not os.path.lexists(target):
        return
    if os.path.exists(target) and not os.path.isfile(target):
        # A rename would put the copy in the place of /dev/null, for everybody.
        raise InvalidRequest(f"{target!r} is not a regular file: name another one")
    if os.path.exists(path) and os.path.samefile(path, target):
        raise InvalidRequest(f"{target!r} is the database itself: name another file")
    for log in ("-wal", "-journal"):
        if os.path.lexists(f"{target}{log}"):
            raise InvalidRequest(
                f"{target!r} is a database in use (there is {target + log!r}): "
                "name another file"
            )
    if not force:
        raise InvalidRequest(
            f"{target!r} is there already: name another file, or use --force to "
            "replace it"
        )


def _copy(source: apsw.Connection, copy: str) -> None:
    """Copy every page, and see that SQLite finds nothing wrong with the copy."""
    target = connecting.connect(copy, apsw.SQLITE_OPEN_READWRITE)
    try:
        target.pragma("synchronous", "OFF")  # it is flushed as a whole in the end
        connecting.copy_pages(source, target)
        # As it was copied it would want a log beside it whenever it is read.
        target.pragma("journal_mode", "DELETE")
        found = target.pragma("integrity_check")
        if found != "ok":
            raise StoreDamaged(f"it is damaged, and so would be its backup: {found}")
    finally:
        connecting.close(target)
