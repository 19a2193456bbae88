"""The start of a daemon: nobody is served before everything is restored.

What it restores last, DELs that were only written down, waits for a lock here that
the test holds.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from grpclib import GRPCError, Status

import metis
from metis.api.adaptiveipam.v1 import AdaptiveIpamStub, CheckPodIpRequest
from metis.cli import daemon as cli
from metis.clock import SystemClock
from metis.cni import spool
from metis.cni.direct import open_direct
from metis.cni.verbs import perform
from metis.daemon import open_node
from metis.model import CIDRBlock, Family, Owner, Pod, Wanted
from tests.cni.calls import config, environ, ipam, request

CIDR = "10.1.0.0/24"
GONE = Owner("default", "gone", "eth0")


@dataclass
class Recovery:
    """A node whose database is behind by one DEL, with the lock that it takes.

    Attributes:
      config: of the daemon.
      address: what the deleted owner still holds in the database.
      waiting: descriptors with which the lock was asked for and not got.
    """

    config: metis.DaemonConfig
    address: str = ""
    waiting: set[int] = field(default_factory=set)
    _changed: trio.Event = field(default_factory=trio.Event)
    _descriptor: int = -1

    async def prepare(self) -> None:
        """Give an address, write its DEL down, and hold the lock."""
        async with open_node(self.config, SystemClock()) as node:
            wanted = [Wanted(Family.IPV4, CIDRBlock.parse(CIDR))]
            [given] = await node.engine.allocate(GONE, wanted, Pod())
        self.address = given.address
        spool.keep(self.config.db_path, GONE)
        directory = spool.directory_of(self.config.db_path)
        self._descriptor = os.open(directory, os.O_RDONLY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def spying(self, lock: Callable[[int], bool]) -> Callable[[int], bool]:
        """The lock, which tells who waits for it."""

        def spy(descriptor: int) -> bool:
            got = lock(descriptor)
            if not got:
                self.waiting.add(descriptor)
                self._changed.set()
                self._changed = trio.Event()
            return got

        return spy

    async def reached_by(self, number: int) -> None:
        """Wait until so many wait for the lock."""
        while len(self.waiting) < number:
            await self._changed.wait()

    def end(self) -> None:
        """Let the lock go."""
        os.close(self._descriptor)


@pytest.fixture
async def recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recovery:
    found = Recovery(
        metis.DaemonConfig(
            db_path=str(tmp_path / "db.sqlite"), socket_path=str(tmp_path / "s")
        )
    )
    await found.prepare()
    monkeypatch.setattr(spool, "_lock", found.spying(spool._lock))
    return found


async def check(settings: metis.DaemonConfig, owner: Owner) -> Status:
    """Ask the daemon whether an owner holds something."""
    transport = metis.UnixTransport(settings.socket_path)
    async with metis.open_channel(transport) as channel:
        try:
            await AdaptiveIpamStub(channel).check_pod_ip(
                CheckPodIpRequest(
                    container_id=owner.container_id,
                    interface_name=owner.interface_name,
                )
            )
        except GRPCError as error:
            return error.status
        except metis.TransportError:
            return Status.UNAVAILABLE
    return Status.OK


@pytest.mark.parametrize("socket_file", ["absent", "dead"])
async def test_until_all_is_restored_nobody_is_served(
    recovery: Recovery, socket_file: str
) -> None:
    if socket_file == "dead":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(recovery.config.socket_path)
    serves = trio.Event()

    async def start(nursery: trio.Nursery) -> None:
        await nursery.start(metis.serve, recovery.config)
        serves.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start, nursery)
        await recovery.reached_by(1)
        assert await check(recovery.config, GONE) is Status.UNAVAILABLE
        assert not serves.is_set()
        recovery.end()
        await serves.wait()
        assert await check(recovery.config, GONE) is Status.NOT_FOUND
        nursery.cancel_scope.cancel()


async def test_a_plugin_waits_for_what_the_daemon_restores_and_is_served(
    recovery: Recovery, tmp_path: Path
) -> None:
    fields = ipam(
        subnet=CIDR,
        daemonSocket=recovery.config.socket_path,
        dbPath=recovery.config.db_path,
        logFile=str(tmp_path / "log"),
    )
    asked = request("ADD", config("1.1.0", ipam=fields), environ("ADD"))
    answers: list[tuple[str, ...]] = []

    async def add() -> None:
        answers.append(
            await perform(
                asked,
                lambda _: None,
                open_direct=lambda asked: open_direct(
                    asked.db_path, asked.release_cooldown
                ),
            )
        )
        added.set()

    added = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(metis.serve, recovery.config)
        nursery.start_soon(add)
        await recovery.reached_by(2)
        assert answers == []
        recovery.end()
        await added.wait()
        nursery.cancel_scope.cancel()
    [[given]] = answers
    assert given.endswith("/24")
    assert given != f"{recovery.address}/24"


async def test_a_second_daemon_is_refused_while_the_first_restores(
    recovery: Recovery,
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(metis.serve, recovery.config)
        await recovery.reached_by(1)
        with pytest.raises(metis.AddressInUse, match="another server holds"):
            await metis.serve(recovery.config)
        assert len(recovery.waiting) == 1
        recovery.end()
        nursery.cancel_scope.cancel()


async def test_a_daemon_that_is_told_to_stop_while_it_restores_does(
    recovery: Recovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(cli, "sd_notify", lambda *lines: told.extend(lines))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cli.run_until_signal, recovery.config)
        await recovery.reached_by(1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert told == ["STOPPING=1"]
    recovery.end()
    async with open_node(recovery.config, SystemClock()) as node:
        assert await spool.apply(recovery.config.db_path, node.engine, node.store) == 1


async def test_the_service_manager_is_told_when_calls_are_served_and_not_before(
    recovery: Recovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    ready = trio.Event()

    def notify(*assignments: str) -> None:
        told.append(assignments[0])
        if "READY=1" in assignments:
            assert Path(recovery.config.socket_path).is_socket()
            ready.set()

    monkeypatch.setattr(cli, "sd_notify", notify)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cli.run_until_signal, recovery.config)
        await recovery.reached_by(1)
        assert told == []
        recovery.end()
        await ready.wait()
        assert await check(recovery.config, GONE) is Status.NOT_FOUND
        os.kill(os.getpid(), signal.SIGTERM)
    assert told == ["READY=1", "STOPPING=1"]
