"""Whether a history of calls and answers, seen from outside, kept every promise.

Clients note every call as it begins and as it ends (`History`), with the monotonic
clock of the machine; nobody asks the daemon what it meant to do. `judge` holds the
history against four rules, `judge_rows` the database that is left in the end:

  stays    what an owner was answered is what every later answer says, until a call
           that may take it away begins
  gone     after an answered DEL an owner holds nothing, until it asks again
  alone    from the answer to an ADD until the cooldown after the first call that may
           take it away, no other owner is given the address
  at rest  the database has what is held for certain, nothing of what is gone, all
           or nothing where a call was never answered, and nobody unheard of

A call without an answer was done whole or not at all, and nobody knows which. What
it may have done counts as possible from its beginning to its end, or for ever where
something else than the killed process may still carry it out.

Pure: looks at nothing but the history and the rows it is given.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

CLOCK_SLACK = 0.002
"""Seconds by which stored times, which are whole milliseconds, and ours may differ."""


def _began(call: Call) -> float:
    return call.began


class Owner(NamedTuple):
    """Who holds addresses: network, container and interface."""

    network: str
    container: str
    interface: str


class Outcome(Enum):
    """How a call ended."""

    UNSENT = auto()
    """Nobody was there; as if it had never been made."""

    ANSWERED = auto()
    REFUSED = auto()
    """An error that says that nothing was changed."""
    DEAD = auto()
    """No answer, and whoever might have carried it out is dead."""
    UNKNOWN = auto()
    """No answer, and somebody may still carry it out."""


@dataclass(slots=True, eq=False)
class Call:
    """One call, from outside.

    Attributes:
      verb: ADD, DEL, CHECK or GC.
      owner: whose; of a GC, the network alone counts.
      began: before anything was sent.
      ended: after the answer, or its absence, was noticed.
      outcome: None while it runs.
      addresses: what was answered to an ADD or a CHECK; none to a CHECK that found
        nothing.
      kept: of a GC, the containers that were to stay.
    """

    verb: str
    owner: Owner
    began: float
    ended: float = math.inf
    outcome: Outcome | None = None
    addresses: frozenset[str] = frozenset()
    kept: Set[str] = frozenset()

    @property
    def is_answered(self) -> bool:
        """Whether it was carried out for certain."""
        return self.outcome is Outcome.ANSWERED

    @property
    def takes_away(self) -> bool:
        """Whether it may have ended what an owner held.

        A GC works in steps: one that failed may have carried out some.
        """
        refused = self.outcome is Outcome.REFUSED
        return self.verb == "GC" or (self.verb == "DEL" and not refused)

    @property
    def may_give(self) -> bool:
        """Whether it may have made somebody an owner."""
        return self.verb == "ADD" and self.outcome is not Outcome.REFUSED

    @property
    def found(self) -> bool:
        """Whether its answer says that the owner holds something."""
        return self.is_answered and bool(self.addresses)

    @property
    def missed(self) -> bool:
        """Whether its answer says that the owner holds nothing."""
        return self.verb == "CHECK" and self.is_answered and not self.addresses

    @property
    def over(self) -> float:
        """From when on it changes nothing any more."""
        return math.inf if self.outcome in (None, Outcome.UNKNOWN) else self.ended

    def __str__(self) -> str:
        what = " ".join(sorted(self.addresses)) or (
            self.outcome.name.lower() if self.outcome else "running"
        )
        who = self.owner.container or f"all of {self.owner.network}"
        return f"{self.verb} {who} [{self.began:.4f}..{self.ended:.4f}] {what}"


@dataclass
class History:
    """All calls of a run; clients note them here.

    Calls of one owner follow one another, but for ADDs and CHECKs of the same owner,
    which may overlap, and DELs of an ADD that was given up.
    """

    calls: list[Call] = field(default_factory=list)

    def begin(
        self, verb: str, owner: Owner, now: float, kept: Set[str] = frozenset()
    ) -> Call:
        """Note that a call begins; to be called before anything is sent."""
        call = Call(verb, owner, now, kept=kept)
        self.calls.append(call)
        return call

    def end(
        self,
        call: Call,
        outcome: Outcome,
        now: float,
        addresses: Iterable[str] = (),
    ) -> None:
        """Note how a call ended; to be called after all was received."""
        assert call.outcome is None, f"{call} has ended already"
        if outcome is Outcome.UNSENT:
            for place in reversed(range(len(self.calls))):  # it is near the end
                if self.calls[place] is call:
                    del self.calls[place]
                    break
        call.outcome, call.ended = outcome, now
        call.addresses = frozenset(addresses)

    def by_owner(self) -> dict[Owner, list[Call]]:
        """The calls about each owner by their beginning, with the GCs that may hit it.

        Those are the ones that did not have it on their list, from its first call
        until it was deleted for good.
        """
        owners: dict[Owner, list[Call]] = {}
        gcs: dict[str, list[Call]] = {}
        for call in self.calls:
            if call.verb == "GC":
                gcs.setdefault(call.owner.network, []).append(call)
            else:
                owners.setdefault(call.owner, []).append(call)
        for its in gcs.values():
            its.sort(key=_began)
        for owner, calls in owners.items():
            calls.sort(key=_began)
            of_network = gcs.get(owner.network, [])
            gone = [one for one in calls if one.verb == "DEL" and one.is_answered]
            for_good = bool(gone) and not _asked_since(calls, gone[-1], math.inf)
            start = bisect.bisect(of_network, calls[0].began, key=_began)
            for gc in of_network[start:]:
                if for_good and gc.began > gone[-1].ended:
                    break
                if owner.container not in gc.kept:
                    calls.append(gc)
            calls.sort(key=_began)
        return owners


@dataclass(frozen=True)
class Fault:
    """One promise that was broken, with the calls that show it."""

    rule: str
    owner: Owner
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.owner.network}/{self.owner.container}: {self.text}"


class _Hold(NamedTuple):
    """A time in which an address is somebody's for certain; then it cools."""

    since: float
    until: float
    owner: Owner
    shown_by: Call


def judge(history: History, cooldown: float) -> list[Fault]:
    """The promises that a history broke; none, if all is well.

    Args:
      history: complete; a call that has not ended counts as one that may still be
        carried out.
      cooldown: of all networks, in seconds.
    """
    faults: list[Fault] = []
    holds: dict[tuple[str, str], list[_Hold]] = {}
    shown: dict[tuple[str, str], list[Call]] = {}
    for owner, calls in history.by_owner().items():
        faults += _stays(owner, calls)
        faults += _gone(owner, calls)
        takes = [call for call in calls if call.takes_away]
        for call in calls:
            if not call.found:
                continue
            until = _first_taken(takes, call)
            for address in call.addresses:
                key = owner.network, address
                shown.setdefault(key, []).append(call)
                if until > call.ended:
                    hold = _Hold(call.ended, until, owner, call)
                    holds.setdefault(key, []).append(hold)
    for key, its in holds.items():
        faults += _alone(key[1], shown[key], its, cooldown)
    return faults


def _first_taken(takes: Sequence[Call], call: Call) -> float:
    """When what a call showed may first have been taken away."""
    return min((one.began for one in takes if one.over > call.began), default=math.inf)


def _stays(owner: Owner, calls: Sequence[Call]) -> Iterator[Fault]:
    """What was answered stays the answer until it may have been taken away."""
    takes = [call for call in calls if call.takes_away]
    shown: Call | None = None
    for call in calls:
        if not (call.found or call.missed):
            continue
        if shown is not None and shown.addresses != call.addresses:
            start = min(shown.began, call.began)
            end = max(shown.ended, call.ended)
            excused = any(one.over > start and one.began < end for one in takes)
            # A CHECK beside the ADD may have come before it.
            if not excused and not (call.missed and call.began < shown.ended):
                yield Fault("stays", owner, f"{shown}, then {call}")
        if call.found:
            shown = call


def _gone(owner: Owner, calls: Sequence[Call]) -> Iterator[Fault]:
    """After an answered DEL nothing is found unless the owner asked again."""
    deletions = _deletions(calls)
    for call in calls:
        if call.found and call.verb == "CHECK":
            before = [one for one in deletions if one.ended <= call.began]
            if before and not _asked_since(calls, before[-1], call.ended):
                yield Fault("gone", owner, f"{before[-1]}, then {call}")


def _deletions(calls: Sequence[Call]) -> list[Call]:
    """The calls after which an owner holds nothing for certain, if it is not adding.

    A GC is one of them where no ADD was under way as it began: that one may have
    been carried out after the list was taken.
    """
    adds = [call for call in calls if call.may_give]
    return [
        call
        for call in calls
        if call.is_answered
        and call.verb in ("DEL", "GC")
        and not (
            call.verb == "GC"
            and any(add.began <= call.began < add.over for add in adds)
        )
    ]


def _asked_since(calls: Sequence[Call], deletion: Call, until: float) -> bool:
    """Whether an ADD that began after a deletion may have given the owner something.

    One that began before it is refused, whenever it arrives.
    """
    start = deletion.began - CLOCK_SLACK
    return any(one.may_give and start <= one.began < until for one in calls)


def _alone(
    address: str, calls: list[Call], holds: list[_Hold], cooldown: float
) -> Iterator[Fault]:
    """While an address is one owner's, or cools after it, no other is given it."""
    holds.sort(key=lambda hold: hold.since)
    calls.sort(key=lambda call: call.ended)
    certain = {hold.shown_by for hold in holds}
    active: list[_Hold] = []
    waiting = collections.deque(holds)
    for call in calls:
        while waiting and waiting[0].since <= call.ended:
            active.append(waiting.popleft())
        active = [one for one in active if one.until + cooldown > call.began]
        for hold in active:
            ends = hold.until + cooldown - CLOCK_SLACK
            if hold.owner == call.owner or call.ended >= ends:
                continue
            # It has the address at its answer, or had it some time in between.
            if call in certain or call.began >= hold.since:
                rule = "alone" if call.ended < hold.until else "cooldown"
                text = f"{address} is given too early: {hold.shown_by}, then {call}"
                yield Fault(rule, call.owner, text)
                break


def judge_rows(
    history: History,
    held: Mapping[Owner, Set[str]],
    families: Mapping[str, int] | None = None,
) -> list[Fault]:
    """How the database that is left differs from what was promised.

    Args:
      history: complete; nothing runs any more.
      held: what the database says who holds.
      families: by network, how many addresses an ADD gives; 1 by default.
    """
    owners = history.by_owner()
    faults = [
        Fault("at rest", owner, f"unheard of: {sorted(held[owner])}")
        for owner in held.keys() - owners.keys()
    ]
    for owner, calls in owners.items():
        has = frozenset(held.get(owner, ()))
        whole = (families or {}).get(owner.network, 1)
        expected = _expected(calls)
        if expected is None:  # a call was not answered, so nobody knows
            if len(has) not in (0, whole):
                text = f"{sorted(has)} is a part of what was asked for: {calls[-1]}"
                faults.append(Fault("at rest", owner, text))
        elif has != expected:
            text = f"{sorted(has)}, promised was {sorted(expected)}: {calls[-1]}"
            faults.append(Fault("at rest", owner, text))
    return faults


def _expected(calls: Sequence[Call]) -> frozenset[str] | None:
    """What an owner must hold in the end; None where nobody knows."""
    shown = [call for call in calls if call.found]
    takes = [call for call in calls if call.takes_away]
    if shown and _first_taken(takes, shown[-1]) == math.inf:
        return shown[-1].addresses
    deletions = _deletions(calls)
    if deletions:
        asked = _asked_since(calls, deletions[-1], math.inf)
    else:
        asked = any(call.may_give for call in calls)
    return None if asked else frozenset()


def tally(history: History) -> collections.Counter[str]:
    """How many calls of each verb there were, and how they ended."""
    return collections.Counter(
        itertools.chain.from_iterable(
            (
                f"calls: {call.verb}",
                f"calls: {call.outcome.name.lower() if call.outcome else 'running'}",
            )
            for call in history.calls
        )
    )
