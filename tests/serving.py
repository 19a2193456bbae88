"""A daemon over the memory transport, for the tests of what stands above it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

import metis
from metis.clock import Clock
from metis.daemon import Daemon
from metis.rpc.channel import Channel


@asynccontextmanager
async def serving(
    directory: Path, clock: Clock | None = None, **settings: float
) -> AsyncIterator[tuple[Channel, Daemon]]:
    """Serve from a database in `directory`; yields a channel and the daemon."""
    transport = metis.MemoryTransport()
    config = metis.DaemonConfig(db_path=str(directory / "metis.sqlite"), **settings)  # type: ignore[arg-type]  # only times are passed
    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(
            partial(metis.serve, config, transport=transport, clock=clock)
        )
        async with metis.open_channel(transport) as channel:
            yield channel, daemon
        nursery.cancel_scope.cancel()
