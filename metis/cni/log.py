"""The plugin's log: one line a call, appended by many processes at once.

May touch the file that it is told to, and nothing else. A line is one write to
a descriptor in append mode, so the lines of parallel calls never mix.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass

from metis.config import DEFAULT_CNI_LOG_PATH

MODE = 0o600
"""Container ids are what it takes to forge a DEL: for the owner's eyes only."""

MAX_VALUE_LENGTH = 16_384
"""Longest value in a line, in characters: room for a traceback, and a bound."""


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
      traceback: of an unexpected error.
      version: the protocol version of the answer; not logged.
      log_path: where the line goes.
    """

    verb: str
    container: str = ""
    interface: str = ""
    pod: str = ""
    addresses: tuple[str, ...] = ()
    outcome: str = "ok"
    traceback: str = ""
    version: str | None = None
    log_path: str = DEFAULT_CNI_LOG_PATH

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
            "traceback": self.traceback,
        }
        parts = [f"{stamp}.{int(at % 1 * 1000):03d}Z"]
        parts += [f"{key}={_quoted(value)}" for key, value in pairs.items() if value]
        return (" ".join(parts) + "\n").encode()


def append(path: str, line: bytes) -> None:
    """Append one line.

    Raises:
      OSError: the file cannot be opened or written, or not the whole line.
      ValueError: the path holds a zero byte or half a surrogate pair.
    """
    # Not blocking: a log that is a pipe nobody reads must not hold a pod up.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, MODE)
    try:
        written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes were written")


def _quoted(value: str) -> str:
    """A value without blanks as it is, any other as a JSON string."""
    value = value[:MAX_VALUE_LENGTH]
    if value.isascii() and value.isprintable() and not set(value) & set(' "=\\'):
        return value
    return json.dumps(value)
