"""Start the servers under measurement, each on a directory of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT = 30.0
"""Seconds a server may take until it serves."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: its socket and its process."""

    name: str
    socket: str
    pid: int


def metis_program() -> str:
    """The console script installed beside this interpreter."""
    return str(Path(sys.executable).with_name("metis"))


@contextmanager
def metis_daemon(directory: Path, *flags: str) -> Iterator[Server]:
    """The installed daemon on a fresh database, ready when its READY=1 arrives."""
    path = directory / "metis.sock"
    notify = directory / "notify"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver,
        (directory / "daemon.log").open("wb") as daemon_log,
    ):
        receiver.bind(str(notify))
        receiver.settimeout(START_TIMEOUT)
        child = subprocess.Popen(
            [
                metis_program(),
                "daemon",
                "--db-path",
                str(directory / "metis.sqlite"),
                "--socket-path",
                str(path),
                *flags,
            ],
            env={**os.environ, "NOTIFY_SOCKET": str(notify)},
            stdin=subprocess.DEVNULL,
            stderr=daemon_log,
        )
        with _stopped_at_exit(child):
            receiver.recv(4096)
            yield Server("metis", str(path), child.pid)


@contextmanager
def bare_server(directory: Path) -> Iterator[Server]:
    """Start grpclib on asyncio with a constant handler (`benchmarks.bare_server`)."""
    path = directory / "bare.sock"
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bare_server", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    with _stopped_at_exit(child), child.stdout:
        child.stdout.readline()
        yield Server("bare grpclib on asyncio", str(path), child.pid)


@contextmanager
def _stopped_at_exit(child: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        child.terminate()
        child.wait(START_TIMEOUT)
