"""Records of deleted owners: whom they refuse, and that they do not pile up."""

from __future__ import annotations

import apsw
import pytest

from metis.errors import OwnerDeleted
from metis.model import Owner, Pod
from metis.store import deletions, schema
from metis.store.sql import allocate, held, release
from tests.store.databases import START_MS, memory_connection, owner, want


@pytest.fixture
def connection() -> apsw.Connection:
    return memory_connection()


def records(connection: apsw.Connection) -> list[tuple[object, ...]]:
    query = "SELECT container_id, deleted_at FROM metis_deleted_owners ORDER BY id"
    return connection.execute(query).fetchall()


@pytest.mark.parametrize(
    ("started_ms", "is_refused"), [(1, True), (50, True), (51, False), (None, False)]
)
def test_what_began_before_or_with_the_deletion_is_refused(
    connection: apsw.Connection, started_ms: int | None, is_refused: bool
) -> None:
    with connection:
        release(connection, 60, owner("a"), 1_000, deleted_at=50)
    wanted = [want("10.0.0.0/24")]
    if is_refused:
        with pytest.raises(OwnerDeleted), connection:
            allocate(connection, 70, owner("a"), wanted, Pod(), started_ms=started_ms)
        assert held(connection, owner("a")) == ()
        assert connection.execute("SELECT * FROM cidr_blocks").fetchall() == []
    else:
        with connection:
            allocate(connection, 70, owner("a"), wanted, Pod(), started_ms=started_ms)
    assert records(connection) == [("a", 50)]


@pytest.mark.parametrize(
    "other", [owner("b"), owner("a", "other"), owner("a", interface="net1")]
)
def test_a_record_is_that_of_one_owner(
    connection: apsw.Connection, other: Owner
) -> None:
    deletions.record(connection, 50, owner("a"), 50)
    deletions.check(connection, other, 1)


def test_a_later_record_stands(connection: apsw.Connection) -> None:
    for deleted_at in (50, 70, 60):
        deletions.record(connection, 80, owner("a"), deleted_at)
    assert records(connection) == [("a", 70)]


def test_a_release_that_is_no_deletion_leaves_no_record(
    connection: apsw.Connection,
) -> None:
    release(connection, 50, owner("a"), 1_000)
    release(connection, 50, owner("a"), 1_000, only_allocation_id="x")
    assert records(connection) == []


def test_old_records_make_room(
    connection: apsw.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletions, "_PRUNED_EVERY", 1)
    monkeypatch.setattr(deletions, "_PRUNED_AT_ONCE", 4)
    for number in range(10):
        deletions.record(connection, number, owner(f"c{number}"), number)
    late = deletions.RECORD_MS + 8
    for number in range(3):
        deletions.record(connection, late, owner(f"d{number}"), late)
    assert records(connection) == [
        ("c8", 8),
        ("c9", 9),
        *((f"d{number}", late) for number in range(3)),
    ]


def test_their_number_is_bounded(
    connection: apsw.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletions, "MOST_RECORDS", 5)
    monkeypatch.setattr(deletions, "_PRUNED_EVERY", 1)
    for number in range(20):
        deletions.record(connection, 50, owner(f"c{number}"), 50)
    assert records(connection) == [(f"c{number}", 50) for number in range(15, 20)]


def test_they_are_looked_at_now_and_then_by_more_than_came_meanwhile(
    connection: apsw.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletions, "MOST_RECORDS", 5)
    counts = []
    for number in range(3 * deletions._PRUNED_EVERY):
        deletions.record(connection, 50, owner(f"c{number}"), 50)
        counts.append(len(records(connection)))
    assert max(counts) < 5 + deletions._PRUNED_EVERY
    assert counts[-1] == 5


def test_a_boot_ends_them(connection: apsw.Connection) -> None:
    deletions.record(connection, 50, owner("a"), 50)
    for boot_id, left in (("boot-1", 1), ("boot-2", 0)):
        with connection:
            schema.prepare(
                connection,
                boot_id=boot_id,
                boottime_ms=0,
                walltime_ms=START_MS,
                cooldown_ms=0,
            )
        assert len(records(connection)) == left
