"""Calls on their way, and the lines in which they wait; the rules are the engine's.

May touch: Trio's events and clock. Knows no store.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import trio

from metis.model import Family, Owner, Pod, Wanted
from metis.ranges import AddressSet

ANSWER_MARGIN = 0.1
"""Seconds before the deadline at which waiting ends, so that the commit and the
answer still reach a caller on a loaded node."""

Key: TypeAlias = tuple[str, Family, AddressSet | None]
"""What a line is for: a network and a family, or a set of ranges of it."""


@dataclass(slots=True, eq=False)
class Place:
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
class Line:
    """The calls that wait for one family on one network, by arrival.

    `tries` and `trying` count attempts to allocate, made by whoever is first:
    while one runs, and when one has ended in between, what the database says and
    who stands in the line do not go together.
    """

    places: list[Place] = field(default_factory=list)
    tries: int = 0
    trying: int = 0
    settled: trio.Event = field(default_factory=trio.Event)

    def enter(self, place: Place) -> None:
        """Take the place of an arrival; whoever stands behind it counts anew."""
        position = self.position(place.ticket)
        for behind in self.places[position - 1 :]:
            behind.wake.set()
        self.places.insert(position - 1, place)

    def leave(self, place: Place) -> None:
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


@dataclass(slots=True, eq=False)
class Call:
    """An allocation on its way: what is asked, since when and until when.

    `started_ms` is when it began, in stored time; `is_over` is set, and `scope`, in
    which it waits, cancelled, by the DEL of its owner.
    """

    owner: Owner
    wanted: Sequence[Wanted]
    pod: Pod
    sticky: bool
    started_ms: int
    ticket: int
    deadline: float
    netns_path: str = ""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_over: bool = False

    @property
    def patience_ends(self) -> float:
        """When waiting for an address ends, in Trio's time."""
        return self.deadline - ANSWER_MARGIN

    def key(self, place: int) -> Key:
        """The line for an entry of `wanted`."""
        want = self.wanted[place]
        return self.owner.network, want.family, want.ranges

    def end(self) -> None:
        """Give it up because its owner was deleted."""
        self.is_over = True
        self.scope.cancel()
