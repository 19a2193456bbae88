"""A time in which nothing is given that might be somebody's without our knowing."""

from __future__ import annotations

import apsw
import pytest

from metis.errors import AddressTaken, PoolExhausted
from metis.model import Allocation, Family, Pod, Wanted
from metis.ranges import AddressRange, AddressSet
from metis.store import caution
from metis.store.sql import allocate, held, release
from metis.store.usage import usage
from tests.store.databases import START_MS, memory_connection, owner, want

COOLDOWN_MS = 60_000
UNTIL_MS = START_MS + COOLDOWN_MS


def give(
    connection: apsw.Connection, now_ms: int, name: str, wanted: Wanted
) -> Allocation:
    with connection:
        (got,) = allocate(connection, now_ms, owner(name), [wanted], Pod())
    return got


def begin(connection: apsw.Connection) -> None:
    with connection:
        caution.begin(connection, START_MS, UNTIL_MS)


def part_of_a_block() -> Wanted:
    one = AddressRange.parse("10.0.0.0/24", "10.0.0.50", "10.0.0.60", "", [])
    return Wanted.out_of(AddressSet((one,)))


@pytest.mark.parametrize(
    "wanted",
    [want("10.0.0.0/24"), want("10.0.0.0/8"), want("fd00::/64"), part_of_a_block()],
    ids=["small", "vast", "ipv6", "range"],
)
@pytest.mark.parametrize("known", [True, False], ids=["known block", "new block"])
def test_nothing_is_given_before_it_ends_and_everything_after(
    wanted: Wanted, known: bool
) -> None:
    connection = memory_connection()
    if known:
        give(connection, START_MS, "c0", wanted)
    begin(connection)
    for now_ms in (START_MS, UNTIL_MS - 1):
        with pytest.raises(PoolExhausted) as caught:
            give(connection, now_ms, "c1", wanted)
        assert caught.value.next_free_ms == UNTIL_MS
    assert give(connection, UNTIL_MS, "c1", wanted).address


def test_whoever_has_an_address_keeps_it() -> None:
    connection = memory_connection()
    had = give(connection, START_MS, "c0", want("10.0.0.0/24"))
    begin(connection)
    assert give(connection, START_MS + 1, "c0", want("10.0.0.0/24")) == had
    assert held(connection, owner("c0")) == (had,)


def test_whoever_gave_an_address_back_has_no_claim_to_it() -> None:
    connection = memory_connection()
    give(connection, START_MS, "c0", want("10.0.0.0/24"))
    with connection:
        release(connection, START_MS, owner("c0"), COOLDOWN_MS // 2)
    begin(connection)
    with pytest.raises(PoolExhausted):
        give(connection, START_MS + 1, "c0", want("10.0.0.0/24"))


def test_an_address_is_not_given_by_name_either() -> None:
    connection = memory_connection()
    give(connection, START_MS, "c0", want("10.0.0.0/8"))
    begin(connection)
    by_name = Wanted(Family.IPV4, None, "10.9.9.9")
    with pytest.raises(AddressTaken, match=r"free in 60\.0 s"):
        give(connection, START_MS, "c1", by_name)
    assert give(connection, UNTIL_MS, "c1", by_name).address == "10.9.9.9"


def test_a_network_without_a_block_tells_when_it_ends() -> None:
    connection = memory_connection()
    begin(connection)
    assert usage(connection, START_MS, "n", Family.IPV4).next_free_ms == UNTIL_MS
    assert usage(connection, UNTIL_MS, "n", Family.IPV4).next_free_ms is None


def test_a_block_that_is_being_deleted_is_not_held_up() -> None:
    connection = memory_connection()
    give(connection, START_MS, "c0", want("10.0.0.0/24"))
    with connection:
        release(connection, START_MS, owner("c0"), 0)
        connection.execute("UPDATE cidr_blocks SET state = 'Deleting'")
    begin(connection)
    latest = connection.execute("SELECT max(release_at) FROM ip_addresses").fetchone()
    assert latest == (START_MS,)


def test_a_longer_rest_that_has_begun_stands() -> None:
    connection = memory_connection()
    begin(connection)
    with connection:
        caution.begin(connection, START_MS, START_MS + 1)
    assert caution.until(connection) == UNTIL_MS


def test_as_a_rule_there_is_none() -> None:
    assert caution.until(memory_connection()) == 0


@pytest.mark.damages_database("rows of another table")
def test_what_is_no_time_is_none() -> None:
    """As where damage has brought the rows of another table into this one."""
    connection = memory_connection()
    begin(connection)
    connection.execute("INSERT INTO metis_caution VALUES ('ip_addresses')")
    assert caution.until(connection) == UNTIL_MS
