"""Load on one daemon over gRPC, from grpcio's C core on asyncio.

A client of another make than the server, so that neither flatters the other;
its requests are made before the clock starts. One channel unless told
otherwise. `python -m benchmarks.grpc_load --socket S --pid P`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from benchmarks.measures import cpu_seconds, markdown_table, percentile
from metis.api.adaptiveipam.v1 import (
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    DeallocatePodIpRequest,
    IpConfig,
)

CALL_TIMEOUT = 30.0
"""Seconds until a call counts as failed."""

INTERFACE = "eth0"


@dataclass(frozen=True, slots=True)
class Level:
    """One operation at one concurrency: calls a second, milliseconds, microseconds."""

    operation: str
    concurrency: int
    calls: int
    per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    server_cpu_us: float | None
    client_cpu_us: float
    failures: dict[str, int]
    addresses_given_twice: int

    HEADERS = (
        "operation",
        "concurrency",
        "calls",
        "calls/s",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "max ms",
        "server CPU us/call",
        "client CPU us/call",
        "failures",
    )

    def row(self) -> list[object]:
        """The figures in the order of HEADERS."""
        failures: object = self.failures or 0
        if self.addresses_given_twice:
            failures = f"{failures}, {self.addresses_given_twice} GIVEN TWICE"
        return [
            self.operation,
            self.concurrency,
            self.calls,
            f"{self.per_second:.0f}",
            f"{self.p50_ms:.2f}",
            f"{self.p95_ms:.2f}",
            f"{self.p99_ms:.2f}",
            f"{self.max_ms:.2f}",
            "-" if self.server_cpu_us is None else f"{self.server_cpu_us:.0f}",
            f"{self.client_cpu_us:.0f}",
            failures,
        ]


def allocate_request(container_id: str, cidr: str, network: str) -> bytes:
    """An AllocatePodIP of the family of `cidr`, serialised."""
    config = IpConfig(
        interface_name=INTERFACE, container_id=container_id, initial_pod_cidr=cidr
    )
    return bytes(
        AllocatePodIpRequest(
            network=network,
            ipv4_config=None if ":" in cidr else config,
            ipv6_config=config if ":" in cidr else None,
            pod_name=f"p-{container_id}",
            pod_namespace="ns",
        )
    )


def deallocate_request(container_id: str, network: str) -> bytes:
    """A DeallocatePodIP, serialised."""
    return bytes(
        DeallocatePodIpRequest(
            network=network,
            interface_name=INTERFACE,
            container_id=container_id,
            pod_name=f"p-{container_id}",
            pod_namespace="ns",
        )
    )


async def run_level(
    methods: Sequence[Any],
    operation: str,
    requests: Sequence[bytes],
    concurrency: int,
    pid: int,
) -> Level:
    """Send all requests with `concurrency` of them under way at any time.

    Args:
      methods: one callable per channel, used in turn.
      operation: name for the report.
      requests: serialised messages.
      concurrency: calls under way.
      pid: the server process, for its CPU time; 0 when it is not known.
    """
    latencies: list[float] = []
    failures: Counter[str] = Counter()
    answers: list[bytes] = []
    queue = iter(requests)

    async def worker(method: Any) -> None:
        for request in queue:
            start = time.perf_counter()
            try:
                answers.append(await method(request, timeout=CALL_TIMEOUT))
            except grpc.RpcError as error:
                failures[f"{error.code().name}: {error.details()}"[:120]] += 1
            latencies.append((time.perf_counter() - start) * 1e3)

    usage = resource.getrusage(resource.RUSAGE_SELF)
    server_cpu, start = cpu_seconds(pid) if pid else 0.0, time.perf_counter()
    await asyncio.gather(
        *(worker(methods[i % len(methods)]) for i in range(concurrency))
    )
    seconds = time.perf_counter() - start
    server_cpu = cpu_seconds(pid) - server_cpu if pid else 0.0
    usage_after = resource.getrusage(resource.RUSAGE_SELF)
    client_cpu = (
        usage_after.ru_utime + usage_after.ru_stime - usage.ru_utime - usage.ru_stime
    )
    calls = len(requests)
    return Level(
        operation=operation,
        concurrency=concurrency,
        calls=calls,
        per_second=calls / seconds,
        p50_ms=percentile(latencies, 50),
        p95_ms=percentile(latencies, 95),
        p99_ms=percentile(latencies, 99),
        max_ms=max(latencies),
        server_cpu_us=server_cpu * 1e6 / calls if pid else None,
        client_cpu_us=client_cpu * 1e6 / calls,
        failures=dict(failures),
        addresses_given_twice=(
            _given_twice(answers) if operation == "AllocatePodIP" else 0
        ),
    )


def _given_twice(answers: Sequence[bytes]) -> int:
    addresses = Counter(
        pod_ip.ip_address
        for answer in map(AllocatePodIpResponse.parse, answers)
        for pod_ip in (answer.ipv4, answer.ipv6)
        if pod_ip is not None
    )
    return sum(count - 1 for count in addresses.values())


def open_channel(socket: str) -> grpc.aio.Channel:
    """A channel that shares its connection with no other."""
    return grpc.aio.insecure_channel(
        f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)]
    )


def method(channel: grpc.aio.Channel, operation: str) -> Any:
    """A method of the service, which takes and gives serialised messages."""
    return channel.unary_unary(f"/adaptiveipam.v1.AdaptiveIpam/{operation}")


def unused_tag() -> str:
    """A prefix of container ids that nobody has used."""
    return f"bench-{os.getpid()}-{time.monotonic_ns()}"


async def load(
    socket: str,
    pid: int,
    *,
    calls: int,
    concurrency: int,
    cidr: str = "10.240.0.0/20",
    network: str = "",
    channels: int = 1,
    warm_up: int = 0,
    deallocate: bool = True,
) -> tuple[float, list[Level]]:
    """Allocate `calls` addresses, then give them back.

    Args:
      socket: the server's.
      pid: the server's, 0 when it is not known.
      calls: of each operation.
      concurrency: calls under way.
      cidr: the block that the first call brings.
      network: whose pool it is.
      channels: connections, used in turn.
      warm_up: calls of each operation that go before and are not counted.
      deallocate: whether to give the addresses back.

    Returns:
      The milliseconds of the very first allocate, which adds the CIDR block and
      is not counted in the levels; then one level per operation.
    """
    opened = [open_channel(socket) for _ in range(channels)]
    try:
        await asyncio.gather(*(channel.channel_ready() for channel in opened))
        allocate = [method(c, "AllocatePodIP") for c in opened]
        release = [method(c, "DeallocatePodIP") for c in opened]
        tag = unused_tag()
        ids = [f"{tag}-{i}" for i in range(warm_up + calls)]
        start = time.perf_counter()
        await allocate[0](
            allocate_request(f"{tag}-first", cidr, network), timeout=CALL_TIMEOUT
        )
        first_ms = (time.perf_counter() - start) * 1e3
        phases: list[tuple[str, list[Any], Callable[..., bytes]]] = [
            ("AllocatePodIP", allocate, partial(allocate_request, cidr=cidr))
        ]
        if deallocate:
            phases.append(("DeallocatePodIP", release, deallocate_request))
        levels = []
        for operation, methods, request in phases:
            requests = [request(name, network=network) for name in ids]
            if warm_up:
                early = requests[:warm_up]
                await run_level(methods, operation, early, concurrency, pid)
            counted = requests[warm_up:]
            levels.append(
                await run_level(methods, operation, counted, concurrency, pid)
            )
    finally:
        for channel in opened:
            await channel.close()
    return first_ms, levels


async def connections_anew(
    socket: str,
    pid: int,
    *,
    calls: int,
    concurrency: int,
    cidr: str = "10.240.0.0/20",
    network: str = "",
) -> Level:
    """Allocate `calls` addresses, each on a connection of its own."""

    async def on_new_connection(
        request: bytes,
        timeout: float,  # noqa: ASYNC109 - called as grpcio's methods are
    ) -> bytes:
        channel = open_channel(socket)
        try:
            answer: bytes = await method(channel, "AllocatePodIP")(
                request, timeout=timeout
            )
        finally:
            await channel.close()
        return answer

    tag = unused_tag()
    await on_new_connection(
        allocate_request(f"{tag}-first", cidr, network), CALL_TIMEOUT
    )
    requests = [allocate_request(f"{tag}-{i}", cidr, network) for i in range(calls)]
    return await run_level(
        [on_new_connection], "AllocatePodIP", requests, concurrency, pid
    )


def main() -> None:
    """Load a daemon that runs already and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--cidr", default="10.240.0.0/20")
    parser.add_argument("--network", default="")
    parser.add_argument("--channels", type=int, default=1)
    parser.add_argument("--no-deallocate", action="store_true")
    args = parser.parse_args()
    levels: list[Level] = []
    for concurrency in map(int, args.concurrency.split(",")):
        first_ms, some = asyncio.run(
            load(
                args.socket,
                args.pid,
                calls=args.calls,
                concurrency=concurrency,
                cidr=args.cidr,
                network=args.network,
                channels=args.channels,
                deallocate=not args.no_deallocate,
            )
        )
        print(f"first allocate before concurrency {concurrency}: {first_ms:.2f} ms")
        levels += some
    print(markdown_table(Level.HEADERS, [level.row() for level in levels]))


if __name__ == "__main__":
    main()
