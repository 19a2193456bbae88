"""Garbage: who is found, and what of it is taken back."""

from __future__ import annotations

import apsw
import pytest

from metis.errors import OwnerDeleted
from metis.model import Owner, Pod
from metis.store import deletions
from metis.store.garbage import collect, owners_besides
from metis.store.sql import allocate, held
from tests.store import original
from tests.store.databases import check_invariants, memory_connection, owner, want


@pytest.fixture
def connection() -> apsw.Connection:
    connection = memory_connection()
    for now_ms, who in (
        (10, owner("a")),
        (10, owner("a", interface="net1")),
        (20, owner("b")),
        (20, owner("a", "other")),
    ):
        with connection:
            allocate(
                connection,
                now_ms,
                who,
                [want("10.0.0.0/24"), want("fd00::/64")],
                Pod(),
            )
    return connection


@pytest.mark.parametrize(
    ("kept", "taken_at", "expected"),
    [
        (set(), 20, [owner("a"), owner("a", interface="net1"), owner("b")]),
        (set(), 19, [owner("a"), owner("a", interface="net1")]),
        ({("a", "eth0")}, 99, [owner("a", interface="net1"), owner("b")]),
        ({("a", "eth0"), ("a", "net1"), ("b", "eth0")}, 99, []),
        (set(), 9, []),
    ],
)
def test_who_is_not_on_the_list_is_found(
    connection: apsw.Connection,
    kept: set[tuple[str, str]],
    taken_at: int,
    expected: list[Owner],
) -> None:
    assert owners_besides(connection, 0, "default", kept, taken_at) == expected


def test_what_is_found_is_taken_back_as_if_deleted(connection: apsw.Connection) -> None:
    with connection:
        got = collect(connection, 30, [owner("a"), owner("none")], 15, 1_000)
    assert [(who.container_id, one.address) for who, one in got] == [
        ("a", "10.0.0.2"),
        ("a", "fd00::2"),
    ]
    assert held(connection, owner("a")) == ()
    assert len(held(connection, owner("a", interface="net1"))) == 2
    assert connection.execute(
        "SELECT DISTINCT release_at FROM ip_addresses WHERE release_at > 0"
    ).fetchall() == [(1_030,)]
    with pytest.raises(OwnerDeleted):
        deletions.check(connection, owner("a"), 15)
    deletions.check(connection, owner("a"), 16)
    deletions.check(connection, owner("none"), 1)
    check_invariants(connection)


def test_what_was_allocated_since_is_looked_at_again(
    connection: apsw.Connection,
) -> None:
    with connection:
        assert collect(connection, 30, [owner("b")], 19, 1_000) == []
    assert len(held(connection, owner("b"))) == 2


def test_what_was_asked_for_again_since_stays(connection: apsw.Connection) -> None:
    with connection:
        allocate(connection, 25, owner("b"), [want("10.0.0.0/24")], Pod())
        got = collect(connection, 30, [owner("b")], 24, 1_000)
    assert [one.address for _, one in got] == ["fd00::4"]
    assert [one.address for one in held(connection, owner("b"))] == ["10.0.0.4"]


def test_owners_of_the_original_are_as_old_as_can_be() -> None:
    connection = memory_connection()
    block = original.add_block(connection, "10.0.0.0/29", reserves=True)
    original.own(connection, block, "10.0.0.2", "c1")
    connection.execute("UPDATE ip_addresses SET allocated_at = NULL")
    assert owners_besides(connection, 0, "default", set(), 1) == [owner("c1")]
    with connection:
        assert len(collect(connection, 5, [owner("c1")], 1, 1_000)) == 1


def test_an_owner_that_no_list_can_name_hinders_nobody(
    connection: apsw.Connection,
) -> None:
    """The original lets in whatever comes."""
    connection.execute(
        "UPDATE ip_addresses SET container_id = 'b' || char(7) WHERE container_id = 'b'"
    )
    assert owners_besides(connection, 0, "default", set(), 20) == [
        owner("a"),
        owner("a", interface="net1"),
    ]
