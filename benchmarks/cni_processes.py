"""What one CNI call costs as a whole process, from spawn to exit.

`python -m benchmarks.cni_processes PROGRAM CONFIG` runs the program as a
runtime does and prints wall time, CPU time and memory of the child.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measures import markdown_table, median, percentile

WARM_UP_RUNS = 3
"""Runs before the counted ones: page cache, byte code, the daemon's first block."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process: milliseconds of wall and CPU time, MiB, exit status, stdout."""

    wall_ms: float
    cpu_ms: float
    rss_mib: float
    exit_status: int
    output: bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """A program's cost for one verb over several runs."""

    label: str
    runs: Sequence[Run]

    HEADERS = (
        "process",
        "runs",
        "wall ms",
        "p95",
        "min",
        "max",
        "CPU ms",
        "max RSS MiB",
        "failed",
    )

    @property
    def wall_ms(self) -> float:
        """The median wall time."""
        return median(run.wall_ms for run in self.runs)

    def row(self) -> list[object]:
        """The figures in the order of HEADERS."""
        walls = [run.wall_ms for run in self.runs]
        return [
            self.label,
            len(walls),
            f"{self.wall_ms:.2f}",
            f"{percentile(walls, 95):.2f}",
            f"{min(walls):.2f}",
            f"{max(walls):.2f}",
            f"{median(run.cpu_ms for run in self.runs):.2f}",
            f"{max(run.rss_mib for run in self.runs):.1f}",
            sum(run.exit_status != 0 for run in self.runs),
        ]


def cni_environment(verb: str, container_id: str, program: str) -> dict[str, str]:
    """The environment of a runtime, and nothing else."""
    return {
        "PATH": os.environ["PATH"],
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": container_id,
        "CNI_NETNS": "/var/run/netns/bench",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": os.path.dirname(os.path.abspath(program)),
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod",
    }


def run_once(argv: Sequence[str], environment: dict[str, str], stdin: bytes) -> Run:
    """Spawn one process and account for it; files, not pipes, so it never waits."""
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as sink:
        source.write(stdin)
        source.flush()
        os.lseek(source.fileno(), 0, os.SEEK_SET)
        actions = [
            (os.POSIX_SPAWN_DUP2, source.fileno(), 0),
            (os.POSIX_SPAWN_DUP2, sink.fileno(), 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        start = time.perf_counter()
        pid = os.posix_spawnp(argv[0], list(argv), environment, file_actions=actions)
        _, status, usage = os.wait4(pid, 0)
        wall = time.perf_counter() - start
        sink.seek(0)
        return Run(
            wall * 1e3,
            (usage.ru_utime + usage.ru_stime) * 1e3,
            usage.ru_maxrss / 1024,
            os.waitstatus_to_exitcode(status),
            sink.read(),
        )


def with_previous_result(config: bytes, result: bytes) -> bytes:
    """The configuration of a CHECK, as libcni passes it."""
    return config.rstrip()[:-1] + b',"prevResult":' + result + b"}"


def verb_costs(
    program: str, config: bytes, verbs: Sequence[str], runs: int, label: str
) -> list[Cost]:
    """The cost of each verb, every container id its own.

    CHECK gets the result of its ADD as prevResult, as libcni would pass it.
    """
    tag = f"bench-{os.getpid()}-{time.monotonic_ns()}"
    results: dict[str, bytes] = {}
    costs = []
    for verb in verbs:
        counted = []
        for i in range(-WARM_UP_RUNS, runs):
            name = f"{tag}-{i + WARM_UP_RUNS}"
            stdin = config
            if verb == "CHECK" and name in results:
                stdin = with_previous_result(config, results[name])
            done = run_once([program], cni_environment(verb, name, program), stdin)
            if verb == "ADD":
                results[name] = done.output
            if i >= 0:
                counted.append(done)
        costs.append(Cost(f"{label} {verb}", counted))
    return costs


def burst_seconds(program: str, config: bytes, count: int) -> tuple[float, int]:
    """Start `count` ADDs at once.

    Returns:
      Seconds until the last has ended, and how many ended well.
    """
    tag = f"burst-{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.NamedTemporaryFile() as source:
        source.write(config)
        source.flush()
        start = time.perf_counter()
        children = []
        for i in range(count):
            with Path(source.name).open("rb") as stdin:
                children.append(
                    subprocess.Popen(
                        [program],
                        stdin=stdin,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=cni_environment("ADD", f"{tag}-{i}", program),
                    )
                )
        served = sum(child.wait() == 0 for child in children)
        return time.perf_counter() - start, served


def main() -> None:
    """Time one program and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("config", type=Path)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--verbs", default="VERSION,ADD,CHECK,DEL")
    args = parser.parse_args()
    costs = verb_costs(
        args.program,
        args.config.read_bytes(),
        args.verbs.split(","),
        args.runs,
        os.path.basename(args.program),
    )
    print(markdown_table(Cost.HEADERS, [cost.row() for cost in costs]))


if __name__ == "__main__":
    main()
