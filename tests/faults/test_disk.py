"""A disk that is full, read-only or slow, and a write lock that somebody keeps.

Calls are answered in time, with an error that tells a runtime to try again; reads go
on; nothing is written by halves; and when the fault is over, everything works again
without anybody's help.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest
import trio
from grpclib import GRPCError, Status
from trio.testing import MockClock

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
    IpConfig,
)
from metis.cni.client import STATUS_CODES
from metis.cni.protocol import TRY_AGAIN_LATER
from metis.engine import Engine
from metis.errors import StoreBusy, StoreUnavailable
from metis.model import Owner, Pod, Wanted
from metis.service import grpc_error
from metis.store import connecting, database
from metis.store.store import Store, open_store
from tests.e2e import isolation
from tests.e2e.requirements import unmet
from tests.faults.clients import PATIENT_SECONDS
from tests.faults.counts import Counts
from tests.faults.promises import Promises
from tests.faults.vfs import Faults, faulty_files, faulty_system_call
from tests.serving import serving
from tests.store.databases import owner, want

IPV4 = want("10.0.0.0/24")
NEW = want("10.1.0.0/24")
NEW_IPV6 = want("fd00::/120")

COOLDOWN = 60.0

PAGE = 4096

DISK_PAGES = 2048
"""Pages of the small file system: 8 MiB, so that what fills it is never our log, which
has 4 MiB before it is folded into the file."""

MOST_FREE = 64
"""Free pages with which every step of a test finds room. What needs the most, 256
new rows and their indexes, writes some 30."""


class Disk:
    """A small file system, and a file that takes up what shall not be free."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "metis.sqlite"
        self._filler = root / "filler"

    @property
    def free_pages(self) -> int:
        return os.statvfs(self.root).f_bavail

    def leave(self, pages: int) -> None:
        """Take up all but so many pages."""
        self.clear()
        surplus = self.free_pages - pages
        if surplus > 0:
            descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT)
            os.posix_fallocate(descriptor, 0, surplus * PAGE)
            os.close(descriptor)
        assert self.free_pages <= pages

    def clear(self) -> None:
        """Give all of it back."""
        self._filler.unlink(missing_ok=True)

    def remount(self, option: str) -> None:
        mount("-o", f"remount,{option}", str(self.root))


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if not isolation.inside():
        unmet("a small file system is mounted: run as root, with util-linux")
    root = tmp_path / "disk"
    root.mkdir()
    mount("-t", "tmpfs", "-o", f"size={DISK_PAGES * PAGE}", "tmpfs", str(root))
    try:
        yield Disk(root)
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


class Desk:
    """Calls on one store, and what they promise."""

    def __init__(self, store: Store, promises: Promises) -> None:
        self.store = store
        self.engine = Engine(store)
        self.promises = promises
        self.refused = 0

    async def add(self, who: Owner, *wanted: Wanted) -> bool:
        deadline = trio.current_time() + PATIENT_SECONDS
        try:
            got = await self.engine.allocate(who, wanted, Pod(), deadline=deadline)
        except StoreUnavailable as error:
            self._refused(error)
            self.promises.not_given(who, len(wanted))
            return False
        self.promises.check_given(who, got, self.engine.now_ms())
        return True

    async def delete(self, who: Owner) -> bool:
        end_ms = self.engine.now_ms() + round(COOLDOWN * 1000)
        try:
            released = await self.engine.deallocate(who)
        except StoreUnavailable as error:
            self._refused(error)
            self.promises.not_taken(who)
            return False
        self.promises.taken(who, released, end_ms)
        return True

    async def collect(self, *kept: str) -> bool:
        end_ms = self.engine.now_ms() + round(COOLDOWN * 1000)
        try:
            gone = await self.engine.collect_garbage(
                "garbage", {(name, "eth0") for name in kept}
            )
        except StoreUnavailable as error:
            self._refused(error)
            for who in self.promises.sure:
                if who.network == "garbage" and who.container_id not in kept:
                    self.promises.not_taken(who)
            return False
        for who, one in gone:
            self.promises.taken(who, [one], end_ms)
        return True

    def checkpoint(self) -> None:
        """Have the next write fold the log into the file first, and another one."""
        inner = self.store._database
        assert isinstance(inner, database.Database)
        inner._checkpoint_at = inner._fold_at = 1

    async def reads_go_on(self, *, wrote_nothing: bool = True) -> None:
        """What is held can be read; what failed has not been written at all."""
        for who, addresses in self.promises.sure.items():
            held = await self.store.held(who)
            if wrote_nothing:
                assert {one.address for one in held} == addresses
            self.promises.check_held(who, held)
        assert (await self.store.list_addresses("", 10)).rows

    def _refused(self, error: StoreUnavailable) -> None:
        self.refused += 1
        status = grpc_error(error).status
        assert STATUS_CODES[status] == TRY_AGAIN_LATER


STEPS: dict[str, Callable[[Desk], Awaitable[bool]]] = {
    "ADD": lambda desk: desk.add(owner("new"), IPV4),
    "ADD of a held address": lambda desk: desk.add(owner("c1"), IPV4),
    "ADD, dual stack, with new blocks": lambda desk: desk.add(
        owner("dual", "other"), NEW, NEW_IPV6
    ),
    "DEL": lambda desk: desk.delete(owner("c2")),
    "DEL of nothing": lambda desk: desk.delete(owner("nobody")),
    "GC": lambda desk: desk.collect("g0"),
}


async def prepared(desk: Desk) -> None:
    """Some owners, before the fault comes."""
    for number in range(5):
        assert await desk.add(owner(f"c{number}"), IPV4)
        assert await desk.add(owner(f"g{number}", "garbage"), IPV4)


def check(path: Path, promises: Promises) -> None:
    connection = apsw.Connection(str(path))
    promises.check_file(connection)
    connection.close()


@pytest.mark.parametrize("folding", [False, True])
@pytest.mark.parametrize("step", STEPS)
async def test_a_full_disk_refuses_writes_whole_and_heals_when_there_is_room(
    disk: Disk, counts: Counts, full: bool, step: str, folding: bool
) -> None:
    refused = 0
    for free in [*range(12), *range(12, MOST_FREE, 1 if full else 8)]:
        disk.clear()
        for each in disk.root.iterdir():
            each.unlink()
        async with open_store(str(disk.path), release_cooldown=COOLDOWN) as store:
            desk = Desk(store, Promises())
            await prepared(desk)
            disk.leave(free)
            if folding:
                desk.checkpoint()
            done = await STEPS[step](desk)
            await desk.reads_go_on()
            others = [await STEPS[other](desk) for other in STEPS if other != step]
            await desk.reads_go_on()
            refused += desk.refused
            if free == 0:
                assert not done
                assert not any(others)
            counts.add("disk: writes on a full file system", 1 + len(others))
            counts.add("disk: writes refused for lack of space", desk.refused)
            disk.clear()
            desk.refused = 0
            for again in STEPS.values():
                assert await again(desk)
            await desk.reads_go_on()
            assert desk.refused == 0
            assert not desk.promises.unsure
        check(disk.path, desk.promises)
    assert refused > 0


async def test_a_database_is_opened_or_not_on_a_full_disk_and_later_at_once(
    disk: Disk, counts: Counts
) -> None:
    opened = 0
    for existing in (False, True):
        for free in range(MOST_FREE):
            disk.clear()
            for each in disk.root.iterdir():
                each.unlink()
            promises = Promises()
            if existing:
                async with open_store(str(disk.path)) as store:
                    await prepared(Desk(store, promises))
            disk.leave(free)
            try:
                async with open_store(str(disk.path)) as store:
                    await STEPS["ADD"](Desk(store, promises))
                    opened += 1
            except* StoreUnavailable:
                counts.add("disk: openings refused for lack of space")
            disk.clear()
            async with open_store(str(disk.path)) as store:
                desk = Desk(store, promises)
                assert await STEPS["ADD"](desk)
                await desk.reads_go_on()
            check(disk.path, promises)
    assert 0 < opened < 2 * MOST_FREE


async def test_the_daemon_stays_up_on_a_full_disk_and_serves_when_there_is_room(
    disk: Disk, counts: Counts, full: bool
) -> None:
    async with serving(disk.root) as (channel, _):
        stub = AdaptiveIpamStub(channel)
        held = {"c0": address_of(await ask(stub, "c0"))}
        for free in range(0, MOST_FREE, 1 if full else 4):
            disk.leave(free)
            for name in (f"a{free}", f"b{free}"):
                with refusals(counts):
                    held[name] = address_of(await ask(stub, name))
            with refusals(counts):
                await stub.deallocate_pod_ip(deletion("c0"))
                del held["c0"]
            for name in held:
                await stub.check_pod_ip(checking(name))
            disk.clear()
            await stub.deallocate_pod_ip(deletion("c0"))
            held["c0"] = address_of(await ask(stub, "c0"))
        assert len(set(held.values())) == len(held)


@contextmanager
def refusals(counts: Counts) -> Iterator[None]:
    """Count a call that is told to come again; nothing else may happen to it."""
    try:
        yield
    except GRPCError as error:
        if error.status is not Status.UNAVAILABLE:
            raise
        counts.add("disk: calls that the daemon refused")


def address_of(response: AllocatePodIpResponse) -> str:
    assert response.ipv4 is not None
    return response.ipv4.ip_address


async def ask(stub: AdaptiveIpamStub, name: str) -> AllocatePodIpResponse:
    return await stub.allocate_pod_ip(
        AllocatePodIpRequest(
            ipv4_config=IpConfig(
                interface_name="eth0", container_id=name, initial_pod_cidr="10.0.0.0/20"
            )
        )
    )


def deletion(name: str) -> DeallocatePodIpRequest:
    return DeallocatePodIpRequest(interface_name="eth0", container_id=name)


def checking(name: str) -> CheckPodIpRequest:
    return CheckPodIpRequest(interface_name="eth0", container_id=name)


async def test_a_read_only_file_system_is_refused_and_served_once_it_is_not(
    disk: Disk, counts: Counts
) -> None:
    promises = Promises()
    async with open_store(str(disk.path)) as store:
        await prepared(Desk(store, promises))
    for _ in range(2):
        disk.remount("ro")
        with pytest.raises(StoreUnavailable):
            async with open_store(str(disk.path)):
                raise AssertionError
        counts.add("disk: remounted read-only")
        disk.remount("rw")
        async with open_store(str(disk.path)) as store:
            desk = Desk(store, promises)
            await desk.reads_go_on()
            assert await STEPS["ADD"](desk)
            assert await STEPS["DEL"](desk)
    check(disk.path, promises)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.EDQUOT])
async def test_a_disk_that_takes_no_write_any_more_leaves_reads_and_heals(
    tmp_path: Path, counts: Counts, number: int
) -> None:
    """As when the kernel remounts a file system after an error: files stay open."""
    path = tmp_path / "metis.sqlite"
    async with open_store(str(path), release_cooldown=COOLDOWN) as store:
        desk = Desk(store, Promises())
        await prepared(desk)
        for number_of_write in range(1, 12):
            faults = Faults("pwrite64", number_of_write, lasting=True)
            with faulty_system_call("pwrite64", faults, number):
                for step in STEPS.values():
                    await step(desk)
                await desk.reads_go_on()
            assert desk.refused > 0
            counts.add("disk: calls refused by a disk that took no write", desk.refused)
            desk.refused = 0
            for step in STEPS.values():
                assert await step(desk)
    check(path, desk.promises)


class SlowDisk:
    """Writes of worker threads stop at a gate; in the loop's thread they take a while.

    Attributes:
      seconds: what the disk has cost, by a clock that only counts.
      reached: set as soon as somebody stands at the gate.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.waits = 0
        self.is_slow = False
        self.reached = trio.Event()
        self._gate = threading.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._loop = threading.get_ident()

    def wait(self, call: str) -> None:
        if not self.is_slow or call not in ("xWrite", "xSync"):
            return
        self.waits += 1
        self.seconds += 1.0
        if threading.get_ident() != self._loop:
            self._token.run_sync_soon(self.reached.set)
            self._gate.wait()

    def open(self) -> None:
        self._gate.set()


@pytest.mark.parametrize("synchronous", ["NORMAL", "FULL"])
async def test_a_slow_disk_holds_up_no_read_and_nobody_past_the_deadline(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mock_clock: MockClock,
    counts: Counts,
    synchronous: str,
) -> None:
    disk = SlowDisk()
    monkeypatch.setattr(time, "monotonic", lambda: disk.seconds)
    ended: list[str] = []

    async def call(name: str, work: Callable[[], Awaitable[object]]) -> None:
        with trio.move_on_after(0.05) as scope:  # as the server does for a deadline
            await work()
        ended.append(f"{name} {'gave up' if scope.cancelled_caught else 'was served'}")

    with faulty_files(Faults(waits=disk.wait)):
        async with open_store(
            str(tmp_path / "metis.sqlite"), synchronous=synchronous
        ) as store:
            desk = Desk(store, Promises())
            await prepared(desk)
            disk.is_slow = True
            if synchronous == "NORMAL":  # one call finds out, in the loop's thread
                await desk.add(owner("first"), IPV4)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, "running", lambda: desk.add(owner("a"), IPV4))
                await disk.reached.wait()
                async with trio.open_nursery() as waiting:
                    waiting.start_soon(call, "b", lambda: desk.add(owner("b"), IPV4))
                    for who in ("c0", "g1"):
                        network = "garbage" if who[0] == "g" else "default"
                        assert await store.held(owner(who, network))
                    assert ended == []
                    mock_clock.jump(1)
                assert ended == ["b gave up"]
                desk.promises.sure.setdefault(owner("b"), frozenset())
                disk.open()
            assert ended == ["b gave up", "running was served"]
            disk.is_slow = False
            assert await desk.delete(owner("c0"))
            await desk.reads_go_on()
    assert disk.waits > 0
    counts.add("disk: slow writes", disk.waits)
    check(tmp_path / "metis.sqlite", desk.promises)


HOLDER = """
import apsw, sys
connection = apsw.Connection(sys.argv[1])
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process in the middle of a write."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == b"locked\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_write_lock_that_somebody_keeps_bounds_calls_and_holds_up_no_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counts, stopped: bool
) -> None:
    """Also one whose holder was stopped, which neither ends nor goes on."""
    monkeypatch.setattr(connecting, "BUSY_TIMEOUT_MS", 20)
    path = tmp_path / "metis.sqlite"
    async with open_store(str(path), release_cooldown=COOLDOWN) as store:
        desk = Desk(store, Promises())
        await prepared(desk)
        with holder(path) as process:
            if stopped:
                process.send_signal(signal.SIGSTOP)
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(is_refused_in_time, desk, number)
                await desk.reads_go_on()
            counts.add("disk: calls refused behind a held write lock", 20)
            # A plugin without a daemon, meanwhile.
            began = time.monotonic()
            async with open_store(str(path), release_cooldown=COOLDOWN) as direct:
                with pytest.raises(StoreBusy):
                    await direct.allocate(owner("direct"), [IPV4], Pod())
            assert time.monotonic() - began < PATIENT_SECONDS
        for step in STEPS.values():  # the kernel let go of the lock
            assert await step(desk)
        await desk.reads_go_on()
    check(path, desk.promises)


async def is_refused_in_time(desk: Desk, number: int) -> None:
    deadline = trio.current_time() + 0.4

    async def call() -> object:
        if number % 2:
            return await desk.engine.deallocate(owner("c1"), deadline=deadline)
        who = owner(f"late{number}")
        return await desk.engine.allocate(who, [IPV4], Pod(), deadline=deadline)

    with pytest.raises(StoreBusy) as caught:
        await call()
    assert trio.current_time() < deadline + PATIENT_SECONDS  # it would stay for ever
    assert STATUS_CODES[grpc_error(caught.value).status] == TRY_AGAIN_LATER
