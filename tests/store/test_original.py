"""A database of the original opens and is served; ours serves the original."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

import apsw
import pytest

from metis.errors import InvalidRequest, PoolExhausted
from metis.model import Family, Owner, Pod, Wanted
from metis.ranges import AddressRange, AddressSet
from metis.store import schema, seeding
from metis.store.sql import allocate, held, release
from metis.store.store import open_store
from metis.store.usage import usage
from tests.store import original
from tests.store.databases import (
    IPV4,
    IPV6,
    START_MS,
    ManualClock,
    check_invariants,
    owner,
    want,
)

COOLDOWN_MS = 60_000


def adopted(*blocks: str) -> apsw.Connection:
    """A database of the original with these blocks, opened by us."""
    connection = apsw.Connection(":memory:")
    original.create(connection)
    for cidr in blocks:
        original.add_block(connection, cidr)
    adopt(connection)
    return connection


def adopt(connection: apsw.Connection) -> None:
    seeding.register(connection)
    connection.pragma("foreign_keys", True)
    assert not schema.check_compatible(connection)
    with connection:
        schema.prepare(
            connection,
            boot_id="boot-1",
            boottime_ms=0,
            walltime_ms=START_MS,
            cooldown_ms=COOLDOWN_MS,
        )
    assert schema.check_compatible(connection)


def give(
    connection: apsw.Connection, who: Owner, *wanted: Wanted, now_ms: int = START_MS
) -> list[str]:
    with connection:
        got = allocate(connection, now_ms, who, wanted, Pod())
    check_counts(connection)
    return [allocation.address for allocation in got]


def give_all(connection: apsw.Connection, wanted: Wanted) -> list[str]:
    got: list[str] = []
    while True:
        try:
            got += give(connection, owner(f"c{len(got)}"), wanted)
        except PoolExhausted:
            return got


def check_counts(connection: apsw.Connection) -> None:
    counted = connection.execute("SELECT allocated_ips FROM cidr_blocks ORDER BY id")
    rows = connection.execute(
        "SELECT sum(a.is_allocated) FROM cidr_blocks AS b"
        " JOIN ip_addresses AS a ON a.cidr_block_id = b.id GROUP BY b.id ORDER BY b.id"
    )
    assert counted.fetchall() == rows.fetchall()


def test_opening_adds_what_is_ours_and_changes_nothing_else() -> None:
    connection = apsw.Connection(":memory:")
    original.create(connection)
    block = original.add_block(connection, "10.0.0.0/24", reserves=True)
    original.own(connection, block, "10.0.0.2", "c1")
    query = (
        "SELECT name, sql FROM sqlite_schema"
        " WHERE type = 'trigger' AND name NOT LIKE 'metis%'"
    )
    triggers = connection.execute(query).fetchall()
    *columns, last = (
        name
        for (name,) in connection.execute(
            "SELECT name FROM pragma_table_info('ip_addresses')"
        )
    )
    assert last == "updated_at"  # which its trigger sets, whoever writes
    addresses = f"SELECT {', '.join(columns)} FROM ip_addresses"  # noqa: S608  # names of the schema
    rows = connection.execute(addresses).fetchall()
    adopt(connection)
    assert connection.execute(query).fetchall() == triggers
    assert connection.execute(addresses).fetchall() == rows
    assert connection.pragma("user_version") == 1
    assert connection.execute("SELECT seeded_ips FROM cidr_blocks").fetchall() == [
        (None,)
    ]


def test_its_allocations_are_held_and_released() -> None:
    connection = apsw.Connection(":memory:")
    original.create(connection)
    block = original.add_block(connection, "10.0.0.0/24", reserves=True)
    original.own(connection, block, "10.0.0.2", "c1")
    adopt(connection)
    assert give(connection, owner("c1"), IPV4) == ["10.0.0.2"]
    assert give(connection, owner("c2"), want("10.0.0.0/24")) == ["10.0.0.3"]
    with connection:
        assert release(connection, START_MS, owner("c1"), COOLDOWN_MS) != ()
    assert held(connection, owner("c1")) == ()
    check_counts(connection)
    assert usage(connection, START_MS, "default", Family.IPV4).cooling == 1


def test_a_whole_block_of_its_gives_every_address_once() -> None:
    connection = adopted("10.0.0.0/22")
    got = give_all(connection, IPV4)
    assert got[0] == "10.0.0.2"
    assert got[-1] == "10.0.3.254"
    assert len(set(got)) == len(got) == 1021


def test_reserved_addresses_that_it_left_free_reach_no_pod() -> None:
    connection = adopted("10.0.0.0/30", "10.0.1.0/29", "fd00::/64")
    assert give_all(connection, IPV4) == [
        "10.0.0.2",
        *(f"10.0.1.{number}" for number in range(2, 7)),
    ]
    assert give(connection, owner("c"), IPV6) == ["fd00::2"]


def test_a_gateway_that_a_pod_of_its_holds_stays_with_the_pod() -> None:
    connection = apsw.Connection(":memory:")
    original.create(connection)
    block = original.add_block(connection, "fd00::/64")
    original.own(connection, block, "fd00::1", "c1")
    adopt(connection)
    assert give(connection, owner("c1"), IPV6) == ["fd00::1"]
    with connection:
        release(connection, START_MS, owner("c1"), 0)
    assert "fd00::1" not in {
        give(connection, owner(f"d{n}"), IPV6)[0] for n in range(70)
    }


def test_a_gateway_that_it_gave_does_not_come_back_to_its_pod() -> None:
    connection = apsw.Connection(":memory:")
    original.create(connection)
    block = original.add_block(connection, "10.0.0.0/29")
    original.own(connection, block, "10.0.0.1", "c1")
    adopt(connection)
    with connection:
        release(connection, START_MS, owner("c1"), COOLDOWN_MS)
    assert give(connection, owner("c1"), IPV4) == ["10.0.0.2"]


@pytest.mark.parametrize(
    "ahead",
    [
        Wanted(Family.IPV6, address="fd00::7f"),
        Wanted.out_of(
            AddressSet((AddressRange.parse("fd00::/120", "fd00::7f", "fd00::8f"),))
        ),
        Wanted.out_of(
            AddressSet((AddressRange.parse("fd00::/120", gateway="fd00::7f"),))
        ),
    ],
    ids=["requested", "range", "gateway"],
)
def test_rows_ahead_of_those_that_it_seeded_lose_no_address(ahead: Wanted) -> None:
    connection = adopted("fd00::/120")  # of which it seeds a quarter
    got = {*give(connection, owner("first"), ahead), *give_all(connection, IPV6)}
    got.add("fd00::7f")  # nobody's where it is the gateway
    assert got >= {f"fd00::{number:x}" for number in range(2, 256)}


@pytest.mark.parametrize(
    ("cidr", "wanted"), [("10.0.0.0/30", IPV4), ("fd00::/126", IPV6)]
)
def test_what_it_left_free_though_no_pod_gets_it_does_not_count_as_free(
    cidr: str, wanted: Wanted
) -> None:
    connection = adopted(cidr)
    give_all(connection, wanted)
    found = usage(connection, START_MS, "default", wanted.family)
    assert found.next_free_ms is None


def test_a_small_ipv6_block_gives_no_address_outside_it() -> None:
    connection = adopted("fd00::/126")
    assert give_all(connection, IPV6) == ["fd00::2", "fd00::3"]


def test_an_ipv6_block_goes_on_where_it_had_stopped_seeding() -> None:
    connection = adopted("fd00::/112")
    got = [give(connection, owner(f"c{number}"), IPV6)[0] for number in range(700)]
    assert got == [f"fd00::{number:x}" for number in range(2, 702)]


@pytest.mark.parametrize("seeded", [1, 5, 700])
def test_the_usage_of_its_blocks_counts_what_is_not_seeded_yet(seeded: int) -> None:
    connection = adopted("fd00::/112")
    got = usage(connection, START_MS, "default", Family.IPV6, position=seeded)
    assert got.next_free_ms == START_MS


def test_a_full_block_of_its_has_nothing_free() -> None:
    connection = adopted("10.0.0.0/29")
    with connection:
        connection.execute(
            "UPDATE ip_addresses SET is_allocated = TRUE, container_id = address,"
            " interface_name = 'eth0'"
        )
        connection.execute("UPDATE cidr_blocks SET allocated_ips = 8")
    with pytest.raises(PoolExhausted, match="8 owned, 0 cooling, 0 reserved"):
        give(connection, owner("c1"), IPV4)
    got = usage(connection, START_MS, "default", Family.IPV4, position=2)
    assert got.next_free_ms is None


def test_an_unmasked_block_is_the_range_that_it_lies_in() -> None:
    connection = adopted("10.0.0.5/29")
    assert give(connection, owner("c1"), want("10.0.0.0/29")) == ["10.0.0.5"]
    assert held(connection, owner("c1"))[0].cidr == "10.0.0.0/29"
    with pytest.raises(InvalidRequest, match=r"overlaps '10\.0\.0\.0/29'"):
        give(connection, owner("c2"), want("10.0.0.0/30"))
    got = [give(connection, owner(f"d{number}"), IPV4)[0] for number in range(4)]
    # Its own rows first, then those that it had left out.
    assert got == ["10.0.0.6", "10.0.0.2", "10.0.0.3", "10.0.0.4"]
    with pytest.raises(PoolExhausted):
        give(connection, owner("e"), IPV4)


def test_two_spellings_of_one_range_never_give_one_address_twice() -> None:
    connection = adopted("10.0.0.5/29", "10.0.0.0/29")
    assert sorted(give_all(connection, IPV4)) == [f"10.0.0.{n}" for n in range(2, 7)]


def test_overlapping_blocks_never_give_one_address_twice() -> None:
    connection = adopted("10.0.0.0/28", "10.0.0.8/29", "10.0.0.0/27")
    got = give_all(connection, IPV4)
    assert len(set(got)) == len(got)
    # .8 and .9 are network and gateway, .15 is the broadcast address, of one.
    assert sorted(int(address.rpartition(".")[2]) for address in got) == [
        *range(2, 8),
        *range(10, 15),
        *range(16, 31),
    ]


def test_an_address_cooling_in_one_block_is_not_given_from_another() -> None:
    connection = adopted("10.0.0.0/29", "10.0.0.0/30")
    give(connection, owner("c1"), IPV4)
    with connection:
        connection.execute("UPDATE cidr_blocks SET state = 'Draining' WHERE id = 1")
        release(connection, START_MS, owner("c1"), COOLDOWN_MS)
    with pytest.raises(PoolExhausted):
        give(connection, owner("c2"), IPV4, now_ms=START_MS + COOLDOWN_MS - 1)
    assert give(connection, owner("c2"), IPV4, now_ms=START_MS + COOLDOWN_MS) == [
        "10.0.0.2"
    ]


def test_an_address_that_only_looks_free_is_no_reason_to_try_again() -> None:
    connection = adopted("10.0.0.0/30", "10.0.0.2/31")
    assert give_all(connection, IPV4) == ["10.0.0.2"]
    with connection:  # it has rested in the one, and is owned in the other
        connection.execute(
            "UPDATE ip_addresses SET release_at = 1"
            " WHERE address = '10.0.0.2' AND cidr_block_id = 2"
        )
    with pytest.raises(PoolExhausted) as caught:
        give(connection, owner("c"), IPV4)
    assert caught.value.next_free_ms is None


def test_blocks_that_cannot_be_served_from_are_left_alone() -> None:
    connection = apsw.Connection(":memory:")
    original.create(connection)
    mapped = original.add_block(connection, "::ffff:10.0.0.0/120")
    held_address = str(ipaddress.ip_address("::ffff:10.0.0.2"))
    original.own(connection, mapped, held_address, "c1")
    connection.execute(
        "INSERT INTO cidr_blocks (cidr, network, ip_family, total_ips)"
        " VALUES ('nonsense', 'default', 'ipv6', 1)"
    )
    connection.execute(
        "INSERT INTO ip_addresses (address, cidr_block_id, is_allocated,"
        " container_id, interface_name) VALUES ('fd00::2', 2, TRUE, 'c2', 'eth0')"
    )
    adopt(connection)
    with pytest.raises(PoolExhausted, match="no CIDR block"):
        give(connection, owner("c3"), IPV6)
    assert held(connection, owner("c1"))[0].address == held_address
    assert held(connection, owner("c2"))[0].cidr == "nonsense"


def test_its_triggers_do_not_hinder_ours() -> None:
    connection = adopted("10.0.0.0/24")
    give(connection, owner("c1"), IPV4, now_ms=7)
    ((allocated_at, updated_at),) = connection.execute(
        "SELECT allocated_at, updated_at FROM ip_addresses WHERE container_id = 'c1'"
    ).fetchall()
    assert allocated_at == 7
    assert isinstance(updated_at, int)
    assert updated_at > START_MS


def run(connection: apsw.Connection, pieces: Sequence[str]) -> None:
    for container in pieces:
        assert original.pick(connection, "default", container) is not None


async def test_both_serve_one_file_in_turns(tmp_path: Path) -> None:
    path = str(tmp_path / "metis.sqlite")
    clock = ManualClock()
    async with open_store(path, clock=clock) as store:
        await store.allocate(owner("a1"), [want("10.0.0.0/24")], Pod())
        await store.allocate(owner("a2"), [want("fd00::/64")], Pod())
        await store.release(owner("a2"))

    connection = apsw.Connection(path)
    assert connection.pragma("journal_mode") == "wal"
    run(connection, ["b1", "b2"])
    original.add_block(connection, "10.0.9.0/24", network="other", reserves=True)
    run(connection, ["b3"])
    check_invariants(connection)
    connection.close()

    async with open_store(path, clock=clock) as store:
        got = [
            (await store.held(owner(container)))[0].address
            for container in ("a1", "b1", "b2", "b3")
        ]
        assert len(set(got)) == 4
        assert await store.allocate(owner("c", "other"), [IPV4], Pod())
        clock.advance(COOLDOWN_MS)
        for number in range(249):
            await store.allocate(owner(f"d{number}"), [IPV4], Pod())
        with pytest.raises(PoolExhausted, match="253 owned, 0 cooling, 3 reserved"):
            await store.allocate(owner("e"), [IPV4], Pod())

    connection = apsw.Connection(path)
    check_invariants(connection)
    connection.close()
