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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    server_cpu_us: float
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
            f"{self.server_cpu_us:.0f}",
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
      pid: the server process, for its CPU time.
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
    server_cpu, start = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(
        *(worker(methods[i % len(methods)]) for i in range(concurrency))
    )
    seconds = time.perf_counter() - start
    server_cpu = cpu_seconds(pid) - server_cpu
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
        server_cpu_us=server_cpu * 1e6 / calls,
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


async def load(
    socket: str,
    pid: int,
    *,
    calls: int,
    concurrency: int,
    cidr: str = "10.240.0.0/20",
    network: str = "",
    channels: int = 1,
    deallocate: bool = True,
) -> tuple[float, list[Level]]:
    """Allocate `calls` addresses, then give them back.

    Returns:
      The milliseconds of the very first allocate, which adds the CIDR block and
      is not counted in the levels; then one level per operation.
    """
    options = [("grpc.use_local_subchannel_pool", 1)]
    opened = [
        grpc.aio.insecure_channel(f"unix:{socket}", options=options)
        for _ in range(channels)
    ]
    try:
        await asyncio.gather(*(channel.channel_ready() for channel in opened))
        service = "/adaptiveipam.v1.AdaptiveIpam/"
        allocate = [c.unary_unary(service + "AllocatePodIP") for c in opened]
        release = [c.unary_unary(service + "DeallocatePodIP") for c in opened]
        tag = f"bench-{os.getpid()}-{time.monotonic_ns()}"
        ids = [f"{tag}-{i}" for i in range(calls)]
        start = time.perf_counter()
        await allocate[0](
            allocate_request(f"{tag}-first", cidr, network), timeout=CALL_TIMEOUT
        )
        first_ms = (time.perf_counter() - start) * 1e3
        requests = [allocate_request(name, cidr, network) for name in ids]
        levels = [
            await run_level(allocate, "AllocatePodIP", requests, concurrency, pid)
        ]
        if deallocate:
            requests = [deallocate_request(name, network) for name in ids]
            levels.append(
                await run_level(release, "DeallocatePodIP", requests, concurrency, pid)
            )
    finally:
        for channel in opened:
            await channel.close()
    return first_ms, levels


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


def as_json(level: Level) -> dict[str, Any]:
    """A level as plain data."""
    return asdict(level)


if __name__ == "__main__":
    main()
