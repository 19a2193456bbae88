"""SIGTERM while a hundred calls are on their way: none hangs and none is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import apsw
import trio
import trio.testing
from grpclib import GRPCError, Status
from grpclib.exceptions import StreamTerminatedError

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    IpConfig,
)
from metis.api.grpc.health.v1 import HealthCheckRequest, HealthStub
from tests.cli.conftest import START_TIMEOUT, DaemonProcess, StartDaemon

CALLS = 100
CONNECTIONS = 5

PATIENCE = 120.0
"""Seconds that a call has, and a daemon that waits for the calls to end."""

REFUSALS = {Status.UNAVAILABLE, Status.CANCELLED, Status.DEADLINE_EXCEEDED}
"""What tells a client to try again, or to go to the database itself."""

Outcome = str | Status
"""The address, or the status of the refusal."""


async def ask(stub: AdaptiveIpamStub, container: str) -> Outcome:
    """One ADD."""
    asked = AllocatePodIpRequest(
        ipv4_config=IpConfig(
            interface_name="eth0",
            container_id=container,
            initial_pod_cidr="10.1.0.0/24",
        )
    )
    try:
        answer = await stub.allocate_pod_ip(asked, timeout=PATIENCE)
    except GRPCError as error:
        return error.status
    except (StreamTerminatedError, metis.TransportError):
        return Status.UNAVAILABLE
    assert answer.ipv4 is not None
    return answer.ipv4.ip_address


class Load:
    """A hundred ADDs over a few connections, and what became of each.

    Attributes:
      outcomes: by container, as they come.
      begun: the daemon is at work on all of them.
      first: one of them has ended.
    """

    def __init__(self, path: Path) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.begun = trio.Event()
        self.first = trio.Event()
        self._path = path
        self._connections = 0

    async def run(self) -> None:
        """Make the calls and wait until every one has ended."""
        async with trio.open_nursery() as connections:
            for number in range(CONNECTIONS):
                connections.start_soon(self._over_one_connection, number)

    async def _over_one_connection(self, number: int) -> None:
        transport = metis.UnixTransport(str(self._path))
        async with (
            metis.open_channel(transport) as channel,
            trio.open_nursery() as calls,
        ):
            for call in range(number, CALLS, CONNECTIONS):
                calls.start_soon(self._call, AdaptiveIpamStub(channel), f"c{call}")
            await trio.testing.wait_all_tasks_blocked()
            with suppress(GRPCError, StreamTerminatedError, metis.TransportError):
                # Answered when all that was sent before it has begun.
                await HealthStub(channel).check(HealthCheckRequest(), timeout=PATIENCE)
            self._connections += 1
            if self._connections == CONNECTIONS:
                self.begun.set()

    async def _call(self, stub: AdaptiveIpamStub, container: str) -> None:
        self.outcomes[container] = await ask(stub, container)
        self.first.set()

    @property
    def answered(self) -> dict[str, str]:
        """The addresses of those that were answered."""
        return {
            container: outcome
            for container, outcome in self.outcomes.items()
            if not isinstance(outcome, Status)
        }

    @property
    def refusals(self) -> set[Status]:
        """With which statuses the others were refused."""
        return {each for each in self.outcomes.values() if isinstance(each, Status)}


@contextmanager
def write_lock(path: Path) -> Iterator[None]:
    """Keep every call waiting for the database."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(60_000)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def owners(path: Path) -> dict[str, str]:
    """Who holds what: addresses by container, as the database has them."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    rows = connection.execute(
        "SELECT container_id, address FROM ip_addresses "
        "WHERE is_allocated AND container_id <> ''"
    )
    held = {str(container): str(address) for container, address in rows}
    connection.close()
    return held


def stop(daemon: DaemonProcess) -> None:
    """Tell it to stop, and wait until it has begun to."""
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("STOPPING=1")


async def ended(daemon: DaemonProcess) -> None:
    """Wait for its end, which must be a clean one."""
    _, stderr = await trio.to_thread.run_sync(
        partial(daemon.process.communicate, timeout=START_TIMEOUT)
    )
    assert daemon.process.returncode == 0, stderr.decode()
    assert b"Traceback" not in stderr


async def check(load: Load, daemon: DaemonProcess, start_daemon: StartDaemon) -> None:
    """Every call has ended well, and the next daemon knows all that was answered."""
    assert len(load.outcomes) == CALLS
    assert load.refusals <= REFUSALS
    held = owners(daemon.db_path)
    assert load.answered.items() <= held.items()

    again = Load(start_daemon().socket_path)
    await again.run()
    assert len(again.answered) == len(set(again.answered.values())) == CALLS
    assert held.items() <= again.answered.items()


async def test_a_stop_as_the_first_is_answered_loses_none(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon()
    load = Load(daemon.socket_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.run)
        await load.first.wait()
        stop(daemon)
        await ended(daemon)
    assert load.answered
    await check(load, daemon, start_daemon)


async def test_calls_that_can_be_served_within_the_grace_are_answered(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon("--shutdown-grace", f"{PATIENCE:g}s")
    load = Load(daemon.socket_path)
    async with trio.open_nursery() as nursery:
        with write_lock(daemon.db_path):
            nursery.start_soon(load.run)
            await load.begun.wait()
            stop(daemon)
            assert load.outcomes == {}
        await ended(daemon)
    assert len(load.answered) == CALLS
    await check(load, daemon, start_daemon)


async def test_calls_that_cannot_be_served_within_the_grace_are_refused(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon("--shutdown-grace", "200ms")
    load = Load(daemon.socket_path)
    async with trio.open_nursery() as nursery:
        with write_lock(daemon.db_path):
            nursery.start_soon(load.run)
            await load.begun.wait()
            stop(daemon)
            await ended(daemon)
    assert load.refusals
    assert owners(daemon.db_path) == {}
    await check(load, daemon, start_daemon)
