"""DELs that could not reach the database: kept, applied once, never too late."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

import metis
from metis.cni import spool
from metis.daemon import Node, open_node
from metis.errors import StoreBusy, StoreUnavailable
from metis.model import CIDRBlock, Family, Owner, Pod, Wanted
from tests.store.databases import ManualClock

OWNER = Owner("default", "c1", "eth0")
WANTED = [Wanted(Family.IPV4, CIDRBlock.parse("10.1.0.0/24"))]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def db_path(tmp_path: Path) -> str:
    return str(tmp_path / "metis.sqlite")


@asynccontextmanager
async def opened(db_path: str, clock: ManualClock) -> AsyncIterator[Node]:
    async with open_node(metis.DaemonConfig(db_path=db_path), clock) as node:
        yield node


async def add(node: Node, owner: Owner = OWNER) -> str:
    [allocation] = await node.engine.allocate(owner, WANTED, Pod())
    return allocation.address


async def apply(node: Node, db_path: str) -> int:
    return await spool.apply(db_path, node.engine, node.store)


def files(db_path: str) -> list[str]:
    return sorted(os.listdir(spool.directory_of(db_path)))


async def test_a_kept_del_is_applied_once(db_path: str, clock: ManualClock) -> None:
    async with opened(db_path, clock) as node:
        await add(node)
        clock.advance(1000)
        spool.keep(db_path, OWNER, clock)
        assert await apply(node, db_path) == 1
        assert await node.store.held(OWNER) == ()
        assert files(db_path) == []
        assert await apply(node, db_path) == 0


async def test_one_that_waits_over_a_restart_is_applied_by_the_next(
    db_path: str, clock: ManualClock
) -> None:
    async with opened(db_path, clock) as node:
        await add(node)
    clock.advance(5)
    spool.keep(db_path, OWNER, clock)
    clock.advance(5)
    async with opened(db_path, clock) as node:
        assert await apply(node, db_path) == 1
        assert await node.store.held(OWNER) == ()


async def test_what_was_given_after_the_del_is_not_taken_away(
    db_path: str, clock: ManualClock
) -> None:
    spool.keep(db_path, OWNER, clock)
    clock.advance(1)
    async with opened(db_path, clock) as node:
        address = await add(node)
        await apply(node, db_path)
        assert [one.address for one in await node.store.held(OWNER)] == [address]
    assert files(db_path) == []


async def test_a_del_that_was_applied_and_not_removed_does_no_harm(
    db_path: str, clock: ManualClock
) -> None:
    """The process was killed between the commit and the removal of the file."""
    async with opened(db_path, clock) as node:
        await add(node)
        spool.keep(db_path, OWNER, clock)
        await node.engine.deallocate(OWNER)
        clock.advance(1)
        await add(node)
        await apply(node, db_path)
        assert len(await node.store.held(OWNER)) == 1


async def test_others_keep_what_they_hold(db_path: str, clock: ManualClock) -> None:
    others = [
        Owner("default", "c1", "net1"),
        Owner("blue", "c1", "eth0"),
        Owner("default", "c2", "eth0"),
    ]
    async with opened(db_path, clock) as node:
        for owner in (OWNER, *others):
            await add(node, owner)
        spool.keep(db_path, OWNER, clock)
        assert await apply(node, db_path) == 1
        for owner in others:
            assert len(await node.store.held(owner)) == 1


@pytest.mark.parametrize("given_since", [False, True])
async def test_after_a_reboot_what_was_given_on_this_boot_is_newer(
    given_since: bool, db_path: str, clock: ManualClock
) -> None:
    async with opened(db_path, clock) as node:
        await add(node)
    clock.boottime = 90_000_000
    spool.keep(db_path, OWNER, clock)
    clock.advance(60_000)
    clock.boot, clock.boottime = "boot-2", 2_000
    async with opened(db_path, clock) as node:
        if given_since:
            await node.engine.deallocate(OWNER)
            await add(node)
        assert await apply(node, db_path) == 1
        assert len(await node.store.held(OWNER)) == given_since


JUNK = {
    "empty": b"",
    "half": b'{"network": "def',
    "list": b"[]",
    "no text": b"\xff\xfe",
    "deep": b"[" * 4000,
    "huge": b" " * 5000,
    "missing": b'{"boottime_ms": 5}',
    "time": b'{"boottime_ms": "5"}',
    "truth": b'{"boottime_ms": true}',
    "type": json.dumps(
        {
            "network": 1,
            "container_id": "c1",
            "interface_name": "eth0",
            "boot_id": "b",
            "boottime_ms": 5,
        }
    ).encode(),
    "name": json.dumps(
        {
            "network": "default",
            "container_id": "",
            "interface_name": "eth0",
            "boot_id": "b",
            "boottime_ms": 5,
        }
    ).encode(),
    "quote": json.dumps(
        {
            "network": "default",
            "container_id": "c' AND id=1",
            "interface_name": "eth0",
            "boot_id": "b",
            "boottime_ms": 5,
        }
    ).encode(),
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
async def test_a_malformed_entry_is_put_aside_and_told_of(
    junk: bytes, db_path: str, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    spool.keep(db_path, OWNER, clock)
    (Path(spool.directory_of(db_path)) / "0.json").write_bytes(junk)
    async with opened(db_path, clock) as node:
        assert await apply(node, db_path) == 1  # the other one
    assert files(db_path) == ["0.malformed"]
    assert "0.json" in caplog.text


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
async def test_what_is_no_file_is_put_aside(
    kind: str, db_path: str, clock: ManualClock, tmp_path: Path
) -> None:
    directory = Path(spool.directory_of(db_path))
    os.mkdir(directory)
    match kind:
        case "link":
            (directory / "0.json").symlink_to(tmp_path / "elsewhere")
        case "pipe":
            os.mkfifo(directory / "0.json")
        case _:
            (directory / "0.json").mkdir()
    async with opened(db_path, clock) as node:
        assert await apply(node, db_path) == 0
    assert files(db_path) == ["0.malformed"]


async def test_a_del_that_cannot_be_read_for_want_of_descriptors_stays(
    db_path: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(_path: str) -> spool.Entry:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with opened(db_path, clock) as node:
        await add(node)
        spool.keep(db_path, OWNER, clock)
        with monkeypatch.context() as patch:
            patch.setattr(spool, "_read", lack)
            with pytest.raises(OSError, match="Too many open files"):
                await apply(node, db_path)
        assert await apply(node, db_path) == 1


async def test_a_del_that_the_database_refuses_stays(
    db_path: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_arguments: object, **_keywords: object) -> None:
        raise StoreUnavailable("the disk is full")

    spool.keep(db_path, OWNER, clock)
    async with opened(db_path, clock) as node:
        with monkeypatch.context() as patch:
            patch.setattr(node.engine, "deallocate", refuse)
            with pytest.raises(StoreUnavailable):
                await apply(node, db_path)
        assert len(files(db_path)) == 1
        assert await apply(node, db_path) == 1


async def test_two_that_apply_at_once_take_turns(
    db_path: str, clock: ManualClock
) -> None:
    owners = [Owner("default", f"c{number}", "eth0") for number in range(20)]
    applied: list[int] = []
    async with opened(db_path, clock) as one, opened(db_path, clock) as other:
        for owner in owners:
            await add(one, owner)
            spool.keep(db_path, owner, clock)

        async def apply_with(node: Node) -> None:
            applied.append(await apply(node, db_path))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(apply_with, one)
            nursery.start_soon(apply_with, other)
    assert sorted(applied) == [0, 20]


async def test_a_lock_that_stays_holds_nobody_up_for_ever(
    db_path: str, clock: ManualClock, autojump_clock: MockClock
) -> None:
    """Whoever has it was stopped, say, by a debugger or a frozen control group."""
    async with opened(db_path, clock) as node:
        spool.keep(db_path, OWNER, clock)
        holder = os.open(spool.directory_of(db_path), os.O_RDONLY)
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(StoreBusy, match="another process has kept the lock"):
            await apply(node, db_path)
        os.close(holder)
        assert await apply(node, db_path) == 1


async def test_a_database_that_is_busy_is_tried_once(
    db_path: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has it applied has a deadline, and tries again until then."""
    tries = 0

    async def refuse(*_arguments: object, **_keywords: object) -> None:
        nonlocal tries
        tries += 1
        raise StoreBusy("database is locked")

    spool.keep(db_path, OWNER, clock)
    async with opened(db_path, clock) as node:
        with monkeypatch.context() as patch:
            patch.setattr(node.store, "release", refuse)
            with pytest.raises(StoreBusy, match="database is locked"):
                await apply(node, db_path)
        assert tries == 1
        assert await apply(node, db_path) == 1


@pytest.mark.parametrize("late_ms", [60_000, 2**62, 10**30])
async def test_an_entry_of_the_future_counts_as_of_now(
    late_ms: int, db_path: str, clock: ManualClock
) -> None:
    spool.keep(db_path, OWNER, clock)
    [path] = spool.pending(db_path, OWNER)
    file = trio.Path(path)
    entry = json.loads(await file.read_text())
    entry["boottime_ms"] += late_ms
    await file.write_text(json.dumps(entry))
    async with opened(db_path, clock) as node:
        await add(node)
        assert await apply(node, db_path) == 1
        assert await node.store.held(OWNER) == ()
        clock.advance(1)
        await add(node)  # the record of the DEL refuses what began until then


async def test_a_daemon_applies_before_it_serves(
    db_path: str, clock: ManualClock
) -> None:
    async with opened(db_path, clock) as node:
        await add(node)
    spool.keep(db_path, OWNER, clock)
    config = metis.DaemonConfig(db_path=db_path)
    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(
            partial(metis.serve, config, transport=metis.MemoryTransport(), clock=clock)
        )
        with pytest.raises(metis.NotAllocated):
            await daemon.engine.check(OWNER)
        nursery.cancel_scope.cancel()


async def test_a_daemon_applies_what_comes_while_it_serves(
    db_path: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "LOOK_SECONDS", 0.01)
    async with opened(db_path, clock) as node, trio.open_nursery() as nursery:
        await add(node)
        await nursery.start(spool.keep_applying, db_path, node.engine, node.store)
        assert len(await node.store.held(OWNER)) == 1
        spool.keep(db_path, OWNER, clock)
        with trio.fail_after(10):
            while await node.store.held(OWNER):
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def test_a_daemon_serves_although_its_spool_cannot_be_applied(
    db_path: str,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse(*_arguments: object, **_keywords: object) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(metis.engine.Engine, "deallocate", refuse)
    spool.keep(db_path, OWNER, clock)
    async with opened(db_path, clock) as node, trio.open_nursery() as nursery:
        await nursery.start(spool.keep_applying, db_path, node.engine, node.store)
        nursery.cancel_scope.cancel()
    assert "the disk is full" in caplog.text
    assert len(files(db_path)) == 1


def test_an_entry_is_its_owner_s_alone_and_nobody_else_s_to_read(
    db_path: str, clock: ManualClock
) -> None:
    assert spool.pending(db_path, OWNER) == []
    spool.keep(db_path, OWNER, clock)
    directory = Path(spool.directory_of(db_path))
    [path] = spool.pending(db_path, OWNER)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert spool.pending(db_path, Owner("default", "c1", "net1")) == []
    assert spool.pending(db_path, Owner("blue", "c1", "eth0")) == []
    clock.advance(1)
    spool.keep(db_path, OWNER, clock)
    assert spool.pending(db_path, OWNER)[0] == path
    assert len(files(db_path)) == 2


def test_a_spool_that_is_full_takes_no_more(
    db_path: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MAX_FILES", 2)
    for number in range(2):
        spool.keep(db_path, Owner("default", f"c{number}", "eth0"), clock)
    with pytest.raises(OSError, match="2 files already"):
        spool.keep(db_path, OWNER, clock)
    assert len(files(db_path)) == 2


def test_a_file_that_cannot_be_written_leaves_nothing_behind(
    db_path: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    spool.keep(db_path, OWNER, clock)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        spool.keep(db_path, Owner("default", "c2", "eth0"), clock)
    assert len(files(db_path)) == 1


async def test_what_a_killed_writer_left_is_removed_when_it_is_old(
    db_path: str, clock: ManualClock
) -> None:
    spool.keep(db_path, OWNER, clock)
    directory = Path(spool.directory_of(db_path))
    for name, age in (("old.tmp", 2 * spool.ABANDONED_SECONDS), ("new.tmp", 0)):
        (directory / name).write_bytes(b"{")
        then = (directory / name).stat().st_mtime - age
        os.utime(directory / name, (then, then))
    async with opened(db_path, clock) as node:
        await apply(node, db_path)
    assert files(db_path) == ["new.tmp"]


@pytest.fixture(autouse=True)
def logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "metis.spool")


def test_there_may_be_a_spool_where_one_is_or_where_that_cannot_be_told(
    db_path: str, clock: ManualClock, tmp_path: Path
) -> None:
    assert not spool.may_hold(db_path)
    link = tmp_path / "link"
    link.symlink_to(db_path)
    (tmp_path / "by").symlink_to(Path(db_path).parent)
    by_link = str(tmp_path / "by" / Path(db_path).name)
    assert not spool.may_hold(by_link)
    spool.keep(db_path, OWNER, clock)
    for path in (db_path, by_link, str(link), f"{db_path}/", f"{db_path}/."):
        assert spool.may_hold(path)
        assert spool.pending(path, OWNER)
