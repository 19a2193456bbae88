"""A daemon as a process of its own, for the commands that talk to one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

START_TIMEOUT = 120.0
"""Seconds until a daemon that does not start fails the test."""


@dataclass
class DaemonProcess:
    """A started `metis daemon`: where it serves and how to end it."""

    process: subprocess.Popen[bytes]
    socket_path: Path
    db_path: Path
    notify: socket.socket

    def wait_for(self, assignment: str) -> None:
        """Wait until the daemon tells the service manager this."""
        while assignment not in self.notify.recv(4096).decode().splitlines():
            pass

    def told(self) -> list[str]:
        """What the service manager was told since, as far as it has arrived."""
        found: list[str] = []
        self.notify.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                found += self.notify.recv(4096).decode().splitlines()
        self.notify.settimeout(START_TIMEOUT)
        return found

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal; returns the exit status and what was on stderr."""
        self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=START_TIMEOUT)
        return self.process.returncode, stderr.decode()


StartDaemon = Callable[..., DaemonProcess]


def run_metis(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the program to its end."""
    environment = {k: v for k, v in os.environ.items() if k != "CNI_COMMAND"}
    environment["COLUMNS"] = "200"  # so that no table cell is wrapped
    return subprocess.run(
        [sys.executable, "-m", "metis", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_TIMEOUT,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """Start daemons that serve when the call returns; all are gone afterwards."""
    started: list[DaemonProcess] = []

    def start(*flags: str, name: str = "metis", **variables: str) -> DaemonProcess:
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.settimeout(START_TIMEOUT)
        notify.bind(str(tmp_path / f"notify-{len(started)}"))
        socket_path, db_path = tmp_path / f"{name}.sock", tmp_path / f"{name}.sqlite"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "metis", "daemon"),
                *("--db-path", db_path, "--socket-path", socket_path),
                *flags,
            ],
            env={**os.environ, "NOTIFY_SOCKET": notify.getsockname(), **variables},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        daemon = DaemonProcess(process, socket_path, db_path, notify)
        started.append(daemon)
        daemon.wait_for("READY=1")
        return daemon

    yield start
    for daemon in started:
        daemon.process.kill()
        daemon.process.communicate()
        daemon.notify.close()
