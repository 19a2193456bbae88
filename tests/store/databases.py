"""Databases and clocks for tests: in memory, of the original, and what must hold."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import apsw
import trio

from metis.clock import StoredClock
from metis.model import CIDRBlock, Family, Owner, Wanted
from metis.store import schema, seeding
from metis.store.invariants import violations
from metis.store.transactions import Work, run_group, run_read

T = TypeVar("T")

START_MS = 1_700_000_000_000
"""Where the wall clock stands when a test begins."""


@dataclass
class ManualClock:
    """A clock that moves when it is told to."""

    boot: str = "boot-1"
    boottime: int = 5_000
    walltime: int = START_MS

    def boot_id(self) -> str:
        return self.boot

    def boottime_ms(self) -> int:
        return self.boottime

    def walltime_ms(self) -> int:
        return self.walltime

    def advance(self, milliseconds: int) -> None:
        self.boottime += milliseconds
        self.walltime += milliseconds


class TrioClock:
    """A clock that follows Trio's, so that the autojump clock moves it too."""

    def boot_id(self) -> str:
        return "boot-1"

    def boottime_ms(self) -> int:
        return round(trio.current_time() * 1000)

    def walltime_ms(self) -> int:
        return START_MS + self.boottime_ms()


MADE: list[apsw.Connection] = []
"""Databases in memory that the running test made, to be checked at its end."""

MOST_MADE = 32
"""Most of them that are kept: hypothesis makes one an example, and one that so many
others followed is done with."""


def memory_connection(cooldown_ms: int = 60_000) -> apsw.Connection:
    """A database in memory, with the schema, at START_MS."""
    connection = apsw.Connection(":memory:")
    seeding.register(connection)
    connection.pragma("foreign_keys", True)
    with connection:
        schema.prepare(
            connection,
            boot_id="boot-1",
            boottime_ms=0,
            walltime_ms=START_MS,
            cooldown_ms=cooldown_ms,
        )
    MADE.append(connection)
    if len(MADE) > MOST_MADE:
        check_connection(MADE.pop(0))
    return connection


@dataclass
class InlineDatabase:
    """A database without threads, for tests on the autojump clock.

    `failures` are raised by the next writes, one each, in place of writing. It lets
    all requests wait for the writer task unless `at_once` says otherwise.
    """

    clock: StoredClock
    connection: apsw.Connection = field(default_factory=memory_connection)
    failures: list[Exception] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    at_once: bool = False

    def write_at_once(self, group: Sequence[Work[object]]) -> list[object] | None:
        return self._run(group) if self.at_once else None

    async def write(self, group: Sequence[Work[object]]) -> list[object]:
        await trio.lowlevel.checkpoint()
        return self._run(group)

    def _run(self, group: Sequence[Work[object]]) -> list[object]:
        self.groups.append(len(group))
        if self.failures:
            raise self.failures.pop(0)
        return run_group(self.connection, self.clock, group)

    async def read(self, work: Work[T]) -> T:
        await trio.lowlevel.checkpoint()
        return run_read(self.connection, self.clock, work)

    async def keep_log_short(self) -> None:
        """There is no log."""


def inline_database() -> InlineDatabase:
    """An InlineDatabase whose stored time follows Trio's."""
    return InlineDatabase(StoredClock(TrioClock(), START_MS))


def owner(container: str, network: str = "default", interface: str = "eth0") -> Owner:
    return Owner(network, container, interface)


def want(cidr: str) -> Wanted:
    """An address of the block's family, from that block where it is missing."""
    block = CIDRBlock.parse(cidr)
    return Wanted(block.family, block)


IPV4 = Wanted(Family.IPV4)
IPV6 = Wanted(Family.IPV6)


def check_connection(connection: apsw.Connection) -> None:
    """See that every invariant holds in a database in memory that is still open."""
    with contextlib.suppress(apsw.ConnectionClosedError):
        connection.set_authorizer(None)
        found = violations(connection)
        assert not found, found


def check_invariants(
    connection: apsw.Connection, *, named_gateways: bool = False
) -> None:
    """What holds after every step, whatever was done.

    Where ranges name their gateways, pods may have the address after that of the
    network.
    """
    query = """
        SELECT b.cidr, b.allocated_ips,
          (SELECT count(*) FROM ip_addresses AS a
           WHERE a.cidr_block_id = b.id AND a.is_allocated = TRUE)
        FROM cidr_blocks AS b"""
    for cidr, counted, rows in connection.execute(query):
        assert counted == rows, f"{cidr} counts {counted} allocated, but has {rows}"
    owned: set[tuple[str, str]] = set()
    query = """
        SELECT b.network, b.cidr, a.address, a.release_at FROM ip_addresses AS a
        JOIN cidr_blocks AS b ON b.id = a.cidr_block_id
        WHERE a.is_allocated = TRUE AND a.container_id <> ''"""
    for network, cidr, address, release_at in connection.execute(query):
        assert (network, address) not in owned, f"{address} has two owners"
        owned.add((network, address))
        block = CIDRBlock.parse(cidr)
        offset = block.offset_of(address)
        assert offset is not None, f"{address} lies outside {cidr}"
        is_given = named_gateways and offset == 1
        assert is_given or not block.is_reserved(offset), f"{address} of {cidr}"
        assert release_at is None
