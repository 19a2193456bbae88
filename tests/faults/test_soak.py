"""Days of a node in minutes, with every fault in between: it ends as it began.

The only test of the bench that compares times, and only with its own.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import apsw
import pytest
import trio

import metis
from metis.model import CIDRBlock
from metis.store import blocks, seeding
from tests.e2e import isolation
from tests.faults.checker import judge, judge_rows
from tests.faults.clients import PATIENT_SECONDS, Site, StubCaller
from tests.faults.counts import Counts
from tests.faults.daemon import Daemon
from tests.faults.load import Crowd, Record, at_work, chance_of
from tests.faults.test_pressure import stopped_writer

CHANGES = 200_000
"""ADDs and DELs."""

SECONDS = 30
"""Of every fault."""

COOLDOWN = 0.2

SITES = [Site(f"pods-{bits}", (f"10.{bits}.0.0/{bits}",)) for bits in range(16, 29)]
"""Thirteen networks, from 13 pods to 65,533."""

CLIENTS = Crowd(on_socket=16, in_workers=1)
TMPFS_SIZE = "256m"
OWN = "small"
"""Name of the directory where a file system of its own is mounted."""

BATCHES = 8
PROBES = 100
"""ADDs and DELs of a batch, one after another. Latency is the median of the quickest
batch: the machine has others to serve, who may come and go meanwhile."""

MEASUREMENTS = 30
PAUSE = 1.0
"""How often it is measured, and seconds in between, until the latency is what it was:
whoever else the machine serves may stay for a while."""

STEPPED = (sys.executable, "-m", "tests.faults.stepped")
DAY = 86_400

GROWTH = {"bytes": 3.0, "memory": 1.5, "descriptors": 1.25, "latency": 3.0}
"""How many times as much the end may have as the beginning. The records of those
that are gone reach their bounds (100,000 past owners, 65,536 deleted ones) after the
beginning was measured, so the file grows; the machine has others to serve."""


@dataclass(frozen=True)
class Measures:
    """What a daemon takes while nobody calls, and how long a call then does.

    Attributes:
      bytes: the database and its log.
      memory: resident, in KiB.
      descriptors: open ones.
      latency: seconds of an ADD or a DEL; see PROBES.
    """

    bytes: int
    memory: int
    descriptors: int
    latency: float

    def has_slowed_down(self, before: Measures) -> bool:
        """Whether a call takes out of proportion."""
        return self.latency > GROWTH["latency"] * before.latency

    def has_outgrown(self, before: Measures) -> list[str]:
        """What is out of proportion."""
        return [
            f"{name}: {getattr(before, name)}, then {getattr(self, name)}"
            for name, times in GROWTH.items()
            if getattr(self, name) > times * getattr(before, name)
        ]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own where that can be had."""
    if not isolation.inside() or os.geteuid() != 0:
        yield tmp_path
        return
    directory = tmp_path / OWN
    directory.mkdir()
    options = ["-o", f"size={TMPFS_SIZE}"]
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", directory], check=True)
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """A file system without a free byte, for the body of a `with`."""
    filler = directory / "filler"
    piece = bytes(1 << 16)
    with filler.open("wb", buffering=0) as file:
        try:
            while piece:
                if file.write(piece) < len(piece):
                    piece = piece[: len(piece) // 2]
        except OSError:
            pass
    yield
    filler.unlink()


@contextmanager
def locked(db_path: Path) -> Iterator[None]:
    """Somebody has begun to write and was stopped, for the body of a `with`."""
    with stopped_writer(db_path) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"locked\n"
            yield
        finally:
            holder.kill()


def seed_whole(db_path: Path) -> None:
    """Give every network all of its rows, which it else gets as it needs them."""
    connection = apsw.Connection(str(db_path))
    seeding.register(connection)
    connection.pragma("foreign_keys", True)
    with connection:
        for site in SITES:
            block = CIDRBlock.parse(site.subnets[0])
            blocks.add_block(connection, 0, site.network, block)
            (row,) = blocks.read_blocks(connection, site.network, block.family)
            stop: int | None = row.seeded_ips
            while stop is not None:
                stop = seeding.extend(connection, 0, row.id, block, stop)
    connection.close()


class Soak:
    """One daemon's life."""

    def __init__(self, directory: Path, counts: Counts, chance: random.Random) -> None:
        self.directory = directory
        self.daemon = Daemon(directory, COOLDOWN)
        self.record = Record()
        self.counts = counts
        self.chance = chance

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        async with at_work(self.daemon, self.record, self.chance, SITES, CLIENTS):
            yield

    async def start(self, *program: str) -> None:
        self.daemon.start(*[program] if program else [])
        assert await self.daemon.ready(), self.daemon.log()

    async def work(self, changes: int) -> None:
        """So many ADDs and DELs without faults."""
        until = self.record.changes + changes
        async with self.load():
            while self.record.changes < until:
                await self.record.progress(100)

    async def measure(self) -> Measures:
        """What it takes by now."""
        batches = []
        site, name = SITES[-5], f"probe-{self.chance.getrandbits(32):08x}"
        async with metis.open_channel(
            metis.UnixTransport(str(self.daemon.socket_path))
        ) as channel:
            stub = StubCaller(channel, PATIENT_SECONDS)
            for batch in range(BATCHES):
                took = []
                for number in range(PROBES // 2):
                    one = f"{name}-{batch}-{number}"
                    for call in (
                        await self.record.add(stub, site, one),
                        await self.record.delete(stub, site, one),
                    ):
                        assert call.is_answered, call
                        took.append(call.ended - call.began)
                batches.append(statistics.median(took))
            process = Path("/proc") / str(self.daemon.pid)
            status = (process / "status").read_text()
            resident = status.partition("VmRSS:")[2].split()[0]
            files = [self.daemon.db_path, Path(f"{self.daemon.db_path}-wal")]
            return Measures(
                sum(file.stat().st_size for file in files if file.exists()),
                int(resident),
                len(list((process / "fd").iterdir())),
                min(batches),
            )

    async def measure_again(self, before: Measures) -> Measures:
        """What it takes by now, when the machine is as idle as it was before."""
        for _ in range(MEASUREMENTS):
            found = await self.measure()
            if not found.has_slowed_down(before):
                break
            await trio.sleep(PAUSE)
        return found

    async def fault(
        self, what: str, seconds: float, work: Callable[[float], Awaitable[None]]
    ) -> None:
        """Clients at work while a fault lasts, and until they are answered again."""
        async with self.load():
            await self.record.progress(20)
            await work(time.monotonic() + seconds)
            await self.record.progress(20)
        self.counts.add(f"soak: seconds of {what}", round(seconds))

    async def kills(self, until: float) -> None:
        while time.monotonic() < until:
            await self.record.progress(self.chance.randint(1, 60))
            self.daemon.kill()
            self.daemon.start()
            await self.record.bury()
            assert await self.daemon.ready(), self.daemon.log()
            self.counts.add("kill -9 of the daemon")

    async def stopped_writers(self, until: float) -> None:
        while time.monotonic() < until:
            with locked(self.daemon.db_path):
                await trio.sleep(self.chance.uniform(0.2, 1.5))  # how long it lasts
            await self.record.progress(20)
            self.counts.add("writers that were stopped in a transaction")

    async def full_disk(self, until: float) -> None:
        while time.monotonic() < until:
            with filled(self.directory):
                await trio.sleep(self.chance.uniform(0.2, 1.5))  # how long it lasts
            await self.record.progress(20)
            self.counts.add("times that the file system was full")

    async def wrong_clock(self, until: float) -> None:
        days = 1
        while time.monotonic() < until:
            self.daemon.stop()
            await self.record.bury()
            await self.start(*STEPPED, "--wall", str(days * DAY))
            await self.record.progress(200)
            self.counts.add("wall clock stepped by a day")
            days = -days
        self.daemon.stop()
        await self.record.bury()
        await self.start()


async def test_a_node_is_after_every_fault_what_it_was_before(
    place: Path,
    counts: Counts,
    seed: str,
    scaled: Callable[[int], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    soak = Soak(place, counts, chance_of(seed))
    seconds = scaled(SECONDS)
    await soak.start()
    soak.daemon.stop()
    seed_whole(soak.daemon.db_path)
    await soak.start()
    await soak.work(scaled(CHANGES) // 5)
    first = await soak.measure()
    await soak.fault("a stopped writer", seconds, soak.stopped_writers)
    if place.name == OWN:
        await soak.fault("a full file system", seconds, soak.full_disk)
    await soak.work(scaled(CHANGES) * 2 // 5)
    same = await soak.measure_again(first)
    await soak.fault("kill -9", seconds, soak.kills)
    await soak.fault("a wrong wall clock", seconds, soak.wrong_clock)
    await soak.work(scaled(CHANGES) * 2 // 5)
    last = await soak.measure_again(first)
    soak.daemon.stop()
    await soak.record.bury()

    soak.record.count(counts)
    counts.add("soak: ADDs and DELs answered", soak.record.changes)
    with capsys.disabled():
        print(f"\nsoak: {first}\nsoak: {same}\nsoak: {last}")
    faults = judge(soak.record.history, COOLDOWN)
    faults += judge_rows(soak.record.history, soak.daemon.left())
    counts.add("lost, doubled or early", len(faults))
    assert not faults, "\n".join(map(str, faults))
    assert not same.has_outgrown(first)
    assert not last.has_outgrown(first)
