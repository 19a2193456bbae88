"""One clock for every time that is stored.

A stored time is in milliseconds since the Unix epoch, read as CLOCK_BOOTTIME
plus an offset that is fixed once per boot and kept in the database. So it never
steps within a boot, whatever happens to the wall clock, and the daemon, the
next daemon and a plugin that opens the database by itself all agree on it.

May touch: the kernel's clocks and its boot id. Knows no database: the store
fixes the offset when it opens (`metis.store`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"


class Clock(Protocol):
    """Where raw time comes from; tests put their own in its place."""

    def boot_id(self) -> str:
        """A text that differs for every boot of the machine."""

    def boottime_ms(self) -> int:
        """Milliseconds since boot, suspended time included; never steps."""

    def walltime_ms(self) -> int:
        """Milliseconds since the Unix epoch; may step at any moment."""


class SystemClock:
    """The kernel's own clocks."""

    def boot_id(self) -> str:
        """The kernel's random id of this boot."""
        return Path(BOOT_ID_PATH).read_text(encoding="ascii").strip()

    def boottime_ms(self) -> int:
        """CLOCK_BOOTTIME in milliseconds."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def walltime_ms(self) -> int:
        """CLOCK_REALTIME in milliseconds."""
        return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class StoredClock:
    """The clock of stored times: a raw clock and the offset of this boot."""

    clock: Clock
    offset_ms: int

    def now_ms(self) -> int:
        """The stored time now, in milliseconds since the Unix epoch."""
        return self.clock.boottime_ms() + self.offset_ms
