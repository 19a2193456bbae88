"""A backup comes back, and never makes two owners."""

from __future__ import annotations

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metis.errors import PoolExhausted, StoreDamaged
from metis.model import CIDRBlock, Family, Pod, Wanted
from metis.ranges import AddressRange, AddressSet
from metis.store import deletions, history, salvage
from metis.store.blocks import add_block
from metis.store.invariants import violations
from metis.store.merging import Report, merge, read_backup
from metis.store.sql import allocate, held, release
from tests.store import original
from tests.store.databases import START_MS, memory_connection, owner, want
from tests.store.test_invariants import BREAKS, break_index

COOLDOWN_MS = 60_000
BLOCK = "10.0.0.0/29"


def add(connection: apsw.Connection, name: str, now_ms: int = START_MS) -> str:
    with connection:
        (got,) = allocate(connection, now_ms, owner(name), [want(BLOCK)], Pod())
    return got.address


def copy_of(connection: apsw.Connection) -> apsw.Connection:
    """A backup."""
    copy = apsw.Connection(":memory:")
    with copy.backup("main", connection, "main") as backup:
        backup.step(-1)
    return copy


def restore(
    connection: apsw.Connection, backup: apsw.Connection, now_ms: int = START_MS + 10
) -> Report:
    saved = read_backup(backup)
    connection.execute("BEGIN")
    report = merge(connection, now_ms, saved, COOLDOWN_MS)
    connection.execute("COMMIT")
    return report


def addresses(connection: apsw.Connection, name: str) -> list[str]:
    return [one.address for one in held(connection, owner(name))]


def test_into_a_new_database_all_come_back() -> None:
    old, new = memory_connection(), memory_connection()
    with old:
        allocate(
            old,
            START_MS,
            owner("a"),
            [want(BLOCK), want("fd00::/64")],
            Pod("web", "shop"),
        )
        add_block(old, START_MS, "blue", CIDRBlock.parse("10.0.0.0/24"))
        old.execute("UPDATE cidr_blocks SET state = 'Draining' WHERE network = 'blue'")
    report = restore(new, old)
    assert (report.kept, len(report.blocks), len(report.owners)) == (0, 3, 2)
    assert report.left == []
    assert held(new, owner("a")) == held(old, owner("a"))
    states = new.execute("SELECT network, cidr, state FROM cidr_blocks ORDER BY id")
    assert states.fetchall() == [
        ("default", BLOCK, "Ready"),
        ("default", "fd00::/64", "Ready"),
        ("blue", "10.0.0.0/24", "Draining"),
    ]
    query = "SELECT pod_name, pod_namespace, allocation_id IS NULL, boot_id"
    rows = new.execute(f"{query} FROM ip_addresses WHERE container_id = 'a'").fetchall()
    assert rows == [("web", "shop", 0, "boot-1")] * 2


def test_whoever_has_an_address_now_keeps_it() -> None:
    connection = memory_connection()
    first = add(connection, "a")
    backup = copy_of(connection)
    with connection:
        release(connection, START_MS + 1, owner("a"), 0)
        connection.execute("DELETE FROM metis_history")
        connection.execute("DELETE FROM metis_former_owners")
        for name in "bcdef":
            allocate(connection, START_MS + 1, owner(name), [want(BLOCK)], Pod())
    (taker,) = (name for name in "bcdef" if first in addresses(connection, name))
    report = restore(connection, backup)
    assert report.kept == 5
    assert addresses(connection, "a") == []
    assert addresses(connection, taker) == [first]
    assert f"container {taker!r} has it now" in report.left[0]


def test_whoever_has_another_address_now_does_not_get_the_old_one_too() -> None:
    old, connection = memory_connection(), memory_connection()
    add(old, "other")
    was = add(old, "a")
    now = add(connection, "a")
    assert was != now
    report = restore(connection, old)
    assert addresses(connection, "a") == [now]
    assert addresses(connection, "other") == []
    assert any(f"it has {now} now" in words for words in report.left)


def test_whoever_lost_an_address_since_does_not_get_it_again() -> None:
    connection = memory_connection()
    add(connection, "released")
    add(connection, "deleted")
    backup = copy_of(connection)
    with connection:
        release(connection, START_MS + 1, owner("released"), 0)
        release(connection, START_MS + 1, owner("deleted"), 0)
        connection.execute("DELETE FROM metis_history WHERE container_id = 'deleted'")
        deletions.record(connection, START_MS + 1, owner("deleted"), START_MS + 1)
    report = restore(connection, backup)
    assert report.owners == []
    assert sorted(words.partition(": it ")[2] for words in report.left) == [
        "has lost it since (deleted)",
        "was deleted since",
    ]


def test_an_owner_that_came_back_after_it_was_deleted_keeps_what_it_has() -> None:
    connection = memory_connection()
    add(connection, "a")
    with connection:
        release(connection, START_MS + 1, owner("a"), 0)
    address = add(connection, "a", START_MS + 2)
    backup = copy_of(connection)
    new = memory_connection()
    assert restore(new, backup).left == []
    assert addresses(new, "a") == [address]


def test_what_is_of_another_boot_stays_away() -> None:
    old, new = memory_connection(), memory_connection()
    add(old, "a")
    add(old, "b")
    old.execute("UPDATE ip_addresses SET boot_id = 'boot-0' WHERE container_id = 'a'")
    report = restore(new, old)
    assert len(report.owners) == 1
    assert "it is of a boot that has ended" in report.left[0]
    assert addresses(new, "b")


def test_what_an_older_metis_gave_in_a_former_boot_stays_away() -> None:
    old, new = memory_connection(), memory_connection()
    add(old, "a")
    old.execute("UPDATE ip_addresses SET boot_id = NULL")
    old.execute("UPDATE metis_boot SET boot_id = 'boot-0'")
    assert restore(new, old).owners == []


def test_all_that_have_no_owner_rest_for_one_cooldown() -> None:
    connection = memory_connection()
    add(connection, "a")
    restore(connection, copy_of(connection), START_MS)
    for cidr in (BLOCK, "10.1.0.0/24"):  # also where no row is so far
        with pytest.raises(PoolExhausted), connection:
            allocate(
                connection,
                START_MS + COOLDOWN_MS - 1,
                owner("b", cidr),
                [Wanted(Family.IPV4, CIDRBlock.parse(cidr))],
                Pod(),
            )
    assert add(connection, "b", START_MS + COOLDOWN_MS)
    assert addresses(connection, "a") == ["10.0.0.2"]


def test_a_second_set_of_ranges_comes_back_too() -> None:
    old, new = memory_connection(), memory_connection()
    sets = [
        AddressSet((AddressRange.parse("10.0.0.0/24", first, last),))
        for first, last in (("10.0.0.9", "10.0.0.20"), ("10.0.0.30", "10.0.0.40"))
    ]
    with old:
        allocate(old, START_MS, owner("a"), list(map(Wanted.out_of, sets)), Pod())
    restore(new, old)
    assert set(addresses(new, "a")) == {"10.0.0.9", "10.0.0.30"}


def test_a_block_that_shares_addresses_with_one_of_now_stays_away() -> None:
    old, new = memory_connection(), memory_connection()
    add(old, "a")
    with new:
        add_block(new, START_MS, "default", CIDRBlock.parse("10.0.0.0/30"))
    report = restore(new, old)
    assert "shares addresses with 10.0.0.0/30" in report.left[0]
    # Its address is of the block that there is now.
    assert addresses(new, "a") == ["10.0.0.2"]


def test_an_address_that_is_in_no_block_of_now_stays_away() -> None:
    old, new = memory_connection(), memory_connection()
    for name in "abcd":
        add(old, name)
    with new:
        add_block(new, START_MS, "default", CIDRBlock.parse("10.0.0.0/30"))
    report = restore(new, old)
    assert len([words for words in report.left if "no block has it" in words]) == 3
    assert addresses(new, "a") == ["10.0.0.2"]


def test_the_history_of_both_is_kept_in_its_order() -> None:
    connection = memory_connection()
    add(connection, "a")
    with connection:
        release(connection, START_MS + 1, owner("a"), 0)
    backup, new = copy_of(connection), memory_connection()
    add(new, "b")
    with new:
        release(new, START_MS + 5, owner("b"), 0)
    assert restore(new, backup).history == 1
    page = history.select(new, history.Selection())
    assert [(one.container_id, one.ended_at) for one in page.entries] == [
        ("b", START_MS + 5),
        ("a", START_MS + 1),
    ]
    assert restore(new, backup).history == 0


def test_the_clock_and_the_records_of_deletions_are_those_of_now() -> None:
    old, new = memory_connection(), memory_connection()
    old.execute("UPDATE metis_boot SET offset_ms = 7")
    with new:
        deletions.record(new, START_MS, owner("gone"), START_MS)
    queries = ("SELECT * FROM metis_boot", "SELECT * FROM metis_deleted_owners")
    before = [new.execute(query).fetchall() for query in queries]
    restore(new, old)
    assert before == [new.execute(query).fetchall() for query in queries]


def test_a_database_of_the_original_comes_back_too() -> None:
    old, new = apsw.Connection(":memory:"), memory_connection()
    original.create(old)
    block = original.add_block(old, BLOCK, reserves=True)
    original.own(old, block, "10.0.0.5", "pod")
    report = restore(new, old)
    assert addresses(new, "pod") == ["10.0.0.5"]
    assert report.left == []


def test_into_a_database_of_the_original_too() -> None:
    connection, old = memory_connection(), memory_connection()
    add(old, "a")
    original.add_block(connection, BLOCK)
    restore(connection, old)
    assert addresses(connection, "a") == ["10.0.0.2"]
    assert add(connection, "b", START_MS + 2 * COOLDOWN_MS) == "10.0.0.3"


@pytest.mark.damages_database("backups with damage")
def test_a_damaged_backup_is_refused() -> None:
    backup = memory_connection()
    add(backup, "a")
    break_index(backup)
    with pytest.raises(StoreDamaged, match="index"):
        read_backup(backup)


@pytest.mark.damages_database("a backup that breaks rules of ours")
def test_a_backup_that_breaks_rules_of_ours_is_weighed_piece_by_piece() -> None:
    backup, new = memory_connection(), memory_connection()
    add(backup, "a")
    for case in ("a counter is off by one", "an address is none"):
        backup.execute(BREAKS[case][0])
    restore(new, backup)
    assert addresses(new, "a") == ["10.0.0.2"]
    assert violations(new) == []


Step = tuple[str, str]
names = st.sampled_from("abcd")
steps = st.lists(st.tuples(st.sampled_from(["add", "release"]), names), max_size=12)


@settings(max_examples=60, deadline=None)
@given(before=steps, since=steps, lost=st.booleans())
def test_whatever_happened_nobody_loses_an_address_and_none_has_two(
    before: list[Step], since: list[Step], lost: bool
) -> None:
    connection = memory_connection()
    now_ms = START_MS
    for at, (what, name) in enumerate(before + since):
        if at == len(before):
            backup = copy_of(connection)
            if lost:
                connection = memory_connection()
        now_ms += 1
        with connection:
            if what == "release":
                release(connection, now_ms, owner(name), 2)
                continue
            try:
                allocate(connection, now_ms, owner(name), [want(BLOCK)], Pod())
            except PoolExhausted:
                continue
    if not since:
        backup = copy_of(connection)
    present = {name: addresses(connection, name) for name in "abcd"}
    saved = {
        row.container_id: row.address
        for row in salvage.read(backup).rows.values()
        if row.container_id
    }
    restore(connection, backup, now_ms + 1)
    assert violations(connection, now_ms + 1) == []
    for name, mine in present.items():
        if mine:
            assert addresses(connection, name) == mine
        else:
            assert addresses(connection, name) in ([], [saved.get(name)])
