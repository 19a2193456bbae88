"""What a daemon is told: `DaemonConfig`, its defaults, and Go durations.

Pure: a config is a frozen value that checks itself when it is made; nothing
here looks at the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from metis.errors import InvalidRequest

DEFAULT_DIRECTORY = "/var/lib/cni/metis"
DEFAULT_DB_PATH = f"{DEFAULT_DIRECTORY}/metis.sqlite"
DEFAULT_SOCKET_PATH = f"{DEFAULT_DIRECTORY}/metis-adaptive-ipam.sock"
DEFAULT_CNI_LOG_PATH = f"{DEFAULT_DIRECTORY}/metis-cni.log"

SYNCHRONOUS_LEVELS = ("NORMAL", "FULL")

_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_UNIT_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}

LONGEST_DURATION = float(2**63 // 10**9)
"""Seconds of the longest duration that Go has, 292 years. A longer one would not
fit the stored times either."""


def parse_duration(text: str) -> float:
    """Read a duration in Go's syntax, as the original's flags take it.

    Args:
      text: one or more decimal numbers with a unit, "1h30m", "1.5s", "500ms";
        or "0". Units: ns, us, ms, s, m, h.

    Returns:
      Seconds.

    Raises:
      InvalidRequest: not a duration, a negative one, or one that is too long.
    """
    if text == "0":
        return 0.0
    seconds, end = 0.0, 0
    for match in _DURATION.finditer(text):
        if match.start() != end:
            break
        seconds += float(match[1]) * _UNIT_SECONDS[match[2]]
        end = match.end()
    if not text or end != len(text):
        raise InvalidRequest(
            f"{text!r} is not a duration: write numbers with a unit "
            "(ns, us, ms, s, m, h), for example '1m', '500ms' or '1h30m'"
        )
    if seconds > LONGEST_DURATION:
        raise InvalidRequest(
            f"{text!r} is too long for a duration: "
            f"the longest is '{LONGEST_DURATION // 3600:.0f}h'"
        )
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Everything that `metis.serve` needs to know. All times are seconds.

    Attributes:
      db_path: the SQLite file; its directory is made when it does not exist.
      socket_path: the Unix socket of the default transport.
      release_cooldown: how long a released address rests before another owner
        may get it. 0 means not at all.
      monitor_interval: how often capacity is looked at.
      draining_expiration: how long a draining block may stay.
      sustained_low_utilization_duration: how long a network must be nearly
        empty before a block of it drains.
      synchronous: SQLite's setting, "NORMAL" or "FULL".
      shutdown_grace: how long calls in flight may take once the daemon stops.

    The three durations of capacity are taken over from the original so that
    its unit files work unchanged; they rest until blocks come from outside.

    Raises:
      InvalidRequest: an empty path, a negative time, an unknown level.
    """

    db_path: str = DEFAULT_DB_PATH
    socket_path: str = DEFAULT_SOCKET_PATH
    release_cooldown: float = 60.0
    monitor_interval: float = 2.0
    draining_expiration: float = 5 * 3600.0
    sustained_low_utilization_duration: float = 8 * 3600.0
    synchronous: str = "NORMAL"
    shutdown_grace: float = 5.0

    def __post_init__(self) -> None:
        for name in ("db_path", "socket_path"):
            value = getattr(self, name)
            if not value or "\0" in value:
                raise InvalidRequest(f"{name} is {value!r}: it must be a file path")
        for name in (
            "release_cooldown",
            "monitor_interval",
            "draining_expiration",
            "sustained_low_utilization_duration",
            "shutdown_grace",
        ):
            value = getattr(self, name)
            if not 0 <= value <= LONGEST_DURATION:
                raise InvalidRequest(
                    f"{name} is {value!r}: it must be a number of seconds from 0 up "
                    f"to {LONGEST_DURATION:.0f}"
                )
        if self.synchronous not in SYNCHRONOUS_LEVELS:
            raise InvalidRequest(
                f"synchronous is {self.synchronous!r}: "
                f"it must be one of {', '.join(SYNCHRONOUS_LEVELS)}"
            )
