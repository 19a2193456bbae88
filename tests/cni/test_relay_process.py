"""The relay as a process, between a runtime and a daemon that may fail it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from subprocess import PIPE, CompletedProcess
from typing import Any

import apsw
import pytest
import trio
from grpclib import GRPCError, Status

import metis
from metis.api.adaptiveipam.v1 import AllocatePodIpRequest, DeallocatePodIpRequest
from metis.api.metis.v1 import RunResponse
from metis.clock import SystemClock
from metis.cni.protocol import version_text
from metis.cni.relay import DATA, END_STREAM, frame
from metis.health import HealthService
from metis.plugin_service import PluginService
from metis.rpc.local import LocalChannel
from metis.rpc.server import serve
from tests.cni.calls import config, environ
from tests.cni.fakes import FakeIpam, FakeNode
from tests.cni.process import UNHURRIED_METIS
from tests.cni.relaying import Script, program


class Place:
    """A node with a fake daemon, and calls of the relay there.

    Attributes:
      ipam: what the daemon gives.
      relays: whether the daemon has `metis.v1.Plugin`.
    """

    def __init__(self, directory: Path) -> None:
        self.ipam = FakeIpam()
        self.relays = True
        self.socket_path = str(directory / "s")
        self.db_path = str(directory / "metis.sqlite")
        self.log = directory / "cni.log"

    def config(self, **changes: Any) -> bytes:
        ours = {
            "daemonSocket": self.socket_path,
            "dbPath": self.db_path,
            "logFile": str(self.log),
        }
        return json.dumps(config("1.1.0", **{**ours, **changes})).encode()

    async def serve(self, *, task_status: trio.TaskStatus[Any]) -> None:
        services: list[Any] = [self.ipam, FakeNode(), HealthService([])]
        if self.relays:
            channel = LocalChannel(services)
            clock = SystemClock()
            services.append(
                PluginService(channel, self.db_path, clock, clock.boot_id())
            )
        transport = metis.UnixTransport(self.socket_path)
        await serve(services, transport, grace=0, task_status=task_status)

    def command(self, *, full: bool = False) -> list[str]:
        return UNHURRIED_METIS if full else program(self.socket_path)

    async def call(
        self,
        command: str = "ADD",
        variables: Mapping[Any, Any] | None = None,
        stdin: bytes | None = None,
        *,
        within: tuple[str, ...] = (),
        full: bool = False,
        stdout: int | None = None,
    ) -> CompletedProcess[bytes]:
        return await trio.run_process(
            [*within, *self.command(full=full)],
            env=variables or environ(command),
            stdin=self.config() if stdin is None else stdin,
            **({"capture_stdout": True} if stdout is None else {"stdout": stdout}),
            capture_stderr=True,
            check=False,
        )

    def logged(self) -> list[str]:
        """The log's lines without what differs from one call to the next."""
        lines = self.log.read_text().splitlines()
        return [re.sub(r" ms=\S+", "", line.partition(" ")[2]) for line in lines]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_a_call_is_one_question_and_its_answer_is_written(place: Place) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(place.serve))
        done = await place.call()
        full = await place.call(full=True)
        nursery.cancel_scope.cancel()
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == full.stdout
    assert json.loads(done.stdout)["ips"][0]["address"] == "10.240.0.2/22"
    assert len(set(place.logged())) == 1
    ours, theirs = place.ipam.asked
    assert isinstance(ours, AllocatePodIpRequest)
    assert ours.boot_id == theirs.boot_id
    assert 0 < ours.started_boottime_ms <= theirs.started_boottime_ms


async def test_nothing_of_weight_is_imported(place: Place) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from metis.cni import relay;"
        "status = relay.Relay('metis', sys.argv[1], relay.posix.getppid()).carry_out();"
        "print(*sys.modules, file=sys.stderr); sys.exit(status)"
    )
    root = str(Path(metis.__file__).parents[1])
    bare = [sys.executable, "-IS", "-c"]
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(place.serve))
        done = await trio.run_process(
            [*bare, code, place.socket_path, root],
            env=environ(),
            stdin=place.config(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        nursery.cancel_scope.cancel()
    before = await trio.run_process(
        [*bare, "import sys; print(*sys.modules, file=sys.stderr)"],
        capture_stderr=True,
    )
    assert done.returncode == 0
    more = set(done.stderr.split()) - set(before.stderr.split())
    assert more <= {
        b"metis",
        b"metis.cni",
        b"metis.cni.relay",
        b"_socket",
        b"importlib",
    } | {
        b"__future__",  # of the packages above it, which the launcher passes by
        b"importlib._bootstrap",
        b"importlib._bootstrap_external",
        b"_warnings",
        b"warnings",
    }


async def test_version_asks_the_daemon_and_reads_nothing(place: Place) -> None:
    read_end, write_end = os.pipe()  # whoever read it would wait for ever
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(place.serve))
        for served in (True, False):
            with trio.fail_after(30):
                done = await trio.run_process(
                    place.command(),
                    env={"CNI_COMMAND": "VERSION"},
                    stdin=read_end,
                    capture_stdout=True,
                    capture_stderr=True,
                    check=False,
                )
            assert (done.returncode, done.stderr) == (0, b"")
            assert done.stdout.decode() == version_text()
            if served:
                nursery.cancel_scope.cancel()
    os.close(read_end)
    os.close(write_end)


async def test_variables_that_are_wrong_are_told_before_stdin_ends(
    place: Place,
) -> None:
    read_end, write_end = os.pipe()
    with trio.fail_after(30):
        done = await trio.run_process(
            place.command(),
            env={"CNI_COMMAND": "ADD"},
            stdin=read_end,
            capture_stdout=True,
            check=False,
        )
    os.close(read_end)
    os.close(write_end)
    assert json.loads(done.stdout)["code"] == 4


@pytest.mark.parametrize("served", [True, False])
async def test_a_daemon_without_the_service_is_asked_as_ever(
    place: Place, served: bool
) -> None:
    place.relays = served
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(place.serve))
        done = await place.call()
        nursery.cancel_scope.cancel()
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(place.ipam.asked) == 1
    assert place.logged()[0].endswith("address=10.240.0.2/22 outcome=ok")


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED])
async def test_a_daemon_that_has_no_answer_is_not_asked_again(
    place: Place, status: Status
) -> None:
    place.ipam.failure = GRPCError(status, "it is stopping")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(place.serve))
        done = await place.call()
        nursery.cancel_scope.cancel()
    assert len(place.ipam.asked) == 1
    assert json.loads(done.stdout)["ips"][0]["address"] == "10.240.0.2/22"
    assert await trio.Path(place.db_path).exists()


async def test_what_the_daemon_said_is_told_when_the_database_fails_too(
    place: Place,
) -> None:
    place.db_path = "/dev/null/a"
    place.ipam.failure = GRPCError(Status.UNAVAILABLE, "it is stopping")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(place.serve))
        done = await place.call()
        full = await place.call(full=True)
        nursery.cancel_scope.cancel()
    assert "is away (it is stopping)" in json.loads(done.stdout)["msg"]
    assert (done.returncode, done.stdout) == (full.returncode, full.stdout)


async def test_a_daemon_that_goes_before_it_answers_is_done_without(
    place: Place,
) -> None:
    with Script(Path(place.socket_path), [], hangs=False):
        done = await place.call()
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["ips"][0]["address"] == "10.240.0.2/22"
    assert await trio.Path(place.db_path).exists()


async def test_a_daemon_that_hangs_is_done_without(place: Place) -> None:
    with Script(Path(place.socket_path), [], hangs=True):
        done = await place.call("STATUS", stdin=place.config(dbPath="/dev/null/a"))
    told = json.loads(done.stdout)
    assert told["code"] == 50
    assert f"({place.socket_path}: no answer within 0.2 s)" in told["msg"]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("closed", [False, True])
async def test_a_result_that_nobody_reads_is_given_back(
    place: Place, closed: bool, full: bool
) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    shut = ("/bin/sh", "-c", 'exec "$@" >&-', "sh") if closed else ()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(place.serve))
        done = await place.call(within=shut, stdout=write_end, full=full)
        nursery.cancel_scope.cancel()
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")
    given, back = place.ipam.asked
    assert isinstance(back, DeallocatePodIpRequest)
    assert (back.container_id, back.only_allocation_id) == ("c1", "a1")
    assert given.ipv4_config.container_id == "c1"
    why = "[Errno 9] Bad file descriptor" if closed else "[Errno 32] Broken pipe"
    assert place.logged() == [
        "verb=ADD container=c1 interface=eth0 "
        f'outcome="5: the result cannot be written to stdout: {why}"'
    ]


async def test_a_result_that_nobody_reads_is_given_back_without_a_daemon(
    place: Place,
) -> None:
    """It answered, and went before it could be asked to take that back."""

    def held() -> list[tuple[str, str]]:
        connection = apsw.Connection(place.db_path)
        rows = connection.execute(
            "SELECT container_id, allocation_id FROM ip_addresses"
            " WHERE is_allocated AND container_id <> ''"
        ).fetchall()
        connection.close()
        return [(str(container), str(allocation)) for container, allocation in rows]

    assert (await place.call()).returncode == 0  # by direct mode
    ((container, allocation),) = held()
    assert container == "c1"
    response = bytes(RunResponse(stdout=b"{}", allocation_id=allocation))
    read_end, write_end = os.pipe()
    os.close(read_end)
    said = frame(DATA, END_STREAM, 1, b"\0" + len(response).to_bytes(4) + response)
    with Script(Path(place.socket_path), [said], hangs=False):
        done = await place.call(stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, b"")
    assert held() == []
    assert place.logged()[1] == (
        'verb=ADD container=c1 interface=eth0 outcome="5: the result cannot be '
        'written to stdout: [Errno 32] Broken pipe"'
    )


class Waiting(FakeIpam):
    """Has an allocation wait until it is let go on, or is given up."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = trio.Event()
        self.go_on = trio.Event()
        self.given_up = trio.Event()

    async def _ask(self, message: Any) -> None:
        await super()._ask(message)
        if isinstance(message, AllocatePodIpRequest):
            self.arrived.set()
            try:
                await self.go_on.wait()
            except trio.Cancelled:
                self.given_up.set()
                raise


async def test_a_relay_whose_parent_goes_gives_back(
    place: Place, tmp_path: Path
) -> None:
    """Its stdout can still be written to: somebody else has the other end, too."""
    place.ipam = ipam = Waiting()
    done = tmp_path / "done"
    parent = ["/bin/sh", "-c", '"$@"; echo $? > ' + str(done), "sh"]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(place.serve))
            stdin, stdout = tmp_path / "stdin", tmp_path / "stdout"
            stdin.write_bytes(place.config())
            with stdin.open() as source, stdout.open("w") as sink:
                outer = await trio.lowlevel.open_process(
                    [*parent, *program(place.socket_path)],
                    env=environ(),
                    stdin=source,
                    stdout=sink,
                )
            await ipam.arrived.wait()
            outer.kill()
            await outer.wait()
            ipam.go_on.set()
            while not any(isinstance(m, DeallocatePodIpRequest) for m in ipam.asked):
                await trio.lowlevel.checkpoint()
            while not (place.log.exists() and place.log.read_bytes().endswith(b"\n")):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert stdout.read_bytes() == b""
    assert place.logged()[0].endswith(
        "cannot be written to stdout: "
        '[Errno 32] the process that started the plugin is gone"'
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_a_relay_that_is_stopped_while_it_waits_gives_its_call_up(
    place: Place, number: signal.Signals
) -> None:
    place.ipam = ipam = Waiting()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(place.serve))
            relay = await nursery.start(
                partial(
                    trio.run_process,
                    place.command(),
                    env=environ(),
                    stdin=place.config(),
                    capture_stdout=False,
                    stdout=PIPE,
                    check=False,
                )
            )
            await ipam.arrived.wait()
            relay.send_signal(number)
            await ipam.given_up.wait()
            said = await relay.stdout.receive_some()
            await relay.wait()
            nursery.cancel_scope.cancel()
    if number is signal.SIGINT:
        assert relay.returncode == 1
        told = json.loads(said)
        assert (told["code"], told["cniVersion"]) == (999, "1.1.0")
        assert told["msg"] == "KeyboardInterrupt"
    else:
        assert (relay.returncode, said) == (-number, b"")


@pytest.mark.parametrize("descriptors", ["<&-", "<&- 2>&-", "2>&-", "0> /dev/null"])
async def test_streams_that_are_closed_or_no_streams_are_as_for_the_whole_plugin(
    place: Place, descriptors: str
) -> None:
    shut = ("/bin/sh", "-c", f'exec "$@" {descriptors}', "sh")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(place.serve))
        done = await place.call(within=shut)
        full = await place.call(within=shut, full=True)
        nursery.cancel_scope.cancel()
    assert (done.returncode, done.stdout) == (full.returncode, full.stdout)
    assert done.stderr == full.stderr == b""


async def test_an_environment_that_is_no_text_is_as_for_the_whole_plugin(
    place: Place,
) -> None:
    latin = {"LC_ALL": "de_DE.ISO-8859-1", "PATH": "/\udcff"}
    for changes in (
        {"CNI_ARGS": "K8S_POD_NAME=\udce9"},
        {"CNI_IFNAME": "\udce9"},
        {"CNI_IFNAME": "é"},
        {"CNI_NETNS": "/\udce9"},
    ):
        variables = environ("ADD", **changes) | latin
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(place.serve))
            done = await place.call(variables=variables)
            full = await place.call(variables=variables, full=True)
            nursery.cancel_scope.cancel()
        assert (done.returncode, done.stdout) == (full.returncode, full.stdout)
        assert done.stderr == full.stderr == b""
    assert len(place.ipam.asked) == 2  # é is two bytes, and a name


async def test_two_relays_of_one_container_get_the_same(place: Place) -> None:
    answers = list[CompletedProcess[bytes]]()

    async def call() -> None:
        answers.append(await place.call())

    async with trio.open_nursery() as daemon:
        await daemon.start(partial(place.serve))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            nursery.start_soon(call)
        daemon.cancel_scope.cancel()
    assert answers[0].stdout == answers[1].stdout
    assert [one.returncode for one in answers] == [0, 0]


def run_main(search_path: str) -> list[str]:
    root = str(Path(metis.__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); from metis.cni import relay;"
        "del sys.modules['metis'], sys.modules['metis.cni'];"
        f"relay.main('metis', '/absent', {search_path})"
    )
    return [sys.executable, "-IS", "-c", code]


async def test_an_environment_that_was_moved_is_explained() -> None:
    done = await trio.run_process(
        run_main("[]"), env=environ(), stdin=b"{}", capture_stdout=True, check=False
    )
    told = json.loads(done.stdout)
    assert (done.returncode, told["code"]) == (1, 999)
    assert told["msg"] == "ModuleNotFoundError: No module named 'metis'"
    assert "moved" in told["details"]
    assert "`metis install`" in told["details"]
