"""The store as the rest of the daemon sees it: one writer task, many readers.

Changes travel as requests through one bounded memory channel to one task. It
takes what is queued and has the database run it as one transaction (group
commit), so that the cost of a commit is shared, and answers each request only
after the commit:

  allocate, release  -> channel -> writer task -> Database.write -> answers
  held, usage, lists -> Database.read

A request that is cancelled while it is queued never runs. One that runs is
waited for, shielded: whoever asked learns what happened to it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

import trio

from metis.clock import Clock, StoredClock, SystemClock
from metis.errors import StoreError, StoreUnavailable
from metis.model import (
    Allocation,
    CIDRBlock,
    Family,
    IPUsage,
    Owner,
    Pod,
    TablePage,
    Wanted,
)
from metis.store import sql, tables
from metis.store.blocks import add_block
from metis.store.database import Work, open_database
from metis.store.usage import usage

T = TypeVar("T")

GROUP_SIZE = 64
"""Most requests in one transaction: beyond it a commit costs little per request,
while the first of the group waits for the work of all the others (about 5 ms)."""

QUEUE_SIZE = 1024
"""Most requests that wait for the writer; whoever comes later waits to queue.

Ten times what the writer does while a client is patient would be pointless, and
16 full groups are done in a tenth of a second.
"""

DRAIN_SECONDS = 5.0
"""How long a closing store works on what is queued before it refuses the rest."""


class DatabaseLike(Protocol):
    """What the store needs of `metis.store.database.Database`."""

    clock: StoredClock

    async def write(self, group: Sequence[Work[object]]) -> list[object]:
        """Run requests as one transaction."""

    async def read(self, work: Work[T]) -> T:
        """Run a request that writes nothing."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What the writer has done so far, and what waits for it now."""

    groups: int
    requests: int
    queue_depth: int


@dataclass(slots=True, eq=False)
class _Request(Generic[T]):
    """A change that somebody waits for, from the queue to its answer."""

    work: Work[T]
    waiting: trio.lowlevel.Task | None = None
    cancelled: bool = False
    running: bool = False
    answered: bool = False
    answer: object = None

    async def wait(self) -> T:
        """Wait for the answer; cancellation withdraws the request while it can."""

        def abort(_: object) -> trio.lowlevel.Abort:
            if self.running:
                return trio.lowlevel.Abort.FAILED
            self.cancelled = True
            return trio.lowlevel.Abort.SUCCEEDED

        if not self.answered:
            self.waiting = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)
        if isinstance(self.answer, Exception):
            raise self.answer
        return cast("T", self.answer)

    def finish(self, answer: object) -> None:
        """Set the answer, an exception included, and wake whoever waits."""
        self.answered, self.answer = True, answer
        if self.waiting is not None:
            trio.lowlevel.reschedule(self.waiting)


class Store:
    """Allocations, blocks and their listings; made by `open_store`."""

    def __init__(self, database: DatabaseLike, *, cooldown_ms: int) -> None:
        self._database = database
        self._cooldown_ms = cooldown_ms
        self._queue, self._requests = trio.open_memory_channel[_Request[object]](
            QUEUE_SIZE
        )
        self._drain_until = math.inf
        self._groups_done = 0
        self._requests_done = 0

    @property
    def clock(self) -> StoredClock:
        """The clock of stored times."""
        return self._database.clock

    def statistics(self) -> StoreStatistics:
        """A snapshot of the writer's work."""
        return StoreStatistics(
            self._groups_done,
            self._requests_done,
            self._requests.statistics().current_buffer_used,
        )

    async def allocate(
        self, owner: Owner, wanted: Sequence[Wanted], pod: Pod
    ) -> tuple[Allocation, ...]:
        """Give an owner the addresses that it asks for, all or none.

        What it holds already is answered as it is; see `sql.allocate`.

        Args:
          owner: who gets them.
          wanted: one entry a family, with the block to add where it is missing.
          pod: kept with the rows for people.

        Returns:
          One allocation for each entry of `wanted`, in its order, committed.

        Raises:
          InvalidRequest: nothing is wanted, or a block overlaps another in part.
          PoolExhausted: nothing is free now.
          StoreError: the database failed; nothing was written.
        """
        return await self._write(
            functools.partial(sql.allocate, owner=owner, wanted=wanted, pod=pod)
        )

    async def release(self, owner: Owner) -> tuple[Allocation, ...]:
        """Take back all that an owner holds; it rests for the cooldown.

        Returns:
          What was released; empty when nothing was held, which is no error.

        Raises:
          StoreError: the database failed; nothing was written.
        """
        return await self._write(
            functools.partial(sql.release, owner=owner, cooldown_ms=self._cooldown_ms)
        )

    async def add_block(self, network: str, block: CIDRBlock) -> None:
        """Let a network be served from a block; nothing happens when it is already.

        Raises:
          InvalidRequest: the block overlaps another of the network in part.
          StoreError: the database failed; nothing was written.
        """
        await self._write(functools.partial(add_block, network=network, block=block))

    async def held(self, owner: Owner) -> tuple[Allocation, ...]:
        """What an owner holds, IPv4 first.

        Raises:
          StoreError: the database failed.
        """
        return await self._read(lambda connection, _: sql.held(connection, owner))

    async def assured(
        self, owner: Owner, wanted: Sequence[Wanted]
    ) -> frozenset[Family]:
        """Families for which a call need not wait behind others; see `sql.assured`.

        Raises:
          StoreError: the database failed.
        """
        return await self._read(
            functools.partial(sql.assured, owner=owner, wanted=wanted)
        )

    async def usage(self, network: str, family: Family, position: int = 1) -> IPUsage:
        """How the addresses of a family are spent on a network.

        Args:
          network: name of the network.
          family: the family.
          position: `next_free_ms` of the answer tells when so many addresses
            will be free that a caller with position - 1 others before it gets
            one; the time of the reading when they are free already.

        Raises:
          StoreError: the database failed.
        """
        return await self._read(
            functools.partial(usage, network=network, family=family, position=position)
        )

    async def list_blocks(
        self, filter_text: str = "", page_size: int = 0, page_token: str = ""
    ) -> TablePage:
        """One page of the CIDR blocks, by id; see `tables.list_blocks`.

        Raises:
          InvalidRequest: the filter, size or token cannot be read.
          StoreError: the database failed.
        """
        return await self._read(
            lambda connection, _: tables.list_blocks(
                connection, filter_text, page_size, page_token
            )
        )

    async def list_addresses(
        self, filter_text: str = "", page_size: int = 0, page_token: str = ""
    ) -> TablePage:
        """One page of the addresses, by id; see `tables.list_addresses`.

        Raises:
          InvalidRequest: the filter, size or token cannot be read.
          StoreError: the database failed.
        """
        return await self._read(
            lambda connection, _: tables.list_addresses(
                connection, filter_text, page_size, page_token
            )
        )

    async def _write(self, work: Work[T]) -> T:
        request = _Request(work)
        try:
            await self._queue.send(cast("_Request[object]", request))
        except trio.ClosedResourceError:
            raise _closing() from None
        return await request.wait()

    async def _read(self, work: Work[T]) -> T:
        if self._drain_until < math.inf:
            raise _closing()
        return await self._database.read(work)

    def close(self) -> None:
        """Take no more requests; the writer works off those that are queued."""
        self._drain_until = trio.current_time() + DRAIN_SECONDS
        self._queue.close()

    async def run_writer(self) -> None:
        """Write what is queued, group by group, until the store is closed.

        Shielded, because requests that wait for it may be: only closing ends it.
        """
        with trio.CancelScope(shield=True):
            async for first in self._requests:
                group = self._collect(first)
                if not group:
                    continue
                for request in group:
                    request.running = True
                answers = await self._run(group)
                for request, answer in zip(group, answers, strict=True):
                    request.finish(answer)

    def _collect(self, first: _Request[object]) -> list[_Request[object]]:
        """The queued requests of one group, without the cancelled ones."""
        group = [first]
        with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
            while len(group) < GROUP_SIZE:
                group.append(self._requests.receive_nowait())
        return [request for request in group if not request.cancelled]

    async def _run(self, group: list[_Request[object]]) -> list[object]:
        """The answers of a group, whatever happens to it."""
        if trio.current_time() >= self._drain_until:
            return [_closing() for _ in group]
        try:
            answers = await self._database.write([request.work for request in group])
        except StoreError as error:
            # One exception each: several tasks will raise and extend it.
            return [type(error)(str(error)) for _ in group]
        except Exception as error:  # a bug, but who waits must not wait for ever
            return [StoreError(f"nothing was written: {error!r}") for _ in group]
        self._groups_done += 1
        self._requests_done += len(group)
        return answers


@contextlib.asynccontextmanager
async def open_store(
    path: str,
    *,
    release_cooldown: float = 60.0,
    synchronous: str = "NORMAL",
    clock: Clock | None = None,
) -> AsyncIterator[Store]:
    """Open the store of a database file for the body of an `async with`.

    Leaving the body, also by an error or cancellation, refuses new requests,
    writes what is queued (for DRAIN_SECONDS at most) and closes the file.

    Args:
      path: the SQLite file; it and its directory are made when missing.
      release_cooldown: rest of a released address, in seconds.
      synchronous: SQLite's setting, "NORMAL" or "FULL".
      clock: where raw time comes from; the kernel's clocks by default.

    Raises:
      StoreIncompatible: a newer version or a file of something else; it was
        left as it is.
      StoreUnavailable: the file or its directory cannot be read and written.
      StoreBusy: another process kept the write lock.
    """
    cooldown_ms = round(release_cooldown * 1000)
    database = await open_database(
        path,
        clock=SystemClock() if clock is None else clock,
        cooldown_ms=cooldown_ms,
        synchronous=synchronous,
    )
    try:
        async with run_store(database, cooldown_ms=cooldown_ms) as store:
            yield store
    finally:
        with trio.CancelScope(shield=True):  # bounded by what still runs
            await database.aclose()


@contextlib.asynccontextmanager
async def run_store(
    database: DatabaseLike, *, cooldown_ms: int
) -> AsyncIterator[Store]:
    """Run the writer task of a store over an open database.

    Args:
      database: `metis.store.database.Database`, or one that a test made.
      cooldown_ms: rest of a released address, in milliseconds.
    """
    store = Store(database, cooldown_ms=cooldown_ms)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run_writer)
        try:
            yield store
        finally:
            store.close()


def _closing() -> StoreUnavailable:
    return StoreUnavailable("the store is closing")
