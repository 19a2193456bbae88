"""Start the servers under measurement, each on a directory of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT = 30.0
"""Seconds a server may take until it serves."""


class StartFailedError(Exception):
    """A server does not serve."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: its socket and its process; no pid when it is not known.

    Attributes:
      name: for people.
      socket: path of its Unix socket.
      pid: of the process, 0 when it is not known.
      start_ms: from its spawn until it said that it serves, wall time.
    """

    name: str
    socket: str
    pid: int
    start_ms: float = 0.0


Start = Callable[[Path], AbstractContextManager[Server]]
"""Starts a server on a directory, and stops it."""


def metis_program() -> str:
    """The console script installed beside this interpreter."""
    return str(Path(sys.executable).with_name("metis"))


@contextmanager
def metis_daemon(directory: Path, *flags: str) -> Iterator[Server]:
    """The installed daemon on DIRECTORY/metis.sqlite; ready when it says READY=1."""
    path = directory / "metis.sock"
    notify = directory / "notify"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver,
        (directory / "daemon.log").open("wb") as daemon_log,
    ):
        receiver.bind(str(notify))
        receiver.settimeout(START_TIMEOUT)
        start = time.perf_counter()
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
            try:
                while b"READY=1" not in receiver.recv(4096):
                    pass
            except TimeoutError:
                said = (directory / "daemon.log").read_text(errors="replace")
                raise StartFailedError(
                    f"metis daemon did not serve within {START_TIMEOUT:g} s: "
                    f"{said.strip()[-500:]}"
                ) from None
            start_ms = (time.perf_counter() - start) * 1e3
            yield Server("metis", str(path), child.pid, start_ms)


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
        if child.stdout.readline() != b"ready\n":
            raise StartFailedError("the bare server did not start; see above")
        yield Server("bare grpclib on asyncio", str(path), child.pid)


@contextmanager
def running_server(socket_path: str, pid: int, directory: Path) -> Iterator[Server]:
    """Use a daemon that somebody else has started, and leave it running."""
    del directory  # it has one of its own
    yield Server("other", socket_path, pid)


@contextmanager
def fresh(start: Start) -> Iterator[Server]:
    """A server on an empty directory of its own, which is removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="metis-bench-") as name,
        start(Path(name)) as server,
    ):
        yield server


@contextmanager
def _stopped_at_exit(child: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        child.terminate()
        child.wait(START_TIMEOUT)
