"""One change of a database by a command, beside the daemon or without one."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import trio

from metis.clock import SystemClock
from metis.cni import cache
from metis.config import DEFAULT_CNI_CACHE_DIR
from metis.store.changing import change_file
from metis.store.transactions import Work

T = TypeVar("T")


def change(
    db_path: str, work: Work[T], release_cooldown: float, *, thorough: bool
) -> T:
    """Run a function in one write transaction; see `metis.store.changing`.

    Args:
      db_path: the database.
      work: what to do.
      release_cooldown: the longest cooldown after a boot, in seconds.
      thorough: whether the whole file is looked through for damage first.

    Raises:
      StoreError: nothing was changed.
    """
    return trio.run(
        partial(
            change_file,
            db_path,
            work,
            clock=SystemClock(),
            cooldown_ms=round(release_cooldown * 1000),
            thorough=thorough,
            evidence=partial(cache.claims, DEFAULT_CNI_CACHE_DIR, db_path),
        )
    )
