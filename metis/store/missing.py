"""A database whose file was removed while it is open: put back, with all it has.

An open file outlives its name, so nothing is lost as long as a process has it open.
But whoever comes next would make another in its place, and give its addresses again.

May touch: the database and files beside it. Imported when one is missing.
"""

from __future__ import annotations

import logging
import os

import apsw

from metis.errors import StoreError
from metis.store import connecting, healing

log = logging.getLogger("metis.store")


def put_back(connection: apsw.Connection, path: str) -> None:
    """Write a database that is open and has no name any more to its place.

    Never raises: whoever closes a database goes on closing it. What cannot be done
    is said.

    Args:
      connection: open on it, not in a transaction.
      path: where it was. Nobody makes another there while this one is open
        (`metis.store.opening`).
    """
    try:
        _write(connection, f"{path}.new")
        os.rename(f"{path}.new", f"{path}.healed")
        healing.go_forward(path)
    except (apsw.Error, OSError, StoreError) as error:
        log.critical(
            "database %s was removed while it was open and cannot be put back: %s",
            path,
            error,
        )
    else:
        log.error("database %s was removed while it was open: it is put back", path)


def _write(connection: apsw.Connection, new: str) -> None:
    """Copy every page into a file of its own, onto the disk."""
    healing.begin_file(new)
    target = connecting.connect(new, apsw.SQLITE_OPEN_READWRITE)
    try:
        target.pragma("synchronous", "FULL")
        connecting.copy_pages(connection, target)
    finally:
        connecting.close(target)
