"""Direct mode: the daemon's own services in the plugin's process, on its database.

What stands here is the daemon without a place to listen: the same store, engine
and services, reached over memory through the same stubs, so that no verb knows
the difference. SQLite keeps it apart from a daemon that is starting and from
other plugins; every allocation is one of its transactions.

Imported only when there is no daemon: it costs what a daemon needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from metis.clock import Clock, SystemClock
from metis.cni import spool
from metis.config import DaemonConfig
from metis.daemon import open_node
from metis.engine import Engine
from metis.errors import StoreError, StoreUnavailable
from metis.rpc.channel import Channel, open_channel
from metis.rpc.server import serve
from metis.rpc.transport import MemoryTransport
from metis.store.store import Store

HASTE_SECONDS = 0.1
"""How long a call that may not wait waits for others who open the database, in
seconds: half of what a STATUS leaves to it. Opening takes milliseconds."""


@asynccontextmanager
async def open_direct(
    db_path: str,
    release_cooldown: float,
    clock: Clock | None = None,
    *,
    apply_kept: bool = True,
) -> AsyncIterator[Channel]:
    """A channel to the node's database, which is made when it does not exist.

    DELs that were kept (`metis.cni.spool`) are applied first, which may have to
    wait for the write lock.

    Args:
      db_path: the database, as the daemon's.
      release_cooldown: rest of a released address, in seconds.
      clock: where raw time comes from; by default the kernel.
      apply_kept: False for whoever may not wait and asks about no owner.

    Raises:
      StoreBusy: another process is at the database; worth a retry.
      StoreDamaged: it was found damaged, and is healed for whoever asks again.
      StoreError: it cannot be used, or not as it is.
    """
    config = DaemonConfig(db_path=db_path, release_cooldown=release_cooldown)
    failure: Exception | None = None
    clock = clock or SystemClock()
    patience = None if apply_kept else HASTE_SECONDS
    async with open_node(config, clock, patience=patience) as node:
        try:
            if apply_kept:
                await _apply_spool(db_path, node.engine, node.store)
            transport = MemoryTransport()
            async with trio.open_nursery() as nursery:
                await nursery.start(partial(serve, node.services, transport, grace=0))
                async with open_channel(transport) as channel:
                    try:
                        yield channel
                    except Exception as error:
                        # Kept out of the nurseries, which would wrap it.
                        failure = error
                nursery.cancel_scope.cancel()
        except StoreError as error:
            failure = error
    if node.store.damage.is_possible:
        # Whoever asks once more shall find it healed, which one look at it does.
        with contextlib.suppress(StoreError):
            async with open_node(config, clock, thorough=True):
                pass
    if failure is not None:
        raise failure


async def _apply_spool(db_path: str, engine: Engine, store: Store) -> None:
    """Apply what was kept; its owners cannot be served as long as it waits.

    Raises:
      StoreError: the database failed, or the spool does.
    """
    try:
        await spool.apply(db_path, engine, store)
    except OSError as error:
        raise StoreUnavailable(
            f"the spool beside it cannot be used: {error}"
        ) from error
