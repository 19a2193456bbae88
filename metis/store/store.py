"""The store as the rest of the daemon sees it: one writer task, many readers.

Changes travel as requests through one bounded memory channel to one task. It
takes what is queued and has the database run it as one transaction (group
commit), so that the cost of a commit is shared, and answers each request only
after the commit:

  allocate, release, collect -> channel -> writer task -> Database.write -> answers
  held, usage, lists -> Database.read

The queue and the task are those of `metis.store.writer`, which spares a change that
is alone the way to the task and back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Sequence, Set
from dataclasses import replace
from typing import TypeVar

import trio

from metis.clock import Clock, StoredClock, SystemClock
from metis.model import (
    Allocation,
    CIDRBlock,
    Family,
    Holding,
    IPUsage,
    Owner,
    Pod,
    TablePage,
    Wanted,
)
from metis.ranges import AddressSet
from metis.store import garbage, history, reclaiming, sql, tables
from metis.store.arrival import Evidence
from metis.store.blocks import add_block
from metis.store.database import open_database
from metis.store.holdings import Residence
from metis.store.transactions import Work
from metis.store.usage import capacity, usage
from metis.store.writer import (
    Damage,
    DatabaseLike,
    StoreStatistics,
    Writer,
    closing,
)

T = TypeVar("T")


class Store:
    """Allocations, blocks and their listings; made by `open_store`."""

    def __init__(
        self, database: DatabaseLike, *, cooldown_ms: int, healings: int = 0
    ) -> None:
        self._database = database
        self._cooldown_ms = cooldown_ms
        self._healings = healings
        self._writer = Writer(database)
        self._boot_id = database.clock.clock.boot_id()

    @property
    def boot_id(self) -> str:
        """The kernel's id of this boot, which every allocation is marked with."""
        return self._boot_id

    @property
    def clock(self) -> StoredClock:
        """The clock of stored times."""
        return self._database.clock

    def statistics(self) -> StoreStatistics:
        """A snapshot of the writer's work."""
        return replace(self._writer.statistics(), healings=self._healings)

    @property
    def damage(self) -> Damage:
        """Whether the database was found to be damaged; it has to be opened anew."""
        return self._writer.damage

    async def allocate(
        self,
        owner: Owner,
        wanted: Sequence[Wanted],
        pod: Pod,
        *,
        sticky: bool = False,
        started_ms: int | None = None,
        netns_path: str = "",
    ) -> tuple[Allocation, ...]:
        """Give an owner the addresses that it asks for, all or none.

        What it holds already is answered as it is; see `sql.allocate`.

        Args:
          owner: who gets them.
          wanted: one entry a family, with the block to add where it is missing,
            or one entry a set of ranges.
          pod: kept with the rows for people.
          sticky: whether the pod is to get what it had last.
          started_ms: when the call began, in stored time; None for any age.
          netns_path: of the owner's network namespace; empty where nobody told.

        Returns:
          One allocation for each entry of `wanted`, in its order, committed.

        Raises:
          InvalidRequest: nothing is wanted, or a block overlaps another in part.
          OwnerDeleted: the owner was deleted after the call began.
          PoolExhausted: nothing is free now.
          StoreError: the database failed; nothing was written.
        """
        return await self._writer.write(
            functools.partial(
                sql.allocate,
                owner=owner,
                wanted=wanted,
                pod=pod,
                sticky=sticky,
                started_ms=started_ms,
                residence=Residence(self._boot_id, netns_path),
            )
        )

    async def release(
        self,
        owner: Owner,
        *,
        deleted_at: int | None = None,
        allocated_until: int | None = None,
        only_allocation_id: str = "",
    ) -> tuple[Allocation, ...]:
        """Take back all that an owner holds; it rests for the cooldown.

        Args:
          owner: whose addresses.
          deleted_at: when the owner was deleted, in stored time, to be kept
            against calls that began before; None keeps nothing.
          allocated_until: only what it got, or asked for last, until this stored
            time; None for all.
          only_allocation_id: only what has this id; empty for all.

        Returns:
          What was released; empty when nothing was held, which is no error.

        Raises:
          StoreError: the database failed; nothing was written.
        """
        return await self._writer.write(
            functools.partial(
                sql.release,
                owner=owner,
                cooldown_ms=self._cooldown_ms,
                deleted_at=deleted_at,
                allocated_until=allocated_until,
                only_allocation_id=only_allocation_id,
            )
        )

    async def collect(
        self, owners: Sequence[Owner], taken_at: int
    ) -> list[tuple[Owner, Allocation]]:
        """Take back what owners held at a time in the past; see `garbage.collect`.

        Args:
          owners: whose addresses; all of them in one transaction.
          taken_at: when it was seen that they are gone, in stored time.

        Raises:
          StoreError: the database failed; nothing was written.
        """
        return await self._writer.write(
            functools.partial(
                garbage.collect,
                owners=owners,
                taken_at=taken_at,
                cooldown_ms=self._cooldown_ms,
            )
        )

    async def reclaim(
        self, gone: Sequence[tuple[Sequence[Holding], str]]
    ) -> list[Holding]:
        """Take back what owners hold that are gone; see `reclaiming.reclaim`.

        Args:
          gone: all holdings of an owner, and the evidence; all of them in one
            transaction.

        Raises:
          StoreError: the database failed; nothing was written.
        """
        return await self._writer.write(
            functools.partial(
                reclaiming.reclaim, gone=gone, cooldown_ms=self._cooldown_ms
            )
        )

    async def add_block(self, network: str, block: CIDRBlock) -> None:
        """Let a network be served from a block; nothing happens when it is already.

        Raises:
          InvalidRequest: the block overlaps another of the network in part.
          StoreError: the database failed; nothing was written.
        """
        await self._writer.write(
            functools.partial(add_block, network=network, block=block)
        )

    async def held(self, owner: Owner) -> tuple[Allocation, ...]:
        """What an owner holds, IPv4 first.

        Raises:
          StoreError: the database failed.
        """
        return await self._read(lambda connection, _: sql.held(connection, owner))

    async def assured(
        self,
        owner: Owner,
        wanted: Sequence[Wanted],
        sticky_pod: Pod | None = None,
    ) -> frozenset[int]:
        """Which entries need not wait behind other calls; see `sql.assured`.

        Raises:
          StoreError: the database failed.
        """
        return await self._read(
            functools.partial(
                sql.assured, owner=owner, wanted=wanted, sticky_pod=sticky_pod
            )
        )

    async def owners_besides(
        self, network: str, kept: Set[tuple[str, str]], taken_at: int
    ) -> list[Owner]:
        """Who holds addresses though a list does not name it.

        Args:
          network: name of the network.
          kept: container id and interface name of all that is on the list.
          taken_at: when the list was taken, in stored time.

        Raises:
          StoreError: the database failed.
        """
        return await self._read(
            functools.partial(
                garbage.owners_besides, network=network, kept=kept, taken_at=taken_at
            )
        )

    async def holdings(
        self, after: reclaiming.Place | None, most: int
    ) -> tuple[list[Holding], reclaiming.Place | None]:
        """Addresses that somebody holds, by owner; see `reclaiming.read_holdings`.

        Raises:
          StoreError: the database failed.
        """
        return await self._read(
            functools.partial(reclaiming.read_holdings, after=after, most=most)
        )

    async def usage(
        self,
        network: str,
        family: Family,
        position: int = 1,
        ranges: AddressSet | None = None,
    ) -> IPUsage:
        """How the addresses of a family are spent on a network.

        Args:
          network: name of the network.
          family: the family.
          position: `next_free_ms` of the answer tells when so many addresses
            will be free that a caller with position - 1 others before it gets
            one; the time of the reading when they are free already.
          ranges: where they are to come from, in place of all blocks.

        Raises:
          StoreError: the database failed.
        """
        return await self._read(
            functools.partial(
                usage, network=network, family=family, position=position, ranges=ranges
            )
        )

    async def capacity(self, network: str) -> dict[Family, IPUsage]:
        """How the addresses of every family are spent that a network has blocks of.

        Raises:
          StoreError: the database failed.
        """
        return await self._read(functools.partial(capacity, network=network))

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

    async def list_history(
        self, selection: history.Selection, page_size: int = 0, page_token: str = ""
    ) -> history.Page:
        """One page of who had which address; see `history.select`.

        Raises:
          InvalidRequest: the size or token cannot be read.
          StoreError: the database failed.
        """
        return await self._read(
            lambda connection, _: history.select(
                connection, selection, page_size, page_token
            )
        )

    async def _read(self, work: Work[T]) -> T:
        if self._writer.is_closing:
            raise closing()
        try:
            return await self._database.read(work)
        except Exception as error:
            self._writer.damage.note(error)
            raise

    async def run_writer(self) -> None:
        """Write what is queued until the store is closed."""
        await self._writer.run()

    def close(self) -> None:
        """Take no more requests; the writer works off those that are queued."""
        self._writer.close()


@contextlib.asynccontextmanager
async def open_store(
    path: str,
    *,
    release_cooldown: float = 60.0,
    synchronous: str = "NORMAL",
    clock: Clock | None = None,
    thorough: bool = False,
    evidence: Evidence | None = None,
    healings: int = 0,
    patience: float | None = None,
) -> AsyncIterator[Store]:
    """Open the store of a database file for the body of an `async with`.

    A database that is damaged is healed first (docs/healing.md).

    Leaving the body, also by an error or cancellation, refuses new requests,
    writes what is queued (for DRAIN_SECONDS at most) and closes the file.

    Args:
      path: the SQLite file; it and its directory are made when missing.
      release_cooldown: rest of a released address, in seconds.
      synchronous: SQLite's setting, "NORMAL" or "FULL".
      clock: where raw time comes from; the kernel's clocks by default.
      thorough: whether the whole file is looked through for damage first.
      evidence: asked who must have an address, when records are missing.
      healings: how often the database was healed before, for the statistics.
      patience: how long to wait for others who open the file, in seconds.

    Raises:
      StoreIncompatible: a newer version or a database of something else; it was
        left as it is.
      StoreUnavailable: the file or its directory cannot be read and written, or
        it is damaged while others have it open.
      StoreBusy: another process kept the write lock.
    """
    cooldown_ms = round(release_cooldown * 1000)
    database = await open_database(
        path,
        clock=SystemClock() if clock is None else clock,
        cooldown_ms=cooldown_ms,
        synchronous=synchronous,
        thorough=thorough,
        evidence=evidence,
        patience=patience,
    )
    healings += database.healed
    try:
        async with run_store(
            database, cooldown_ms=cooldown_ms, healings=healings
        ) as store:
            yield store
    finally:
        with trio.CancelScope(shield=True):  # bounded by what still runs
            await database.aclose()


@contextlib.asynccontextmanager
async def run_store(
    database: DatabaseLike, *, cooldown_ms: int, healings: int = 0
) -> AsyncIterator[Store]:
    """Run the writer task of a store over an open database.

    Args:
      database: `metis.store.database.Database`, or one that a test made.
      cooldown_ms: rest of a released address, in milliseconds.
      healings: how often the database was healed so far.
    """
    store = Store(database, cooldown_ms=cooldown_ms, healings=healings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run_writer)
        nursery.start_soon(database.keep_log_short)
        try:
            yield store
        finally:
            store.close()
            nursery.cancel_scope.cancel()  # the writer works on, as long as it has to
