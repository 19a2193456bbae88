"""Random calls on a database, with what was asked and answered, and when.

Run as a process of its own it is what a plugin without a daemon is to the database:
`python -m tests.faults.linear_worker DB NAME SEED CALLS` prints a line when a call
begins and one when it is answered, so that whoever kills it knows what it was at.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import trio

from metis.engine import Engine
from metis.errors import MetisError, NotAllocated, OwnerDeleted
from metis.model import Allocation, Pod
from metis.store import opening
from metis.store.store import open_store
from tests.faults.linear import Call
from tests.store.databases import owner, want

BLOCK = want("10.0.0.0/28")
"""13 addresses, for more owners than that: they are given back and wanted again."""

OWNERS = [f"c{number}" for number in range(18)]

COOLDOWN = 0.02
"""Seconds an address rests; some calls wait for it and some do not."""


NEVER = -math.inf
"""The end of a call that is known to have done nothing."""


def now() -> float:
    """Seconds of the clock that stored times are of, the same for all processes."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) / 1e9


def chance(seed: str) -> random.Random:
    """What random choices follow from."""
    return random.Random(seed)  # noqa: S311  # a load, not a secret


def addresses(got: Iterable[Allocation]) -> frozenset[str]:
    return frozenset(one.address for one in got)


@dataclass
class Caller:
    """Makes random calls of an engine, and writes down what came of them."""

    engine: Engine
    chance: random.Random
    tell: Callable[[Call], None]

    async def call(self) -> None:
        """One call, whichever."""
        who, begin = self.chance.choice(OWNERS), now()
        verb = self.chance.choices(
            ["ADD", "DEL", "CHECK", "GC", "cancelled ADD"], [8, 6, 2, 0.5, 1]
        )[0]
        if verb == "GC":
            await self._collect(begin)
            return
        cancelled = verb == "cancelled ADD"
        verb = verb.removeprefix("cancelled ")
        self.tell(Call(verb, who, begin, math.inf, None))
        got: frozenset[str] | None = None
        why = "given up"
        with trio.CancelScope() as scope:
            if cancelled:
                scope.deadline = trio.current_time() + self.chance.random() / 300
            try:
                got = await self.answer(verb, who)
                why = ""
            except OwnerDeleted as error:
                why = repr(error)  # whatever it had got, the DEL took back
            except MetisError as error:
                self.tell(Call(verb, who, begin, NEVER, None, repr(error)))
                return
        # One that was given up may have been carried out, but will not be any more.
        self.tell(Call(verb, who, begin, now(), got, why))

    async def answer(self, verb: str, who: str) -> frozenset[str]:
        if verb == "ADD":
            deadline = trio.current_time() + self.chance.choice([0, 0.2, 0.3])
            return addresses(
                await self.engine.allocate(
                    owner(who), [BLOCK], Pod(), deadline=deadline
                )
            )
        if verb == "DEL":
            return addresses(await self.engine.deallocate(owner(who)))
        try:
            return addresses(await self.engine.check(owner(who)))
        except NotAllocated:
            return frozenset()

    async def _collect(self, begin: float) -> None:
        kept = {(name, "eth0") for name in OWNERS if self.chance.random() < 0.9}
        gone = [name for name in OWNERS if (name, "eth0") not in kept]
        for name in gone:
            self.tell(Call("GC", name, begin, math.inf, None))
        collected = await self.engine.collect_garbage("default", kept)
        end = now()
        for who, one in collected:
            self.tell(
                Call("GC", who.container_id, begin, end, frozenset([one.address]))
            )
        taken = {who.container_id for who, _ in collected}
        for name in gone:
            if name not in taken:  # and nothing is said about what it has by now
                self.tell(Call("GC", name, begin, NEVER, None))


@dataclass
class History:
    """Calls as they are told: a beginning, then perhaps an answer.

    `undone` are those that are known to have done nothing; they are for people.
    """

    answered: list[Call] = field(default_factory=list)
    undone: list[Call] = field(default_factory=list)
    open: dict[tuple[str, str, float], Call] = field(default_factory=dict)

    def note(self, call: Call) -> None:
        key = call.verb, call.owner, call.begin
        if call.end == math.inf:
            self.open[key] = call
            return
        self.open.pop(key, None)
        (self.undone if call.end == NEVER else self.answered).append(call)

    def add(self, other: History) -> None:
        """Take in what another process did."""
        self.answered += other.answered
        self.undone += other.undone
        self.open |= other.open

    @property
    def calls(self) -> list[Call]:
        return [*self.answered, *self.open.values()]


def line_of(call: Call, name: str) -> str:
    got = None if call.addresses is None else sorted(call.addresses)
    return json.dumps(
        [name, call.verb, call.owner, call.begin, call.end, got, call.error]
    )


def call_of(line: str) -> Call:
    _, verb, who, begin, end, got, error = json.loads(line)
    addresses = None if got is None else frozenset(got)
    return Call(verb, who, begin, end, addresses, error)


async def main(path: str, name: str, seed: str, count: int) -> None:
    def tell(call: Call) -> None:
        print(line_of(call, name), flush=True)

    async with open_store(path, release_cooldown=COOLDOWN) as store:
        caller = Caller(Engine(store), chance(seed), tell)
        for _ in range(count):
            await caller.call()


if __name__ == "__main__":
    opening.OPENING_SECONDS = 120.0  # whoever opens it just now may be held up
    trio.run(main, sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
