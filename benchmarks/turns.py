"""The section `cpu`: what a call costs the server, whoever else uses the machine.

Two servers live side by side and have their turn every few calls, so that a
neighbour, who makes caches cold and switches frequent, disturbs both alike; client and
servers share one CPU (`benchmarks.one_cpu`). Each turn is a value of the series: the
median of their ratios is what the guard holds. Rates and latencies are the section
`load`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack

from benchmarks.daemon_load import CallsFailedError
from benchmarks.grpc_load import (
    allocate_request,
    deallocate_request,
    method,
    open_channel,
    run_level,
    unused_tag,
)
from benchmarks.one_cpu import one_cpu
from benchmarks.series import Rounds
from benchmarks.servers import Server, Start, fresh
from benchmarks.settings import Settings

CALLS = {1: 60, 32: 200}
"""Calls of a turn, by concurrency: some 60 ms, a few of the scheduler's slices."""

TURNS = 10
"""Turns of each server in a round, of which the first is not counted."""

CIDR = "10.240.0.0/16"


def measure(settings: Settings, servers: Mapping[str, Start]) -> Rounds:
    """CPU of the servers for allocations and releases, in turns."""
    series = Rounds()
    for _ in range(settings.rounds):
        with one_cpu(), ExitStack() as stack:
            running = {
                name: stack.enter_context(fresh(start))
                for name, start in servers.items()
            }
            asyncio.run(_round(series, running))
    return series


async def _round(series: Rounds, servers: Mapping[str, Server]) -> None:
    channels = {name: open_channel(s.socket) for name, s in servers.items()}
    try:
        for channel in channels.values():
            await channel.channel_ready()
        for concurrency, calls in CALLS.items():
            for turn in range(TURNS):
                for name, channel in channels.items():
                    tag = unused_tag()
                    ids = [f"{tag}-{i}" for i in range(calls)]
                    requests = {
                        "AllocatePodIP": [allocate_request(i, CIDR, "") for i in ids],
                        "DeallocatePodIP": [deallocate_request(i, "") for i in ids],
                    }
                    for operation, messages in requests.items():
                        level = await run_level(
                            [method(channel, operation)],
                            operation,
                            messages,
                            concurrency,
                            servers[name].pid,
                        )
                        if level.failures:
                            raise CallsFailedError(f"{name}: {level.failures}")
                        if turn and level.server_cpu_us is not None:
                            series.add(
                                f"cpu/{name}/{operation}/{concurrency}/server_cpu_us",
                                level.server_cpu_us,
                            )
    finally:
        for channel in channels.values():
            await channel.close()
