"""The section `embedded`: allocations inside one program, without a socket.

`python -m benchmarks.embedded KIND CALLS` is the program: it serves itself over the
memory transport and allocates through the generated stub ("memory"), or calls the
engine ("engine"); it prints its figures as JSON. Afterwards allocations and calls over
two bare connections of h2 take turns in it, which need caches as much: their ratio
depends neither on the machine's speed nor on who else uses it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection

import metis
from benchmarks.databases import POOL, TASKS, allocate_many
from benchmarks.grpc_load import INTERFACE
from benchmarks.series import Rounds
from benchmarks.settings import Settings
from metis.api.adaptiveipam.v1 import AdaptiveIpamStub, AllocatePodIpRequest, IpConfig

KINDS = ("memory", "engine")

WARM_UP = 500
"""Allocations that are not counted."""

TURNS = 20
"""Turns of allocations and of bare h2, of which the first is not counted."""

TURN = 128
"""Allocations of a turn: two groups of what one commit takes."""

EXCHANGES = 64
"""Calls over bare h2 of a turn."""

REQUEST_HEADERS = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/adaptiveipam.v1.AdaptiveIpam/AllocatePodIP"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
RESPONSE_HEADERS = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS = [(b"grpc-status", b"0")]

MESSAGE = bytes(100)
"""As long as a request with its names."""

TIMEOUT = 30.0
"""Seconds for one call, as clients set one."""


def measure(settings: Settings) -> Rounds:
    """Both kinds in turn."""
    series = Rounds()
    for _ in range(settings.rounds):
        for kind in KINDS:
            program = [sys.executable, "-m", "benchmarks.embedded"]
            done = subprocess.run(
                [*program, kind, str(settings.embedded_calls)],
                check=True,
                stdout=subprocess.PIPE,
            )
            for name, values in json.loads(done.stdout).items():
                series.extend({f"embedded/{kind}/{name}": values})
    return series


def exchange(count: int) -> int:
    """Carry calls over two connections of h2 and nothing else, one after the other.

    Returns:
      The bytes that went over.
    """
    client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
    server = H2Connection(H2Configuration(client_side=False, header_encoding=None))
    client.initiate_connection()
    server.initiate_connection()
    carried = 0
    for _ in range(count):
        stream = client.get_next_available_stream_id()
        client.send_headers(stream, REQUEST_HEADERS)
        client.send_data(stream, MESSAGE, end_stream=True)
        sent = client.data_to_send()
        server.receive_data(sent)
        server.acknowledge_received_data(len(MESSAGE), stream)
        server.send_headers(stream, RESPONSE_HEADERS)
        server.send_data(stream, MESSAGE)
        server.send_headers(stream, TRAILERS, end_stream=True)
        answered = server.data_to_send()
        client.receive_data(answered)
        client.acknowledge_received_data(len(MESSAGE), stream)
        carried += len(sent) + len(answered)
    return carried


async def _over_memory(stub: AdaptiveIpamStub, tag: str, calls: int) -> None:
    numbers = iter(range(calls))

    async def work() -> None:
        for i in numbers:
            config = IpConfig(
                interface_name=INTERFACE,
                container_id=f"{tag}-{i}",
                initial_pod_cidr=POOL,
            )
            await stub.allocate_pod_ip(
                AllocatePodIpRequest(
                    ipv4_config=config, pod_name=f"p-{tag}-{i}", pod_namespace="ns"
                ),
                timeout=TIMEOUT,
            )

    async with trio.open_nursery() as nursery:
        for _ in range(TASKS):
            nursery.start_soon(work)


async def _run(kind: str, calls: int, directory: Path) -> dict[str, list[float]]:
    transport = metis.MemoryTransport()
    config = metis.DaemonConfig(db_path=str(directory / "metis.sqlite"))
    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(partial(metis.serve, config, transport=transport))
        async with metis.open_channel(transport) as channel:
            stub = AdaptiveIpamStub(channel)
            if kind == "memory":
                allocate = partial(_over_memory, stub)
            else:
                allocate = partial(allocate_many, daemon.engine, cidr=POOL)
            await allocate("warm-up", WARM_UP)
            wall, cpu = time.perf_counter(), time.process_time()
            await allocate("counted", calls)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            figures = {"per_second": [calls / wall], "cpu_us": [cpu * 1e6 / calls]}
            for turn in range(TURNS):
                begin = time.process_time()
                await allocate(f"turn-{turn}", TURN)
                between = time.process_time()
                exchange(EXCHANGES)
                end = time.process_time()
                if turn:
                    turn_us = (between - begin) * 1e6 / TURN
                    figures.setdefault("turn_cpu_us", []).append(turn_us)
                    exchange_us = (end - between) * 1e6 / EXCHANGES
                    figures.setdefault("exchange_cpu_us", []).append(exchange_us)
        nursery.cancel_scope.cancel()
    return figures


def main() -> None:
    """Measure one kind in this process."""
    kind, calls = sys.argv[1], int(sys.argv[2])
    if kind not in KINDS:
        raise SystemExit(f"{kind!r} is not known: it must be one of {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="metis-bench-") as name:
        print(json.dumps(trio.run(_run, kind, calls, Path(name))))


if __name__ == "__main__":
    main()
