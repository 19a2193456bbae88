"""The writer task: groups, answers after the commit, cancellation and the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from metis.clock import StoredClock
from metis.errors import (
    InvalidRequest,
    PoolExhausted,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreUnavailable,
)
from metis.model import Allocation, CIDRBlock, Family, Pod
from metis.store.store import Store, open_store, run_store
from metis.store.transactions import Work
from metis.store.writer import (
    DRAIN_SECONDS,
    GROUP_SIZE,
    QUEUE_SIZE,
    StoreStatistics,
)
from tests.store.databases import (
    IPV4,
    START_MS,
    InlineDatabase,
    ManualClock,
    TrioClock,
    check_invariants,
    inline_database,
    owner,
    want,
)

BLOCK = want("10.0.0.0/22")


class GatedDatabase(InlineDatabase):
    """A database whose writes wait at a gate."""

    def __init__(self) -> None:
        super().__init__(StoredClock(TrioClock(), START_MS))
        self.gate = trio.Event()

    async def write(self, group: Sequence[Work[object]]) -> list[object]:
        await self.gate.wait()
        return await super().write(group)


@asynccontextmanager
async def gated() -> AsyncIterator[tuple[Store, GatedDatabase]]:
    """A store whose writer is held by a first request at the gate."""
    database = GatedDatabase()
    async with (
        trio.open_nursery() as nursery,
        run_store(database, cooldown_ms=1_000) as store,
    ):
        nursery.start_soon(store.allocate, owner("first"), [BLOCK], Pod())
        await wait_all_tasks_blocked()
        try:
            yield store, database
        finally:
            database.gate.set()


def owners(database: InlineDatabase) -> set[object]:
    rows = database.connection.execute(
        "SELECT container_id FROM ip_addresses WHERE container_id <> ''"
    )
    return {container for (container,) in rows}


async def test_what_is_queued_is_written_as_one_group() -> None:
    async with gated() as (store, database):
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(store.allocate, owner(f"c{number}"), [IPV4], Pod())
            await wait_all_tasks_blocked()
            assert store.statistics() == StoreStatistics(0, 0, 10)
            database.gate.set()
        assert database.groups == [1, 10]
        assert store.statistics() == StoreStatistics(2, 11, 0)
    check_invariants(database.connection)


async def test_a_group_is_bounded() -> None:
    async with gated() as (store, database):
        async with trio.open_nursery() as nursery:
            for number in range(GROUP_SIZE + 5):
                nursery.start_soon(store.allocate, owner(f"c{number}"), [IPV4], Pod())
            await wait_all_tasks_blocked()
            database.gate.set()
        assert database.groups == [1, GROUP_SIZE, 5]


async def test_requests_are_served_in_the_order_in_which_they_came() -> None:
    got: dict[int, str] = {}

    async def allocate(store: Store, number: int) -> None:
        ((allocation),) = await store.allocate(owner(f"c{number}"), [IPV4], Pod())
        got[number] = allocation.address

    async with gated() as (store, database), trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(allocate, store, number)
            await wait_all_tasks_blocked()
        database.gate.set()
    assert got == {number: f"10.0.0.{number + 3}" for number in range(20)}


async def test_an_answer_comes_after_the_commit(tmp_path: Path) -> None:
    path = str(tmp_path / "metis.sqlite")
    async with open_store(path) as store:
        await store.add_block("default", CIDRBlock.parse("10.0.0.0/22"))
        witness = apsw.Connection(path)

        async def allocate(container: str) -> None:
            (allocation,) = await store.allocate(owner(container), [IPV4], Pod())
            assert witness.execute(
                "SELECT address FROM ip_addresses WHERE container_id = ?", (container,)
            ).fetchall() == [(allocation.address,)]
            await store.release(owner(container))
            assert (
                witness.execute(
                    "SELECT 1 FROM ip_addresses WHERE container_id = ?", (container,)
                ).fetchall()
                == []
            )

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(allocate, f"c{number}")
        witness.close()
        statistics = store.statistics()
        assert statistics.requests == 201
        assert statistics.groups < 201


async def test_one_owner_gets_one_address_at_any_concurrency(tmp_path: Path) -> None:
    got: list[tuple[Allocation, ...]] = []
    async with open_store(str(tmp_path / "metis.sqlite")) as store:

        async def allocate() -> None:
            got.append(
                await store.allocate(owner("c1"), [BLOCK, want("fd00::/64")], Pod())
            )

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(allocate)
        usage = await store.usage("default", Family.IPV4)
    assert len(got) == 20
    assert {allocation.address for answer in got for allocation in answer} == {
        "10.0.0.2",
        "fd00::2",
    }
    assert usage.owned == 1


async def test_an_error_reaches_its_own_caller_alone() -> None:
    errors: list[Exception] = []

    async def overlap(store: Store) -> None:
        try:
            await store.allocate(owner("bad"), [want("10.0.0.0/24")], Pod())
        except InvalidRequest as error:
            errors.append(error)

    async with gated() as (store, database), trio.open_nursery() as nursery:
        nursery.start_soon(store.allocate, owner("c1"), [IPV4], Pod())
        nursery.start_soon(overlap, store)
        nursery.start_soon(store.allocate, owner("c2"), [IPV4], Pod())
        await wait_all_tasks_blocked()
        database.gate.set()
    assert len(errors) == 1
    assert owners(database) == {"first", "c1", "c2"}


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (StoreBusy("locked"), StoreBusy),
        (StoreUnavailable("full"), StoreUnavailable),
        (ZeroDivisionError("bug"), StoreError),
    ],
)
async def test_an_error_of_the_transaction_reaches_the_whole_group(
    failure: Exception, expected: type[StoreError]
) -> None:
    errors: list[StoreError] = []

    async def allocate(store: Store, container: str) -> None:
        try:
            await store.allocate(owner(container), [IPV4], Pod())
        except StoreError as error:
            errors.append(error)

    async with gated() as (store, database):
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(allocate, store, f"c{number}")
            await wait_all_tasks_blocked()
            database.gate.set()
            while len(database.groups) < 1:
                await trio.lowlevel.checkpoint()
            database.failures = [failure]
        assert [type(error) for error in errors] == [expected] * 3
        assert len({id(error) for error in errors}) == 3
        assert str(failure) in str(errors[0])
        await allocate(store, "c9")
    assert owners(database) == {"first", "c9"}


async def test_a_disk_that_takes_no_write_is_told_once_a_minute_and_when_it_is_over(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "metis.store")
    database = inline_database()
    async with run_store(database, cooldown_ms=1000) as store:
        for pause in (0, 1, 58, 2, 1):
            await trio.sleep(pause)
            database.failures.append(StoreUnavailable("the disk is full"))
            with pytest.raises(StoreUnavailable):
                await store.release(owner("c1"))
        assert caplog.text.count("cannot be written to: the disk is full") == 2
        await store.release(owner("c1"))
        await store.release(owner("c1"))
    assert caplog.text.count("written to again") == 1


async def test_a_request_cancelled_while_queued_never_runs() -> None:
    async with gated() as (store, database):
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            for container, cancel in (("c1", False), ("c2", True), ("c3", False)):
                nursery.start_soon(
                    _allocate_in,
                    scope if cancel else trio.CancelScope(),
                    store,
                    container,
                )
                await wait_all_tasks_blocked()
            assert store.statistics().queue_depth == 3
            scope.cancel()
            await wait_all_tasks_blocked()
            assert scope.cancelled_caught
            database.gate.set()
        assert database.groups == [1, 2]
    assert owners(database) == {"first", "c1", "c3"}


async def _allocate_in(scope: trio.CancelScope, store: Store, container: str) -> None:
    with scope:
        await store.allocate(owner(container), [IPV4], Pod())


async def test_a_group_of_cancelled_requests_is_no_transaction() -> None:
    async with gated() as (store, database):
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(store.allocate, owner(f"c{number}"), [IPV4], Pod())
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        database.gate.set()
        await wait_all_tasks_blocked()
        assert database.groups == [1]
        await store.allocate(owner("late"), [IPV4], Pod())
        assert database.groups == [1, 1]
    assert owners(database) == {"first", "late"}


async def test_a_request_cancelled_before_it_is_queued_never_runs() -> None:
    database = inline_database()
    async with run_store(database, cooldown_ms=1_000) as store:
        with trio.move_on_after(0):
            await store.allocate(owner("c1"), [BLOCK], Pod())
        await wait_all_tasks_blocked()
    assert database.groups == []


@asynccontextmanager
async def idle() -> AsyncIterator[tuple[Store, InlineDatabase]]:
    """A store whose writer task waits, over a database that waits for nothing."""
    database = inline_database()
    database.at_once = True
    async with run_store(database, cooldown_ms=1_000) as store:
        await wait_all_tasks_blocked()
        yield store, database
    check_invariants(database.connection)


def task_of(_connection: apsw.Connection, _now_ms: int) -> str:
    return trio.lowlevel.current_task().name


async def test_a_request_by_itself_is_written_without_the_task() -> None:
    async with idle() as (store, database):
        writer = store._writer
        assert await writer.write(task_of) == trio.lowlevel.current_task().name
        assert database.groups == [1]
        assert store.statistics() == StoreStatistics(1, 1, 0)
        database.at_once = False
        assert "run_writer" in await writer.write(task_of)
        assert store.statistics() == StoreStatistics(2, 2, 0)


async def test_requests_that_come_at_once_are_one_group_of_the_task() -> None:
    tasks = []

    async def write(store: Store) -> None:
        tasks.append(await store._writer.write(task_of))

    async with idle() as (store, database):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(write, store)
        assert database.groups == [5]
    assert len(set(tasks)) == 1
    assert "run_writer" in tasks[0]


ROUNDS = 30
"""Trio runs the tasks of a turn in any order, so both orders come up among so many."""


async def test_whoever_was_alone_stays_before_who_comes_then() -> None:
    got: dict[str, int] = {}

    async def allocate(store: Store, container: str, begun: trio.Event) -> None:
        begun.set()
        (allocation,) = await store.allocate(owner(container), [BLOCK], Pod())
        got[container] = int(allocation.address.rpartition(".")[2])

    async with idle() as (store, database):
        for number in range(ROUNDS):
            begun = trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(allocate, store, f"a{number}", begun)
                await begun.wait()
                await allocate(store, f"b{number}", begun)
            assert got[f"b{number}"] == got[f"a{number}"] + 1
    assert set(database.groups) == {1, 2}


async def test_a_request_by_itself_that_is_cancelled_never_runs() -> None:
    async with idle() as (store, database):
        with trio.move_on_after(0) as scope:
            await store.allocate(owner("c1"), [BLOCK], Pod())
        assert scope.cancelled_caught
        assert database.groups == []
        await store.allocate(owner("c2"), [BLOCK], Pod())
    assert owners(database) == {"c2"}


async def test_a_request_by_itself_that_is_cancelled_while_others_may_come() -> None:
    served = set()

    async def allocate(
        store: Store, container: str, scope: trio.CancelScope, begun: trio.Event
    ) -> None:
        with scope:
            begun.set()
            await store.allocate(owner(container), [BLOCK], Pod())
            served.add(container)

    async with idle() as (store, database):
        for number in range(ROUNDS):
            begun, scope = trio.Event(), trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(allocate, store, f"c{number}", scope, begun)
                await begun.wait()
                scope.cancel()
        assert len(database.groups) == len(served)
    assert owners(database) == served
    assert 0 < len(served) < ROUNDS


async def test_a_request_by_itself_is_written_though_the_store_closes() -> None:
    async def allocate(store: Store, begun: trio.Event) -> None:
        begun.set()
        await store.allocate(owner("c1"), [BLOCK], Pod())

    for _ in range(ROUNDS):
        begun = trio.Event()
        async with trio.open_nursery() as nursery:
            async with idle() as (store, database):
                nursery.start_soon(allocate, store, begun)
                await begun.wait()
            assert owners(database) == {"c1"}


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (StoreBusy("locked"), StoreBusy),
        (StoreUnavailable("full"), StoreUnavailable),
        (StoreDamaged("torn"), StoreDamaged),
        (ZeroDivisionError("bug"), StoreError),
    ],
)
async def test_a_request_by_itself_is_told_what_fails(
    failure: Exception, expected: type[StoreError]
) -> None:
    async with idle() as (store, database):
        database.failures = [failure]
        with pytest.raises(expected, match=str(failure)) as caught:
            await store.allocate(owner("c1"), [BLOCK], Pod())
        assert type(caught.value) is expected
        assert store.damage.is_possible == (expected in (StoreDamaged, StoreError))
        with pytest.raises(PoolExhausted):
            await store.allocate(owner("c1"), [IPV4], Pod())
        await store.allocate(owner("c1"), [BLOCK], Pod())


async def test_a_request_that_runs_is_waited_for(autojump_clock: object) -> None:
    database = GatedDatabase()
    answers = []

    async def open_late() -> None:
        await trio.sleep(10)
        database.gate.set()

    async with (
        trio.open_nursery() as nursery,
        run_store(database, cooldown_ms=1_000) as store,
    ):
        nursery.start_soon(open_late)
        with trio.move_on_after(1) as scope:
            answers.append(await store.allocate(owner("c1"), [BLOCK], Pod()))
            await trio.lowlevel.checkpoint()
        assert trio.current_time() == pytest.approx(10, abs=1)
        assert scope.cancelled_caught
    assert [answer[0].address for answer in answers] == ["10.0.0.2"]
    assert owners(database) == {"c1"}


async def test_whoever_finds_the_queue_full_waits_and_may_give_up() -> None:
    async with gated() as (store, database), trio.open_nursery() as nursery:
        for number in range(QUEUE_SIZE):
            nursery.start_soon(store.release, owner(f"c{number}"))
        await wait_all_tasks_blocked()
        assert store.statistics().queue_depth == QUEUE_SIZE
        with trio.move_on_after(0) as scope:
            await store.allocate(owner("late"), [IPV4], Pod())
        assert scope.cancelled_caught
        database.gate.set()
    assert owners(database) == {"first"}


async def test_closing_writes_what_is_queued_and_refuses_the_rest() -> None:
    database = GatedDatabase()
    refused: list[tuple[str, str]] = []

    async def allocate(container: str) -> None:
        try:
            await store.allocate(owner(container), [BLOCK], Pod())
        except StoreUnavailable as error:
            refused.append((container, str(error)))

    async with trio.open_nursery() as nursery:
        async with run_store(database, cooldown_ms=1_000) as store:
            for container in ("c1", "c2"):
                nursery.start_soon(allocate, container)
            await wait_all_tasks_blocked()
            nursery.start_soon(_open_when_blocked, database)
        await allocate("late")
        with pytest.raises(StoreUnavailable, match="closing"):
            await store.held(owner("c1"))
    assert refused == [("late", "the store is closing")]
    assert owners(database) == {"c1", "c2"}


async def _open_when_blocked(database: GatedDatabase) -> None:
    await wait_all_tasks_blocked()
    database.gate.set()


async def test_whoever_waits_to_queue_when_it_closes_is_refused() -> None:
    refused = []

    async def allocate(store: Store) -> None:
        with pytest.raises(StoreUnavailable, match="closing"):
            await store.allocate(owner("late"), [IPV4], Pod())
        refused.append("late")

    async with trio.open_nursery() as nursery, gated() as (store, database):
        for number in range(QUEUE_SIZE):
            nursery.start_soon(store.release, owner(f"c{number}"))
        await wait_all_tasks_blocked()
        nursery.start_soon(allocate, store)
        await wait_all_tasks_blocked()
        nursery.start_soon(_open_when_blocked, database)
        store.close()
    assert refused == ["late"]


async def test_draining_is_bounded_in_time(autojump_clock: object) -> None:
    database = GatedDatabase()
    refused = []

    async def allocate(store: Store, container: str) -> None:
        try:
            await store.allocate(owner(container), [BLOCK], Pod())
        except StoreUnavailable:
            refused.append(container)

    async def open_late() -> None:
        await trio.sleep(DRAIN_SECONDS + 1)
        database.gate.set()

    async with (
        trio.open_nursery() as nursery,
        run_store(database, cooldown_ms=1_000) as store,
    ):
        nursery.start_soon(allocate, store, "runs")
        await wait_all_tasks_blocked()
        nursery.start_soon(allocate, store, "queued")
        await wait_all_tasks_blocked()
        nursery.start_soon(open_late)
    assert refused == ["queued"]
    assert owners(database) == {"runs"}


async def test_cancelling_the_program_writes_what_runs_and_closes_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metis.sqlite"
    with trio.CancelScope() as scope:
        async with open_store(str(path)) as store, trio.open_nursery() as nursery:
            await store.allocate(owner("c0"), [BLOCK], Pod())
            for number in range(30):
                nursery.start_soon(store.allocate, owner(f"c{number}"), [IPV4], Pod())
            await wait_all_tasks_blocked(0)
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not (tmp_path / "metis.sqlite-wal").exists()
    connection = apsw.Connection(str(path))
    check_invariants(connection)
    connection.close()


async def test_cancelling_the_store_still_answers_who_waits_outside_it() -> None:
    database = GatedDatabase()
    got = []

    async def allocate(store: Store, container: str) -> None:
        got.append(await store.allocate(owner(container), [BLOCK], Pod()))

    async with trio.open_nursery() as outside:
        with trio.CancelScope() as scope:
            async with run_store(database, cooldown_ms=1_000) as store:
                for container in ("runs", "queued"):
                    outside.start_soon(allocate, store, container)
                    await wait_all_tasks_blocked()
                outside.start_soon(_open_when_blocked, database)
                scope.cancel()
                await trio.sleep_forever()
    assert len(got) == 2
    assert owners(database) == {"runs", "queued"}


async def test_an_error_of_the_body_closes_the_file(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_store(str(tmp_path / "metis.sqlite")):
            raise ZeroDivisionError
    assert caught.group_contains(ZeroDivisionError)
    assert not (tmp_path / "metis.sqlite-wal").exists()


async def test_an_error_of_opening_is_raised_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "metis.sqlite").mkdir()
    with pytest.raises(StoreUnavailable, match="not a regular file"):
        async with open_store(str(tmp_path / "metis.sqlite")):
            raise AssertionError


async def test_the_cooldown_is_given_in_seconds(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_store(
        str(tmp_path / "metis.sqlite"), clock=clock, release_cooldown=0.25
    ) as store:
        await store.allocate(owner("c1"), [want("10.0.0.1/32")], Pod())
        assert await store.release(owner("c1")) != ()
        assert await store.release(owner("c1")) == ()
        clock.advance(249)
        with pytest.raises(PoolExhausted) as caught:
            await store.allocate(owner("c2"), [IPV4], Pod())
        assert caught.value.next_free_ms == START_MS + 250
        clock.advance(1)
        assert store.clock.now_ms() == START_MS + 250
        assert await store.allocate(owner("c2"), [IPV4], Pod()) != ()


async def test_the_tables_are_listed(tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "metis.sqlite")) as store:
        await store.allocate(owner("c1"), [BLOCK, want("fd00::/64")], Pod("web-0"))
        blocks = await store.list_blocks("ip_family=ipv4")
        assert [row[1] for row in blocks.rows] == ["10.0.0.0/22"]
        page = await store.list_addresses("pod_name=web-0", 1)
        assert [row[1] for row in page.rows] == ["10.0.0.2"]
        page = await store.list_addresses("pod_name=web-0", 1, page.next_token)
        assert [row[1] for row in page.rows] == ["fd00::2"]
        assert page.next_token == ""
        with pytest.raises(InvalidRequest):
            await store.list_blocks("1=0; DELETE FROM cidr_blocks")


async def test_a_page_of_a_full_slash_16_fits_a_message(tmp_path: Path) -> None:
    pod = Pod("n" * 253, "s" * 63)
    async with open_store(str(tmp_path / "metis.sqlite")) as store:
        async with trio.open_nursery() as nursery:
            for number in range(7_000):
                container = f"{number:064x}"
                nursery.start_soon(
                    store.allocate, owner(container), [want("10.0.0.0/16")], pod
                )
        pages, token, rows = 0, "", 0
        while token or not pages:
            page = await store.list_addresses("", 0, token)
            size = sum(len(value) + 4 for row in page.rows for value in row)
            assert size < 3 * 1024 * 1024
            pages, token, rows = pages + 1, page.next_token, rows + len(page.rows)
    assert pages > 1
    assert rows == 8192


async def test_a_store_over_a_database_of_a_test_is_the_same_store() -> None:
    database = inline_database()
    async with run_store(database, cooldown_ms=0) as store:
        await store.add_block("default", CIDRBlock.parse("10.0.0.0/30"))
        (got,) = await store.allocate(owner("c1"), [IPV4], Pod())
        assert await store.held(owner("c1")) == (got,)
        usage = await store.usage("default", Family.IPV4)
        assert (usage.owned, usage.reserved, usage.next_free_ms) == (1, 3, None)
