"""The section `profile`: where the daemon's CPU goes, by a sampling profiler."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import layers
from benchmarks.databases import POOL
from benchmarks.grpc_load import load
from benchmarks.series import Rounds
from benchmarks.servers import Server, fresh, metis_daemon
from benchmarks.settings import Settings

LEVEL = 32
"""Calls under way while the daemon is sampled."""

RATE = 250
"""Samples a second: py-spy stops the process for each, some 0.3 ms."""

CALLS = 2000
"""Calls of each operation before the next pool: the daemon is never without."""

PROGRAM = "py-spy"


class SamplerError(Exception):
    """The profiler is missing, or is not let near the daemon."""


def program() -> str:
    """The profiler: beside the interpreter, else on PATH.

    Raises:
      SamplerError: there is none.
    """
    beside = Path(sys.executable).with_name(PROGRAM)
    found = str(beside) if beside.exists() else shutil.which(PROGRAM)
    if found is None:
        raise SamplerError(
            f"{PROGRAM} is missing: install the dependency group `bench`"
        )
    return found


def measure(settings: Settings) -> Rounds:
    """Shares of the layers at concurrency 32, allocations and releases in turn."""
    series = Rounds()
    seconds = max(1, round(settings.sampling_seconds / settings.rounds))
    for _ in range(settings.rounds):
        with (
            tempfile.TemporaryDirectory(prefix="metis-bench-") as name,
            fresh(metis_daemon) as server,
        ):
            # Before the profiler, which the daemon pays for.
            series.add("profile/server_cpu_us", _cpu_us(server, "before"))
            raw = _sampled(server, seconds, Path(name) / "raw")
        for layer, share in layers.shares(raw).items():
            series.add(f"profile/{layer}/share", share)
    return series


def _cpu_us(server: Server, network: str) -> float:
    """CPU of a call, the mean of both operations."""
    _, levels = asyncio.run(
        load(
            server.socket,
            server.pid,
            calls=CALLS,
            concurrency=LEVEL,
            cidr=POOL,
            network=network,
        )
    )
    return sum(level.server_cpu_us or 0.0 for level in levels) / len(levels)


def _sampled(server: Server, seconds: int, output: Path) -> list[str]:
    """Sample the daemon while it is under load.

    Raises:
      SamplerError: it could not be sampled; tells what the profiler said.
    """
    with subprocess.Popen(
        [
            program(),
            "record",
            *("--pid", str(server.pid)),
            *("--duration", str(seconds)),
            *("--rate", str(RATE)),
            *("--format", "raw"),
            *("--output", str(output)),
            "--full-filenames",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as sampler:
        number = 0
        while sampler.poll() is None:
            _cpu_us(server, f"sampled-{number}")
            number += 1
        said, _ = sampler.communicate()
    if sampler.returncode or not output.exists():
        raise SamplerError(
            f"{PROGRAM} could not sample the daemon; it needs root or the capability "
            f"SYS_PTRACE: {said.decode(errors='replace').strip()[-500:]}"
        )
    return output.read_text().splitlines()
