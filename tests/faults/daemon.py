"""A daemon that is killed, stopped and started again, and what it leaves behind."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import apsw
import trio

from metis.clock import SystemClock
from metis.store.reading import check_file
from tests.e2e.daemon import METIS
from tests.faults.checker import Owner

START_SECONDS = 120.0
"""Until a starting daemon must be ready or have ended."""

STOP_SECONDS = 120.0
"""Until a daemon that was told to stop must have ended."""

LOG_TAIL = 4000
"""Characters of the log that a failure shows."""


class Daemon:
    """One daemon on one database, again and again; nothing here waits for it to serve.

    Attributes:
      cooldown: how long a released address rests, in seconds.
      socket_path: its Unix socket.
      db_path: its database.
      log_path: what it says on stderr, all runs together.
      starts: how often it was started.
    """

    def __init__(self, directory: Path, cooldown: float) -> None:
        self.cooldown = cooldown
        self.socket_path = directory / "metis.sock"
        self.db_path = directory / "metis.sqlite"
        self.log_path = directory / "metis.log"
        self.starts = 0
        self._notify_path = directory / "notify.sock"
        self._notifications: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._serves = False

    @property
    def pid(self) -> int:
        """Its process id while it runs."""
        assert self._process is not None, "the daemon does not run"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started, and was not seen to end since."""
        return self._process is not None

    @property
    def flags(self) -> list[str]:
        """The arguments after "metis"."""
        return [
            *("daemon", "--release-cooldown", f"{self.cooldown * 1000:.0f}ms"),
            *("--db-path", str(self.db_path), "--socket-path", str(self.socket_path)),
        ]

    def start(
        self, program: Sequence[str] = (str(METIS),), more: Sequence[str] = ()
    ) -> None:
        """Start the process; `ready` waits until it serves.

        Args:
          program: what takes the arguments of `metis`.
          more: flags that this run alone has.
        """
        assert self._process is None, "the daemon runs already"
        self.starts += 1
        self._serves = False
        self._notify_path.unlink(missing_ok=True)
        self._notifications = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        )
        self._notifications.bind(str(self._notify_path))
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*program, *self.flags, *more],
                env={**os.environ, "NOTIFY_SOCKET": str(self._notify_path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def ready(self) -> bool:
        """Wait until it serves; False when it ended before."""
        return await trio.to_thread.run_sync(self.wait_ready)

    def wait_ready(self) -> bool:
        """As `ready`, in the calling thread."""
        notifications, deadline = self._notifications, time.monotonic() + START_SECONDS
        assert notifications is not None, "the daemon does not run"
        pidfd = os.pidfd_open(self.pid)
        try:
            while not self._serves:
                left = deadline - time.monotonic()
                watched = [notifications.fileno(), pidfd]
                seen, _, _ = select.select(watched, [], [], max(left, 0))
                assert seen, f"not ready after {START_SECONDS} s: {self.log()}"
                if notifications.fileno() not in seen:
                    return False
                said = notifications.recv(4096).decode().splitlines()
                self._serves = "READY=1" in said
            return True
        finally:
            os.close(pidfd)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None, "the daemon does not run"
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it with SIGKILL, and see it end; it may have ended by itself."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """End it as a service manager does, and see that it ends well."""
        self.signal(signal.SIGTERM)
        status = self.wait()
        assert status == 0, f"exit status {status}: {self.log()}"

    def wait(self) -> int:
        """Wait for its end; returns its exit status."""
        assert self._process is not None, "the daemon does not run"
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"it does not end: {self.log()}") from None
        finally:
            self._process = None
            if self._notifications is not None:
                self._notifications.close()

    def log(self) -> str:
        """The end of what it said."""
        return self.log_path.read_text()[-LOG_TAIL:]

    def left(self) -> dict[Owner, set[str]]:
        """Who holds what in the database that it left; see `read_database`."""
        assert self._process is None, "the daemon runs"
        return read_database(self.db_path)


def read_database(path: Path) -> dict[Owner, set[str]]:
    """Who holds what in a database that nobody uses, which must be whole.

    Raises:
      AssertionError: `metis check` finds a violation.
    """
    violations = check_file(str(path), SystemClock()).violations
    assert not violations, f"{path}: {violations}"
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        held: dict[Owner, set[str]] = {}
        for network, container, interface, address in connection.execute(
            "SELECT b.network, a.container_id, a.interface_name, a.address"
            " FROM ip_addresses AS a JOIN cidr_blocks AS b ON b.id = a.cidr_block_id"
            " WHERE a.is_allocated = TRUE AND a.container_id <> ''"
        ):
            held.setdefault(Owner(network, container, interface), set()).add(address)
        return held
    finally:
        connection.close()
