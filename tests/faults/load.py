"""Clients that keep a node busy with everything there is, and note all of it.

Each client has containers of its own, and makes one call after another about one of
them, chosen at random: new ones, the same again, two at once, a DEL, and after a
call that was not answered one of the three things that a runtime may do: a DEL, the
ADD again, or nothing. What is left by nothing is for the GC.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import trio

import metis
from tests.faults.checker import Call, History, Outcome, Owner, tally
from tests.faults.clients import (
    Caller,
    NoAnswer,
    NotSent,
    PluginCaller,
    ProcessCaller,
    Refused,
    Site,
    StubCaller,
    boottime_ms,
)
from tests.faults.counts import Counts
from tests.faults.daemon import Daemon

MOST_HELD = 3
"""Containers of one client that hold something, or may."""

GIVEN_UP = 0.05
"""Part of the ADDs that are given up at once, as by a runtime that lost patience."""

NOTICED_SECONDS = 120.0
"""Until a client must have noticed that its connection is gone."""

CHANNELS = 4
"""Connections that the clients on the socket share."""

RESTS = 250
"""Answers of everybody between two calls of a plugin that is a process a call."""

PAUSE = 0.05
"""Seconds of rest after a call that could not even be sent."""


def chance_of(seed: str | float) -> random.Random:
    """Random choices that follow from a seed."""
    return random.Random(seed)  # noqa: S311  # the seed is printed, no secret


class Record:
    """A history, and who makes the calls; `checker.judge` takes it from there.

    Attributes:
      history: every call.
      answers: how many were answered or refused.
      changes: how many ADDs and DELs were answered.
      is_over: whether clients shall make no more calls.
      silences: what was known of the calls that were not answered.
      is_answering: whether the last call to end was answered or refused.
    """

    def __init__(self) -> None:
        self.history = History()
        self.answers = 0
        self.changes = 0
        self.is_over = False
        self.is_answering = True
        self.silences: list[str] = []
        self._on_socket: set[Call] = set()
        self._possible: dict[str, set[str]] = {}
        self._unknown: list[Call] = []
        self._progress = trio.Event()

    def possible(self, network: str) -> frozenset[str]:
        """Containers of a network that may hold something, or be about to."""
        return frozenset(self._possible.get(network, ()))

    def forget(self, site: Site, container: str) -> None:
        """Leave a container to the GC; no call about it may run."""
        self._possible.get(site.network, set()).discard(container)

    async def add(self, caller: Caller, site: Site, container: str) -> Call:
        """An ADD; the call tells how it ended."""
        self._possible.setdefault(site.network, set()).add(container)
        call = self._begin("ADD", site.owner(container))
        await self._carry_out(call, caller, lambda: caller.add(site, container))
        return call

    async def delete(self, caller: Caller, site: Site, container: str) -> Call:
        """A DEL."""

        async def delete() -> frozenset[str]:
            await caller.delete(site, container)
            return frozenset()

        call = self._begin("DEL", site.owner(container))
        await self._carry_out(call, caller, delete)
        if call.is_answered:
            self.forget(site, container)
        return call

    async def check(
        self, caller: Caller, site: Site, container: str, believed: frozenset[str]
    ) -> Call:
        """A CHECK."""
        call = self._begin("CHECK", site.owner(container))
        await self._carry_out(
            call, caller, lambda: caller.check(site, container, believed)
        )
        return call

    async def collect(self, caller: Caller, site: Site) -> Call:
        """A GC that keeps everything which may hold something and was not forgotten."""
        taken_ms = boottime_ms() - 1  # whoever begins from now on was given it later
        kept = self.possible(site.network)

        async def collect() -> frozenset[str]:
            await caller.collect(site, kept, taken_ms)
            return frozenset()

        call = self.history.begin(
            "GC", Owner(site.network, "", ""), time.monotonic(), kept
        )
        await self._carry_out(call, caller, collect)
        return call

    async def bury(self) -> None:
        """The daemon is dead: so are the calls that it took and did not answer."""
        now, running = time.monotonic(), set(self._on_socket)
        with trio.fail_after(NOTICED_SECONDS):
            while running & self._on_socket:
                await self._progress.wait()
        for call in self._unknown:
            call.outcome, call.ended = Outcome.DEAD, max(call.ended, now)
        self._unknown.clear()

    def begin_anew(self) -> None:
        """Let there be other clients; what the former ones have is left to the GC."""
        self.is_over = False
        self._possible.clear()

    def finish(self) -> None:
        """Have clients make no more calls."""
        self.is_over = True
        self._progress.set()

    async def progress(self, answers: int) -> None:
        """Wait until so many more calls were answered, or it is over."""
        until = self.answers + answers
        while self.answers < until and not self.is_over:
            await self._progress.wait()

    def count(self, counts: Counts) -> None:
        """Note what was done."""
        for what, number in tally(self.history).items():
            counts.add(what, number)
        given = [one for one in self.history.calls if one.verb == "ADD" and one.found]
        counts.add("addresses given", sum(len(one.addresses) for one in given))

    def _begin(self, verb: str, owner: Owner) -> Call:
        return self.history.begin(verb, owner, time.monotonic())

    async def _carry_out(
        self,
        call: Call,
        caller: Caller,
        work: Callable[[], Awaitable[frozenset[str]]],
    ) -> None:
        addresses: frozenset[str] = frozenset()
        outcome = Outcome.UNKNOWN  # also for a client that gives up
        if caller.dies_with_daemon:
            self._on_socket.add(call)
        try:
            addresses = await work()
            outcome = Outcome.ANSWERED
        except Refused:
            outcome = Outcome.REFUSED
        except NotSent:
            outcome = Outcome.UNSENT
        except NoAnswer as error:
            self.silences.append(f"{call.verb}: {error}")
        finally:
            self.history.end(call, outcome, time.monotonic(), addresses)
            self._on_socket.discard(call)
            self.is_answering = outcome in (Outcome.ANSWERED, Outcome.REFUSED)
            if outcome is Outcome.UNKNOWN:
                self._unknown.append(call)
            elif outcome is not Outcome.UNSENT:
                self.answers += 1
                self.changes += call.is_answered and call.verb in ("ADD", "DEL")
            self._progress.set()
            self._progress = trio.Event()
        if outcome is Outcome.UNSENT:
            await trio.sleep(PAUSE)  # until somebody serves again


@dataclass
class Container:
    """What a client believes of one of its containers."""

    site: Site
    name: str
    believed: frozenset[str] = frozenset()
    is_sure: bool = True


@dataclass
class Client:
    """One of the clients, until the record is over.

    Attributes:
      caller: makes its calls.
      record: notes them.
      sites: the networks that it uses.
      chance: what its choices follow from.
      name: of its containers.
      rests: so many answers of all clients between two of its calls.
    """

    caller: Caller
    record: Record
    sites: Sequence[Site]
    chance: random.Random
    name: str
    rests: int = 0
    held: list[Container] = field(default_factory=list)
    gone: list[Container] = field(default_factory=list)
    made: int = 0

    async def run(self) -> None:
        """Make calls, one after another, until the record is over."""
        while not self.record.is_over:
            await self.record.progress(self.rests)
            await self._turn()

    async def _turn(self) -> None:
        unsure = [one for one in self.held if not one.is_sure]
        if unsure:
            await self._make_sure(unsure[0])
        elif len(self.held) < MOST_HELD and self.chance.random() < 0.6:
            await self._start()
        elif self.held:
            await self._go_on(self.chance.choice(self.held))
        else:
            await self._start()

    async def _start(self) -> None:
        """A new container, or now and then one that was deleted."""
        if self.gone and self.chance.random() < 0.2:
            one = self.gone.pop()
            if self.chance.random() < 0.3:
                await self.record.check(self.caller, one.site, one.name, one.believed)
        else:
            self.made += 1
            site = self.chance.choice(self.sites)
            one = Container(site, f"{self.name}-{self.made}")
        self.held.append(one)
        if self.chance.random() < GIVEN_UP:
            one.is_sure = False
            with trio.move_on_after(self.chance.uniform(0, 0.01)):
                await self._add(one)
        else:
            await self._add(one)

    async def _go_on(self, one: Container) -> None:
        """Something about a container that holds what is believed."""
        choice = self.chance.random()
        if choice < 0.05:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.record.add, self.caller, one.site, one.name)
                nursery.start_soon(self._add, one)
        elif choice < 0.25:
            await self._add(one)
        elif choice < 0.5:
            await self.record.check(self.caller, one.site, one.name, one.believed)
        else:
            await self._delete(one)

    async def _make_sure(self, one: Container) -> None:
        """After a call that was not answered: DEL, ADD again, or leave it to the GC."""
        choice = self.chance.random()
        if choice < 0.45:
            await self._delete(one)
        elif choice < 0.9:
            await self._add(one)
        else:
            self.held.remove(one)
            self.record.forget(one.site, one.name)

    async def _add(self, one: Container) -> None:
        call = await self.record.add(self.caller, one.site, one.name)
        one.is_sure = call.outcome is not Outcome.UNKNOWN
        if call.is_answered:
            one.believed = call.addresses
        elif one.is_sure and not one.believed:
            self.held.remove(one)
            self.record.forget(one.site, one.name)

    async def _delete(self, one: Container) -> None:
        call = await self.record.delete(self.caller, one.site, one.name)
        one.is_sure = call.outcome is not Outcome.UNKNOWN
        if call.is_answered:
            self.held.remove(one)
            self.gone = [*self.gone[-2:], one]


async def collect_garbage(
    caller: Caller, record: Record, sites: Sequence[Site], chance: random.Random
) -> None:
    """The GC of a runtime, after every hundred answers or so."""
    while not record.is_over:
        await record.progress(chance.randint(20, 150))
        await record.collect(caller, chance.choice(sites))


@dataclass(frozen=True)
class Crowd:
    """How many clients there are, by the way they call.

    Attributes:
      on_socket: stubs, which share CHANNELS connections.
      in_workers: plugins that stay, each in a process.
      processes: plugins that are a process a call, of which there are few: each
        costs a third of a second.
    """

    on_socket: int
    in_workers: int = 0
    processes: int = 0


@asynccontextmanager
async def at_work(
    daemon: Daemon,
    record: Record,
    chance: random.Random,
    sites: Sequence[Site],
    crowd: Crowd,
) -> AsyncIterator[list[PluginCaller]]:
    """A crowd at work for the body of an `async with`; a GC is among them.

    Whatever containers there were before are nobody's any more, and left to the GC.

    Yields:
      The plugins in workers, which may be killed.
    """
    record.begin_anew()
    places = daemon.socket_path, daemon.db_path, daemon.cooldown
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                metis.open_channel(metis.UnixTransport(str(daemon.socket_path)))
            )
            for _ in range(CHANNELS)
        ]
        workers = [PluginCaller(*places) for _ in range(crowd.in_workers)]
        stubs = [StubCaller(channels[n % CHANNELS]) for n in range(crowd.on_socket)]
        processes = [ProcessCaller(*places) for _ in range(crowd.processes)]
        prefix = f"{chance.getrandbits(32):08x}"
        async with trio.open_nursery() as nursery:
            callers: list[Caller] = [*stubs, *workers, *processes]
            for number, caller in enumerate(callers):
                client = Client(
                    caller,
                    record,
                    sites,
                    chance_of(chance.random()),
                    f"{prefix}-{number}",
                    rests=RESTS if caller in processes else 0,
                )
                nursery.start_soon(client.run)
            for caller in (callers[0], *workers[:1]):
                its_chance = chance_of(chance.random())
                nursery.start_soon(collect_garbage, caller, record, sites, its_chance)
            yield workers
            record.finish()
        for worker in workers:
            await worker.end()
