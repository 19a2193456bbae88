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
DEFAULT_CNI_CACHE_DIR = "/var/lib/cni/results"
DEFAULT_CNI_LOG_PATH = f"{DEFAULT_DIRECTORY}/metis-cni.log"

SYNCHRONOUS_LEVELS = ("NORMAL", "FULL")

LAST_UID = 2**32 - 2
"""The highest uid. The one after it, -1 as the kernel counts, stands for none."""

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
      cni_cache_dir: where libcni, and so the container runtime, keeps the result of
        each ADD; looked at when the database has lost records. Empty for nowhere.
      shutdown_grace: how long calls in flight may take once the daemon stops.
      allow_uids: who may connect to the Unix socket, beside root and the user
        that the daemon runs as.
      reclaim_interval: how often the daemon looks for owners that are gone, and
        the least time for which one must be gone. 0 means never.
      reclaim_grace: how long an owner is left alone after it asked for its address,
        whatever is seen of it. Runtimes list a container only once all of it is
        up, and give up on that within 4 minutes.
      reclaim_limit: most addresses that are taken back at once; where it would be
        more, none is.
      cri_socket: the Unix socket of the container runtime's CRI, as a path, to ask
        which containers there are; empty asks nobody.

    The three durations of capacity are taken over from the original so that
    its unit files work unchanged; they rest until blocks come from outside.

    Raises:
      InvalidRequest: an empty path, a negative time, an unknown level, a uid
        that is none, a negative limit.
    """

    db_path: str = DEFAULT_DB_PATH
    socket_path: str = DEFAULT_SOCKET_PATH
    release_cooldown: float = 60.0
    monitor_interval: float = 2.0
    draining_expiration: float = 5 * 3600.0
    sustained_low_utilization_duration: float = 8 * 3600.0
    synchronous: str = "NORMAL"
    shutdown_grace: float = 5.0
    cni_cache_dir: str = DEFAULT_CNI_CACHE_DIR
    allow_uids: tuple[int, ...] = ()
    reclaim_interval: float = 60.0
    reclaim_grace: float = 300.0
    reclaim_limit: int = 100
    cri_socket: str = ""

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
            "reclaim_interval",
            "reclaim_grace",
        ):
            value = getattr(self, name)
            if not 0 <= value <= LONGEST_DURATION:
                raise InvalidRequest(
                    f"{name} is {value!r}: it must be a number of seconds from 0 up "
                    f"to {LONGEST_DURATION:.0f}"
                )
        if "\0" in self.cni_cache_dir:
            raise InvalidRequest(
                f"cni_cache_dir is {self.cni_cache_dir!r}: it must be the path of a "
                "directory, or empty"
            )
        if self.synchronous not in SYNCHRONOUS_LEVELS:
            raise InvalidRequest(
                f"synchronous is {self.synchronous!r}: "
                f"it must be one of {', '.join(SYNCHRONOUS_LEVELS)}"
            )
        for uid in self.allow_uids:
            if type(uid) is not int or not 0 <= uid <= LAST_UID:
                raise InvalidRequest(
                    f"allow_uids has {uid!r}: write the number of a user, "
                    f"0 to {LAST_UID}, as `id -u NAME` tells it"
                )
        if type(self.reclaim_limit) is not int or self.reclaim_limit < 0:
            raise InvalidRequest(
                f"reclaim_limit is {self.reclaim_limit!r}: "
                "it must be a number of addresses, 0 or more"
            )
        if self.cri_socket and (
            not self.cri_socket.startswith("/") or "\0" in self.cri_socket
        ):
            raise InvalidRequest(
                f"cri_socket is {self.cri_socket!r}: it must be the absolute path of "
                "a Unix socket, for example '/run/containerd/containerd.sock'"
            )
