"""The section `flat`: what a call costs by the size of the pool and what cools in it.

Pools take turns every few calls, so that whatever disturbs the machine disturbs all
of them. Sizes are networks of one daemon; fills are daemons side by side, each on
a copy of a database that was made once.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import databases
from benchmarks.grpc_load import (
    CALL_TIMEOUT,
    allocate_request,
    method,
    open_channel,
    unused_tag,
)
from benchmarks.measures import cpu_seconds, median
from benchmarks.series import Rounds
from benchmarks.servers import Server, fresh, metis_daemon
from benchmarks.settings import Settings

CHUNK = 20
"""Calls in one pool before the next has its turn."""

WARM_UP = 20
"""Calls in each pool that are not counted."""

CIDRS = {
    "/24": "10.0.0.0/24",
    "/20": "10.0.0.0/20",
    "/16": "10.0.0.0/16",
    "/8": "10.0.0.0/8",
    "/64": "fd00:10::/64",
}
"""A block of each size."""


@dataclass(slots=True)
class Pool:
    """One pool under measurement.

    Attributes:
      call: sends one serialised AllocatePodIP.
      pid: the daemon's.
      cidr: the block that the first call brings.
      network: whose pool it is.
      walls: seconds of each counted call.
      cpu: seconds of the daemon's CPU for all of them.
    """

    call: Any
    pid: int
    cidr: str
    network: str
    walls: list[float] = field(default_factory=list)
    cpu: float = 0.0

    def requests(self, count: int) -> Iterator[bytes]:
        """Requests of owners that hold nothing yet, made before the clock starts."""
        tag = unused_tag()
        return iter(
            [
                allocate_request(f"{tag}-{i}", self.cidr, self.network)
                for i in range(count)
            ]
        )

    async def send(self, requests: Sequence[bytes]) -> None:
        """Send one after the other, and count them."""
        cpu = cpu_seconds(self.pid)
        for request in requests:
            start = time.perf_counter()
            await self.call(request, timeout=CALL_TIMEOUT)
            self.walls.append(time.perf_counter() - start)
        self.cpu += cpu_seconds(self.pid) - cpu


async def take_turns(pools: Sequence[Pool], calls: int) -> None:
    """Allocate `calls` addresses in each pool, a few at a time."""
    requests = [pool.requests(WARM_UP + calls) for pool in pools]
    for pool, early in zip(pools, requests, strict=True):
        for _ in range(WARM_UP):
            await pool.call(next(early), timeout=CALL_TIMEOUT)
    for begin in range(0, calls, CHUNK):
        for pool, waiting in zip(pools, requests, strict=True):
            size = min(CHUNK, calls - begin)
            await pool.send([next(waiting) for _ in range(size)])


def measure(settings: Settings) -> Rounds:
    """Allocations by size and by fill of the pool."""
    series = Rounds()
    with tempfile.TemporaryDirectory(prefix="metis-bench-") as name:
        prepared = {
            count: databases.prepare(Path(name) / str(count), count)
            for count in settings.cooling
        }
        for number in range(settings.rounds):
            with fresh(metis_daemon) as server:
                asyncio.run(_sizes(series, settings, server, number))
            with ExitStack() as stack:
                servers = {
                    count: stack.enter_context(_copy_served(stack, directory))
                    for count, directory in prepared.items()
                }
                asyncio.run(_fills(series, settings, servers))
    return series


def _copy_served(stack: ExitStack, prepared: Path) -> Any:
    directory = Path(
        stack.enter_context(tempfile.TemporaryDirectory(prefix="metis-bench-"))
    )
    databases.copy(prepared, directory)
    cooldown = f"{databases.COOLDOWN_SECONDS}s"
    return metis_daemon(directory, "--release-cooldown", cooldown)


async def _sizes(
    series: Rounds, settings: Settings, server: Server, number: int
) -> None:
    """First allocates of blocks, then allocations in them."""
    channel = open_channel(server.socket)
    try:
        await channel.channel_ready()
        call = method(channel, "AllocatePodIP")
        # The daemon's very first calls load and make what every later one uses.
        warm = Pool(call, server.pid, CIDRS["/24"], "warm")
        await warm.send(list(warm.requests(WARM_UP)))
        sizes = list(settings.blocks)
        # Whoever is first in one round is not in the next.
        sizes = sizes[number % len(sizes) :] + sizes[: number % len(sizes)]
        for i in range(settings.first_times):
            for size in sizes:
                pool = Pool(call, server.pid, CIDRS[size], f"first-{size[1:]}-{i}")
                await pool.send(list(pool.requests(1)))
                series.add(f"flat/first/{size}/ms", pool.walls[0] * 1e3)
                series.add(f"flat/first/{size}/cpu_us", pool.cpu * 1e6)
        pools = {
            size: Pool(call, server.pid, CIDRS[size], f"first-{size[1:]}-0")
            for size in sizes
        }
        await take_turns(list(pools.values()), settings.flat_calls)
    finally:
        await channel.close()
    for size, pool in pools.items():
        _note(series, f"flat/block/{size}", pool)


async def _fills(
    series: Rounds, settings: Settings, servers: Mapping[int, Server]
) -> None:
    channels = {count: open_channel(s.socket) for count, s in servers.items()}
    try:
        pools = {}
        for count, channel in channels.items():
            await channel.channel_ready()
            call = method(channel, "AllocatePodIP")
            pid = servers[count].pid
            pools[count] = Pool(call, pid, databases.POOL, databases.NETWORK)
        await take_turns(list(pools.values()), settings.flat_calls)
    finally:
        for channel in channels.values():
            await channel.close()
    for count, pool in pools.items():
        _note(series, f"flat/cooling/{count}", pool)


def _note(series: Rounds, prefix: str, pool: Pool) -> None:
    series.add(f"{prefix}/p50_ms", median(pool.walls) * 1e3)
    series.add(f"{prefix}/cpu_us", pool.cpu * 1e6 / len(pool.walls))
