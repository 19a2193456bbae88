"""The section `load`: calls of many clients at once, servers taking turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from benchmarks.grpc_load import Level, connections_anew, load, unused_tag
from benchmarks.series import Rounds
from benchmarks.servers import Server, Start, fresh
from benchmarks.settings import Settings

CONNECTIONS_LEVEL = 32
"""Calls under way while new connections are set against a kept one."""

MAY_REPEAT = ("bare",)
"""Servers whose handler is a constant that gives everybody one address."""


class CallsFailedError(Exception):
    """Calls failed, or one address was given to two owners: no figure is worth it."""


def measure(
    settings: Settings, servers: Mapping[str, Start], *, unused_networks: bool = False
) -> Rounds:
    """Allocate and deallocate at each concurrency, and on new connections.

    Args:
      settings: how much.
      servers: by the name that they get in the series.
      unused_networks: whether each run brings a network of its own, for a server
        that keeps its database from one to the next.
    """
    series = Rounds()
    tag = f"{unused_tag()}-" if unused_networks else ""
    for number in range(settings.rounds):
        for level in settings.levels:
            for name, start in servers.items():
                network = tag and f"{tag}{number}-{level}"
                with fresh(start) as server:
                    _load(series, name, server, settings, level, network)
        if settings.whole:
            for name, start in servers.items():
                network = tag and f"{tag}{number}"
                with fresh(start) as server:
                    _connections(series, name, server, settings, network)
    return series


def _load(
    series: Rounds,
    name: str,
    server: Server,
    settings: Settings,
    concurrency: int,
    network: str,
) -> None:
    _, levels = asyncio.run(
        load(
            server.socket,
            server.pid,
            calls=settings.calls,
            concurrency=concurrency,
            warm_up=settings.warm_up,
            network=network,
        )
    )
    for level in levels:
        _note(series, f"load/{name}/{level.operation}/{concurrency}", level, name)


def _connections(
    series: Rounds, name: str, server: Server, settings: Settings, network: str
) -> None:
    """One kept connection, then one for each call, on the same server."""
    _, (kept,) = asyncio.run(
        load(
            server.socket,
            server.pid,
            calls=settings.calls // 2,
            concurrency=CONNECTIONS_LEVEL,
            warm_up=settings.warm_up,
            network=network,
            deallocate=False,
        )
    )
    anew = asyncio.run(
        connections_anew(
            server.socket,
            server.pid,
            calls=settings.calls // 2,
            concurrency=CONNECTIONS_LEVEL,
            network=network,
        )
    )
    for how, level in (("kept", kept), ("anew", anew)):
        _note(series, f"connections/{name}/{how}/{CONNECTIONS_LEVEL}", level, name)


def _note(series: Rounds, prefix: str, level: Level, server: str) -> None:
    """Take over the figures of one level.

    Raises:
      CallsFailedError: not every call was served.
    """
    if level.failures:
        raise CallsFailedError(f"{prefix}: {level.failures}")
    if level.addresses_given_twice and server not in MAY_REPEAT:
        raise CallsFailedError(
            f"{prefix}: {level.addresses_given_twice} addresses were given twice"
        )
    series.add(f"{prefix}/per_second", level.per_second)
    series.add(f"{prefix}/p50_ms", level.p50_ms)
    series.add(f"{prefix}/p99_ms", level.p99_ms)
    series.add(f"{prefix}/max_ms", level.max_ms)
    if level.server_cpu_us is not None:
        series.add(f"{prefix}/server_cpu_us", level.server_cpu_us)
    series.add(f"{prefix}/client_cpu_us", level.client_cpu_us)
