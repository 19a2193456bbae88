"""The plugin's log: one line a call, appended by many processes at once.

May touch the file that it is told to and the one older generation beside it, and
nothing else. A line is one write to a descriptor in append mode, so the lines of
parallel calls never mix.

Nobody waits for anybody. Whoever finds the file full renames it, under a lock
that is taken at once or not at all; whoever does not get it writes on. A line
that was on its way meanwhile lands in the older generation and is not lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from dataclasses import dataclass

from metis.cni import relay
from metis.config import DEFAULT_CNI_LOG_PATH

MODE = 0o600
"""Container ids are what it takes to forge a DEL: for the owner's eyes only."""

MAX_VALUE_LENGTH = 16_384
"""Longest value in a line, in characters: room for a traceback, and a bound."""

MAX_LOG_BYTES = relay.MAX_LOG_BYTES
"""Size at which a log is rotated; the relay appends to smaller ones by itself."""

OVERFULL = 2
"""Times MAX_LOG_BYTES from which on lines are dropped, the bound whatever happens.
Whoever rotates may be stopped while it has the lock, or may not rename: then a
full disk would be worse than a gap in the log."""

OLDER = ".1"
"""What the name of the older generation ends in."""

LEVELS = ("error", "warning", "info", "debug")
"""From the least to the most that is logged: calls that failed; those that did
nothing though asked to; all of them; all, with what they were told."""

DEFAULT_LEVEL = "info"


@dataclass(slots=True)
class CallRecord:
    """What the log says about a call; filled in as the call gets on.

    Attributes:
      verb: CNI_COMMAND.
      container: CNI_CONTAINERID.
      interface: CNI_IFNAME.
      pod: NAMESPACE/NAME, or empty.
      addresses: those that were given or checked.
      outcome: "ok", or the code and message of the error.
      note: why a call that succeeded did nothing.
      traceback: of an unexpected error.
      details: of the error; like the next three, in the log of level debug alone.
      netns: CNI_NETNS.
      args: CNI_ARGS.
      stdin: the configuration, which may hold secrets.
      version: the protocol version of the answer; not logged.
      log_path: where the line goes; empty for nowhere.
      level: one of LEVELS.
      complaint: what was wrong about the level that was asked for.
    """

    verb: str
    container: str = ""
    interface: str = ""
    pod: str = ""
    addresses: tuple[str, ...] = ()
    outcome: str = "ok"
    note: str = ""
    traceback: str = ""
    details: str = ""
    netns: str = ""
    args: str = ""
    stdin: bytes = b""
    version: str | None = None
    log_path: str = DEFAULT_CNI_LOG_PATH
    level: str = DEFAULT_LEVEL
    complaint: str = ""

    def set_level(self, value: object) -> None:
        """Take the level that a configuration asks for; None means the default.

        Any other value than one of LEVELS is the default one, with a complaint:
        a log must not be the reason why a call fails.
        """
        name = value.lower() if isinstance(value, str) else value
        if name in LEVELS:
            self.level = str(name)
        elif value is not None and value != "":
            self.complaint = (
                f"metis: logLevel is {ascii(value)[:80]}: write one of "
                f"{', '.join(LEVELS)}; {DEFAULT_LEVEL} is used"
            )

    @property
    def is_wanted(self) -> bool:
        """Whether a log of this level has a line about the call."""
        if self.outcome != "ok":
            return True
        return LEVELS.index(self.level) >= LEVELS.index(
            "warning" if self.note else "info"
        )

    def line(self, *, at: float, seconds: float) -> bytes:
        """The line, with its end.

        Args:
          at: when the call ended, in seconds since the epoch.
          seconds: how long it took.
        """
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
        pairs = {
            "verb": self.verb,
            "container": self.container,
            "interface": self.interface,
            "pod": self.pod,
            "address": ",".join(self.addresses),
            "ms": f"{seconds * 1000:.1f}",
            "outcome": self.outcome,
            "note": self.note,
            "traceback": self.traceback,
        }
        if self.level == "debug":
            pairs |= {
                "details": self.details,
                "netns": self.netns,
                "args": self.args,
                "stdin": self.stdin[:MAX_VALUE_LENGTH].decode(errors="replace"),
            }
        parts = [f"{stamp}.{int(at % 1 * 1000):03d}Z"]
        parts += [f"{key}={_quoted(value)}" for key, value in pairs.items() if value]
        return (" ".join(parts) + "\n").encode()


def append(path: str, line: bytes, *, limit: int = MAX_LOG_BYTES) -> None:
    """Append one line; a file that is full becomes the older generation first.

    Args:
      path: the log.
      line: what to write, with its end.
      limit: bytes from which on the file is full.

    Raises:
      OSError: the file cannot be opened, rotated or written, or not the whole
        line.
      ValueError: the path holds a zero byte or half a surrogate pair.
    """
    descriptor = _open(path)
    try:
        _keep_private(descriptor)
        if _is_full(descriptor, limit) and _rotated(descriptor, path, limit):
            os.close(descriptor)
            descriptor = -1
            descriptor = _open(path)
        written = os.write(descriptor, line)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes were written")


def _open(path: str) -> int:
    # Not blocking: a log that is a pipe nobody reads must not hold a pod up.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    return os.open(path, flags, MODE)


def _keep_private(descriptor: int) -> None:
    """Take from others what they may do with a log that somebody else has made."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) and stat.S_IMODE(mode) & ~MODE:
        with contextlib.suppress(OSError):  # not ours to change, but to write to
            os.fchmod(descriptor, stat.S_IMODE(mode) & MODE)


def _is_full(descriptor: int, limit: int) -> bool:
    status = os.fstat(descriptor)
    return stat.S_ISREG(status.st_mode) and status.st_size >= limit


def _rotated(descriptor: int, path: str, limit: int) -> bool:
    """Make a full file the older generation, unless somebody else is at it.

    The lock belongs to the file and not to its name. So under it the name is
    still that of this file, or somebody has renamed it already; another file of
    that name can only be renamed by whoever has the lock of that one.

    Returns:
      Whether the name is free, or another file's, by now.

    Raises:
      OSError: it cannot be renamed and must not grow any more.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours, named = os.fstat(descriptor), os.stat(path)
        if (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino):
            os.rename(path, path + OLDER)
    except FileNotFoundError:
        return True
    except OSError as error:
        if _is_full(descriptor, OVERFULL * limit):
            raise OSError(f"it is full and cannot be rotated: {error}") from error
        return False
    return True


def _quoted(value: str) -> str:
    """A value without blanks as it is, any other as a JSON string."""
    value = value[:MAX_VALUE_LENGTH]
    if value.isascii() and value.isprintable() and not set(value) & set(' "=\\'):
        return value
    return json.dumps(value)
