"""What repair does about each rule, and what it leaves alone."""

from __future__ import annotations

import contextlib

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metis.errors import PoolExhausted
from metis.model import CIDRBlock, Pod, Wanted
from metis.ranges import AddressRange, AddressSet
from metis.store.blocks import add_block
from metis.store.invariants import violations
from metis.store.repair import REPAIRED, repair
from metis.store.sql import allocate, held, release
from metis.store.violations import Kind, Violation
from tests.store.databases import START_MS, memory_connection, owner, want
from tests.store.test_invariants import (
    BREAKS,
    NOW_MS,
    break_index,
    the_original,
)
from tests.store.test_invariants import connection as connection  # a fixture

COOLDOWN_MS = 60_000

LEFT_ALONE = {
    "a block is no range": [Kind.BLOCK, Kind.DELETING],
    "an owner has an address that no pod may have": [Kind.RESERVED],
    "an owned address has no interface": [Kind.ROW],
    "an address is of a block that is gone": [Kind.REFERENCE],
}
"""What nobody can mend without a guess."""


def mend(connection: apsw.Connection) -> list[Violation]:
    connection.execute("BEGIN")
    done = repair(connection, NOW_MS, COOLDOWN_MS)
    connection.execute("COMMIT")
    return done


@pytest.mark.parametrize("case", set(BREAKS) - set(LEFT_ALONE))
def test_afterwards_all_invariants_hold(connection: apsw.Connection, case: str) -> None:
    connection.execute(BREAKS[case][0])
    assert mend(connection)
    assert violations(connection, NOW_MS) == []


@pytest.mark.damages_database("it cannot be mended without a guess")
@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_would_be_a_guess_is_left_alone(
    connection: apsw.Connection, case: str
) -> None:
    statements, kind, words = BREAKS[case]
    connection.execute(statements)
    mend(connection)
    left = violations(connection, NOW_MS)
    assert kind in {one.kind for one in left}
    assert {one.kind for one in left} <= set(LEFT_ALONE[case])
    assert any(words in one.words for one in left)


def test_where_nothing_is_broken_nothing_is_written(
    connection: apsw.Connection,
) -> None:
    before = connection.total_changes()
    assert mend(connection) == []
    assert connection.total_changes() == before


def test_what_is_a_warning_is_left_alone() -> None:
    connection = the_original()
    before = connection.total_changes()
    assert repair(connection, NOW_MS, COOLDOWN_MS) == []
    assert connection.total_changes() == before


def test_owners_keep_what_they_have_whatever_is_mended(
    connection: apsw.Connection,
) -> None:
    mine = held(connection, owner("a"))
    for statements, kind, _ in BREAKS.values():
        if kind in (Kind.COUNTER, Kind.TIME, Kind.FILLED, Kind.NOTE, Kind.DELETING):
            connection.execute(statements)
    assert mend(connection)
    assert held(connection, owner("a")) == mine
    assert violations(connection, NOW_MS) == []


def test_of_two_owners_the_one_that_asked_last_keeps_the_address() -> None:
    connection = memory_connection()
    with connection:
        for cidr in ("10.0.0.0/29", "10.0.1.0/29"):
            add_block(connection, START_MS, "default", CIDRBlock.parse(cidr))
        allocate(connection, START_MS, owner("late"), [want("10.0.0.0/29")], Pod())
    connection.execute(
        "INSERT INTO ip_addresses (address, cidr_block_id, container_id,"
        " interface_name, is_allocated, allocated_at, given_at, allocation_id)"
        " VALUES ('10.0.0.2', 2, 'early', 'eth0', TRUE, 5, 5, 'x');"
        "UPDATE cidr_blocks SET allocated_ips = 1 WHERE id = 2"
    )
    done = mend(connection)
    assert [one.kind for one in done] == [Kind.TWICE, Kind.OUTSIDE]
    assert [one.address for one in held(connection, owner("late"))] == ["10.0.0.2"]
    assert held(connection, owner("early")) == ()
    history = connection.execute(
        "SELECT address, container_id, given_at, ended_at, reason FROM metis_history"
    )
    assert history.fetchall() == [("10.0.0.2", "early", 5, NOW_MS, REPAIRED)]
    assert violations(connection, NOW_MS) == []


def test_an_owned_address_outside_its_block_stays_owned(
    connection: apsw.Connection,
) -> None:
    with connection:
        connection.execute(
            "UPDATE ip_addresses SET address = '10.9.9.9' WHERE container_id = 'a'"
            " AND cidr_block_id = 1"
        )
    mend(connection)
    assert held(connection, owner("a"))[0].address == "10.9.9.9"
    left = violations(connection, NOW_MS)
    assert [one.kind for one in left] == [Kind.OUTSIDE]
    with connection:
        release(connection, NOW_MS, owner("a"), COOLDOWN_MS)
    mend(connection)
    assert violations(connection, NOW_MS) == []


def test_an_address_without_a_row_is_given_again(connection: apsw.Connection) -> None:
    with connection:
        for name in ("d", "e"):
            allocate(connection, NOW_MS, owner(name), [want("10.0.0.0/29")], Pod())
        release(connection, NOW_MS, owner("d"), 0)
        connection.execute(
            "DELETE FROM ip_addresses WHERE address = '10.0.0.5' AND cidr_block_id = 1"
        )
    mend(connection)
    wanted, end = [want("10.0.0.0/29")], NOW_MS + COOLDOWN_MS
    with pytest.raises(PoolExhausted), connection:  # whoever had it may still be there
        allocate(connection, end - 1, owner("f"), wanted, Pod())
    got = set()
    for name in ("f", "g"):
        with connection, contextlib.suppress(PoolExhausted):
            (one,) = allocate(connection, end, owner(name), wanted, Pod())
            got.add(one.address)
    assert "10.0.0.5" in got
    assert violations(connection, end) == []


def test_a_row_that_was_neither_allocated_nor_free_rests(
    connection: apsw.Connection,
) -> None:
    connection.execute("UPDATE ip_addresses SET is_allocated = 7 WHERE id = 7")
    mend(connection)
    rows = connection.execute("SELECT release_at FROM ip_addresses WHERE id = 7")
    assert rows.fetchall() == [(NOW_MS + COOLDOWN_MS,)]


def test_a_part_of_a_block_is_filled_anew() -> None:
    connection = memory_connection()
    part = AddressSet((AddressRange.parse("10.0.0.0/24", "10.0.0.9", "10.0.0.20"),))
    with connection:
        allocate(connection, START_MS, owner("a"), [Wanted.out_of(part)], Pod())
    connection.execute("UPDATE ip_addresses SET sort_key = NULL WHERE id = 2")
    assert [one.kind for one in mend(connection)] == [Kind.WINDOW]
    with connection:
        for name in "bcdefghijkl":
            allocate(connection, START_MS, owner(name), [Wanted.out_of(part)], Pod())
    assert violations(connection) == []


def test_the_newer_of_two_blocks_drains_where_the_older_has_all_of_it() -> None:
    connection = memory_connection()
    with connection:
        for network, cidr in (("default", "10.0.0.0/24"), ("x", "10.0.0.128/25")):
            add_block(connection, START_MS, network, CIDRBlock.parse(cidr))
        connection.execute("UPDATE cidr_blocks SET network = 'default'")
    assert [one.kind for one in mend(connection)] == [Kind.OVERLAP]
    states = connection.execute("SELECT state FROM cidr_blocks ORDER BY id")
    assert states.fetchall() == [("Ready",), ("Draining",)]


def test_an_index_is_made_anew(connection: apsw.Connection) -> None:
    break_index(connection)
    assert {one.kind for one in mend(connection)} == {Kind.INDEX}
    assert violations(connection, NOW_MS) == []


@pytest.mark.damages_database("SQLite finds the file damaged")
def test_a_damaged_file_is_not_written(connection: apsw.Connection) -> None:
    connection.execute("UPDATE cidr_blocks SET allocated_ips = 77 WHERE id = 1")
    connection.pragma("writable_schema", True)
    connection.execute(
        "UPDATE sqlite_schema SET sql = replace(sql, 'total_ips INTEGER NOT NULL',"
        " 'total_ips INTEGER NOT NULL CHECK (total_ips < 0)')"
        " WHERE name = 'cidr_blocks'"
    )
    connection.pragma("writable_schema", "RESET")
    assert Kind.FILE in {one.kind for one in violations(connection)}
    assert mend(connection) == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(set(BREAKS) - set(LEFT_ALONE))), max_size=6))
def test_any_of_them_together_are_mended_as_well(cases: list[str]) -> None:
    connection = memory_connection()
    with connection:
        for name in ("a", "b", "gone"):
            for network in ("default", "blue"):
                wanted = [want("10.0.0.0/29"), want("fd00::/64")]
                allocate(connection, START_MS, owner(name, network), wanted, Pod())
        release(connection, START_MS, owner("gone"), COOLDOWN_MS)
    for case in cases:
        try:
            connection.execute(BREAKS[case][0])
        except apsw.ConstraintError:
            continue  # another case has done it
    mend(connection)
    assert violations(connection, NOW_MS) == []
