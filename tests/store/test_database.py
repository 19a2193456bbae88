"""Real files: opening them, refusing them, and transactions on them."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio
import trio.testing

from metis.errors import (
    InvalidRequest,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreIncompatible,
    StoreUnavailable,
)
from metis.model import Pod
from metis.store import connecting, database, reclaiming, sql
from metis.store.connecting import translated
from metis.store.database import Database, open_database
from metis.store.holdings import Residence
from metis.store.transactions import Work, run_group
from tests.store import original
from tests.store.databases import ManualClock, check_invariants, owner, want

NOBODY = 65534

LOCKS = {".opening", ".users"}
"""What stays beside a database, empty."""


async def opened(
    path: Path, *, clock: ManualClock | None = None, synchronous: str = "NORMAL"
) -> Database:
    return await open_database(
        str(path),
        clock=clock or ManualClock(),
        cooldown_ms=60_000,
        synchronous=synchronous,
    )


def allocation(container: str, cidr: str = "10.0.0.0/24") -> Work[object]:
    return functools.partial(
        sql.allocate, owner=owner(container), wanted=[want(cidr)], pod=Pod()
    )


def execute(statement: str) -> Work[object]:
    return lambda connection, _: connection.execute(statement).fetchall()


def files(path: Path) -> dict[str, bytes]:
    """Every file of a directory with what is in it, but for locks."""
    return {
        each.name: each.read_bytes()
        for each in path.iterdir()
        if each.suffix not in LOCKS
    }


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Run without root's rights, which no permission bit binds."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that the unprivileged may reach, as pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


async def test_a_new_database_belongs_to_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "metis.sqlite"
    db = await opened(path)
    await db.write([allocation("c1")])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for each in path.parent.iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600, each
    assert len(files(path.parent)) == 3
    await db.aclose()
    assert list(files(path.parent)) == ["metis.sqlite"]


async def test_the_mode_of_a_directory_that_somebody_made_is_kept(
    tmp_path: Path,
) -> None:
    os.chmod(tmp_path, 0o1777)
    await (await opened(tmp_path / "metis.sqlite")).aclose()
    assert stat.S_IMODE(os.stat(tmp_path).st_mode) == 0o1777


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o777])
async def test_a_database_that_others_may_read_is_closed_to_them(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "metis.sqlite"
    first = await opened(path)  # keeps the files beside it in being
    every = [path, tmp_path / "metis.sqlite-wal", tmp_path / "metis.sqlite-shm"]
    for each in every:
        each.chmod(mode)
    second = await opened(path)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in every]
    await second.aclose()
    await first.aclose()
    assert modes == [0o600] * 3


async def test_a_database_by_a_link_is_closed_to_others_where_it_is(
    tmp_path: Path,
) -> None:
    path, link = tmp_path / "metis.sqlite", tmp_path / "link"
    path.touch(0o644)
    link.symlink_to(path)
    await (await opened(link)).aclose()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_file_that_is_not_ours_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "metis.sqlite"
    foreign = apsw.Connection(str(path))
    foreign.execute("PRAGMA user_version = 7; CREATE TABLE future (x)")
    foreign.close()
    path.chmod(0o644)
    with pytest.raises(StoreIncompatible):
        await opened(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize(("synchronous", "number"), [("NORMAL", 1), ("FULL", 2)])
async def test_the_writer_has_the_pragmas_of_the_original(
    tmp_path: Path, synchronous: str, number: int
) -> None:
    db = await opened(tmp_path / "metis.sqlite", synchronous=synchronous)
    writer = db._writer
    assert writer.pragma("journal_mode") == "wal"
    assert writer.pragma("foreign_keys") == 1
    assert writer.pragma("synchronous") == number
    assert writer.pragma("busy_timeout") == connecting.BUSY_TIMEOUT_MS
    await db.aclose()


async def test_opening_again_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "metis.sqlite"
    db = await opened(path)
    await db.write([allocation("c1")])
    await db.aclose()
    before = files(tmp_path)
    await (await opened(path)).aclose()
    assert files(tmp_path) == before


async def test_the_clock_outlives_a_stepped_wall_clock(tmp_path: Path) -> None:
    path, clock = tmp_path / "metis.sqlite", ManualClock()
    db = await opened(path, clock=clock)
    now_ms = db.clock.now_ms()
    await db.aclose()
    clock.walltime -= 86_400_000
    clock.boottime += 7
    db = await opened(path, clock=clock)
    assert db.clock.now_ms() == now_ms + 7
    await db.aclose()
    clock.boot, clock.boottime = "boot-2", 0
    db = await opened(path, clock=clock)
    assert db.clock.now_ms() == clock.walltime
    await db.aclose()


async def test_where_the_boot_is_not_known_the_database_is_left_as_it_is(
    tmp_path: Path,
) -> None:
    class Lost(ManualClock):
        def boot_id(self) -> str:
            raise FileNotFoundError(2, "No such file or directory", "/proc/boot_id")

    path = tmp_path / "metis.sqlite"
    await (await opened(path)).aclose()
    before = files(tmp_path)
    with pytest.raises(StoreUnavailable, match=r"/proc/boot_id: No such file"):
        await opened(path, clock=Lost())
    assert files(tmp_path) == before


async def test_another_boot_id_takes_nothing_from_whose_namespace_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node in LXC: its /proc shows another id than that of a pod on it."""
    monkeypatch.setattr(connecting, "EMPTY_AT_BOOT", (f"{tmp_path}/run/",))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "c1").touch()
    (tmp_path / "disk").touch()
    path = tmp_path / "metis.sqlite"
    db = await opened(path)
    for name, netns in {"c1": "run/c1", "c2": "run/c2", "c3": "disk"}.items():
        residence = Residence("boot-1", f"{tmp_path}/{netns}")
        give = functools.partial(sql.allocate, pod=Pod(), residence=residence)
        wanted = [want("10.0.0.0/24")]
        await db.write([functools.partial(give, owner=owner(name), wanted=wanted)])
    await db.aclose()
    for boot in ("boot-2", "boot-1", "boot-2"):
        db = await opened(path, clock=ManualClock(boot))
        read = functools.partial(reclaiming.read_holdings, after=None, most=9)
        holdings, _ = await db.read(read)
        await db.aclose()
        found = {one.owner.container_id: one.boot_id for one in holdings}
        assert found == {"c1": boot}


def newer(path: Path, journal_mode: str) -> apsw.Connection:
    """A database of a version to come; its connection stays open."""
    connection = apsw.Connection(str(path))
    connection.pragma("journal_mode", journal_mode)
    connection.execute("CREATE TABLE cidr_blocks (id)")
    connection.pragma("user_version", 2)
    return connection


@pytest.mark.parametrize("journal_mode", ["wal", "delete"])
async def test_a_newer_version_is_left_as_it_is(
    tmp_path: Path, journal_mode: str
) -> None:
    path = tmp_path / "metis.sqlite"
    newer(path, journal_mode).close()
    before = files(tmp_path)
    with pytest.raises(StoreIncompatible, match=r"metis\.sqlite.*version 2"):
        await opened(path)
    assert files(tmp_path) == before


async def test_a_newer_version_keeps_the_log_of_its_crash(tmp_path: Path) -> None:
    alive, dead = tmp_path / "alive", tmp_path / "dead"
    alive.mkdir()
    connection = newer(alive / "metis.sqlite", "wal")
    shutil.copytree(alive, dead, ignore=shutil.ignore_patterns("*-shm"))
    connection.close()
    before = files(dead)
    assert before["metis.sqlite-wal"] != b""
    with pytest.raises(StoreIncompatible, match="version 2"):
        await opened(dead / "metis.sqlite")
    after = files(dead)
    after.pop("metis.sqlite-shm", None)  # an index of the log, kept by readers too
    assert after == before


async def test_a_database_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "songs.sqlite"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE songs (title)")
    connection.close()
    before = files(tmp_path)
    with pytest.raises(StoreIncompatible, match=r"songs\.sqlite.*holds 'songs'"):
        await opened(path)
    assert files(tmp_path) == before


async def test_a_log_that_another_process_folds_back_meanwhile_hinders_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever closes the database last removes the log, at any moment."""

    def seen(path: str) -> bool:
        return path.endswith("-wal") or os.path.lexists(path)

    monkeypatch.setattr(os.path, "exists", seen)
    await (await opened(tmp_path / "metis.sqlite")).aclose()


async def test_a_directory_in_its_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="not a regular file"):
        await opened(tmp_path)


async def test_a_file_in_place_of_its_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        StoreUnavailable, match=r"directory '.*/file' .* cannot be made"
    ):
        await opened(tmp_path / "file" / "metis.sqlite")


async def test_a_directory_that_cannot_be_made_is_named(open_directory: Path) -> None:
    with (
        unprivileged(),
        pytest.raises(StoreUnavailable, match=r"'.*/new' .*Permission denied"),
    ):
        await opened(open_directory / "new" / "metis.sqlite")


async def test_a_database_that_cannot_be_made_is_named(open_directory: Path) -> None:
    with (
        unprivileged(),
        pytest.raises(StoreUnavailable, match=r"metis\.sqlite.*Permission denied"),
    ):
        await opened(open_directory / "metis.sqlite")
    assert files(open_directory) == {}


async def test_a_database_in_a_read_only_directory_is_refused(
    open_directory: Path,
) -> None:
    path = open_directory / "metis.sqlite"
    await (await opened(path)).aclose()
    path.chmod(0o666)
    with unprivileged(), pytest.raises(StoreUnavailable, match="is not writable"):
        await opened(path)


async def test_a_read_only_database_is_refused_untouched(open_directory: Path) -> None:
    path = open_directory / "metis.sqlite"
    await (await opened(path)).aclose()
    before = files(open_directory)
    os.chmod(open_directory, 0o777)
    os.chmod(path, 0o444)
    with unprivileged(), pytest.raises(StoreUnavailable, match="the file is read-only"):
        await opened(path)
    assert files(open_directory) == before


@pytest.fixture
async def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """A database with one owner, c1, whose busy timeout is over at once.

    No group counts as slow, however busy the machine is.
    """
    monkeypatch.setattr(connecting, "BUSY_TIMEOUT_MS", 1)
    monkeypatch.setattr(database, "SLOW_GROUP_SECONDS", math.inf)
    db = await opened(tmp_path / "metis.sqlite")
    await db.write([allocation("c1")])
    return db


def addresses(answers: list[object]) -> list[str | type]:
    """What was answered: the address, or the class of the error."""
    return [
        answer[0].address if isinstance(answer, tuple) else type(answer)
        for answer in answers
    ]


async def test_a_group_is_answered_request_by_request(db: Database) -> None:
    answers = await db.write([allocation("c2"), allocation("c1"), allocation("c3")])
    assert addresses(answers) == ["10.0.0.3", "10.0.0.2", "10.0.0.4"]


async def test_an_error_undoes_its_own_writes_alone(db: Database) -> None:
    def half_done(connection: apsw.Connection, now_ms: int) -> object:
        allocation("half")(connection, now_ms)
        raise ZeroDivisionError

    answers = await db.write(
        [
            allocation("c2"),
            half_done,
            execute("INSERT INTO cidr_blocks (cidr) VALUES (NULL)"),
            allocation("c3", "10.0.0.0/25"),
            allocation("c4"),
        ]
    )
    assert addresses(answers) == [
        "10.0.0.3",
        ZeroDivisionError,
        StoreError,
        InvalidRequest,
        "10.0.0.4",
    ]
    assert (
        await db.read(lambda connection, _: sql.held(connection, owner("half"))) == ()
    )
    await db.read(lambda connection, _: check_invariants(connection))


async def test_a_group_is_run_again_if_a_request_fails_half_way_alone(
    db: Database,
) -> None:
    runs: list[str] = []

    def counted(name: str, work: Work[object]) -> Work[object]:
        def run(connection: apsw.Connection, now_ms: int) -> object:
            runs.append(name)
            return work(connection, now_ms)

        return run

    def half_done(connection: apsw.Connection, now_ms: int) -> object:
        allocation("half")(connection, now_ms)
        raise ZeroDivisionError

    first, last = counted("first", allocation("c2")), counted("last", allocation("c3"))
    harmless = counted("harmless", lambda *_: 1 // 0)
    answers = await db.write([first, harmless, last])
    assert addresses(answers) == ["10.0.0.3", ZeroDivisionError, "10.0.0.4"]
    assert runs == ["first", "harmless", "last"]
    runs.clear()
    answers = await db.write([first, counted("half", half_done), last])
    assert addresses(answers) == ["10.0.0.3", ZeroDivisionError, "10.0.0.4"]
    assert runs == ["first", "half", "first", "half", "last"]
    await db.read(lambda connection, _: check_invariants(connection))


async def test_the_error_of_a_single_request_undoes_it(db: Database) -> None:
    def half_done(connection: apsw.Connection, now_ms: int) -> object:
        allocation("half")(connection, now_ms)
        raise ZeroDivisionError

    assert addresses(await db.write([half_done])) == [ZeroDivisionError]
    assert addresses(
        await db.write([execute("INSERT INTO cidr_blocks (cidr) VALUES (NULL)")])
    ) == [StoreError]
    assert addresses(await db.write([allocation("c2")])) == ["10.0.0.3"]


@pytest.mark.parametrize("others", [0, 2])
async def test_a_held_write_lock_is_busy_and_passes(db: Database, others: int) -> None:
    group = [allocation(f"c{number}") for number in range(2, 3 + others)]
    blocker = apsw.Connection(db.path)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="nothing was written: database is locked"):
        await db.write(group)
    assert not db._writer.in_transaction
    # Readers do not wait for it.
    assert await db.read(lambda connection, _: sql.held(connection, owner("c1"))) != ()
    blocker.execute("COMMIT")
    blocker.close()
    assert addresses(await db.write(group))[0] == "10.0.0.3"


@pytest.mark.parametrize("others", [0, 2])
async def test_a_full_disk_writes_nothing_and_passes(db: Database, others: int) -> None:
    group = [allocation(f"c{number}") for number in range(2, 3 + others)]
    large = functools.partial(
        sql.allocate, owner=owner("c1", "large"), wanted=[want("fd00::/64")], pod=Pod()
    )
    pages = db._writer.pragma("max_page_count")
    db._writer.pragma("max_page_count", db._writer.pragma("page_count"))
    assert addresses(await db.write([large, *group])) == [
        StoreUnavailable,
        *(f"10.0.0.{number}" for number in range(3, 4 + others)),
    ]
    (alone,) = await db.write([large])
    assert isinstance(alone, StoreUnavailable)
    assert "database or disk is full" in str(alone)
    assert not db._writer.in_transaction
    db._writer.pragma("max_page_count", pages)
    assert addresses(await db.write([large])) == ["fd00::2"]
    await db.read(lambda connection, _: check_invariants(connection))


async def test_when_sqlite_undoes_the_transaction_the_whole_group_fails(
    db: Database,
) -> None:
    def lost(connection: apsw.Connection, _: int) -> object:
        connection.execute("ROLLBACK")  # as SQLite does by itself on some errors
        raise apsw.IOError("disk I/O error")

    with pytest.raises(StoreUnavailable, match="nothing was written: disk I/O error"):
        await db.write([allocation("c2"), lost, allocation("c3")])
    assert addresses(await db.write([lost])) == [StoreUnavailable]
    assert addresses(await db.write([allocation("c4")])) == ["10.0.0.3"]


async def test_an_error_of_the_commit_fails_the_whole_group(db: Database) -> None:
    def refuse() -> bool:
        return True

    db._writer.set_commit_hook(refuse)
    with pytest.raises(StoreError, match="nothing was written"):
        await db.write([allocation("c2"), allocation("c3")])
    assert not db._writer.in_transaction
    db._writer.set_commit_hook(None)
    assert addresses(await db.write([allocation("c4")])) == ["10.0.0.3"]


async def test_a_bug_in_the_clock_leaves_no_transaction_open(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ManualClock, "boottime_ms", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await db.write([allocation("c2")])
    assert addresses(await db.write([allocation("c2")])) == ["10.0.0.3"]


def thread_of(_connection: apsw.Connection, _now_ms: int) -> int:
    return threading.get_ident()


async def test_a_group_that_waits_for_nothing_runs_in_the_calling_thread(
    db: Database,
) -> None:
    assert await db.write([thread_of]) == [threading.get_ident()]


async def test_a_group_that_is_flushed_runs_in_a_worker_thread(tmp_path: Path) -> None:
    db = await opened(tmp_path / "full.sqlite", synchronous="FULL")
    assert await db.write([thread_of]) != [threading.get_ident()]
    await db.aclose()


async def test_a_worker_thread_waits_for_the_lock_of_another_process(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = apsw.Connection(db.path)
    other.execute("BEGIN IMMEDIATE")

    def run(*arguments: Any) -> list[object]:
        if threading.get_ident() != main:
            other.execute("ROLLBACK")  # whoever held the lock lets it go
        return run_group(*arguments)

    main = threading.get_ident()
    monkeypatch.setattr(database, "run_group", run)
    assert await db.write([thread_of]) != [main]
    assert await db.write([thread_of]) == [main]
    other.close()


async def test_after_a_slow_group_the_next_ones_run_in_a_worker_thread(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CAUTIOUS_GROUPS", 2)
    monkeypatch.setattr(database, "SLOW_GROUP_SECONDS", -1.0)
    main = threading.get_ident()
    assert await db.write([thread_of]) == [main]
    monkeypatch.setattr(database, "SLOW_GROUP_SECONDS", math.inf)
    assert await db.write([thread_of]) != [main]
    assert await db.write([thread_of]) != [main]
    assert await db.write([thread_of]) == [main]


@pytest.mark.parametrize("reason", ["flushed", "slow", "long log", "locked"])
async def test_what_has_to_wait_is_not_written_at_once(
    db: Database, reason: str
) -> None:
    work = allocation("c2")
    other = apsw.Connection(db.path)
    if reason == "flushed":
        db._flushes = True
    elif reason == "slow":
        db._cautious_groups = 1
    elif reason == "long log":
        db._checkpoint_at = 0
    else:
        other.execute("BEGIN IMMEDIATE")
    assert db.write_at_once([work]) is None
    assert not db._writer.in_transaction
    if reason == "locked":
        other.execute("ROLLBACK")
    other.close()
    assert addresses(await db.write([work])) == ["10.0.0.3"]


def foldings(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """In which threads a method folds the log, from now on."""
    threads: list[int] = []
    real = getattr(Database, name)

    def folding(self: Database) -> None:
        threads.append(threading.get_ident())
        real(self)

    monkeypatch.setattr(Database, name, folding)
    return threads


async def check_log_stayed_small(db: Database) -> None:
    # Without folding, 200 transactions of some six pages each would be in the log.
    assert len(files(Path(db.path).parent)["metis.sqlite-wal"]) < 200 * 4096
    other = apsw.Connection(db.path)
    check_invariants(other)
    assert other.pragma("integrity_check") == "ok"
    other.close()


async def test_the_log_is_folded_into_the_file_in_a_worker_thread_and_stays_small(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CHECKPOINT_PAGES", 20)
    monkeypatch.setattr(database, "LONGEST_LOG_PAGES", 20)
    folded = foldings(monkeypatch, "_checkpoint")
    db._checkpoint_at = 20
    for number in range(200):
        await db.write([allocation(f"c{number}")])
    assert folded
    assert threading.get_ident() not in folded
    await check_log_stayed_small(db)


async def write_and_fold(db: Database, count: int) -> None:
    """Write, and have the log folded in between; some six pages each time."""
    release = functools.partial(sql.release, owner=owner("c1"), cooldown_ms=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(db.keep_log_short)
        for _ in range(count):
            await db.write([allocation("c1"), release])
            await trio.testing.wait_all_tasks_blocked()
            async with db._fold_limiter:  # it is folded by now
                pass
        nursery.cancel_scope.cancel()


async def test_the_log_is_folded_beside_those_who_write(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CHECKPOINT_PAGES", 20)
    db._fold_at = 20
    beside, between = (foldings(monkeypatch, name) for name in ("_fold", "_checkpoint"))
    await write_and_fold(db, 200)
    assert len(beside) > 10
    assert threading.get_ident() not in beside
    assert not between
    await check_log_stayed_small(db)


async def test_a_log_that_does_not_begin_anew_is_folded_between_groups(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CHECKPOINT_PAGES", 20)
    monkeypatch.setattr(database, "LONG_LOG_PAGES", 60)
    db._fold_at = 20
    beside, between = (foldings(monkeypatch, name) for name in ("_fold", "_checkpoint"))
    reader = apsw.Connection(db.path)
    reader.execute("BEGIN; SELECT * FROM cidr_blocks").fetchall()
    await write_and_fold(db, 50)
    assert len(beside) - 5 < len(between) < len(beside)
    reader.close()
    await write_and_fold(db, 20)
    assert db._wal_pages < 60


async def test_a_database_in_the_place_of_ours_is_not_opened_to_fold_its_log(
    db: Database,
) -> None:
    os.rename(db.path, f"{db.path}.ours")
    shutil.copy(f"{db.path}.ours", db.path)
    db._fold()
    assert db._folder is None
    os.rename(f"{db.path}.ours", db.path)
    db._fold()
    assert db._folder is not None


async def test_readers_cannot_write(db: Database) -> None:
    with pytest.raises(StoreUnavailable, match="nothing was read"):
        await db.read(execute("DELETE FROM ip_addresses"))


async def test_a_reader_with_an_error_serves_the_next_one(db: Database) -> None:
    for _ in range(2 * database.READERS):
        with pytest.raises(StoreError, match="no such table"):
            await db.read(execute("SELECT * FROM songs"))
        with pytest.raises(ZeroDivisionError):
            await db.read(lambda *_: 1 // 0)
    assert await db.read(execute("SELECT 1")) == [(1,)]


async def test_closing_waits_for_the_reads_that_run(db: Database) -> None:
    results = []

    async def read() -> None:
        results.append(await db.read(execute("SELECT count(*) FROM ip_addresses")))

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await db.aclose()
    assert results == [[(256,)]] * 20


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (apsw.BusyError, StoreBusy),
        (apsw.LockedError, StoreBusy),
        (apsw.ProtocolError, StoreBusy),
        (apsw.FullError, StoreUnavailable),
        (apsw.IOError, StoreUnavailable),
        (apsw.ReadOnlyError, StoreUnavailable),
        (apsw.CantOpenError, StoreUnavailable),
        (apsw.PermissionsError, StoreUnavailable),
        (apsw.NotADBError, StoreDamaged),
        (apsw.CorruptError, StoreDamaged),
        (apsw.SQLError, StoreError),
    ],
)
def test_every_error_of_sqlite_becomes_one_of_ours(
    error: type[apsw.Error], expected: type[StoreError]
) -> None:
    got = translated(error("why"), "what failed")
    assert type(got) is expected
    assert str(got).startswith("what failed: why")


async def test_a_file_system_without_shared_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pragma = apsw.Connection.pragma

    class Connection(apsw.Connection):
        def pragma(self, name: str, *values: object, **_: object) -> object:
            return "delete" if name == "journal_mode" else pragma(self, name, *values)

    monkeypatch.setattr(apsw, "Connection", Connection)
    with pytest.raises(StoreUnavailable, match="cannot share memory"):
        await opened(tmp_path / "metis.sqlite")


async def test_a_journal_mode_that_others_keep_changing_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metis.sqlite"
    made_by_the_original = apsw.Connection(str(path))
    original.create(made_by_the_original)
    made_by_the_original.close()
    pragma, tries = apsw.Connection.pragma, []

    class Connection(apsw.Connection):
        def pragma(self, name: str, *values: object, **_: object) -> object:
            if name == "journal_mode" and values:
                tries.append(values)
                raise apsw.BusyError("database is locked")
            return pragma(self, name, *values)

    monkeypatch.setattr(apsw, "Connection", Connection)
    with pytest.raises(StoreBusy, match="journal mode"):
        await opened(path)
    assert len(tries) == connecting._WAL_ATTEMPTS


FORKING = """
import functools, os, sys
from metis.clock import SystemClock
from metis.model import CIDRBlock, Family, Owner, Pod, Wanted
from metis.store import sql
from metis.store.database import connect
from metis.store.transactions import run_group

path, count = sys.argv[1], int(sys.argv[2])
gate, opened = os.pipe()
for number in range(count):
    if os.fork() == 0:
        os.close(opened)
        os.read(gate, 1)  # ends when the parent closes its end
        break
else:
    os.close(opened)
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(count)))

database = connect(path, SystemClock(), 60_000, "NORMAL")
work = functools.partial(
    sql.allocate,
    owner=Owner("default", f"c{number}", "eth0"),
    wanted=[Wanted(Family.IPV4, CIDRBlock.parse("10.0.0.0/24"))],
    pod=Pod(),
)
(answer,) = run_group(database._writer, database.clock, [work])
database._close()
os.write(1, f"{answer[0].address}\\n".encode())
"""


def test_many_processes_may_make_the_database_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metis.sqlite"
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(path), "50"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stderr == ""
    assert done.returncode == 0
    got = done.stdout.splitlines()
    assert sorted(got) == sorted(f"10.0.0.{number}" for number in range(2, 52))
    connection = apsw.Connection(str(path))
    check_invariants(connection)
    assert connection.pragma("integrity_check") == "ok"
    connection.close()


async def test_text_that_is_none_is_an_error_of_the_store(db: Database) -> None:
    """As a flipped bit makes it, which SQLite does not look for."""
    garble = "UPDATE ip_addresses SET pod_name = CAST(x'a4' AS TEXT) WHERE id = 3"
    read = execute("SELECT pod_name FROM ip_addresses")
    await db.write([execute(garble)])
    with pytest.raises(StoreError, match="holds text that is none"):
        await db.read(read)
    assert addresses(await db.write([read])) == [StoreError]
    assert addresses(await db.write([read, allocation("c9")]))[0] is StoreError


async def test_a_database_that_somebody_removes_is_put_back_with_all_it_has(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    for suffix in ("", "-wal", "-shm"):
        os.unlink(db.path + suffix)
    with pytest.raises(StoreDamaged, match="removed"):
        await db.write([allocation("c2")])
    await db.aclose()
    assert "it is put back" in caplog.text
    again = await opened(Path(db.path))
    assert not again.healed
    assert addresses(await again.write([allocation("c1"), allocation("c2")])) == [
        "10.0.0.2",
        "10.0.0.3",
    ]
    await again.aclose()


async def test_a_database_in_whose_place_is_another_is_written_to_no_more(
    db: Database, tmp_path: Path
) -> None:
    other = await opened(tmp_path / "other.sqlite")
    await other.aclose()
    os.rename(other.path, db.path)
    with pytest.raises(StoreDamaged, match="replaced"):
        await db.write([allocation("c2")])


async def test_what_cannot_be_put_back_is_said_and_the_database_is_closed(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    os.unlink(db.path)
    os.mkdir(f"{db.path}.new")
    await db.aclose()
    assert "cannot be put back" in caplog.text
    os.rmdir(f"{db.path}.new")
