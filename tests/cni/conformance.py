"""One runtime, two ways to call the plugin, and a real daemon behind it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import apsw

from metis.cni.install import install
from metis.cni.plugin import run
from tests.cni.calls import Config, environ
from tests.cni.process import UNLOGGED

START_TIMEOUT = 30.0
"""Seconds until a daemon that does not start fails the tests."""


@dataclass(frozen=True)
class Answer:
    """What a runtime sees of a call."""

    status: int
    stdout: str
    stderr: str

    @property
    def object(self) -> Any:
        """The object on standard output; None for nothing."""
        return json.loads(self.stdout) if self.stdout else None

    @property
    def code(self) -> int:
        """The code of the error object; 0 for success."""
        return 0 if self.status == 0 else int(self.object["code"])


class Carrier(Protocol):
    """A way to call the plugin."""

    def __call__(self, variables: Mapping[str, str], stdin: bytes) -> Answer: ...


def in_process(variables: Mapping[str, str], stdin: bytes) -> Answer:
    """Call it in this process, over a real socket all the same."""
    stdout, stderr = list[str](), list[str]()
    status = run(
        variables, read=lambda: stdin, write=stdout.append, complain=stderr.append
    )
    return Answer(status, "".join(stdout), "".join(stderr))


@dataclass(frozen=True)
class Program:
    """Call the installed program, as runtimes do."""

    path: Path

    def __call__(self, variables: Mapping[str, str], stdin: bytes) -> Answer:
        done = subprocess.run(
            [self.path],
            env={os.fsencode(k): os.fsencode(v) for k, v in variables.items()},
            input=stdin,
            capture_output=True,
            check=False,
            timeout=START_TIMEOUT,
        )
        return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


def installed(directory: Path) -> Program:
    """Install the plugin below a directory, without a log of the machine's."""
    path = install(directory)
    script = path.read_text()
    start = "from metis.__main__ import main"
    assert start in script
    path.write_text(script.replace(start, f"import metis.config\n{UNLOGGED}\n{start}"))
    return Program(path)


@dataclass(frozen=True)
class Node:
    """A node with a daemon."""

    directory: Path

    @property
    def socket_path(self) -> str:
        return str(self.directory / "s")

    @property
    def db_path(self) -> str:
        return str(self.directory / "metis.sqlite")

    @property
    def log_path(self) -> str:
        return str(self.directory / "cni.log")

    def owned(self, network: str) -> list[tuple[str, str, str]]:
        """What is held on a network: container, interface, address."""
        return [held[1:] for held in self.all_owned() if held[0] == network]

    def all_owned(self) -> list[tuple[str, str, str, str]]:
        """What is held on the node: network, container, interface, address."""
        connection = apsw.Connection(self.db_path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            rows = connection.execute(
                "SELECT b.network, a.container_id, a.interface_name, a.address"
                " FROM ip_addresses AS a JOIN cidr_blocks AS b"
                " ON b.id = a.cidr_block_id"
                " WHERE a.is_allocated AND a.container_id <> '' ORDER BY a.id",
            )
            return [(str(a), str(b), str(c), str(d)) for a, b, c, d in rows]
        finally:
            connection.close()


def await_ready(
    notify: socket.socket, daemon: subprocess.Popen[bytes], log: Path
) -> None:
    """Wait until a daemon tells its service manager that it serves."""
    notify.settimeout(0.2)  # between looks whether it is still there
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        try:
            if b"READY=1" in notify.recv(4096).splitlines():
                return
        except TimeoutError:
            if daemon.poll() is not None:
                break
    raise AssertionError(f"the daemon does not serve: {log.read_text()}")


@contextmanager
def node(directory: Path) -> Iterator[Node]:
    """A node whose daemon serves, as a process of its own."""
    place = Node(directory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(directory / "n"))
        environment = {k: v for k, v in os.environ.items() if k != "CNI_COMMAND"}
        with (directory / "daemon.log").open("wb") as log:
            daemon = subprocess.Popen(
                [
                    *(sys.executable, "-m", "metis", "daemon"),
                    *("--db-path", place.db_path, "--socket-path", place.socket_path),
                ],
                env=environment | {"NOTIFY_SOCKET": notify.getsockname()},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        try:
            await_ready(notify, daemon, directory / "daemon.log")
            yield place
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(START_TIMEOUT)


@dataclass
class Runtime:
    """A runtime that calls the plugin for one network of a node.

    Attributes:
      node: where the daemon serves.
      carry: how the plugin is called.
      network: of the addresses; every case has its own.
    """

    node: Node
    carry: Carrier
    network: str

    def config(self, version: str | None = "1.1.0", **changes: Any) -> Config:
        """A configuration; `ipam` adds to that section, None leaves a key out."""
        section = {
            "type": "metis",
            "network": self.network,
            "ranges": [[{"subnet": "10.240.0.0/24"}]],
            **(changes.pop("ipam", None) or {}),
        }
        fields = {
            "cniVersion": version,
            "name": "podnet",
            "type": "ptp",
            "daemonSocket": self.node.socket_path,
            "dbPath": self.node.db_path,
            "logFile": self.node.log_path,
            "ipam": {k: v for k, v in section.items() if v is not None},
            **changes,
        }
        return {key: value for key, value in fields.items() if value is not None}

    def call(
        self,
        command: str,
        container: str = "c1",
        fields: Config | bytes | None = None,
        *,
        variables: Mapping[str, str | None] | None = None,
        **more: str | None,
    ) -> Answer:
        """Call the plugin; whatever comes back must be well-formed."""
        if fields is None:
            fields = self.config()
        stdin = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        own: dict[str, str | None] = {"CNI_CONTAINERID": container}
        answer = self.carry(
            environ(command, **{**own, **(variables or {}), **more}), stdin
        )
        check_form(answer)
        return answer

    def add(self, container: str = "c1", **changes: Any) -> Any:
        """An ADD that succeeds; its result."""
        answer = self.call("ADD", container, self.config(**changes))
        assert answer.status == 0, answer.stdout
        return answer.object

    @property
    def owned(self) -> list[tuple[str, str, str]]:
        """What is held on the network."""
        return self.node.owned(self.network)


def check_form(answer: Answer) -> None:
    """Hold an answer to what every answer must be, whatever was asked.

    Status 0 with a JSON object, or nothing, on standard output; or status 1 with
    an error object there, indented by four and without a newline at its end.
    """
    assert answer.status in (0, 1)
    assert "Traceback" not in answer.stdout + answer.stderr
    if answer.status == 0:
        assert answer.stdout == "" or isinstance(answer.object, dict)
        return
    error = answer.object
    assert set(error) <= {"cniVersion", "code", "msg", "details"}
    assert isinstance(error["code"], int)
    assert error["code"] > 0
    assert isinstance(error["msg"], str)
    assert error["msg"]
    assert isinstance(error.get("details", ""), str)
    assert answer.stdout == json.dumps(error, indent=4)
