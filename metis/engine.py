"""The rules of allocation: who waits, for how long, in which order.

The store answers at once; the engine decides what to do with "nothing is free"
and "the database is busy". A call whose family is exhausted waits in the line
of that network and family while an address leaves cooldown in time for it, and
is answered with `PoolExhausted` at once when none does.

  Rule 1: lines are ordered by arrival at the engine, not by when the shortage
          was noticed, so a call keeps its place when it changes lines.
  Rule 2: a call tries to allocate only while no earlier call waits in a line of
          a family that it needs from the pool (not what it holds, has a claim
          to, or brings a new block for). So nobody overtakes, and as the earliest
          call of all is never held up by this rule, nobody deadlocks.
  Rule 3: a call stands in one line at a time, that of the family which lacks. So
          dual stack neither takes nor keeps from others what it cannot use yet.
          Requests that name a set of ranges have a line for each such set.
  Rule 4: only the first of a line sleeps for the end of a cooldown; leaving a
          line wakes the next. Nobody polls.
  Rule 5: whoever stands further behind counts the addresses that become free
          in time, and goes at once when they do not reach to its place.
  Rule 6: a DEL ends every call of its owner that is on its way: nobody waits for
          the answer, and the address would be nobody's.

May touch: the store and Trio's clock. Knows no gRPC.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from metis.errors import (
    NotAllocated,
    OwnerDeleted,
    PoolExhausted,
    StoreBusy,
    StoreError,
)
from metis.model import Allocation, Family, IPUsage, Owner, Pod, Wanted
from metis.store.store import Store
from metis.waiting import ANSWER_MARGIN, Call, Key, Line, Place

T = TypeVar("T")

DEFAULT_CAPACITY_WAIT = 9.0
"""Patience of a call that brings no deadline, in seconds: what the original
waits, and a second less than its client does."""

FIRST_BUSY_PAUSE = 0.01
"""Seconds before a busy database is tried again; SQLite itself has waited for
`metis.store.database.BUSY_TIMEOUT_MS` by then. Doubles up to LAST_BUSY_PAUSE."""

LAST_BUSY_PAUSE = 0.25
"""Longest pause before a busy database is tried again, in seconds."""

COUNTS_OF_A_MOVING_LINE = 3
"""How often a call counts anew because the line moved while it did. After that
it stays: a line that moves is a reason to, and its turn will tell."""

COLLECTED_AT_ONCE = 64
"""Owners whose addresses garbage collection takes back in one transaction: some
5 ms, after which other calls have their turn."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """How many calls wait for an address, by network and family."""

    waiting: Mapping[tuple[str, Family], int]


class Engine:
    """Allocates, deallocates and checks, over one store.

    Args:
      store: open for as long as the engine is used.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tickets = itertools.count()
        self._lines: dict[Key, Line] = {}
        self._calls: dict[Owner, list[Call]] = {}

    async def allocate(
        self,
        owner: Owner,
        wanted: Sequence[Wanted],
        pod: Pod,
        *,
        deadline: float | None = None,
        sticky: bool = False,
        started_ms: int | None = None,
        netns_path: str = "",
    ) -> tuple[Allocation, ...]:
        """Give an owner the addresses that it asks for, all or none.

        A repeated call is answered with what the owner holds. When nothing is
        free the call waits for the next cooldown to end, in the order of
        arrival, if that is in time.

        Args:
          owner: who gets them.
          wanted: one entry a family, with the block to add where it is missing,
            or one entry a set of ranges.
          pod: kept with the addresses for people.
          deadline: when the caller stops listening, in `trio.current_time()`
            seconds; DEFAULT_CAPACITY_WAIT from now when None.
          sticky: whether the pod is to get what it had last.
          started_ms: when the call began, in stored time; None means now.
          netns_path: of the owner's network namespace, kept as evidence of its
            life; empty where nobody told.

        Returns:
          One allocation for each entry of `wanted`, in its order, committed.

        Raises:
          InvalidRequest: nothing is wanted, a block overlaps another in part, or
            a requested address can never be had.
          OwnerDeleted: the owner was deleted since the call began.
          AddressTaken: a requested address is another owner's now.
          PoolExhausted: nothing is free and nothing will be in time.
          StoreBusy: the database was busy until the deadline.
          StoreError: the database failed; nothing was written.
        """
        if started_ms is None:
            # A DEL noted in this very millisecond was here before this call: one
            # that comes from now on ends it without any clock.
            started_ms = self.now_ms() + 1
        call = Call(
            owner,
            wanted,
            pod,
            sticky,
            started_ms,
            next(self._tickets),
            _until(deadline),
            netns_path,
        )
        under_way = self._calls.setdefault(owner, [])
        under_way.append(call)
        try:
            served = await self._allocate(call)
            if not call.is_over:
                return served
            await self._take_back(call, served)
        finally:
            under_way.remove(call)
            if not under_way:
                self._calls.pop(owner, None)
        raise OwnerDeleted(
            f"container {owner.container_id!r} was deleted from network "
            f"{owner.network!r} while this call for {owner.interface_name!r} was on "
            "its way: a new call is served"
        )

    async def deallocate(
        self,
        owner: Owner,
        *,
        deadline: float | None = None,
        arrived_ms: int | None = None,
    ) -> tuple[Allocation, ...]:
        """Take back all that an owner holds; it rests for the cooldown.

        Allocations of the owner that are on their way end, and those that began
        before this call but arrive later will be refused.

        Args:
          owner: whose addresses.
          deadline: as in `allocate`.
          arrived_ms: when the wish to delete it arrived, in stored time, where
            that was earlier than now. What the owner got later stays with it.

        Returns:
          What was released; empty when nothing was held, which is no error.

        Raises:
          StoreBusy: the database was busy until the deadline.
          StoreError: the database failed; nothing was written.
        """
        deleted_at = self.now_ms() if arrived_ms is None else arrived_ms
        for call in self._calls.get(owner, ()):
            if arrived_ms is None or call.started_ms <= arrived_ms:
                call.end()
        released = await _persist(
            lambda: self._store.release(
                owner, deleted_at=deleted_at, allocated_until=arrived_ms
            ),
            _until(deadline),
        )
        self._announce_all(owner.network, released)
        return released

    async def give_back(
        self, owner: Owner, allocation_id: str, *, deadline: float | None = None
    ) -> tuple[Allocation, ...]:
        """Take back what nobody learned of, unless the owner has asked again since.

        Args:
          owner: whose addresses.
          allocation_id: that of the allocation in question.
          deadline: as in `allocate`.

        Returns:
          What was released; empty when the owner's allocation is another now.

        Raises:
          StoreError: as for `deallocate`.
        """
        released = await _persist(
            lambda: self._store.release(owner, only_allocation_id=allocation_id),
            _until(deadline),
        )
        self._announce_all(owner.network, released)
        return released

    async def collect_garbage(
        self,
        network: str,
        kept: Set[tuple[str, str]],
        *,
        taken_ms: int | None = None,
        deadline: float | None = None,
    ) -> list[tuple[Owner, Allocation]]:
        """Take back what is held on a network by whoever a list does not name.

        Each owner is as if deleted when the list was taken. It takes as many
        transactions as there are owners, COLLECTED_AT_ONCE a piece.

        Args:
          network: the only one that is touched.
          kept: container id and interface name of all that is on the list.
          taken_ms: when the list was taken, in stored time; None means now. What
            was allocated later stays.
          deadline: as in `allocate`.

        Returns:
          Who had which address.

        Raises:
          StoreError: as for `deallocate`; what was taken back before stays so.
        """
        ends = _until(deadline)
        taken_at = self.now_ms() if taken_ms is None else taken_ms
        owners = await self._store.owners_besides(network, kept, taken_at)
        collected: list[tuple[Owner, Allocation]] = []
        for start in range(0, len(owners), COLLECTED_AT_ONCE):
            some = owners[start : start + COLLECTED_AT_ONCE]
            got = await _persist(partial(self._store.collect, some, taken_at), ends)
            self._announce_all(network, [allocation for _, allocation in got])
            collected += got
        return collected

    async def capacity(self, network: str) -> dict[Family, IPUsage]:
        """How the addresses of a network are spent, by family.

        A family without a block is left out: the first request brings its block.

        Raises:
          StoreError: the database failed.
        """
        return await self._store.capacity(network)

    async def check(self, owner: Owner) -> tuple[Allocation, ...]:
        """What an owner holds, IPv4 first.

        Raises:
          NotAllocated: it holds nothing.
          StoreError: the database failed.
        """
        held = await self._store.held(owner)
        if not held:
            raise NotAllocated(
                f"container {owner.container_id!r} holds no address for interface "
                f"{owner.interface_name!r} on network {owner.network!r}"
            )
        return held

    def now_ms(self) -> int:
        """The stored time now, in milliseconds since the Unix epoch."""
        return self._store.clock.now_ms()

    def stored_ms(self, boottime_ms: int, boot_id: str) -> int | None:
        """A moment that a caller told, in stored time; never after now.

        Args:
          boottime_ms: milliseconds since the boot; 0 where the caller told none.
          boot_id: of which boot. Nothing is known of the clock of another one.
        """
        clock = self._store.clock
        if boottime_ms == 0 or boot_id != self._store.boot_id:
            return None
        return min(boottime_ms + clock.offset_ms, clock.now_ms())

    def announce(self, network: str, family: Family) -> None:
        """Tell who waits that the addresses of a network have changed.

        Whoever frees addresses or adds a block calls it, after the commit.
        """
        for key, line in self._lines.items():
            if key[:2] == (network, family):
                line.wake_first()

    def statistics(self) -> EngineStatistics:
        """A snapshot of who waits."""
        waiting: dict[tuple[str, Family], int] = {}
        for key, line in self._lines.items():
            waiting[key[:2]] = waiting.get(key[:2], 0) + len(line.places)
        return EngineStatistics(waiting)

    def _announce_all(self, network: str, released: Sequence[Allocation]) -> None:
        if not self._lines:
            return
        for family in {allocation.family for allocation in released}:
            self.announce(network, family)

    async def _allocate(self, call: Call) -> tuple[Allocation, ...]:
        """Allocate at once, or in turn when others wait or nothing is free.

        A call that need not wait is not withdrawn when its owner is deleted: as a
        rule the DEL is behind it in the store's queue, and takes back what it gets.
        """
        missing = list(range(len(call.wanted)))
        if self._line_ahead(call, missing) is not None:
            missing = await self._missing(call)
        key = self._line_ahead(call, missing)
        if key is None:
            try:
                return await self._attempt(call)
            except PoolExhausted as shortage:
                if self._time_of(shortage.next_free_ms) > call.patience_ends:
                    raise
                key = call.key(shortage.place)
                if len(missing) > 1:
                    missing = await self._missing(call)
                missing = [*{*missing, shortage.place}]
        with call.scope:
            return await self._allocate_in_turn(call, missing, key)
        return ()  # it is over

    async def _take_back(self, call: Call, served: Sequence[Allocation]) -> None:
        """Take back what an owner got that was deleted meanwhile.

        As a rule the DEL has. It has not where it was of an earlier time, was given up
        in the queue, or was done while this call waited to try again.
        """
        with trio.CancelScope(shield=True), contextlib.suppress(StoreError):
            for allocation_id in {one.allocation_id for one in served}:
                await self.give_back(call.owner, allocation_id, deadline=call.deadline)

    async def _missing(self, call: Call) -> list[int]:
        """The entries that a call needs from the pool (rule 2)."""
        assured = await self._store.assured(
            call.owner, call.wanted, call.pod if call.sticky else None
        )
        return [place for place in range(len(call.wanted)) if place not in assured]

    async def _attempt(self, call: Call) -> tuple[Allocation, ...]:
        served = await _persist(
            lambda: self._store.allocate(
                call.owner,
                call.wanted,
                call.pod,
                sticky=call.sticky,
                started_ms=call.started_ms,
                netns_path=call.netns_path,
            ),
            call.deadline,
        )
        for want in call.wanted:
            if want.block is not None:  # it may be new, and serve others too
                self.announce(call.owner.network, want.family)
        return served

    async def _allocate_in_turn(
        self, call: Call, missing: Sequence[int], key: Key
    ) -> tuple[Allocation, ...]:
        """Stand in the line of `key`, or of what lacks then, until served."""
        while True:
            with self._in_line(key, call) as (line, place):
                while True:
                    ahead = self._line_ahead(call, missing)
                    if ahead == key:
                        await self._check_prospect(call, key, line)
                        if not await place.woken(call.patience_ends):
                            raise await self._shortage(key)
                        continue
                    if ahead is not None:
                        break
                    try:
                        with line.attempt():
                            return await self._attempt(call)
                    except PoolExhausted as shortage:
                        ahead = call.key(shortage.place)
                        if ahead != key:
                            break
                        free_at = self._time_of(shortage.next_free_ms)
                        if free_at > call.patience_ends:
                            raise
                    await place.woken(free_at)
            key = ahead

    def _line_ahead(self, call: Call, places: Sequence[int]) -> Key | None:
        """A line for one of these entries in which an earlier call waits (rule 2)."""
        for place in places if self._lines else ():
            key = call.key(place)
            line = self._lines.get(key)
            if line is not None and line.position(call.ticket) > 1:
                return key
        return None

    @contextlib.contextmanager
    def _in_line(self, key: Key, call: Call) -> Iterator[tuple[Line, Place]]:
        """Stand in a line for the body of a `with`; the last one takes it away."""
        line = self._lines.setdefault(key, Line())
        place = Place(call.ticket)
        line.enter(place)
        try:
            yield line, place
        finally:
            line.leave(place)
            if not line.places:
                del self._lines[key]

    async def _check_prospect(self, call: Call, key: Key, line: Line) -> None:
        """Refuse a call at whose place nothing becomes free in time (rule 5)."""
        with trio.move_on_at(call.patience_ends):
            for _ in range(COUNTS_OF_A_MOVING_LINE):
                if line.trying:
                    await line.settled.wait()
                position, tries = line.position(call.ticket), line.tries
                if position == 1:
                    return
                usage = await self._usage(key, position)
                if self._time_of(usage.next_free_ms) <= call.patience_ends:
                    return
                still = line.position(call.ticket) == position and line.tries == tries
                if still and not line.trying:
                    break
            else:
                return
        raise await self._shortage(key)

    async def _shortage(self, key: Key) -> PoolExhausted:
        """What to tell a call whose patience ends, with fresh counts."""
        network, family, ranges = key
        usage = await self._usage(key)
        free_at = usage.next_free_ms
        return PoolExhausted(
            network,
            family,
            owned=usage.owned,
            cooling=usage.cooling,
            reserved=usage.reserved,
            next_free_ms=free_at,
            wait_ms=None if free_at is None else free_at - self.now_ms(),
            ranges="" if ranges is None else str(ranges),
        )

    async def _usage(self, key: Key, position: int = 1) -> IPUsage:
        network, family, ranges = key
        return await self._store.usage(network, family, position, ranges)

    def _time_of(self, stored_ms: int | None) -> float:
        """A stored time in Trio's time; None, which is never, as infinity."""
        if stored_ms is None:
            return math.inf
        wait_ms = stored_ms - self.now_ms()
        return trio.current_time() + wait_ms / 1000


def _until(deadline: float | None) -> float:
    return trio.current_time() + DEFAULT_CAPACITY_WAIT if deadline is None else deadline


async def _persist(work: Callable[[], Awaitable[T]], deadline: float) -> T:
    """Do something with the store, again while the database is busy."""
    pause = FIRST_BUSY_PAUSE
    while True:
        try:
            return await work()
        except StoreBusy:
            if trio.current_time() + pause >= deadline - ANSWER_MARGIN:
                raise
        await trio.sleep(pause)
        pause = min(2 * pause, LAST_BUSY_PAUSE)
