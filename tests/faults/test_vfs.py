"""Write errors at every place of a small node's life, injected below SQLite.

Every call either succeeds or fails as a StoreError. What was answered holds when the
files are opened again without faults: those of a store that was closed, and those
that it would have left if it had been killed.
"""

from __future__ import annotations

import copy
import errno
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import apsw
import pytest
import trio

from metis.clock import StoredClock
from metis.errors import StoreBusy, StoreUnavailable
from metis.model import Owner, Pod, Wanted
from metis.store import database
from metis.store.store import Store, open_store
from metis.store.transactions import Work
from tests.faults.counts import Counts
from tests.faults.promises import Promises
from tests.faults.vfs import Faults, faulty_files, faulty_system_call
from tests.store.databases import ManualClock, owner, want

COOLDOWN = 60.0

FAILURES = (StoreBusy, StoreUnavailable)
"""What a call may fail with: StoreErrors that are worth another try (code 11)."""

IPV4 = want("10.0.0.0/24")
IPV6 = want("fd00::/120")
SMALL = want("10.1.0.0/30")

FAULTS_A_CALL = 25
"""Faults at the places of one kind of call that an ordinary run tries; a full one
tries them all."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """In memory: hundreds of databases are made and thrown away."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        yield Path(name)


class Life:
    """One small node's life, told to a ledger; goes on whatever fails."""

    def __init__(self, path: Path, synchronous: str) -> None:
        self.path = path
        self.synchronous = synchronous
        self.clock = ManualClock()
        self.promises = Promises()
        self.killed: Life | None = None

    async def run(self) -> None:
        """All that writes: twice, on a new file and on one that is there."""
        await self._with_store(self._first)
        await self._with_store(self._second)

    async def _with_store(self, work: Callable[[Store], Awaitable[None]]) -> None:
        self.clock.advance(1)
        try:
            async with open_store(
                str(self.path),
                clock=self.clock,
                release_cooldown=COOLDOWN,
                synchronous=self.synchronous,
            ) as store:
                await work(store)
        except* FAILURES:
            self.promises.failed += 1

    async def _first(self, store: Store) -> None:
        for number in (1, 2, 3):
            await self.add(store, owner(f"c{number}"), IPV4)
        await self.add(store, owner("dual"), IPV4, IPV6)
        await self.add(store, owner("small", "net-b"), SMALL)
        await self.delete(store, owner("c2"))
        await self.checkpoint(store)
        await self.add(store, owner("c1"), IPV4)
        await self.collect(store, owner("c3"), owner("dual"))
        async with trio.open_nursery() as nursery:  # a group
            for number in (4, 5, 6):
                nursery.start_soon(self.add, store, owner(f"c{number}"), IPV4)

    async def _second(self, store: Store) -> None:
        for who in list(self.promises.sure):
            await self.look(store, who)
        await self.add(store, owner("c7"), IPV4, IPV6)
        await self.delete(store, owner("small", "net-b"))
        await self.checkpoint(store)
        await self.delete(store, owner("c1"))
        await self.delete(store, owner("dual"))
        self.killed = self._as_killed()

    def _as_killed(self) -> Life:
        """The same life, on the files as they are this moment."""
        place = Path(tempfile.mkdtemp(dir=self.path.parent.parent))
        shutil.copytree(self.path.parent, place, dirs_exist_ok=True)
        life = Life(place / self.path.name, self.synchronous)
        life.clock = copy.copy(self.clock)
        life.promises = copy.deepcopy(self.promises)
        return life

    async def add(self, store: Store, who: Owner, *wanted: Wanted) -> None:
        try:
            got = await store.allocate(who, wanted, Pod("web-0"))
        except FAILURES:
            self.promises.not_given(who, len(wanted))
        else:
            self.promises.check_given(who, got, store.clock.now_ms())

    async def delete(self, store: Store, who: Owner) -> None:
        now_ms = store.clock.now_ms()
        try:
            released = await store.release(who, deleted_at=now_ms)
        except FAILURES:
            self.promises.not_taken(who)
        else:
            self.promises.taken(who, released, now_ms + round(COOLDOWN * 1000))

    async def collect(self, store: Store, *gone: Owner) -> None:
        now_ms = store.clock.now_ms()
        try:
            collected = await store.collect(gone, now_ms)
        except FAILURES:
            for who in gone:
                self.promises.not_taken(who)
        else:
            for who in gone:
                released = [got for one, got in collected if one == who]
                self.promises.taken(who, released, now_ms + round(COOLDOWN * 1000))

    async def look(self, store: Store, who: Owner) -> None:
        try:
            held = await store.held(who)
        except FAILURES:
            self.promises.failed += 1
        else:
            self.promises.check_held(who, held)

    async def checkpoint(self, store: Store) -> None:
        """Have the next write fold the log into the file first, and another one."""
        database_ = store._database
        assert isinstance(database_, database.Database)
        database_._checkpoint_at = database_._fold_at = 1


def injected(
    directory: Path,
    faults: Faults,
    synchronous: str = "NORMAL",
    around: AbstractContextManager[None] | None = None,
) -> Life:
    """A life with faults in it, and what is found after it."""
    place = Path(tempfile.mkdtemp(dir=directory))
    life = Life(place / "metis.sqlite", synchronous)
    with told(faults):
        with faulty_files(faults), around or nullcontext():
            trio.run(life.run)
        reopened(life)
        if life.killed is not None:
            reopened(life.killed)
    return life


def reopened(life: Life) -> None:
    """Without faults the database is whole, as promised, and serves."""
    path = life.path
    place = path.parent

    async def serve() -> None:
        life.clock.advance(1)
        async with open_store(
            str(path), clock=life.clock, release_cooldown=COOLDOWN
        ) as store:
            for who in life.promises.sure:
                life.promises.check_held(who, await store.held(who))
            await life.add(store, owner("after"), IPV4, IPV6)
            for who in list(life.promises.sure):
                await life.delete(store, who)
            assert life.promises.failed == failed

    if path.exists():
        connection = apsw.Connection(str(path))
        if connection.pragma("user_version"):
            life.promises.check_file(connection)
        connection.close()
    failed = life.promises.failed
    trio.run(serve)
    for suffix in ("-wal", "-shm", "-journal", ".damaged"):
        assert not list(place.glob(f"{path.name}{suffix}*"))
    connection = apsw.Connection(str(path))
    life.promises.check_file(connection)
    connection.close()
    shutil.rmtree(place)


@contextmanager
def told(faults: Faults) -> Iterator[None]:
    """Say in a failure which fault it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"with {faults}")
        raise


CALLS = [
    ("xWrite", "io"),
    ("xWrite", "full"),
    ("xWrite", "torn"),
    ("xSync", "io"),
    ("xTruncate", "io"),
    ("xOpen", "io"),
    ("xDelete", "io"),
    ("xLock", "io"),
    ("xRead", "io"),
    ("xFileSize", "io"),
]


@pytest.mark.parametrize("synchronous", ["NORMAL", "FULL"])
@pytest.mark.parametrize(("call", "failure"), CALLS)
def test_whatever_call_fails_what_was_answered_holds(
    directory: Path,
    counts: Counts,
    full: bool,
    call: str,
    failure: str,
    synchronous: str,
) -> None:
    counting = Faults()
    life = injected(directory, counting, synchronous)
    assert life.promises.failed == 0
    for faults in each_place(counting, call, failure, full):
        life = injected(directory, faults, synchronous)
        assert faults.injected > 0
        counts.add(f"vfs: {call} failed ({failure})", faults.injected)
        counts.add("vfs: calls answered", life.promises.answered)
        counts.add("vfs: calls that failed", life.promises.failed)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("mmap", errno.ENOMEM),
        ("fcntl", errno.ENOLCK),
        ("ftruncate", errno.ENOSPC),
    ],
)
def test_whatever_fails_about_shared_memory_what_was_answered_holds(
    directory: Path, counts: Counts, full: bool, call: str, number: int
) -> None:
    counting = Faults()
    injected(directory, counting, around=faulty_system_call(call, counting, number))
    for faults in each_place(counting, call, "io", full):
        around = faulty_system_call(call, faults, number)
        life = injected(directory, faults, around=around)
        assert faults.injected > 0
        counts.add(f"vfs: {call} failed ({errno.errorcode[number]})", faults.injected)
        counts.add("vfs: calls answered", life.promises.answered)
        counts.add("vfs: calls that failed", life.promises.failed)


def each_place(
    counting: Faults, call: str, failure: str, full: bool
) -> Iterator[Faults]:
    """Faults at the places where a life makes the call: at one, or from it on."""
    total = counting.calls[call]
    assert total > 0
    step = 1 if full else max(1, total // FAULTS_A_CALL)
    for lasting in (False, True):
        for number in range(1, total + 1, step):
            yield Faults(call, number, failure, lasting)


def test_a_store_that_answers_though_nothing_was_written_is_found_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(
        connection: apsw.Connection, clock: StoredClock, group: Sequence[Work[object]]
    ) -> list[object]:
        connection.execute("BEGIN IMMEDIATE")
        answers = [work(connection, clock.now_ms()) for work in group]
        with suppress(apsw.Error):
            connection.execute("COMMIT")
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        return answers

    monkeypatch.setattr(database, "run_group", careless)
    counting = Faults()
    injected(directory, counting)
    found = 0
    for faults in each_place(counting, "xWrite", "io", full=False):
        try:
            injected(directory, faults)
        except (AssertionError, ExceptionGroup) as error:
            found += "AssertionError" in repr(error)
    assert found > 0
