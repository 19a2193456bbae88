"""Slow commits, a full network, a lock whose holder was stopped: waits are bounded."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio
import trio.testing

import metis
from tests.faults.checker import Call, Outcome, judge, judge_rows
from tests.faults.clients import (
    PATIENT_SECONDS,
    PluginCaller,
    ProcessCaller,
    Site,
    StubCaller,
)
from tests.faults.counts import Counts
from tests.faults.daemon import Daemon
from tests.faults.load import Record, chance_of

COOLDOWN = 0.2
PODS = Site("pods", ("10.1.0.0/20",))
SMALL = Site("small", ("10.2.0.0/26",))
HELD = 61
"""Addresses that a /26 has for pods."""

LONG_COOLDOWNS = (5.0, 20.0, 80.0)
"""Seconds for which ADDs wait, and within which everybody else must be done; the longer
ones for a machine that did not give everybody else so much time."""

SLOW_COMMIT = 0.05
"""Seconds that each commit takes on a disk that is slow."""

SLOW = (sys.executable, "-m", "tests.faults.stepped", "--slow", str(SLOW_COMMIT))

WAITING = 50
"""ADDs that wait."""

LOCKED_SECONDS = 120.0
"""Within which everybody has an answer while the lock is held: a plugin asks the
daemon for 10 s and then the database for as long, and the machine may be busy."""

HOLDER = """
import os, signal, sys, apsw
connection = apsw.Connection(sys.argv[1])
connection.set_busy_timeout(60_000)
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE cidr_blocks SET updated_at = updated_at + 1")
print("locked", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
connection.execute("ROLLBACK")
"""
"""A program that has begun to write as it is stopped."""


def stopped_writer(db_path: Path) -> subprocess.Popen[bytes]:
    """A program that will say "locked" and be stopped then (HOLDER)."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(db_path)], stdout=subprocess.PIPE
    )


@asynccontextmanager
async def serving(
    directory: Path, program: tuple[str, ...] = (), cooldown: float = COOLDOWN
) -> AsyncIterator[tuple[Daemon, StubCaller]]:
    """A daemon, which stops well in the end, and a stub on a channel to it."""
    daemon = Daemon(directory, cooldown)
    daemon.start(*[program] if program else [])
    try:
        assert await daemon.ready(), daemon.log()
        async with metis.open_channel(
            metis.UnixTransport(str(daemon.socket_path))
        ) as channel:
            yield daemon, StubCaller(channel, PATIENT_SECONDS)
            daemon.stop()
    finally:
        if daemon.running:
            daemon.kill()


def verdict(daemon: Daemon, record: Record, counts: Counts) -> None:
    """Every promise was kept."""
    record.count(counts)
    faults = judge(record.history, daemon.cooldown)
    faults += judge_rows(record.history, daemon.left())
    counts.add("lost, doubled or early", len(faults))
    assert not faults, "\n".join(map(str, faults))


async def test_an_add_that_waits_for_slow_commits_is_done_or_has_written_nothing(
    tmp_path: Path, counts: Counts, seed: str
) -> None:
    """300 at once, most of them with too little time; those that fail send a DEL."""
    chance, record = chance_of(seed), Record()
    held: set[str] = set()
    async with serving(tmp_path, SLOW) as (daemon, stub):
        channel = stub.channel

        async def attempt(name: str) -> None:
            call = await record.add(
                StubCaller(channel, chance.uniform(0.02, 3)), PODS, name
            )
            if call.is_answered:
                held.add(name)
                return
            if call.outcome is Outcome.REFUSED:
                check = await record.check(stub, PODS, name, frozenset())
                assert not check.found, f"{call}, then {check}"
            # As a runtime does. It has time of its own, and that must suffice.
            deletion = await record.delete(stub, PODS, name)
            assert deletion.is_answered, deletion

        for turn in range(10):
            async with trio.open_nursery() as nursery:
                for number in range(300):
                    nursery.start_soon(attempt, f"pod-{turn}-{number}")
            counts.add("ADDs at once while each commit takes 50 ms", 300)
    left = daemon.left()
    assert {owner.container for owner in left} == held
    assert 0 < len(held) < 3000
    counts.add("of them done", len(held))
    await record.bury()
    verdict(daemon, record, counts)


async def test_nobody_waits_behind_the_adds_of_a_network_that_is_full(
    tmp_path: Path, counts: Counts
) -> None:
    for cooldown in LONG_COOLDOWNS:
        directory = tmp_path / f"{cooldown:g}"
        directory.mkdir()
        if await nobody_waits_behind_adds_that_wait(directory, counts, cooldown):
            return
    raise AssertionError(f"others waited, whatever the cooldown: {LONG_COOLDOWNS}")


async def nobody_waits_behind_adds_that_wait(
    directory: Path, counts: Counts, cooldown: float
) -> bool:
    """Whether everybody else was done before the first of those that wait."""
    record = Record()
    served = serving(directory, cooldown=cooldown)
    async with served as (daemon, stub):
        patient = StubCaller(stub.channel, cooldown + PATIENT_SECONDS)

        async def all_of(work: Callable[[str], Awaitable[Call]], names: str) -> None:
            async with trio.open_nursery() as nursery:
                for number in range(WAITING):
                    nursery.start_soon(work, f"{names}-{number}")

        async with trio.open_nursery() as nursery:
            for number in range(HELD):
                nursery.start_soon(record.add, stub, SMALL, f"held-{number}")
        await all_of(partial(record.delete, stub, SMALL), "held")
        start = len(record.history.calls)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(all_of, partial(record.add, patient, SMALL), "waiting")
            await trio.testing.wait_all_tasks_blocked()
            await all_of(partial(record.add, stub, PODS), "elsewhere")
            await all_of(partial(record.add, stub, PODS), "more-elsewhere")
            await record.delete(stub, SMALL, f"held-{HELD - 1}")
    calls = record.history.calls[start:]
    assert all(call.is_answered for call in calls)
    waiting = [call for call in calls if call.owner.container.startswith("waiting")]
    others = [call for call in calls if call not in waiting]
    assert (len(waiting), len(others)) == (WAITING, 2 * WAITING + 1)
    counts.add("ADDs that wait for a full network", len(waiting))
    counts.add("ADDs and DELs beside them", len(others))
    verdict(daemon, record, counts)
    return max(one.ended for one in others) < min(one.ended for one in waiting)


async def test_a_lock_whose_holder_was_stopped_is_waited_for_a_bounded_time(
    tmp_path: Path, counts: Counts
) -> None:
    record = Record()
    async with serving(tmp_path) as (daemon, stub):
        await record.add(stub, PODS, "held")
        places = daemon.socket_path, daemon.db_path, daemon.cooldown
        plugin, process = PluginCaller(*places), ProcessCaller(*places)
        hasty = StubCaller(stub.channel)
        with stopped_writer(daemon.db_path) as holder:
            assert holder.stdout is not None
            assert await trio.to_thread.run_sync(holder.stdout.readline) == b"locked\n"
            before = time.monotonic()
            async with trio.open_nursery() as nursery:
                for number in range(40):
                    nursery.start_soon(record.add, hasty, PODS, f"stub-{number}")
                nursery.start_soon(record.add, plugin, PODS, "worker")
                nursery.start_soon(record.add, process, PODS, "process")
                # Reads wait for nobody.
                check = await record.check(stub, PODS, "held", frozenset())
                assert check.found
            assert time.monotonic() - before < LOCKED_SECONDS
            counts.add("calls while the holder of the lock was stopped", 43)
            adds = record.history.calls[1:]
            assert not [call for call in adds if call.verb == "ADD" and call.found]
            holder.send_signal(signal.SIGCONT)
            assert await trio.to_thread.run_sync(holder.wait) == 0
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(record.add, stub, PODS, f"stub-{number}")
            nursery.start_soon(record.add, plugin, PODS, "worker")
        await plugin.end()
        last = record.history.calls[-41:]
        assert all(call.found for call in last)
    await record.bury()
    verdict(daemon, record, counts)


async def test_a_daemon_that_hung_does_nothing_that_was_given_up_meanwhile(
    tmp_path: Path, counts: Counts
) -> None:
    """A DEL that it never read was made by the plugin itself, and an ADD after it."""
    record = Record()
    async with serving(tmp_path) as (daemon, stub):
        plugin = PluginCaller(daemon.socket_path, daemon.db_path, daemon.cooldown)
        for number in range(3):
            name = f"pod-{number}"
            assert (await record.add(stub, PODS, name)).found
            daemon.signal(signal.SIGSTOP)
            hasty = StubCaller(stub.channel, 0.2)
            given_up = await record.delete(hasty, PODS, name)
            deleted = await record.delete(plugin, PODS, name)
            again = await record.add(plugin, PODS, name)
            daemon.signal(signal.SIGCONT)
            await record.add(stub, PODS, f"other-{number}")  # it has caught up
            check = await record.check(stub, PODS, name, frozenset())
            assert given_up.outcome is Outcome.UNKNOWN
            assert deleted.is_answered
            assert again.found
            assert check.addresses == again.addresses
            counts.add("daemons that hung and went on")
        await plugin.end()
    await record.bury()
    verdict(daemon, record, counts)
