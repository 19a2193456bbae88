"""The installed `metis`, run as a user runs it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.network import output

METIS = Path(sys.executable).with_name("metis")
"""The console script of the environment in which the tests run."""

COOLDOWN = "10m"
"""Longer than any scenario, so that no address cools down within one."""

START_SECONDS = 120.0
"""Until a starting daemon must be ready."""

STOP_SECONDS = 120.0
"""Until a daemon that was told to stop must have ended."""


class Daemon:
    """One daemon on one database; it may be started again and again.

    Attributes:
      cooldown: how long a released address rests.
      flags: what else is on its command line.
      socket_path: its Unix socket.
      db_path: its database.
      log_path: what it says on stderr, all runs together.
    """

    def __init__(
        self, directory: Path, cooldown: str = COOLDOWN, flags: Sequence[str] = ()
    ) -> None:
        self.cooldown = cooldown
        self.flags = tuple(flags)
        self.socket_path = directory / "metis.sock"
        self.db_path = directory / "metis.sqlite"
        self.log_path = directory / "metis.log"
        self._notify_path = directory / "notify.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait for its notification that it is ready.

        Raises:
          AssertionError: it ended, or START_SECONDS passed.
        """
        assert self._process is None, "the daemon runs already"
        self._notify_path.unlink(missing_ok=True)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications,
            self.log_path.open("ab") as log,
        ):
            notifications.bind(str(self._notify_path))
            self._process = subprocess.Popen(
                [
                    *(METIS, "daemon", "--release-cooldown", self.cooldown),
                    *("--db-path", self.db_path, "--socket-path", self.socket_path),
                    *self.flags,
                ],
                env={**os.environ, "NOTIFY_SOCKET": str(self._notify_path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            if not _is_ready(self._process, notifications):
                self.kill()
                raise AssertionError(
                    f"the daemon is not ready: {self.log_path.read_text()}"
                )

    def stop(self) -> None:
        """End it as a service manager does, and see that it ends well."""
        assert self._end(signal.SIGTERM) == 0, self.log_path.read_text()

    def kill(self) -> None:
        """End it with SIGKILL: it gets no moment to tidy up."""
        self._end(signal.SIGKILL)

    @property
    def running(self) -> bool:
        """Whether it was started, and neither stopped nor killed since."""
        return self._process is not None

    def table(self, name: str) -> list[dict[str, str]]:
        """All rows of "cidr-blocks" or "ip-addresses", through the admin command."""
        rows: list[dict[str, str]] = json.loads(
            output(
                *(str(METIS), "admin", name, "list", "-o", "json"),
                *("--socket-path", str(self.socket_path)),
            )
        )
        return rows

    def _end(self, with_signal: signal.Signals) -> int:
        assert self._process is not None, "the daemon does not run"
        process, self._process = self._process, None
        process.send_signal(with_signal)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _is_ready(process: subprocess.Popen[bytes], notifications: socket.socket) -> bool:
    """Wait for READY=1 (sd_notify(3)), or for the end of the process."""
    pidfd = os.pidfd_open(process.pid)
    try:
        while True:
            waited_for = [notifications.fileno(), pidfd]
            readable, _, _ = select.select(waited_for, [], [], START_SECONDS)
            if notifications.fileno() not in readable:
                return False
            if "READY=1" in notifications.recv(4096).decode().splitlines():
                return True
    finally:
        os.close(pidfd)
