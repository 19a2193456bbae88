"""The look at a database before SQLite opens it.

As a rule it is at rest, and begins and ends as it should. That takes a few system
calls, and none of the modules that heal what is not so: a plugin without a daemon
pays for whatever it imports. They are imported when there is something to see to.

May touch: the files, by plain reads while nobody has them open.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from metis.clock import Clock
from metis.errors import StoreIncompatible, StoreUnavailable
from metis.store.opening import USERS, Attendance

if TYPE_CHECKING:
    from metis.store.rebuilding import Claim

Evidence: TypeAlias = "Callable[[], Sequence[Claim]]"
"""Tells who must have an address, by what the node knows outside of the database."""

MAGIC = b"SQLite format 3\0"
HEADER_SIZE = 100
"""How a database begins, and how long its header is (SQLite's file format, 1.3)."""

_TRACES = ("-wal", "-shm", ".salvage", ".healed", ".lost")
"""Suffixes of files that a kill leaves, or somebody who has the database open."""


class Patient:
    """A database, and what it takes to make one in its place.

    Attributes:
      path: the database.
      clock: where raw time comes from.
      cooldown_ms: how long addresses without an owner wait, in milliseconds.
      evidence: asked when records are missing; None for nobody.
    """

    def __init__(
        self, path: str, clock: Clock, cooldown_ms: int, evidence: Evidence | None
    ) -> None:
        self.path = path
        self.clock = clock
        self.cooldown_ms = cooldown_ms
        self.evidence = evidence

    def claims(self) -> Sequence[Claim]:
        """Who must have an address, by the evidence of the node."""
        return () if self.evidence is None else self.evidence()


def refuse_stranger(path: str) -> None:
    """Refuse a file that never was a database, and by which metis never was.

    A wrong path would else have somebody's file set aside as a damaged database. What
    was one has the lock files of `metis.store.opening` beside it, or what a kill has
    left; and metis never makes one that does not begin as a database does.

    Args:
      path: the database. Nobody of metis has it open where those are missing.

    Raises:
      StoreIncompatible: it is such a file; it was left as it is.
    """
    if any(os.path.lexists(path + suffix) for suffix in (USERS, *_TRACES)):
        return
    try:
        with open(path, "rb", buffering=0) as file:
            begin = file.read(len(MAGIC))
    except OSError:
        return  # as a rule, there is none yet
    if begin.strip(b"\0") and begin != MAGIC:  # a crash may leave nothing but zeros
        raise StoreIncompatible(
            f"{path!r} is no database, and nothing beside it tells that it ever was: "
            "write another path, or move the file away"
        )


def is_at_rest(path: str, attendance: Attendance) -> bool:
    """Whether there is a database that SQLite may open, by all that can be seen.

    Args:
      path: the database.
      attendance: ours at it. Where others are, they have seen to it.

    Returns:
      False when it has to be looked at closely (`metis.store.healing`).

    Raises:
      StoreUnavailable: others have it open, though there is none any more.
    """
    if not attendance.alone:
        if not os.path.exists(path):
            raise StoreUnavailable(
                f"database {path!r} is gone, and others still have it open: "
                "a new one is made when they have closed it"
            )
        return True
    if any(os.path.lexists(path + suffix) for suffix in _TRACES):
        return False
    try:
        return not what_is_wrong(path)
    except OSError:
        return False  # as a rule, there is none yet


def what_is_wrong(path: str) -> str:
    """What is wrong with how a database at rest begins and ends; empty for nothing.

    Raises:
      OSError: it cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        header = file.read(HEADER_SIZE)
        size = os.fstat(file.fileno()).st_size
    if size == 0:
        return "it is empty"
    if len(header) < HEADER_SIZE or not header.startswith(MAGIC):
        return "it does not begin as a database does"
    pages = int.from_bytes(header[28:32], "big")
    page_size = int.from_bytes(header[16:18], "big")
    whole = pages * (65_536 if page_size == 1 else page_size)
    # Only if these agree does the number of pages count (section 1.3.8).
    if header[24:28] == header[92:96] and size < whole:
        return f"it is cut: it has {size} of {whole} bytes"
    return ""
