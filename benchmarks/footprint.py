"""The section `footprint`: memory, CPU at rest, and the time to start."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks import databases, goals
from benchmarks.daemon_load import CallsFailedError
from benchmarks.grpc_load import load
from benchmarks.measures import cpu_seconds, rss_mib
from benchmarks.series import Rounds
from benchmarks.servers import bare_server, fresh, metis_daemon
from benchmarks.settings import Settings

SETTLE_SECONDS = 2.0
"""From READY=1 until memory is read and a daemon counts as idle."""

HELD_OF_LARGE = 40_000
"""Of the rows of the large database, how many a pod has; the others are cooling."""

STARTS = 3
"""Starts of each server in a round, in turns; each is a value of the series."""


def measure(settings: Settings) -> Rounds:
    """Starts, memory and CPU at rest; what takes long, when the whole is asked for."""
    series = Rounds()
    for _ in range(settings.rounds):
        _start_empty(series)
    if settings.whole:
        _idle(series, settings)
        _full(series)
        _start_large(series, settings)
    return series


def _start_empty(series: Rounds) -> None:
    for last in (False,) * (STARTS - 1) + (True,):
        with fresh(metis_daemon) as server:
            series.add("footprint/start/empty/wall_ms", server.start_ms)
            cpu_ms = cpu_seconds(server.pid) * 1e3
            series.add("footprint/start/empty/cpu_ms", cpu_ms)
            with fresh(bare_server) as bare:
                cpu_ms = cpu_seconds(bare.pid) * 1e3
                series.add("footprint/bare/start_cpu_ms", cpu_ms)
                if last:
                    time.sleep(SETTLE_SECONDS)
                    series.add("footprint/idle/rss_mib", rss_mib(server.pid))
                    series.add("footprint/bare/rss_mib", rss_mib(bare.pid))


def _idle(series: Rounds, settings: Settings) -> None:
    """Several daemons at rest side by side, so that they take 30 s and not 150."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(fresh(metis_daemon)) for _ in range(settings.rounds)
        ]
        time.sleep(SETTLE_SECONDS)
        before = [cpu_seconds(server.pid) for server in servers]
        time.sleep(settings.idle_seconds)
        for server, used in zip(servers, before, strict=True):
            idle_ms = (cpu_seconds(server.pid) - used) * 1e3
            series.add("footprint/idle/cpu_ms", idle_ms)


def _full(series: Rounds) -> None:
    """Fill a pool once: memory does not come and go with the neighbours."""
    with fresh(metis_daemon) as server:
        _, (level,) = asyncio.run(
            load(
                server.socket,
                server.pid,
                calls=goals.FULL_POOL - 1,
                concurrency=32,
                cidr=databases.POOL,
                deallocate=False,
            )
        )
        if level.failures:
            raise CallsFailedError(f"filling a pool: {level.failures}")
        series.add("footprint/full/rss_mib", rss_mib(server.pid))


def _start_large(series: Rounds, settings: Settings) -> None:
    with tempfile.TemporaryDirectory(prefix="metis-bench-") as name:
        cooling = goals.LARGE_DATABASE - HELD_OF_LARGE
        prepared = databases.prepare(Path(name) / "large", cooling, HELD_OF_LARGE)
        for i in range(settings.rounds):
            directory = Path(name) / f"copy-{i}"
            directory.mkdir(mode=0o700)
            databases.copy(prepared, directory)
            with metis_daemon(directory) as server:
                cpu_ms = cpu_seconds(server.pid) * 1e3
                series.add("footprint/start/large/wall_ms", server.start_ms)
                series.add("footprint/start/large/cpu_ms", cpu_ms)
