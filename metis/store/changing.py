"""Changing a database from a process of one's own, beside the daemon.

Opens it as the daemon does, so that it is made, brought up to date and, where it is
damaged, healed first, and runs one function in one write transaction. A daemon that
serves from it waits meanwhile, as it does for a plugin that works by itself, and goes
on with what is there then.

May touch: the database, through `metis.store.database`.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar, cast

import trio

from metis.clock import Clock
from metis.errors import StoreBusy
from metis.store.arrival import Evidence
from metis.store.database import open_database
from metis.store.transactions import Work

T = TypeVar("T")

PATIENCE_SECONDS = 10.0
"""How long to wait for the write lock, in seconds: a daemon has it for milliseconds
at a time, and one that was stopped inside its transaction keeps it for good."""


async def change_file(
    path: str,
    work: Work[T],
    *,
    clock: Clock,
    cooldown_ms: int,
    thorough: bool = False,
    evidence: Evidence | None = None,
) -> T:
    """Run a function in one write transaction of a database.

    Args:
      path: the file.
      work: what to do; nothing of it stands when it raises.
      clock: where raw time comes from.
      cooldown_ms: the longest cooldown after a boot, in milliseconds.
      thorough: whether the whole file is looked through for damage first.
      evidence: who must have an address by what the node shows, for healing.

    Returns:
      Its answer, committed.

    Raises:
      StoreError: as `metis.store.database.open_database` and its `write`; nothing
        was changed.
    """
    open_it = partial(
        open_database,
        path,
        clock=clock,
        cooldown_ms=cooldown_ms,
        synchronous="FULL",
        thorough=thorough,
        evidence=evidence,
    )
    deadline = trio.current_time() + PATIENCE_SECONDS
    while True:
        try:
            database = await open_it()
            try:
                (answer,) = await database.write([work])
            finally:
                with trio.CancelScope(shield=True):  # bounded: nobody else uses it
                    await database.aclose()
        except StoreBusy:  # after BUSY_TIMEOUT_MS, or a time of the same order
            if trio.current_time() > deadline:
                raise
            continue
        if isinstance(answer, Exception):
            raise answer
        return cast("T", answer)
