"""Whether concurrent calls could have happened one after the other, address by address.

A call takes effect at one point between its beginning and its end. For every address
there must be an order of all calls that had to do with it, and points in that order,
by which the address goes from free to an owner, to its cooldown, to free (Wing and
Gong's search, 1993, with time in it: points are put as early as they can be, because
an earlier one never forbids what a later one allows).

Pure: no clock of its own. Times are in seconds, of one clock for all processes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

STORED_TIME = 0.001
"""Seconds by which stored times are rounded down: a cooldown may seem so much
shorter."""


class Effect(Enum):
    """What a call did to an address, or what it saw of it."""

    GOT = "got it"
    GAVE = "gave it back"
    HELD = "held it"
    LACKED = "did not hold it"


@dataclass(frozen=True)
class Event:
    """A call, as far as one address is concerned.

    Attributes:
      certain: False for a call that nobody knows the outcome of.
    """

    effect: Effect
    owner: str
    begin: float
    end: float
    certain: bool = True


@dataclass(frozen=True)
class Call:
    """A call and its answer.

    Attributes:
      verb: "ADD", "DEL", "CHECK", or "GC" for each owner that one took from.
      addresses: what was given, given back or held; None when there was no answer, or
        one that leaves open what was done.
      end: when there was an answer; infinity for never.
      error: what it was answered with in place of addresses, for people.
    """

    verb: str
    owner: str
    begin: float
    end: float
    addresses: frozenset[str] | None
    error: str = ""


@dataclass(frozen=True)
class State:
    """An address between two points.

    Attributes:
      now: the point that it has come to.
      holder: whose it is; empty for nobody's.
      former: who gave it back last.
      free_at: when others than `former` may have it.
    """

    now: float = -math.inf
    holder: str = ""
    former: str = ""
    free_at: float = -math.inf

    def allows_all_of(self, other: State) -> bool:
        """Whether whatever may follow another state of this kind may follow this."""
        return self.now <= other.now and self.free_at <= other.free_at

    def after(self, event: Event, cooldown: float) -> State | None:
        """What an event makes of it; None when it cannot come next."""
        point = max(self.now, event.begin)
        holder, former, free_at = self.holder, self.former, self.free_at
        match event.effect:
            case Effect.GOT if not holder:
                if former != event.owner:
                    point = max(point, free_at)
                holder = event.owner
            case Effect.GAVE if holder == event.owner:
                holder, former = "", event.owner
                free_at = point + cooldown - STORED_TIME
            case Effect.GOT | Effect.HELD if holder == event.owner:
                pass
            case Effect.LACKED if holder != event.owner:
                pass
            case _:
                return None
        if point > event.end:
            return None
        return State(point, holder, former, free_at)


def events_of(address: str, calls: Iterable[Call]) -> list[Event]:
    """All that had, or may have had, to do with an address, by its beginning."""
    calls = list(calls)
    owners = {c.owner for c in calls if c.addresses and address in c.addresses}
    events = []
    for call in calls:
        acts = {"ADD": Effect.GOT, "CHECK": Effect.HELD}.get(call.verb, Effect.GAVE)
        if call.addresses is None:
            if acts is not Effect.HELD:
                events.append(Event(acts, call.owner, call.begin, call.end, False))
        elif address in call.addresses:
            events.append(Event(acts, call.owner, call.begin, call.end))
        elif call.owner in owners:
            events.append(Event(Effect.LACKED, call.owner, call.begin, call.end))
    return sorted(events, key=lambda event: event.begin)


def order_of(events: Sequence[Event], cooldown: float) -> list[Event] | None:
    """An order in which the events could have been, or None when there is none.

    Args:
      events: of one address, by their beginnings.
      cooldown: how long an address rests, in seconds.
    """
    return _Search(events, cooldown).run()


class _Search:
    """A search in depth that comes to no state twice.

    A state is an address and the events that have not been. Those that nobody is
    certain of need not be; once they cannot be any more they make no difference.
    """

    def __init__(self, events: Sequence[Event], cooldown: float) -> None:
        self._events = events
        self._cooldown = cooldown
        self._certain = sum(1 << n for n, event in enumerate(events) if event.certain)
        self._seen: dict[tuple[int, str, str], list[State]] = {}

    def run(self) -> list[Event] | None:
        order: list[Event] = []
        start = self._settled(0, State(), order)
        path = [(*start, self._next(*start), 0)]
        while path:
            done, state, places, length = path[-1]
            if done & self._certain == self._certain:
                return order
            if not places:
                path.pop()
                del order[length:]
                continue
            del order[length:]
            place = places.pop()
            event = self._events[place]
            after = state.after(event, self._cooldown)
            if after is None or not (event.certain or after.holder != state.holder):
                continue
            order.append(event)
            done, after = self._settled(done | 1 << place, after, order)
            known = self._seen.setdefault((done, after.holder, after.former), [])
            if any(other.allows_all_of(after) for other in known):
                continue
            known.append(after)
            path.append((done, after, self._next(done, after), len(order)))
        return None

    def _settled(
        self, done: int, state: State, order: list[Event]
    ) -> tuple[int, State]:
        """Take in what only sees, and leave out what can be no more.

        Not what gets the address for whoever has it: it may be needed later, when that
        one has given it back.
        """
        for place in self._open(done, state.now):
            event = self._events[place]
            if not event.certain:
                if event.end < state.now:
                    done |= 1 << place
                continue
            if event.effect is Effect.GOT:
                continue
            after = state.after(event, self._cooldown)
            if after == state:
                done |= 1 << place
                order.append(event)
        return done, state

    def _next(self, done: int, state: State) -> list[int]:
        """Places of the events that may come next; the likeliest last."""
        soonest = math.inf
        places: list[int] = []
        for place in self._open(done):
            event = self._events[place]
            if event.begin > soonest:
                break
            places.append(place)
            if event.certain:
                soonest = min(soonest, event.end)
        if soonest < state.now:
            return []
        key = self._events
        places.sort(key=lambda place: (key[place].certain, -key[place].end))
        return places

    def _open(self, done: int, until: float = math.inf) -> Iterator[int]:
        """Places of what has not been, of what begins until then."""
        place = (~done & (done + 1)).bit_length() - 1  # the first that has not been
        while place < len(self._events) and self._events[place].begin <= until:
            if not done >> place & 1:
                yield place
            place += 1


def faults_of(calls: Sequence[Call], cooldown: float) -> list[str]:
    """The addresses whose calls could not have been one after the other, in words."""
    addresses = {one for call in calls for one in call.addresses or ()}
    faults = []
    for address in sorted(addresses):
        events = events_of(address, calls)
        if order_of(events, cooldown) is None:
            told = "\n".join(
                f"  {event.begin:.4f} to {event.end:.4f}: {event.owner} "
                f"{event.effect.value}{'' if event.certain else ', perhaps'}"
                for event in _culprits(events, cooldown)
            )
            faults.append(f"{address} cannot have had this life:\n{told}")
    return faults


def _culprits(events: Sequence[Event], cooldown: float) -> Sequence[Event]:
    """The last events of the shortest beginning that has no order already."""

    def beginning(count: int) -> list[Event]:
        limit = events[count].begin if count < len(events) else math.inf
        return [
            # Nobody knows whether what goes on has been already.
            event if event.end <= limit else replace(event, certain=False)
            for event in events[:count]
        ]

    count = bisect.bisect(
        range(len(events)),
        0,
        key=lambda count: order_of(beginning(count), cooldown) is None,
    )
    return beginning(count)[-6:]
