"""What is measured of a process, and how figures are put together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

PROCESS_CLOCK = 2
"""Of a process's clock ids, the one of all its threads, to the nanosecond: the
kernel's CPUCLOCK_SCHED, as clock_getcpuclockid(3) makes it."""


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used so far, ended threads included."""
    return time.clock_gettime(~pid << 3 | PROCESS_CLOCK)


def rss_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"process {pid} tells no VmRSS")


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def median(values: Iterable[float]) -> float:
    """The median of a few rounds."""
    return statistics.median(values)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that reads well in a terminal and in a document."""
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)
