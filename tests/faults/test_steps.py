"""kill -9 at every named step of a write, a start and a stop.

Each step's daemon runs on what the one before left: its start is the recovery from
that death. In the end the installed daemon serves from it, and is asked about
everybody.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import apsw
import pytest
import trio

import metis
from tests.faults.checker import Outcome, judge, judge_rows
from tests.faults.clients import PATIENT_SECONDS, ProcessCaller, Site, StubCaller
from tests.faults.counts import Counts
from tests.faults.daemon import STOP_SECONDS, Daemon
from tests.faults.load import Record
from tests.faults.stepped import STEPS

COOLDOWN = 0.2
SITE = Site("pods", ("10.1.0.0/24",))
VAST = Site("vast", ("10.64.0.0/12",))

AT_ONCE = 6
"""Calls at once, so that several are in one transaction."""

TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds to which the kernel tells when a process began (proc(5)); a GC leaves alone
what was given in the same tick."""

ROWS = 64
BLOCK_STEPS = 8
"""ADDs at once, and how often, until a new block has needed its second batch."""

STEPPED = (sys.executable, "-m", "tests.faults.stepped")

Step = tuple[str, int]
"""Its name, and the how manieth time it is to be the last."""

WRITE: list[Step] = [
    ("before BEGIN", 1),
    ("after BEGIN", 1),
    ("in a request", 1),
    ("in a request", 2),
    ("in a request", 4),
    ("after a request", 1),
    ("after a request", 3),
    ("before COMMIT", 1),
    ("in COMMIT", 1),
    ("before a write to the log", 1),
    ("before a write to the log", 2),
    ("before a write to the log", 7),
    ("in a write to the log", 1),
    ("in a write to the log", 6),
    ("after COMMIT", 1),
    ("before a request is told", 1),
    ("before a request is told", 3),
    ("before the answer is sent", 1),
    ("after the answer is sent", 1),
]
FLUSHED: list[Step] = [("before a sync of the log", 1), ("after a sync of the log", 1)]
CHECKPOINT: list[Step] = [
    ("before a checkpoint", 1),
    ("before a write to the database", 1),
    ("in a write to the database", 3),
    ("before a sync of the database", 1),
    ("after a sync of the database", 1),
    ("after a checkpoint", 1),
]
STOP: list[Step] = [
    ("before a write to the database", 2),
    ("in a write to the database", 1),
    ("before a sync of the database", 1),
    ("after a sync of the database", 1),
    ("before the log is deleted", 1),
]
SEEDING: list[Step] = [
    ("before a seeding step", 1),
    ("in a write to the log", 20),
    ("before a seeding step", 2),
    ("after a seeding step", 2),
]
START: list[Step] = [
    ("before a look at the file", 1),
    ("before a file is opened", 1),
    ("in the schema", 1),
    ("in the schema", 9),
    ("before COMMIT", 1),
    ("in COMMIT", 1),
    ("before a write to the database", 1),
    ("in a write to the database", 5),
    ("before a file is linked", 1),
    ("after a file is linked", 1),
    ("after a look at the file", 1),
    ("before a file is opened", 2),
    ("before it is made ours", 1),
    ("before the log's index grows", 1),
    ("before the log's index is mapped", 1),
    ("after it is made ours", 1),
]
HEALING: list[Step] = [
    ("before it is healed", 1),
    ("before BEGIN", 1),
    ("in the schema", 5),
    ("before COMMIT", 1),
    ("in a write to the database", 5),
    ("before a file is linked", 1),
    ("after a file is linked", 1),
    ("before a file is moved", 1),
    ("after a file is moved", 1),
    ("before a file is moved", 2),
    ("after a file is moved", 2),
    ("after it is healed", 1),
]
PLUGIN: list[Step] = [
    ("before the daemon is asked", 1),
    ("after the daemon has answered", 1),
]
DIRECT: list[Step] = [
    ("before it is made ours", 1),
    ("before BEGIN", 1),
    ("in a request", 1),
    ("before COMMIT", 1),
    ("in a write to the log", 1),
    ("after COMMIT", 1),
    ("before a request is told", 1),
    ("after the daemon has answered", 1),
]
SPOOL: list[Step] = [("before a DEL is kept", 1), ("after a DEL is kept", 1)]


@dataclass
class Chain:
    """Daemons that die one after another on one database."""

    daemon: Daemon
    counts: Counts
    stack: AsyncExitStack
    record: Record = field(default_factory=Record)
    containers: list[str] = field(default_factory=list)

    @property
    def stub(self) -> StubCaller:
        """A caller of whatever daemon serves; set by `chain`."""
        return self._stub

    _stub: StubCaller = field(init=False)

    @property
    def plugin(self) -> ProcessCaller:
        """The plugin, a process a call."""
        daemon = self.daemon
        return ProcessCaller(daemon.socket_path, daemon.db_path, daemon.cooldown)

    async def plugin_dies(self, step: Step, verb: str, name: str) -> None:
        """One call of a plugin that dies at a step."""
        caller = self.plugin
        caller.program = (*STEPPED, step[0], str(step[1]), "-")
        work = self.record.add if verb == "ADD" else self.record.delete
        call = await work(caller, SITE, name)
        assert call.outcome is Outcome.UNKNOWN, f"{step} was not reached: {call}"
        self.counts.add(f"kill -9 of a plugin {step[0]}")

    async def connect(self) -> None:
        channel = await self.stack.enter_async_context(
            metis.open_channel(metis.UnixTransport(str(self.daemon.socket_path)))
        )
        self._stub = StubCaller(channel, PATIENT_SECONDS)

    async def start(self, step: Step, *flags: str, at_once: bool = False) -> None:
        """Start a daemon that will die at a step, and wait until it serves.

        Args:
          step: where.
          flags: of the daemon, more than the usual ones.
          at_once: whether it dies before it serves; it is not waited for then.
        """
        self.marker.unlink(missing_ok=True)
        marker = "-" if at_once else str(self.marker)
        self.daemon.start([*STEPPED, step[0], str(step[1]), marker], flags)
        if not at_once:
            assert await self.daemon.ready(), self.daemon.log()

    @property
    def marker(self) -> Path:
        return self.daemon.db_path.with_name("counting")

    async def count(self) -> None:
        """Have the daemon count steps from now on."""
        self.daemon.signal(signal.SIGUSR1)
        with trio.fail_after(STOP_SECONDS):
            while not self.marker.exists():  # noqa: ASYNC110  # another process makes it
                await trio.sleep(0.002)

    async def died(self, step: Step) -> None:
        """See that the daemon died at its step, and by it."""
        status = await trio.to_thread.run_sync(self.daemon.wait)
        assert status == -signal.SIGKILL, f"{step} was not reached: {status}"
        await self.record.bury()
        self.counts.add(f"kill -9 {step[0]}")

    async def add(self, names: Sequence[str], site: Site = SITE) -> None:
        """ADDs at once."""
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(self.record.add, self.stub, site, name)

    async def delete(self, names: Sequence[str]) -> None:
        """DELs at once."""
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(self.record.delete, self.stub, SITE, name)

    async def settle(self, names: Sequence[str]) -> None:
        """Look what a death made of containers; delete half, add the others again."""
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(
                    partial(
                        self.record.check, self.stub, SITE, name, believed=frozenset()
                    )
                )
        await self.delete(names[::2])
        await self.add(names[1::2])

    async def serve(self) -> None:
        """Have the installed daemon serve."""
        self.daemon.start()
        assert await self.daemon.ready(), self.daemon.log()

    def judge(self) -> None:
        """Every promise was kept; the daemon has been stopped."""
        self.record.count(self.counts)
        faults = judge(self.record.history, COOLDOWN)
        faults += judge_rows(self.record.history, self.daemon.left())
        self.counts.add("lost, doubled or early", len(faults))
        assert not faults, "\n".join(map(str, faults))

    async def end(self) -> None:
        """The installed daemon serves everybody, stops, and has kept all promises."""
        await self.serve()
        async with trio.open_nursery() as nursery:
            for owner in self.record.history.by_owner():
                site = VAST if owner.network == VAST.network else SITE
                nursery.start_soon(
                    self.record.check, self.stub, site, owner.container, frozenset()
                )
        await self.add([f"last{number}" for number in range(AT_ONCE)])
        self.daemon.stop()
        await self.record.bury()
        self.judge()


@pytest.fixture
async def chain(tmp_path: Path, counts: Counts) -> AsyncIterator[Chain]:
    async with AsyncExitStack() as stack:
        chain = Chain(Daemon(tmp_path, COOLDOWN), counts, stack)
        await chain.connect()
        yield chain
        if chain.daemon.running:
            chain.daemon.kill()


def named(step: Step, number: int = AT_ONCE) -> list[str]:
    """Containers of a step."""
    return [f"{step[0]} {step[1]} {n}".replace(" ", "-") for n in range(number)]


async def do(chain: Chain, verb: str, names: list[str]) -> None:
    """What a step is to be found in."""
    if verb == "ADD":
        await chain.add(names)
    elif verb == "DEL":
        await chain.delete(names)
    else:
        for name in names[::2]:
            chain.record.forget(SITE, name)
        # DELs beside it, so that it shares its transaction.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chain.record.collect, chain.stub, SITE)
            nursery.start_soon(chain.delete, names[1::2])


@pytest.mark.parametrize("verb", ["ADD", "DEL", "GC"])
async def test_a_daemon_may_die_at_every_step_of_a_write(
    chain: Chain, verb: str
) -> None:
    names: list[str] = []
    for step in WRITE:
        await chain.start(step)
        await chain.settle(names)
        names = named(step)
        if verb != "ADD":
            await chain.add(names)
        await chain.count()
        await do(chain, verb, names)
        await chain.died(step)
    await chain.end()


@pytest.mark.parametrize("verb", ["ADD", "DEL"])
async def test_a_daemon_that_flushes_may_die_over_it(chain: Chain, verb: str) -> None:
    for step in FLUSHED:
        await chain.start(step, "--synchronous", "FULL")
        names = named(step)
        if verb == "DEL":
            await chain.add(names)
        await chain.count()
        await do(chain, verb, names)
        await chain.died(step)
    await chain.end()


async def test_a_daemon_may_die_at_every_step_of_a_checkpoint(chain: Chain) -> None:
    for step in CHECKPOINT:
        await chain.start(step)
        await chain.count()
        (name,) = named(step, 1)
        chain.record.is_answering = True
        while chain.record.is_answering:
            await chain.add([name])
            await chain.delete([name])
        await chain.died(step)
    await chain.end()


async def test_a_daemon_may_die_at_every_step_of_its_end(chain: Chain) -> None:
    for step in STOP:
        await chain.start(step)
        await chain.add(named(step))
        await chain.count()
        chain.daemon.signal(signal.SIGTERM)
        await chain.died(step)
    await chain.end()


async def test_a_daemon_may_die_at_every_step_of_seeding(chain: Chain) -> None:
    for step in SEEDING:
        await chain.start(step)
        await chain.count()
        chain.record.is_answering = True
        for number in range(BLOCK_STEPS):
            if chain.record.is_answering:
                names = [f"{name}-{number}" for name in named(step, ROWS)]
                await chain.add(names, VAST)
        await chain.died(step)
    await chain.end()


async def test_a_daemon_may_die_at_every_step_of_its_first_start(chain: Chain) -> None:
    for step in START:
        await chain.start(step, at_once=True)
        await chain.died(step)
    await chain.end()


async def test_a_daemon_may_die_at_every_step_of_healing_its_database(
    chain: Chain,
) -> None:
    names = [f"held{number}" for number in range(3 * AT_ONCE)]
    for step in HEALING:
        await chain.serve()
        await chain.settle(names)
        chain.daemon.stop()
        spoil(chain.daemon.db_path)
        await chain.start(step, at_once=True)
        await chain.died(step)
    await chain.end()


def spoil(path: Path) -> None:
    """Break an index, from which nobody needs to read what is lost."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    ((start, size),) = connection.execute(
        "SELECT (rootpage - 1) * page_size, page_size"
        " FROM sqlite_schema, pragma_page_size WHERE name = 'idx_ip_addresses_owner'"
    ).fetchall()
    connection.close()
    with path.open("r+b") as file:
        file.seek(int(str(start)))
        file.write(bytes(int(str(size))))


@pytest.mark.parametrize("then", ["DEL", "ADD", "nothing"])
@pytest.mark.parametrize("served", [True, False], ids=["by the daemon", "directly"])
async def test_a_plugin_may_die_at_every_step_of_an_add(
    chain: Chain, served: bool, then: str
) -> None:
    """Then its runtime sends a DEL, or the ADD again, or forgets it (a GC finds it)."""
    await chain.serve()
    if not served:
        chain.daemon.stop()
    for step in PLUGIN if served else DIRECT:
        (name,) = names = named(step, 1)
        await chain.plugin_dies(step, "ADD", name)
        caller = chain.plugin
        if then == "DEL":
            await chain.record.delete(caller, SITE, name)
        elif then == "ADD":
            again = await chain.record.add(caller, SITE, name)
            assert again.found
        else:
            chain.record.forget(SITE, name)
            await trio.sleep(2 * TICK)
            assert (await chain.record.collect(caller, SITE)).is_answered
        believed: frozenset[str] = frozenset()
        if then == "ADD":
            believed = again.addresses
        check = await chain.record.check(caller, SITE, name, believed)
        assert check.found == (then == "ADD"), names
    if served:
        chain.daemon.stop()
    await chain.end()


async def test_a_plugin_may_die_over_the_del_that_it_keeps(chain: Chain) -> None:
    """The runtime sends the DEL again; it is kept once more, and applied later."""
    for step in SPOOL:
        await chain.serve()
        (name,) = named(step, 1)
        await chain.add([name])
        chain.daemon.stop()
        hidden = chain.daemon.db_path.with_name("hidden")
        chain.daemon.db_path.rename(hidden)
        chain.daemon.db_path.mkdir()  # nobody can open that
        await chain.plugin_dies(step, "DEL", name)
        assert (await chain.record.delete(chain.plugin, SITE, name)).is_answered
        chain.daemon.db_path.rmdir()
        hidden.rename(chain.daemon.db_path)
    await chain.end()


def test_every_step_that_has_a_name_is_reached_by_a_test() -> None:
    lists = [WRITE, FLUSHED, CHECKPOINT, STOP, SEEDING, START, HEALING]
    lists += [PLUGIN, DIRECT, SPOOL]
    assert {step for steps in lists for step, _ in steps} == set(STEPS)
