"""Each rule, broken: it is found and named, and nothing else is."""

from __future__ import annotations

import contextlib

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metis.errors import MetisError
from metis.model import CIDRBlock, Family, Pod, Wanted
from metis.ranges import AddressRange, AddressSet
from metis.store import caution, schema
from metis.store.blocks import add_block
from metis.store.garbage import collect, owners_besides
from metis.store.invariants import examine, violations
from metis.store.sql import allocate, release
from metis.store.violations import Kind
from tests.store import original
from tests.store.databases import START_MS, memory_connection, owner, want

BROKEN = pytest.mark.damages_database("a rule is broken to see that it is found")

NOW_MS = START_MS + 1_000
assert NOW_MS == 1_700_000_001_000


@pytest.fixture
def connection() -> apsw.Connection:
    """Two networks, both families, an owner of each; one address cools."""
    connection = memory_connection()
    with connection:
        for name in ("a", "b", "gone"):
            for network in ("default", "blue"):
                allocate(
                    connection,
                    START_MS,
                    owner(name, network),
                    [want("10.0.0.0/29"), want("fd00::/64")],
                    Pod(f"pod-{name}", "ns"),
                )
        release(connection, START_MS, owner("gone"), 60_000)
    return connection


def test_a_database_in_use_has_nothing_to_complain_about(
    connection: apsw.Connection,
) -> None:
    found = examine(connection, NOW_MS)
    assert found.violations == found.warnings == ()
    assert (found.blocks, found.addresses) == (4, 8 + 8 + 256 + 256)


def test_an_empty_database_has_nothing_to_complain_about() -> None:
    assert violations(memory_connection(), NOW_MS) == []


def test_inside_a_transaction_its_own_writes_count(connection: apsw.Connection) -> None:
    with connection:
        connection.execute("UPDATE cidr_blocks SET allocated_ips = 99 WHERE id = 1")
        assert [one.kind for one in violations(connection)] == [Kind.COUNTER]
        assert connection.in_transaction
        connection.execute("UPDATE cidr_blocks SET allocated_ips = 5 WHERE id = 1")
    assert violations(connection) == []


BREAKS = {
    "a counter is off by one": (
        "UPDATE cidr_blocks SET allocated_ips = allocated_ips + 1 WHERE id = 1",
        Kind.COUNTER,
        "counts 6 allocated addresses, and has 5",
    ),
    "a counter is missing": (
        "UPDATE cidr_blocks SET allocated_ips = NULL WHERE id = 1",
        Kind.COUNTER,
        "counts None allocated addresses, and has 5",
    ),
    "a block has host bits": (
        "UPDATE cidr_blocks SET cidr = '10.0.0.3/29' WHERE id = 1",
        Kind.BLOCK,
        "has the cidr '10.0.0.3/29' in place of '10.0.0.0/29'",
    ),
    "a block is no range": (
        "UPDATE cidr_blocks SET cidr = '10.0.0.0' WHERE id = 1",
        Kind.BLOCK,
        "'10.0.0.0' of network 'default' is no range",
    ),
    "a block has the wrong size": (
        "UPDATE cidr_blocks SET total_ips = 7 WHERE id = 1",
        Kind.BLOCK,
        "total_ips 7 in place of 8",
    ),
    "a block has a state that does not exist": (
        "UPDATE cidr_blocks SET state = 'Gone' WHERE id = 1",
        Kind.BLOCK,
        "state 'Gone'",
    ),
    "a block that holds something is being deleted": (
        "UPDATE cidr_blocks SET state = 'Deleting' WHERE id = 1",
        Kind.DELETING,
        "is Deleting, but 3 of its addresses are owned or cooling",
    ),
    "a block was made at no time": (
        "UPDATE cidr_blocks SET created_at = -1 WHERE id = 1",
        Kind.TIME,
        "block 10.0.0.0/29 of network 'default' was made",
    ),
    "a block claims rows beyond its end": (
        "UPDATE cidr_blocks SET seeded_ips = 9 WHERE id = 1",
        Kind.FILLED,
        "9 of its 8 addresses",
    ),
    "a block lacks a row": (
        "DELETE FROM ip_addresses WHERE cidr_block_id = 1 AND address = '10.0.0.5'",
        Kind.FILLED,
        "first 8 addresses have rows, and 1 have none",
    ),
    "an address lies outside its block": (
        "INSERT INTO ip_addresses (address, cidr_block_id) VALUES ('10.0.0.8', 1)",
        Kind.OUTSIDE,
        "'10.0.0.8' lies outside its block 10.0.0.0/29",
    ),
    "an address is none": (
        "INSERT INTO ip_addresses (address, cidr_block_id) VALUES ('10.0.0', 1)",
        Kind.ADDRESS,
        "'10.0.0' is no address of its block",
    ),
    "an address is of the other family": (
        "INSERT INTO ip_addresses (address, cidr_block_id) VALUES ('fd00::9', 1)",
        Kind.ADDRESS,
        "'fd00::9' is no address of its block",
    ),
    "an address is not in canonical form": (
        "UPDATE ip_addresses SET address = 'FD00::9'"
        " WHERE address = 'fd00::9' AND cidr_block_id = 2",
        Kind.ADDRESS,
        "'FD00::9' of fd00::/64 of network 'default' is written so in place of",
    ),
    "an owner has an address that no pod may have": (
        "UPDATE ip_addresses SET container_id = 'c', interface_name = 'eth0',"
        " allocated_at = 1 WHERE address = '10.0.0.0' AND cidr_block_id = 1",
        Kind.RESERVED,
        "10.0.0.0 of 10.0.0.0/29 of network 'default' is for no pod",
    ),
    "an owned address has an end of its cooldown": (
        "UPDATE ip_addresses SET release_at = 5 WHERE container_id = 'a' AND id = 3",
        Kind.ROW,
        "allocated and cooling at once (container 'a'",
    ),
    "an owned address has no interface": (
        "UPDATE ip_addresses SET interface_name = '' WHERE container_id = 'a'"
        " AND id = 3",
        Kind.ROW,
        "has an owner without an interface",
    ),
    "an owned address was given at no time": (
        "UPDATE ip_addresses SET allocated_at = NULL WHERE id = 3",
        Kind.ROW,
        "10.0.0.2 of 10.0.0.0/29, network 'default', was allocated at no time",
    ),
    "an address is allocated to nobody": (
        "UPDATE ip_addresses SET container_id = NULL WHERE id = 3",
        Kind.ROW,
        "is allocated to nobody",
    ),
    "an address is neither allocated nor free": (
        "UPDATE ip_addresses SET is_allocated = NULL WHERE id = 7",
        Kind.ROW,
        "neither allocated nor free",
    ),
    "a free address names an owner": (
        "UPDATE ip_addresses SET pod_name = 'p' WHERE id = 7",
        Kind.ROW,
        "10.0.0.6 of 10.0.0.0/29, network 'default', is free and names an owner",
    ),
    "an address cools until no time": (
        "UPDATE ip_addresses SET release_at = 'soon' WHERE id = 7",
        Kind.TIME,
        "cools until no time",
    ),
    "an address cools for longer than there are dates": (
        "UPDATE ip_addresses SET release_at = 1 << 60 WHERE id = 7",
        Kind.TIME,
        "cools until no time",
    ),
    "an address was allocated in the future": (
        "UPDATE ip_addresses SET allocated_at = 1700000001001 WHERE id = 3",
        Kind.TIME,
        "was allocated in the future",
    ),
    "a sort key is of another address": (
        "UPDATE ip_addresses SET sort_key = x'0a000003' WHERE id = 7",
        Kind.ROW,
        "has the sort key",
    ),
    "a note is about a row that is gone": (
        "PRAGMA foreign_keys = OFF;"
        " INSERT INTO metis_former_owners VALUES (9999, 'c', 'eth0', 5, NULL, NULL)",
        Kind.REFERENCE,
        "row 9999 of metis_former_owners refers to a row of ip_addresses",
    ),
    "an address is of a block that is gone": (
        "PRAGMA foreign_keys = OFF;"
        " INSERT INTO ip_addresses (address, cidr_block_id, container_id,"
        " interface_name, is_allocated, allocated_at)"
        " VALUES ('10.9.9.9', 99, 'c', 'eth0', TRUE, 1)",
        Kind.REFERENCE,
        "10.9.9.9 belongs to a block that is not there, and container c has it",
    ),
    "a note about a former owner names nobody": (
        "UPDATE metis_former_owners SET container_id = ''"
        " WHERE address_id = (SELECT min(address_id) FROM metis_former_owners)",
        Kind.NOTE,
        "metis_former_owners names nobody",
    ),
    "an ownership ended before it began": (
        "UPDATE metis_history SET given_at = ended_at + 1 WHERE id = 1",
        Kind.NOTE,
        "metis_history ended before it began",
    ),
    "there are two clocks": (
        "INSERT INTO metis_boot VALUES ('boot-0', 1)",
        Kind.NOTE,
        "metis_boot has 2 rows",
    ),
    "a caution has no end": (
        "INSERT INTO metis_caution VALUES ('later')",
        Kind.NOTE,
        "metis_caution has no time",
    ),
}
"""name of the case: (statements that break a rule, which, words about it)."""


@BROKEN
@pytest.mark.parametrize("case", BREAKS)
def test_what_is_broken_is_named(connection: apsw.Connection, case: str) -> None:
    statements, kind, words = BREAKS[case]
    connection.execute(statements)
    found = examine(connection, NOW_MS)
    assert found.warnings == ()
    mine = [one for one in found.violations if one.kind is kind]
    assert len(mine) == 1, found.violations
    assert words in mine[0].words


@BROKEN
def test_an_address_with_two_owners_is_named_with_both() -> None:
    connection = memory_connection()
    with connection:
        for cidr in ("10.0.0.0/29", "10.0.1.0/29"):
            add_block(connection, START_MS, "default", CIDRBlock.parse(cidr))
        allocate(connection, START_MS, owner("late"), [want("10.0.0.0/29")], Pod())
    connection.execute(
        "INSERT INTO ip_addresses (address, cidr_block_id, container_id,"
        " interface_name, is_allocated, allocated_at, allocation_id)"
        " VALUES ('10.0.0.2', 2, 'early', 'eth0', TRUE, 5, 'x');"
        "UPDATE cidr_blocks SET allocated_ips = 1 WHERE id = 2"
    )
    twice = [one for one in violations(connection) if one.kind is Kind.TWICE]
    assert len(twice) == 1
    assert "container 'late'" in twice[0].words
    assert "container 'early'" in twice[0].words
    assert twice[0].mend.startswith("taken from container 'early'")


@BROKEN
def test_an_address_that_is_owned_and_cools_elsewhere_is_named() -> None:
    connection = memory_connection()
    with connection:
        allocate(connection, START_MS, owner("a"), [want("10.0.0.0/29")], Pod())
        allocate(connection, START_MS, owner("b", "x"), [want("10.0.0.0/30")], Pod())
        release(connection, START_MS, owner("b", "x"), 60_000)
    connection.execute("UPDATE cidr_blocks SET network = 'default' WHERE id = 2")
    (cooling,) = (v for v in violations(connection, NOW_MS) if v.kind is Kind.COOLING)
    assert "which container 'a' has of 10.0.0.0/29, is cooling in" in cooling.words
    later = violations(connection, START_MS + 60_000)
    assert not [one for one in later if one.kind is Kind.COOLING]


@BROKEN
def test_blocks_that_share_addresses_are_named_while_both_give_some() -> None:
    connection = memory_connection()
    with connection:
        for network, cidr in (
            ("default", "10.0.0.0/24"),
            ("x", "10.0.0.128/25"),
            ("y", "10.0.0.0/23"),
        ):
            add_block(connection, START_MS, network, CIDRBlock.parse(cidr))
    assert violations(connection) == []  # on networks of their own
    connection.execute("UPDATE cidr_blocks SET network = 'default'")
    found = violations(connection)
    assert {one.kind for one in found} == {Kind.OVERLAP}
    # The third contains the others, so to drain one of them would be a guess.
    assert sorted((one.row_id, one.mend) for one in found) == [
        (2, "set to Draining"),
        (3, ""),
        (3, ""),
    ]
    connection.execute("UPDATE cidr_blocks SET state = 'Draining' WHERE id <> 1")
    found_now = examine(connection)
    assert found_now.violations == ()
    assert {one.kind for one in found_now.warnings} == {Kind.OVERLAP}


@BROKEN
def test_a_part_of_a_block_that_lacks_a_row_is_named() -> None:
    connection = memory_connection()
    part = AddressSet((AddressRange.parse("10.0.0.0/24", "10.0.0.9", "10.0.0.20"),))
    with connection:
        allocate(connection, START_MS, owner("a"), [Wanted.out_of(part)], Pod())
    assert violations(connection) == []
    connection.execute("UPDATE ip_addresses SET sort_key = NULL WHERE id = 5")
    (found,) = violations(connection)
    assert found.kind is Kind.WINDOW
    assert "12 addresses from offset 9 to 20" in found.words


@BROKEN
def test_an_index_that_lacks_entries_is_named(connection: apsw.Connection) -> None:
    break_index(connection)
    found = violations(connection, NOW_MS)
    assert {one.kind for one in found} == {Kind.INDEX}
    assert "idx_ip_addresses_owner" in found[0].words


def break_index(connection: apsw.Connection) -> None:
    """Let one index be of fewer rows than there are."""
    connection.pragma("writable_schema", True)
    connection.execute(
        "UPDATE sqlite_schema SET sql = sql || ' WHERE id > 4'"
        " WHERE name = 'idx_ip_addresses_owner'"
    )
    connection.pragma("writable_schema", "RESET")
    connection.execute("REINDEX idx_ip_addresses_owner")
    connection.pragma("writable_schema", True)
    connection.execute(
        "UPDATE sqlite_schema SET sql = replace(sql, ' WHERE id > 4', '')"
        " WHERE name = 'idx_ip_addresses_owner'"
    )
    connection.pragma("writable_schema", "RESET")


def test_without_a_stored_time_nothing_is_in_the_future(
    connection: apsw.Connection,
) -> None:
    with connection:
        allocate(connection, START_MS * 2, owner("late"), [want("10.0.1.0/29")], Pod())
    assert violations(connection) == []
    assert {one.kind for one in violations(connection, NOW_MS)} == {Kind.TIME}


def the_original() -> apsw.Connection:
    """A database with every mistake of the original that is legal for it."""
    connection = apsw.Connection(":memory:")
    original.create(connection)
    original.add_block(connection, "10.0.0.0/29", reserves=True)
    second = original.add_block(connection, "10.0.0.5/29")
    third = original.add_block(connection, "fd00::/126")
    original.own(connection, second, "10.0.0.5", "pod")
    original.own(connection, third, "fd00::", "pod")
    original.own(connection, third, "fd00::1", "other")
    original.own(connection, third, "fd00::9", "outside")
    return connection


def test_what_the_original_does_in_its_ordinary_work_is_a_warning() -> None:
    connection = the_original()
    found = examine(connection, NOW_MS)
    assert found.violations == ()
    assert {one.kind for one in found.warnings} == {
        Kind.BLOCK,
        Kind.OUTSIDE,
        Kind.OVERLAP,
        Kind.RESERVED,
    }
    assert not any(one.mend for one in found.warnings)


def test_what_the_original_never_does_is_a_violation_in_its_database_too() -> None:
    connection = the_original()
    original.own(connection, 1, "10.0.0.5", "second owner")
    connection.execute("UPDATE cidr_blocks SET allocated_ips = 0 WHERE id = 3")
    found = examine(connection, NOW_MS)
    assert [one.kind for one in found.violations] == [Kind.COUNTER, Kind.TWICE]


def test_the_overlap_of_a_block_that_the_original_added_later_is_a_warning(
    connection: apsw.Connection,
) -> None:
    original.add_block(connection, "10.0.0.4/30")
    found = examine(connection, NOW_MS)
    assert found.violations == ()
    assert [one.kind for one in found.warnings] == [Kind.OVERLAP]


SETS = [
    AddressSet((AddressRange.parse("10.0.0.0/28", "10.0.0.4", "10.0.0.7"),)),
    AddressSet(
        (
            AddressRange.parse("10.0.0.0/28", "10.0.0.9", "10.0.0.14"),
            AddressRange.parse("10.2.0.0/30"),
        )
    ),
    AddressSet((AddressRange.parse("10.0.0.0/28", gateway="10.0.0.14"),)),
]

WANTED = [
    [want("10.0.0.0/28")],
    [want("fd00::/126"), want("10.1.0.0/30")],
    [Wanted(Family.IPV6)],
    [Wanted.out_of(SETS[0])],
    [Wanted.out_of(SETS[0]), Wanted.out_of(SETS[1])],
    [Wanted.out_of(SETS[2])],
    [Wanted(Family.IPV4, CIDRBlock.parse("10.0.0.0/28"), "10.0.0.11")],
    [want("10.0.0.0/27")],
]

steps = st.tuples(
    st.sampled_from(
        ["add"] * 6 + ["del"] * 3 + ["gc", "drain", "wait", "boot", "rest"]
    ),
    st.integers(0, len(WANTED) - 1),
    st.sampled_from("abcdef"),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, min_size=10, max_size=30))
def test_no_mix_of_calls_breaks_an_invariant(mix: list[tuple[str, int, str]]) -> None:
    """ADD in all its forms, DEL, GC, drained blocks, reboots, and rests."""
    connection = memory_connection()
    now_ms = START_MS
    for what, number, name in mix:
        now_ms += 7
        who = owner(name, "default" if number % 3 else "blue")
        with contextlib.suppress(MetisError), connection:
            if what == "add":
                allocate(connection, now_ms, who, WANTED[number], Pod("p"), sticky=True)
            elif what == "del":
                release(connection, now_ms, who, 20, deleted_at=now_ms)
            elif what == "gc":
                gone = owners_besides(
                    connection, 0, "default", {(name, "eth0")}, now_ms
                )
                collect(connection, now_ms, gone, now_ms, 20)
            elif what == "drain":
                connection.execute(
                    "UPDATE cidr_blocks SET state = iif(state = 'Ready', 'Draining',"
                    " 'Ready') WHERE id = ?",
                    (number,),
                )
            elif what == "boot":
                schema.prepare(
                    connection,
                    boot_id=f"boot-{now_ms}",
                    boottime_ms=0,
                    walltime_ms=now_ms,
                    cooldown_ms=20,
                )
            elif what == "rest":
                caution.begin(connection, now_ms, now_ms + 20)
        found = violations(connection, now_ms)
        assert not found, (what, number, name, found)
