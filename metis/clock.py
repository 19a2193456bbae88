"""One clock for every time that is stored.

A stored time is in milliseconds since the Unix epoch, read as CLOCK_BOOTTIME
plus an offset that is fixed once per boot and kept in the database. So it never
steps within a boot, whatever happens to the wall clock, and the daemon, the
next daemon and a plugin that opens the database by itself all agree on it.

May touch: the kernel's clocks and its boot id. Knows no database: the store
fixes the offset when it opens (`metis.store`).
"""

from __future__ import annotations

import errno
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
_BOOT_ID = re.compile(r"[0-9a-f-]{36}")
"""A UUID (random(4)); the places of its hyphens tell nothing more."""


class Clock(Protocol):
    """Where raw time comes from; tests put their own in its place."""

    def boot_id(self) -> str:
        """A text that differs for every boot of the machine.

        Raises:
          OSError: it is not known.
        """

    def boottime_ms(self) -> int:
        """Milliseconds since boot, suspended time included; never steps."""

    def walltime_ms(self) -> int:
        """Milliseconds since the Unix epoch; may step at any moment."""


class SystemClock:
    """The kernel's own clocks."""

    def boot_id(self) -> str:
        """The kernel's random id of this boot.

        Raises:
          OSError: it cannot be read, or is none. Another text in its place would be
            another boot, and cost every owner its address.
        """
        text = Path(BOOT_ID_PATH).read_bytes().decode("ascii", "replace").strip()
        if not _BOOT_ID.fullmatch(text):
            raise OSError(errno.EIO, f"it has {text[:40]!r}, no boot id", BOOT_ID_PATH)
        return text

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
