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
  Rule 4: only the first of a line sleeps for the end of a cooldown; leaving a
          line wakes the next. Nobody polls.
  Rule 5: whoever stands further behind counts the addresses that become free
          in time, and goes at once when they do not reach to its place.

May touch: the store and Trio's clock. Knows no gRPC.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import trio

from metis.errors import NotAllocated, PoolExhausted, StoreBusy
from metis.model import Allocation, Family, Owner, Pod, Wanted
from metis.store.store import Store

T = TypeVar("T")

DEFAULT_CAPACITY_WAIT = 9.0
"""Patience of a call that brings no deadline, in seconds: what the original
waits, and a second less than its client does."""

ANSWER_MARGIN = 0.1
"""Seconds before the deadline at which waiting ends, so that the commit and the
answer still reach a caller on a loaded node."""

FIRST_BUSY_PAUSE = 0.01
"""Seconds before a busy database is tried again; SQLite itself has waited for
`metis.store.database.BUSY_TIMEOUT_MS` by then. Doubles up to LAST_BUSY_PAUSE."""

LAST_BUSY_PAUSE = 0.25
"""Longest pause before a busy database is tried again, in seconds."""

COUNTS_OF_A_MOVING_LINE = 3
"""How often a call counts anew because the line moved while it did. After that
it stays: a line that moves is a reason to, and its turn will tell."""

_Key: TypeAlias = tuple[str, Family]
"""What a line is for: a network and a family."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """How many calls wait for an address, by network and family."""

    waiting: Mapping[_Key, int]


@dataclass(slots=True, eq=False)
class _Place:
    """Where a call stands in a line; the ticket tells when it arrived."""

    ticket: int
    wake: trio.Event = field(default_factory=trio.Event)

    async def woken(self, deadline: float) -> bool:
        """Wait until the line moves or changes; False at the deadline."""
        with trio.move_on_at(deadline):
            await self.wake.wait()
        moved = self.wake.is_set()
        self.wake = trio.Event()
        return moved


@dataclass(slots=True)
class _Line:
    """The calls that wait for one family on one network, by arrival.

    `tries` and `trying` count attempts to allocate, made by whoever is first:
    while one runs, and when one has ended in between, what the database says and
    who stands in the line do not go together.
    """

    places: list[_Place] = field(default_factory=list)
    tries: int = 0
    trying: int = 0
    settled: trio.Event = field(default_factory=trio.Event)

    def enter(self, place: _Place) -> None:
        """Take the place of an arrival; whoever stands behind it counts anew."""
        position = self.position(place.ticket)
        for behind in self.places[position - 1 :]:
            behind.wake.set()
        self.places.insert(position - 1, place)

    def leave(self, place: _Place) -> None:
        """Give up a place; whoever is first then may try."""
        self.places.remove(place)
        self.wake_first()

    def wake_first(self) -> None:
        """Have the first one try, because something has changed."""
        if self.places:
            self.places[0].wake.set()

    def position(self, ticket: int) -> int:
        """1 for the first place, or where a new arrival would stand."""
        return 1 + bisect.bisect_left(self.places, ticket, key=lambda p: p.ticket)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Mark an attempt to allocate."""
        self.trying += 1
        try:
            yield
        finally:
            self.trying -= 1
            self.tries += 1
            self.settled.set()
            self.settled = trio.Event()


@dataclass(frozen=True, slots=True)
class _Call:
    """An allocation on its way: what is asked, since when and until when."""

    owner: Owner
    wanted: Sequence[Wanted]
    pod: Pod
    ticket: int
    deadline: float

    @property
    def patience_ends(self) -> float:
        """When waiting for an address ends, in Trio's time."""
        return self.deadline - ANSWER_MARGIN


class Engine:
    """Allocates, deallocates and checks, over one store.

    Args:
      store: open for as long as the engine is used.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tickets = itertools.count()
        self._lines: dict[_Key, _Line] = {}

    async def allocate(
        self,
        owner: Owner,
        wanted: Sequence[Wanted],
        pod: Pod,
        *,
        deadline: float | None = None,
    ) -> tuple[Allocation, ...]:
        """Give an owner the addresses that it asks for, all or none.

        A repeated call is answered with what the owner holds. When nothing is
        free the call waits for the next cooldown to end, in the order of
        arrival, if that is in time.

        Args:
          owner: who gets them.
          wanted: one entry a family, with the block to add where it is missing.
          pod: kept with the addresses for people.
          deadline: when the caller stops listening, in `trio.current_time()`
            seconds; DEFAULT_CAPACITY_WAIT from now when None.

        Returns:
          One allocation for each entry of `wanted`, in its order, committed.

        Raises:
          InvalidRequest: nothing is wanted, a block overlaps another in part, or
            a requested address can never be had.
          AddressTaken: a requested address is another owner's now.
          PoolExhausted: nothing is free and nothing will be in time.
          StoreBusy: the database was busy until the deadline.
          StoreError: the database failed; nothing was written.
        """
        call = _Call(owner, wanted, pod, next(self._tickets), _until(deadline))
        missing = [want.family for want in wanted]
        if self._line_ahead(call, missing) is not None:
            assured = await self._store.assured(owner, wanted)
            missing = [family for family in missing if family not in assured]
        key = self._line_ahead(call, missing)
        if key is None:
            try:
                return await self._attempt(call)
            except PoolExhausted as shortage:
                if self._time_of(shortage.next_free_ms) > call.patience_ends:
                    raise
                key = _key(shortage)
                missing = [*{*missing, key[1]}]
        return await self._allocate_in_turn(call, missing, key)

    async def deallocate(
        self, owner: Owner, *, deadline: float | None = None
    ) -> tuple[Allocation, ...]:
        """Take back all that an owner holds; it rests for the cooldown.

        Args:
          owner: whose addresses.
          deadline: as in `allocate`.

        Returns:
          What was released; empty when nothing was held, which is no error.

        Raises:
          StoreBusy: the database was busy until the deadline.
          StoreError: the database failed; nothing was written.
        """
        released = await _persist(lambda: self._store.release(owner), _until(deadline))
        for allocation in released:
            self.announce(owner.network, allocation.family)
        return released

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

    def announce(self, network: str, family: Family) -> None:
        """Tell who waits that the addresses of a network have changed.

        Whoever frees addresses or adds a block calls it, after the commit.
        """
        line = self._lines.get((network, family))
        if line is not None:
            line.wake_first()

    def statistics(self) -> EngineStatistics:
        """A snapshot of who waits."""
        return EngineStatistics(
            {key: len(line.places) for key, line in self._lines.items()}
        )

    async def _attempt(self, call: _Call) -> tuple[Allocation, ...]:
        served = await _persist(
            lambda: self._store.allocate(call.owner, call.wanted, call.pod),
            call.deadline,
        )
        for want in call.wanted:
            if want.block is not None:  # it may be new, and serve others too
                self.announce(call.owner.network, want.family)
        return served

    async def _allocate_in_turn(
        self, call: _Call, missing: Sequence[Family], key: _Key
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
                        ahead = _key(shortage)
                        if ahead != key:
                            break
                        free_at = self._time_of(shortage.next_free_ms)
                        if free_at > call.patience_ends:
                            raise
                    await place.woken(free_at)
            key = ahead

    def _line_ahead(self, call: _Call, families: Sequence[Family]) -> _Key | None:
        """A line of these families in which an earlier call waits (rule 2)."""
        for family in families:
            key = (call.owner.network, family)
            line = self._lines.get(key)
            if line is not None and line.position(call.ticket) > 1:
                return key
        return None

    @contextlib.contextmanager
    def _in_line(self, key: _Key, call: _Call) -> Iterator[tuple[_Line, _Place]]:
        """Stand in a line for the body of a `with`; the last one takes it away."""
        line = self._lines.setdefault(key, _Line())
        place = _Place(call.ticket)
        line.enter(place)
        try:
            yield line, place
        finally:
            line.leave(place)
            if not line.places:
                del self._lines[key]

    async def _check_prospect(self, call: _Call, key: _Key, line: _Line) -> None:
        """Refuse a call at whose place nothing becomes free in time (rule 5)."""
        with trio.move_on_at(call.patience_ends):
            for _ in range(COUNTS_OF_A_MOVING_LINE):
                if line.trying:
                    await line.settled.wait()
                position, tries = line.position(call.ticket), line.tries
                if position == 1:
                    return
                usage = await self._store.usage(*key, position)
                if self._time_of(usage.next_free_ms) <= call.patience_ends:
                    return
                still = line.position(call.ticket) == position and line.tries == tries
                if still and not line.trying:
                    break
            else:
                return
        raise await self._shortage(key)

    async def _shortage(self, key: _Key) -> PoolExhausted:
        """What to tell a call whose patience ends, with fresh counts."""
        usage = await self._store.usage(*key)
        free_at = usage.next_free_ms
        return PoolExhausted(
            *key,
            owned=usage.owned,
            cooling=usage.cooling,
            reserved=usage.reserved,
            next_free_ms=free_at,
            wait_ms=None if free_at is None else free_at - self._store.clock.now_ms(),
        )

    def _time_of(self, stored_ms: int | None) -> float:
        """A stored time in Trio's time; None, which is never, as infinity."""
        if stored_ms is None:
            return math.inf
        wait_ms = stored_ms - self._store.clock.now_ms()
        return trio.current_time() + wait_ms / 1000


def _key(shortage: PoolExhausted) -> _Key:
    return (shortage.network, Family(shortage.family))


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
