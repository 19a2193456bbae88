"""All benchmarks of the installed program, against yardsticks of the same run.

Single times mean little from one machine to the next, so every figure stands
beside one of a bare interpreter, of host-local, or of a bare grpclib server
that was taken in turn with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cni_processes import Cost, burst_seconds, command_cost, verb_costs
from benchmarks.grpc_load import Level, as_json, load
from benchmarks.measures import markdown_table, median, rss_mib
from benchmarks.servers import Server, bare_server, metis_daemon, metis_program

ROUNDS = 3
"""Each figure is the median of so many, the servers taking turns."""

BURST = 64
"""CNI ADD processes started at once."""

FIRST_ALLOCATE_CIDRS = ("10.0.0.0/24", "10.0.0.0/20", "10.0.0.0/16", "10.0.0.0/8")

MEMORY_CALLS = 4095
"""Allocations before memory is read; the first one makes it 4,096."""

HOST_LOCAL = Path("/usr/lib/cni/host-local")
"""Where Debian's containernetworking-plugins puts it."""

Start = Callable[[Path], AbstractContextManager[Server]]


def in_fresh_directory(start: Start, measure: Callable[[Server], Any]) -> Any:
    """Start a server on an empty directory, measure it, stop it, remove all."""
    with (
        tempfile.TemporaryDirectory(prefix="metis-bench-") as name,
        start(Path(name)) as server,
    ):
        return measure(server)


def load_once(
    server: Server, *, calls: int, concurrency: int, cidr: str = "10.240.0.0/20"
) -> tuple[float, list[Level]]:
    """`load`, run to its end."""
    return asyncio.run(
        load(server.socket, server.pid, calls=calls, concurrency=concurrency, cidr=cidr)
    )


def loads(calls: int, levels: Sequence[int]) -> dict[str, Any]:
    """Allocate and deallocate at each concurrency, both servers in turn."""
    servers: dict[str, Start] = {"metis": metis_daemon, "bare": bare_server}
    rounds: dict[tuple[str, str, int], list[Level]] = {}
    for _ in range(ROUNDS):
        for concurrency in levels:
            for name, start in servers.items():
                _, measured = in_fresh_directory(
                    start,
                    partial(load_once, calls=calls, concurrency=concurrency),
                )
                for level in measured:
                    key = (name, level.operation, level.concurrency)
                    rounds.setdefault(key, []).append(level)
    rows, ratios, raw = [], [], []
    for (name, operation, concurrency), measured in rounds.items():
        middle = sorted(measured, key=lambda level: level.per_second)[ROUNDS // 2]
        if name == "bare" and operation == "AllocatePodIP":
            # Its constant handler gives everybody one address, on purpose.
            rows.append([name, *middle.row()[:-1], middle.failures or 0])
        else:
            rows.append([name, *middle.row()])
        raw += [{"server": name, **as_json(level)} for level in measured]
        if name == "metis":
            bare = rounds["bare", operation, concurrency]
            ratios.append(
                [
                    operation,
                    concurrency,
                    _ratio(measured, bare, "per_second"),
                    _ratio(measured, bare, "server_cpu_us"),
                    f"{median(x.p99_ms / x.p50_ms for x in measured):.2f}",
                    f"{median(x.p99_ms / x.p50_ms for x in bare):.2f}",
                ]
            )
    headers = (
        "operation",
        "concurrency",
        "calls/s",
        "CPU a call",
        "p99/p50",
        "its p99/p50",
    )
    print(f"\n## The daemon, median of {ROUNDS} rounds\n")
    print(markdown_table(("server", *Level.HEADERS), rows))
    print("\n### metis against the bare server\n")
    print(markdown_table(headers, ratios))
    return {
        "rounds": raw,
        "ratios": [dict(zip(headers, r, strict=True)) for r in ratios],
    }


def _ratio(ours: Sequence[Level], theirs: Sequence[Level], figure: str) -> str:
    """The median of the ratios round by round."""
    pairs = zip(ours, theirs, strict=True)
    value = median(getattr(a, figure) / (getattr(b, figure) or 1) for a, b in pairs)
    return f"{value:.2f}"


def first_allocates() -> dict[str, float]:
    """The first allocate of a block, by the size of the block."""
    found = {
        cidr: median(
            in_fresh_directory(
                metis_daemon,
                partial(load_once, calls=1, concurrency=1, cidr=cidr),
            )[0]
            for _ in range(ROUNDS)
        )
        for cidr in FIRST_ALLOCATE_CIDRS
    }
    print(f"\n## First allocate of a block, median of {ROUNDS} rounds\n")
    print(
        markdown_table(
            ("block", "ms"), [(cidr, f"{ms:.2f}") for cidr, ms in found.items()]
        )
    )
    return found


def memory() -> dict[str, float]:
    """Resident memory idle and after 4,096 allocations of a /19."""

    def measure(server: Server) -> dict[str, float]:
        idle = rss_mib(server.pid)
        _, levels = asyncio.run(
            load(
                server.socket,
                server.pid,
                calls=MEMORY_CALLS,
                concurrency=32,
                cidr="10.240.0.0/19",
                deallocate=False,
            )
        )
        assert not levels[0].failures, levels[0].failures
        return {"idle MiB": idle, "after 4096 MiB": rss_mib(server.pid)}

    found: dict[str, float] = in_fresh_directory(metis_daemon, measure)
    print("\n## Resident memory of the daemon\n")
    print(markdown_table(list(found), [[f"{v:.1f}" for v in found.values()]]))
    return found


def cni_processes(runs: int) -> dict[str, Any]:
    """Whole CNI calls beside a bare interpreter and host-local."""
    with tempfile.TemporaryDirectory(prefix="metis-bench-") as name:
        directory = Path(name)
        subprocess.run(
            [metis_program(), "install", "--cni-dir", name],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        plugin = str(directory / "bin" / "metis")
        ranges = [[{"subnet": "10.241.0.0/20"}]]
        with metis_daemon(directory) as server:
            config = _config(
                "metis",
                ranges=ranges,
                daemonSocket=server.socket,
                logFile=str(directory / "cni.log"),
            )
            costs = [
                command_cost(
                    [sys.executable, "-I", "-S", "-c", "pass"], runs, "bare interpreter"
                )
            ]
            verbs = ("VERSION", "ADD", "CHECK", "DEL")
            costs += verb_costs(plugin, config, verbs, runs, "metis")
            bursts = [("metis", *burst_seconds(plugin, config, BURST))]
        if HOST_LOCAL.exists():
            program = str(HOST_LOCAL)
            config = _config("host-local", ranges=ranges, dataDir=name)
            costs += verb_costs(program, config, ("ADD", "DEL"), runs, "host-local")
            bursts.append(("host-local", *burst_seconds(program, config, BURST)))
        else:
            print("host-local is missing (Debian: containernetworking-plugins)")
    bare = costs[0].wall_ms
    print("\n## Whole CNI processes\n")
    print(
        markdown_table(
            (*Cost.HEADERS, "to a bare interpreter"),
            [[*cost.row(), f"{cost.wall_ms / bare:.2f}"] for cost in costs],
        )
    )
    print(f"\n{BURST} ADDs at once:\n")
    print(
        markdown_table(
            ("plugin", "seconds", "served"),
            [(name, f"{seconds:.2f}", served) for name, seconds, served in bursts],
        )
    )
    return {
        "wall_ms": {cost.label: cost.wall_ms for cost in costs},
        "bursts": {name: seconds for name, seconds, _ in bursts},
    }


def _config(plugin: str, **ipam: Any) -> bytes:
    """A configuration as ptp passes it to its IPAM plugin."""
    return json.dumps(
        {
            "cniVersion": "1.0.0",
            "name": "bench",
            "type": "ptp",
            "ipam": {"type": plugin, **ipam},
        }
    ).encode()


def main() -> None:
    """Run the chosen benchmarks and print their tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = ("load", "first", "memory", "cni")
    parser.add_argument("which", nargs="*", choices=[*names, []], help="default: all")
    parser.add_argument("--calls", type=int, default=2000, help="a level")
    parser.add_argument("--concurrency", default="1,8,32,128")
    parser.add_argument("--runs", type=int, default=30, help="of a CNI process")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if shutil.which(metis_program()) is None:
        parser.error(f"{metis_program()} is missing: install the package first")
    print(f"{os.cpu_count()} CPUs, Python {sys.version.split()[0]}")
    levels = [int(level) for level in args.concurrency.split(",")]
    benchmarks: dict[str, Callable[[], Any]] = {
        "load": lambda: loads(args.calls, levels),
        "first": first_allocates,
        "memory": memory,
        "cni": lambda: cni_processes(args.runs),
    }
    figures = {name: benchmarks[name]() for name in args.which or names}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
