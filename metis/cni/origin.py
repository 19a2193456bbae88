"""Where a call of the plugin comes from: when its process began, on which boot.

An ADD that a runtime has given up may still run when the DEL of its container
comes, and must then lose to it. Who began first is told by the kernel's record
of the process, which counts the time that it waited for a CPU, too.

May touch: /proc/self/stat, the kernel's clocks and its boot id.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from metis.clock import Clock, SystemClock

STAT_PATH = "/proc/self/stat"

_START_FIELD = 22 - 3
"""Place of `starttime` behind the program's name, whose end is that of field 2
(proc(5)). The name may hold blanks and parentheses of its own."""


@dataclass(frozen=True, slots=True)
class Origin:
    """When a call began; without arguments it is unknown.

    Attributes:
      boot_id: the kernel's id of the boot, or empty.
      started_boottime_ms: milliseconds since that boot, or 0; at the latest.
      earliest_boottime_ms: the same, at the earliest.
    """

    boot_id: str = ""
    started_boottime_ms: int = 0
    earliest_boottime_ms: int = 0


def read_origin(
    clock: Clock | None = None, stat_path: str = STAT_PATH, ticks: int | None = None
) -> Origin:
    """When this process began; unknown where the kernel does not tell.

    Args:
      clock: where raw time comes from; by default the kernel.
      stat_path: the kernel's record of the process.
      ticks: its clock ticks a second; by default the kernel's own.
    """
    clock = clock or SystemClock()
    try:
        return origin_of(Path(stat_path).read_bytes(), clock, clock.boot_id(), ticks)
    except OSError:
        return Origin()


def origin_of(
    stat: bytes, clock: Clock, boot_id: str, ticks: int | None = None
) -> Origin:
    """When a process of this machine began, by the kernel's record of it.

    The kernel counts in ticks, of 10 ms as a rule, so the moment is known as a
    span. For an ADD its end counts, or the present where that is earlier: always after
    the true moment. So an ADD that follows a DEL is never taken for an earlier one,
    however fast it follows. The other way around there is time enough: a DEL that is
    sent after an ADD needs more than a tick to become a process and ask. For the list
    of a GC the beginning counts, so that nothing which was given since is taken for
    older.

    Args:
      stat: the record, which may be of another process; unknown if it is none.
      clock: where raw time comes from.
      boot_id: the id of the boot, by that clock.
      ticks: clock ticks a second; by default the kernel's own.
    """
    ticks = ticks or os.sysconf("SC_CLK_TCK")
    try:
        start = int(stat.rpartition(b")")[2].split()[_START_FIELD])
    except (ValueError, IndexError):
        return Origin()
    end_of_tick = -(-(start + 1) * 1000 // ticks)  # rounded up
    return Origin(boot_id, min(end_of_tick, clock.boottime_ms()), start * 1000 // ticks)
