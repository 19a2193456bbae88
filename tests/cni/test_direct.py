"""The plugin without its daemon: the same answers, from the same database."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import apsw
import pytest
import trio
from trio.testing import MockClock

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
    DeallocatePodIpResponse,
    IpConfig,
)
from metis.clock import SystemClock
from metis.cni import client, spool
from metis.cni.client import DaemonClient, Unreachable, open_daemon
from metis.cni.direct import open_direct
from metis.cni.origin import Origin
from metis.cni.protocol import CNIError
from metis.cni.verbs import perform
from metis.errors import StoreIncompatible, StoreUnavailable
from metis.model import Owner
from metis.rpc.channel import Channel
from metis.rpc.server import serve
from metis.store import healing, sql
from tests.cni.calls import Config, config, environ, ipam, request
from tests.cni.fakes import FakeIpam
from tests.cni.process import UNHURRIED_METIS

DAEMON = [sys.executable, "-m", "metis", "daemon"]

PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:])"
"""A main plugin, as far as its delegate sees of it."""

MANY = 8
"""Plugins at once; tests/e2e starts as many as a full node does."""


@dataclass
class Place:
    """Where a node's files are, and a node without a daemon at first."""

    directory: Path

    @property
    def socket_path(self) -> str:
        return str(self.directory / "s")

    @property
    def db_path(self) -> str:
        return str(self.directory / "db" / "metis.sqlite")

    def config(self, **fields: Any) -> Config:
        section = ipam(
            subnet="10.9.0.0/24",
            daemonSocket=self.socket_path,
            dbPath=self.db_path,
            logFile=str(self.directory / "log"),
            **fields,
        )
        return config("1.1.0", ipam=section, prevResult={})

    @property
    def daemon_config(self) -> metis.DaemonConfig:
        return metis.DaemonConfig(db_path=self.db_path, socket_path=self.socket_path)

    async def perform(
        self,
        command: str,
        container: str = "c1",
        origin: Origin | None = None,
        **fields: Any,
    ) -> Any:
        """One call in this process; the addresses that it was about."""
        asked = request(
            command, self.config(**fields), environ(command, CNI_CONTAINERID=container)
        )
        return await perform(
            asked,
            lambda _text: None,
            open_direct=lambda asked: open_direct(
                asked.db_path, asked.release_cooldown
            ),
            origin=origin,
        )

    async def run(self, command: str, container: str = "c1") -> tuple[int, Any]:
        """One call as a process; its status and what it printed."""
        done = await trio.run_process(
            UNHURRIED_METIS,
            env=environ(command, CNI_CONTAINERID=container),
            stdin=json.dumps(self.config()).encode(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        assert done.stderr == b""
        return done.returncode, json.loads(done.stdout) if done.stdout else None

    async def run_many(self, count: int) -> list[str]:
        """ADDs of as many containers at once; the addresses, by container."""
        addresses: dict[int, str] = {}

        async def add(number: int) -> None:
            status, answer = await self.run("ADD", f"c{number}")
            assert status == 0, answer
            addresses[number] = answer["ips"][0]["address"]

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(add, number)
        return [addresses[number] for number in range(count)]


def now() -> Origin:
    """A call that begins now; everything before is in an earlier millisecond."""
    clock = SystemClock()
    begun = clock.boottime_ms()
    while clock.boottime_ms() == begun:
        pass
    return Origin(clock.boot_id(), clock.boottime_ms())


def open_file(path: str) -> Any:
    return open(path, "r+b")


def exists(path: str) -> bool:
    return os.path.exists(path)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextlib.asynccontextmanager
async def daemon(place: Place) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(metis.serve, place.daemon_config)
        yield
        nursery.cancel_scope.cancel()


async def test_every_verb_is_served_without_a_daemon(place: Place) -> None:
    await place.perform("STATUS")
    assert await place.perform("ADD", "c1") == ("10.9.0.2/24",)
    assert await place.perform("ADD", "c1") == ("10.9.0.2/24",)
    assert await place.perform("ADD", "c2") == ("10.9.0.3/24",)
    with pytest.raises(CNIError) as caught:
        await place.perform("CHECK", "c3")
    assert caught.value.code == 100
    assert await place.perform("DEL", "c1") == ()
    assert await place.perform("DEL", "c1") == ()


async def test_variables_that_a_verb_does_not_need_are_not_looked_at(
    place: Place,
) -> None:
    await place.perform("STATUS", "/\n")


async def test_del_on_a_node_without_a_database_succeeds(place: Place) -> None:
    assert await place.perform("DEL") == ()
    assert await place.perform("ADD") == ("10.9.0.2/24",)


async def test_a_released_address_rests_as_long_as_the_configuration_says(
    place: Place,
) -> None:
    await place.perform("ADD", "c1", releaseCooldown="1h")
    await place.perform("DEL", "c1", releaseCooldown="1h")
    database = apsw.Connection(place.db_path, flags=apsw.SQLITE_OPEN_READONLY)
    [(rest,)] = database.execute(
        "SELECT release_at - updated_at FROM ip_addresses WHERE release_at > 0"
    )
    database.close()
    assert rest == 3_600_000
    assert await place.perform("ADD", "c2") == ("10.9.0.3/24",)


async def test_an_add_waits_for_a_cooldown_as_it_does_with_a_daemon(
    place: Place,
) -> None:
    async with open_direct(place.db_path, 0.05) as channel:
        stub = AdaptiveIpamStub(channel)
        first, second = (
            AllocatePodIpRequest(
                ipv4_config=IpConfig(
                    interface_name="eth0",
                    container_id=container,
                    initial_pod_cidr="10.9.0.5/32",
                )
            )
            for container in ("c1", "c2")
        )
        given = await stub.allocate_pod_ip(first, timeout=10)
        await stub.deallocate_pod_ip(
            DeallocatePodIpRequest(container_id="c1", interface_name="eth0")
        )
        answer = await stub.allocate_pod_ip(second, timeout=10)
    assert answer.ipv4 == given.ipv4


async def test_direct_mode_and_the_daemon_take_turns_on_one_database(
    place: Place,
) -> None:
    assert await place.perform("ADD", "c1") == ("10.9.0.2/24",)
    async with daemon(place):
        assert await place.perform("ADD", "c1") == ("10.9.0.2/24",)
        assert await place.perform("ADD", "c2") == ("10.9.0.3/24",)
        await place.perform("DEL", "c1")
    assert await place.perform("ADD", "c2") == ("10.9.0.3/24",)
    assert await place.perform("ADD", "c3") == ("10.9.0.4/24",)
    async with daemon(place):
        assert await place.perform("ADD", "c3") == ("10.9.0.4/24",)


async def test_direct_mode_works_beside_a_daemon_that_does_not_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LIVENESS_SECONDS", 0.001)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(place.socket_path)
        deaf.listen()
        assert await place.perform("ADD") == ("10.9.0.2/24",)


async def test_a_failure_of_a_question_is_itself_and_the_database_is_closed(
    place: Place,
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_direct(place.db_path, 60):
            raise ZeroDivisionError
    assert not exists(f"{place.db_path}-wal")


@pytest.mark.damages_database("a database of a version to come")
async def test_a_database_of_a_newer_version_is_left_as_it_is(place: Place) -> None:
    os.mkdir(os.path.dirname(place.db_path))
    connection = apsw.Connection(place.db_path)
    connection.pragma("user_version", 2)
    connection.close()
    before = await trio.Path(place.db_path).read_bytes()
    with pytest.raises(StoreIncompatible, match="version 2"):
        async with open_direct(place.db_path, 60):
            pass
    with pytest.raises(Unreachable, match=r"is away .*, and the database"):
        await place.perform("ADD")
    assert await trio.Path(place.db_path).read_bytes() == before


@pytest.mark.damages_database("what was damaged is kept beside it")
async def test_a_database_that_is_broken_is_healed_and_its_addresses_wait(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    await place.perform("ADD", "c1")
    await trio.Path(place.db_path).write_bytes(b"")
    await place.perform("STATUS")
    with pytest.raises(CNIError, match="the next is free in") as caught:
        await place.perform("ADD", "c2")
    assert caught.value.code == 11
    assert await place.perform("DEL", "c1") == ()
    (aside,) = healing.damaged_copies(place.db_path)
    report = await trio.Path(f"{aside}.report").read_text()
    assert "is damaged: it is empty" in report
    assert capfd.readouterr().out == ""


@pytest.mark.damages_database("what was damaged is kept beside it")
async def test_damage_that_a_call_meets_is_healed_and_the_call_made_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = await place.perform("ADD", "c1")
    with open_file(place.db_path) as file:
        file.seek(3 * 4096)
        file.write(bytes(4096))
    real, left = sql.allocate, 1

    def allocate(*arguments: Any, **keywords: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise apsw.CorruptError("database disk image is malformed")
        return real(*arguments, **keywords)

    monkeypatch.setattr(sql, "allocate", allocate)
    assert await place.perform("ADD", "c1") == given
    assert left < 0
    assert len(healing.damaged_copies(place.db_path)) == 1


@pytest.mark.damages_database("what was damaged is kept beside it")
async def test_rows_that_make_no_sense_fail_one_call_and_not_the_next(
    place: Place,
) -> None:
    """SQLite finds no fault with a page that stands in the place of another."""
    given = await place.perform("ADD", "c1")
    connection = apsw.Connection(place.db_path)
    [(wrong, right)] = connection.execute(
        "SELECT (SELECT rootpage FROM sqlite_schema WHERE name = 'cidr_blocks'),"
        " (SELECT rootpage FROM sqlite_schema WHERE name = 'metis_boot')"
    )
    connection.close()
    with open_file(place.db_path) as file:
        file.seek((right - 1) * 4096)
        page = file.read(4096)
        file.seek((wrong - 1) * 4096)
        file.write(page)
    with pytest.raises(CNIError):
        await place.perform("ADD", "c2")
    assert len(healing.damaged_copies(place.db_path)) == 1
    assert await place.perform("ADD", "c1") == given


async def test_a_del_that_cannot_be_carried_out_is_kept_and_applied_once(
    place: Place,
) -> None:
    await place.perform("ADD", "c1")
    await place.perform("ADD", "c2")
    os.rename(place.db_path, f"{place.db_path}.away")
    os.mkdir(place.db_path)
    assert await place.perform("DEL", "c1") == ()
    assert len(spool.pending(place.db_path, Owner("default", "c1", "eth0"))) == 1
    os.rmdir(place.db_path)
    os.rename(f"{place.db_path}.away", place.db_path)
    with pytest.raises(CNIError, match="holds no address"):
        await place.perform("CHECK", "c1")
    assert os.listdir(spool.directory_of(place.db_path)) == []
    assert await place.perform("ADD", "c2") == ("10.9.0.3/24",)


async def test_a_del_behind_a_lock_that_stays_is_kept(
    place: Place, mock_clock: MockClock
) -> None:
    mock_clock.rate = 1.0
    await place.perform("ADD")
    locking = apsw.Connection(place.db_path)
    locking.execute("BEGIN IMMEDIATE")
    mock_clock.autojump_threshold = 0.0
    assert await place.perform("DEL") == ()
    locking.execute("ROLLBACK")
    locking.close()
    assert len(spool.pending(place.db_path, Owner("default", "c1", "eth0"))) == 1


async def test_status_waits_for_no_del_that_was_kept(place: Place) -> None:
    """It was kept because of the very lock that it would wait for."""
    await place.perform("ADD")
    spool.keep(place.db_path, Owner("default", "c1", "eth0"))
    locking = apsw.Connection(place.db_path)
    locking.execute("BEGIN IMMEDIATE")
    status, answer = await place.run("STATUS")
    locking.close()
    assert (status, answer) == (0, None)
    assert len(spool.pending(place.db_path, Owner("default", "c1", "eth0"))) == 1


@pytest.mark.parametrize("text", ["2562047h", "9999999999999999h"])
async def test_no_cooldown_is_too_long_for_a_del(place: Place, text: str) -> None:
    await place.perform("ADD")
    assert await place.perform("DEL", releaseCooldown=text) == ()
    with pytest.raises(CNIError, match="holds no address"):
        await place.perform("CHECK")


async def test_a_del_that_cannot_even_be_kept_fails(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.makedirs(place.db_path)
    monkeypatch.setattr(spool, "keep", full)
    with pytest.raises(
        CNIError, match=r"nor can the DEL be kept: .*No space"
    ) as caught:
        await place.perform("DEL")
    assert caught.value.code == 11


async def test_an_add_never_fails_into_the_spool(place: Place) -> None:
    os.makedirs(place.db_path)
    with pytest.raises(Unreachable):
        await place.perform("ADD")
    assert not exists(spool.directory_of(place.db_path))


async def test_an_owner_s_kept_del_comes_before_what_a_running_daemon_is_asked(
    place: Place,
) -> None:
    owner = Owner("default", "c1", "eth0")
    async with daemon(place):
        await place.perform("ADD")
        spool.keep(place.db_path, owner)
        with pytest.raises(CNIError, match="holds no address"):
            await place.perform("CHECK")
        await place.perform("ADD")
        before = now()
        spool.keep(place.db_path, owner)
        assert await place.perform("ADD", origin=now()) == ("10.9.0.2/24",)
        spool.keep(place.db_path, owner)
        with pytest.raises(CNIError, match="was deleted"):
            await place.perform("ADD", origin=before)
    assert os.listdir(spool.directory_of(place.db_path)) == []


async def test_an_add_that_began_before_a_del_loses_whoever_serves_either(
    place: Place,
) -> None:
    before = now()
    await place.perform("DEL")
    with pytest.raises(CNIError, match="was deleted") as caught:
        await place.perform("ADD", origin=before)
    assert caught.value.code == 11
    async with daemon(place):
        with pytest.raises(CNIError, match="was deleted"):
            await place.perform("ADD", origin=before)
        assert await place.perform("ADD", origin=now()) == ("10.9.0.2/24",)
        await place.perform("DEL")
    with pytest.raises(CNIError, match="was deleted"):
        await place.perform("ADD", origin=before)


async def test_a_spool_that_cannot_be_applied_holds_requests_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of an entry would be answered with what it no longer wants."""

    async def refuse(*_arguments: object, **_keywords: object) -> None:
        raise StoreUnavailable("the disk is full")

    await place.perform("ADD")
    spool.keep(place.db_path, Owner("default", "c1", "eth0"))
    monkeypatch.setattr(metis.engine.Engine, "deallocate", refuse)
    with pytest.raises(Unreachable, match="the disk is full"):
        await place.perform("ADD")


# processes


async def test_many_plugins_at_once_without_daemon_or_database(place: Place) -> None:
    addresses = await place.run_many(MANY)
    assert len(set(addresses)) == MANY
    async with open_direct(place.db_path, 60) as channel:
        for number, address in enumerate(addresses):
            message = CheckPodIpRequest(
                container_id=f"c{number}", interface_name="eth0"
            )
            answer = await AdaptiveIpamStub(channel).check_pod_ip(message)
            assert [f"{one.ip_address}/24" for one in answer.held] == [address]


async def test_many_plugins_at_once_while_a_daemon_starts(place: Place) -> None:
    place.directory.joinpath("db").mkdir()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(metis.serve, place.daemon_config)
        addresses = await place.run_many(MANY)
        nursery.cancel_scope.cancel()
    assert len(set(addresses)) == MANY


async def test_after_kill_9_of_the_daemon_the_next_call_succeeds(place: Place) -> None:
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                [
                    *(*DAEMON, "--db-path", place.db_path),
                    *("--socket-path", place.socket_path),
                ],
                stdin=PIPE,
                stderr=PIPE,
                check=False,
            )
        )
        assert process.stderr is not None
        async for data in process.stderr:
            if b"serving" in data:
                break
        status, first = await place.run("ADD", "c1")
        assert status == 0
        process.kill()
        await process.wait()
        assert exists(place.socket_path)
        assert await place.run("ADD", "c1") == (0, first)
        assert await place.run("DEL", "c1") == (0, None)
        status, second = await place.run("ADD", "c2")
        assert status == 0
        nursery.cancel_scope.cancel()
    assert first["ips"][0]["address"] == "10.9.0.2/24"
    assert second["ips"][0]["address"] == "10.9.0.3/24"


class Orphaning(FakeIpam):
    """Kills the plugin's parent while its ADD is on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.parent: trio.Process | None = None
        self.undone = trio.Event()

    async def allocate_pod_ip(
        self, message: AllocatePodIpRequest
    ) -> AllocatePodIpResponse:
        assert self.parent is not None
        self.parent.send_signal(signal.SIGKILL)
        await self.parent.wait()
        return await super().allocate_pod_ip(message)

    async def deallocate_pod_ip(
        self, message: DeallocatePodIpRequest
    ) -> DeallocatePodIpResponse:
        self.undone.set()
        return await super().deallocate_pod_ip(message)


@pytest.mark.parametrize("read", [True, False])
async def test_an_orphan_gives_back_what_it_was_given_and_nothing_else(
    read: bool, place: Place
) -> None:
    """Whether somebody still holds its stdout or not: the runtime has given up."""
    ipam = Orphaning()
    read_end, write_end = os.pipe()
    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(serve, [ipam], metis.UnixTransport(place.socket_path), grace=0)
        )
        ipam.parent = await nursery.start(
            partial(
                trio.run_process,
                [sys.executable, "-c", PARENT, *UNHURRIED_METIS],
                env=environ(),
                stdin=json.dumps(place.config()).encode(),
                stdout=write_end,
                check=False,
            )
        )
        os.close(write_end)
        if not read:
            os.close(read_end)
        with trio.fail_after(30):
            await ipam.undone.wait()
        nursery.cancel_scope.cancel()
    if read:
        assert os.read(read_end, 1) == b""
        os.close(read_end)
    add, undo = ipam.asked
    assert isinstance(add, AllocatePodIpRequest)
    assert add.boot_id
    assert add.started_boottime_ms > 0
    assert undo == DeallocatePodIpRequest(
        network="default",
        interface_name="eth0",
        container_id="c1",
        only_allocation_id="a1",
    )


async def test_a_question_may_be_asked_of_direct_mode_by_hand(place: Place) -> None:
    async def check(channel: Channel, seconds: float) -> object:
        message = CheckPodIpRequest(container_id="c1", interface_name="eth0")
        stub = AdaptiveIpamStub(channel)
        return await stub.check_pod_ip(message, timeout=seconds)

    asking = DaemonClient(
        place.socket_path,
        open_daemon,
        place.db_path,
        partial(open_direct, place.db_path, 60),
    )
    with pytest.raises(CNIError) as caught:
        await asking.ask(check)
    assert caught.value.code == 100
    assert place.db_path in caught.value.details
