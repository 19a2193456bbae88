"""One runtime, several ways to call the plugin, and a real daemon behind it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import apsw

from metis.cni.install import install
from metis.cni.relay import Relay
from tests.cni.calls import Config, environ
from tests.cni.process import METIS, UNLOGGED
from tests.cni.relaying import ROOT, standing_in

START_TIMEOUT = 120.0
"""Seconds until a daemon that does not start fails the tests."""

PASSING = re.compile(r"\b\d+(\.\d+)? s\b")
"""How long until an address is free, which is less at the second call."""

STAMP = re.compile(r"^\S+Z | ms=\S+", re.MULTILINE)
"""When a line was logged, and how long its call took."""

STATUS_TRIES = 20

LATE = re.compile(r"did not answer|no answer|deadline|cannot be used")
"""What a STATUS says for which the daemon, or the database, was too slow."""


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


@dataclass(frozen=True)
class InProcess:
    """Call it in this process, over a real socket all the same.

    Attributes:
      socket_path: where the relay looks for its daemon.
      relayed: whether it is asked to do the call, or the whole plugin does.
    """

    socket_path: str
    relayed: bool

    def __call__(self, variables: Mapping[str, str], stdin: bytes) -> Answer:
        with standing_in(variables, lambda: stdin) as seen:
            call = Relay("/opt/cni/bin/metis", self.socket_path, os.getppid())
            status = call.carry_out() if self.relayed else call.take_over()
        return Answer(
            status, b"".join(seen.stdout).decode(), b"".join(seen.stderr).decode()
        )


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


def installed(directory: Path, socket_path: str) -> Program:
    """Install the plugin below a directory, without a log of the machine's.

    Args:
      directory: where the runtime's plugins are to be.
      socket_path: where the daemon serves.
    """
    path = install(directory, socket_path=socket_path)
    script = path.read_text()
    start = "sys.argv = sys.argv[1:]"
    assert start in script
    unlogged = f"sys.path.append({str(ROOT)!a}); import metis.config; {UNLOGGED}"
    assert "'" not in unlogged.replace(repr(str(ROOT)), "")
    path.write_text(
        script.replace(start, f"{unlogged.replace(chr(39), chr(34))}\n{start}")
    )
    return Program(path)


@dataclass
class Recorded:
    """A way to call the plugin, of which every answer is kept.

    Attributes:
      carry: that way.
      node: where it is used.
      answers: what was answered, without what differs from node to node.
    """

    carry: Carrier
    node: Node
    answers: list[Answer] = field(default_factory=list)

    def __call__(self, variables: Mapping[str, str], stdin: bytes) -> Answer:
        answer = self.carry(variables, stdin)
        self.answers.append(
            Answer(answer.status, self.plain(answer.stdout), self.plain(answer.stderr))
        )
        return answer

    def plain(self, text: str) -> str:
        """A text that does not tell which of two nodes it is from, nor when."""
        text = text.replace(str(self.node.directory), "NODE")
        return PASSING.sub("N s", text)

    def logged(self) -> dict[str, list[str]]:
        """What was logged on the node by now, but for times."""
        lines = {}
        for path in self.node.directory.glob("*.log"):
            if path.name != "daemon.log":
                text = STAMP.sub("", self.plain(path.read_text()))
                lines[path.name] = text.splitlines()
        return lines


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
                    *(*METIS, "daemon"),
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

    STATUS has 0.4 s of real time, which is nothing on a busy machine: it is asked
    again, as runtimes do, while the answer is that there was none in time.

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
        env = environ(command, **{**own, **(variables or {}), **more})
        for _ in range(STATUS_TRIES if command == "STATUS" else 1):
            answer = self.carry(env, stdin)
            check_form(answer)
            if not (answer.code == 50 and LATE.search(answer.stdout)):
                break
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
