"""Which address an owner gets, on a database in memory."""

from __future__ import annotations

import functools
import itertools

import apsw
import pytest

from metis.errors import InvalidRequest, PoolExhausted
from metis.model import Allocation, CIDRBlock, Family, Owner, Pod, Wanted
from metis.store import picking, seeding
from metis.store.blocks import add_block
from metis.store.sql import allocate, held, release
from metis.store.transactions import run_group
from tests.store.databases import (
    IPV4,
    IPV6,
    check_invariants,
    memory_connection,
    owner,
    want,
)

COOLDOWN_MS = 60_000
POD = Pod("web-0", "shop")


@pytest.fixture
def connection() -> apsw.Connection:
    return memory_connection()


def give(
    connection: apsw.Connection, who: Owner, *wanted: Wanted, now_ms: int = 0
) -> list[str]:
    """Allocate as the store does, in a transaction; the addresses."""
    with connection:
        got = allocate(connection, now_ms, who, wanted, POD)
    check_invariants(connection)
    return [allocation.address for allocation in got]


def take_back(connection: apsw.Connection, who: Owner, now_ms: int = 0) -> list[str]:
    with connection:
        released = release(connection, now_ms, who, COOLDOWN_MS)
    check_invariants(connection)
    return [allocation.address for allocation in released]


def give_all(connection: apsw.Connection, wanted: Wanted, now_ms: int = 0) -> list[str]:
    """Allocate to new owners until nothing is free."""
    got: list[str] = []
    try:
        for number in itertools.count():
            got += give(connection, owner(f"c{number}"), wanted, now_ms=now_ms)
    except PoolExhausted:
        return got
    raise AssertionError


def test_first_address_is_the_one_after_the_gateway(
    connection: apsw.Connection,
) -> None:
    with connection:
        got = allocate(
            connection, 0, owner("c1"), [want("10.240.0.0/20"), want("fd00::/64")], POD
        )
    assert got == (
        Allocation(Family.IPV4, "10.240.0.2", "10.240.0.0/20"),
        Allocation(Family.IPV6, "fd00::2", "fd00::/64"),
    )


@pytest.mark.parametrize(
    ("cidr", "expected"),
    [
        ("10.0.0.8/32", ["10.0.0.8"]),
        ("10.0.0.8/31", ["10.0.0.8", "10.0.0.9"]),
        ("10.0.0.8/30", ["10.0.0.10"]),
        ("10.0.0.8/29", [f"10.0.0.{n}" for n in range(10, 15)]),
        ("fd00::8/128", ["fd00::8"]),
        ("fd00::8/127", ["fd00::8", "fd00::9"]),
        ("fd00::8/126", ["fd00::a", "fd00::b"]),
        ("fd00::8/125", [f"fd00::{n:x}" for n in range(10, 16)]),
    ],
)
def test_a_small_block_gives_exactly_its_addresses(
    connection: apsw.Connection, cidr: str, expected: list[str]
) -> None:
    assert give_all(connection, want(cidr)) == expected


def test_a_repeated_call_gets_the_same_address(connection: apsw.Connection) -> None:
    first = give(connection, owner("c1"), want("10.0.0.0/24"))
    assert give(connection, owner("c1"), want("10.0.0.0/24")) == first
    assert connection.execute("SELECT allocated_ips FROM cidr_blocks").fetchall() == [
        (4,)
    ]  # network, gateway, broadcast and this one


def test_a_repeated_call_adds_only_what_is_missing(connection: apsw.Connection) -> None:
    (first,) = give(connection, owner("c1"), want("10.0.0.0/24"))
    both = give(connection, owner("c1"), want("fd00::/64"), want("10.0.0.0/24"))
    assert both == ["fd00::2", first]


def test_owners_differ_by_network_container_and_interface(
    connection: apsw.Connection,
) -> None:
    block = want("10.0.0.0/24")
    assert give(connection, owner("c1"), block) == ["10.0.0.2"]
    assert give(connection, owner("c1", interface="net1"), block) == ["10.0.0.3"]
    assert give(connection, owner("c2"), block) == ["10.0.0.4"]
    assert give(connection, owner("c1", "other"), block) == ["10.0.0.2"]
    assert take_back(connection, owner("c1", "other")) == ["10.0.0.2"]
    assert [a.address for a in held(connection, owner("c1"))] == ["10.0.0.2"]


def test_dual_stack_takes_neither_when_one_is_exhausted(
    connection: apsw.Connection,
) -> None:
    give(connection, owner("other"), want("fd00::/128"))
    answers = run_group(
        connection,
        _Clock(),  # type: ignore[arg-type]  # only now_ms is read
        [
            functools.partial(
                allocate,
                owner=owner("c1"),
                wanted=[want("10.0.0.0/24"), IPV6],
                pod=POD,
            )
        ],
    )
    assert isinstance(answers[0], PoolExhausted)
    assert answers[0].family == "ipv6"
    assert held(connection, owner("c1")) == ()
    assert connection.execute(
        "SELECT count(*) FROM ip_addresses WHERE release_at IS NOT NULL"
    ).fetchall() == [(0,)]


def test_dual_stack_keeps_what_it_held_when_the_other_is_exhausted(
    connection: apsw.Connection,
) -> None:
    give(connection, owner("other"), want("fd00::/128"))
    give(connection, owner("c1"), want("10.0.0.0/24"))
    with pytest.raises(PoolExhausted):
        give(connection, owner("c1"), IPV4, IPV6)
    assert [a.address for a in held(connection, owner("c1"))] == ["10.0.0.2"]


def test_of_two_exhausted_families_the_longer_wait_is_told(
    connection: apsw.Connection,
) -> None:
    give(connection, owner("a"), want("10.0.0.1/32"))
    give(connection, owner("b"), want("fd00::1/128"))
    take_back(connection, owner("b"), now_ms=0)
    take_back(connection, owner("a"), now_ms=500)
    with pytest.raises(PoolExhausted) as caught:
        give(connection, owner("c"), IPV6, IPV4, now_ms=600)
    assert caught.value.family == "ipv4"
    assert caught.value.wait_ms == COOLDOWN_MS - 100


@pytest.mark.parametrize("wanted", [[], [IPV4, IPV4]])
def test_what_is_wanted_must_make_sense(
    connection: apsw.Connection, wanted: list[Wanted]
) -> None:
    with pytest.raises(InvalidRequest, match="one address of ipv4"):
        give(connection, owner("c1"), *wanted)


def test_a_network_without_a_block_says_so(connection: apsw.Connection) -> None:
    with pytest.raises(PoolExhausted, match="no CIDR block of this family") as caught:
        give(connection, owner("c1"), IPV4)
    assert caught.value.next_free_ms is None


def test_released_addresses_rest_for_the_cooldown(connection: apsw.Connection) -> None:
    assert give(connection, owner("c1"), want("10.0.0.0/30")) == ["10.0.0.2"]
    assert take_back(connection, owner("c1"), now_ms=1_000) == ["10.0.0.2"]
    with pytest.raises(PoolExhausted) as caught:
        give(connection, owner("c2"), IPV4, now_ms=1_000 + COOLDOWN_MS - 1)
    assert caught.value.next_free_ms == 1_000 + COOLDOWN_MS
    assert (caught.value.owned, caught.value.cooling, caught.value.reserved) == (
        0,
        1,
        3,
    )
    assert caught.value.wait_ms == 1
    assert give(connection, owner("c2"), IPV4, now_ms=1_000 + COOLDOWN_MS) == [
        "10.0.0.2"
    ]


def test_releasing_nothing_is_no_error(connection: apsw.Connection) -> None:
    assert take_back(connection, owner("c1")) == []
    give(connection, owner("c1"), want("10.0.0.0/24"))
    assert take_back(connection, owner("c1")) == ["10.0.0.2"]
    assert take_back(connection, owner("c1")) == []


def test_a_released_row_forgets_its_owner(connection: apsw.Connection) -> None:
    give(connection, owner("c1"), want("10.0.0.0/24"), now_ms=7)
    query = (
        "SELECT container_id, interface_name, pod_name, pod_namespace, allocated_at,"
        " release_at, updated_at FROM ip_addresses WHERE address = '10.0.0.2'"
    )
    assert connection.execute(query).fetchall()[0][:6] == (
        "c1",
        "eth0",
        "web-0",
        "shop",
        7,
        None,
    )
    take_back(connection, owner("c1"), now_ms=9)
    assert connection.execute(query).fetchall() == [
        (None, None, None, None, None, 9 + COOLDOWN_MS, 9)
    ]


def test_never_used_addresses_come_before_released_ones(
    connection: apsw.Connection,
) -> None:
    give(connection, owner("c1"), want("10.0.0.0/29"))
    take_back(connection, owner("c1"))
    late = 10 * COOLDOWN_MS
    assert give_all(connection, IPV4, now_ms=late) == [
        "10.0.0.3",
        "10.0.0.4",
        "10.0.0.5",
        "10.0.0.6",
        "10.0.0.2",
    ]


def test_a_block_grows_before_it_gives_an_address_again(
    connection: apsw.Connection,
) -> None:
    for number in range(254):
        give(connection, owner(f"c{number}"), want("10.0.0.0/22"))
    take_back(connection, owner("c7"))
    late = 10 * COOLDOWN_MS
    assert give(connection, owner("d"), IPV4, now_ms=late) == ["10.0.1.0"]


def test_the_address_free_for_longest_comes_first(connection: apsw.Connection) -> None:
    addresses = give_all(connection, want("10.0.0.0/29"))
    order = [3, 0, 4, 1, 2]
    for when, number in enumerate(order):
        take_back(connection, owner(f"c{number}"), now_ms=when)
    late = 10 * COOLDOWN_MS
    assert give_all(connection, IPV4, now_ms=late) == [addresses[n] for n in order]


def test_picking_follows_an_index_and_sorts_nothing(
    connection: apsw.Connection,
) -> None:
    plan = [
        str(row[3])
        for row in connection.execute(
            f"EXPLAIN QUERY PLAN {picking.FIRST_FREE[0]}", (1,)
        )
    ]
    assert plan == [
        "SEARCH a USING INDEX metis_ip_addresses_by_release (cidr_block_id=?)"
    ]


def test_blocks_are_used_oldest_first(connection: apsw.Connection) -> None:
    with connection:
        for cidr in ("10.0.9.0/30", "10.0.1.0/30", "10.0.5.0/31"):
            add_block(connection, 0, "default", CIDRBlock.parse(cidr))
    assert give_all(connection, IPV4) == [
        "10.0.9.2",
        "10.0.1.2",
        "10.0.5.0",
        "10.0.5.1",
    ]


@pytest.mark.parametrize("state", ["Draining", "Deleting"])
def test_a_block_that_is_not_ready_gives_nothing_and_keeps_what_is_held(
    connection: apsw.Connection, state: str
) -> None:
    give(connection, owner("c1"), want("10.0.0.0/24"))
    with connection:
        connection.execute("UPDATE cidr_blocks SET state = ?", (state,))
    with pytest.raises(PoolExhausted):
        give(connection, owner("c2"), want("10.0.0.0/24"))
    assert give(connection, owner("c1"), IPV4) == ["10.0.0.2"]
    assert give(connection, owner("c2"), want("10.0.1.0/24")) == ["10.0.1.2"]
    assert take_back(connection, owner("c1")) == ["10.0.0.2"]


@pytest.mark.parametrize("other", ["10.0.0.0/25", "10.0.0.128/25", "10.0.0.0/23"])
def test_a_block_that_overlaps_another_in_part_is_refused(
    connection: apsw.Connection, other: str
) -> None:
    give(connection, owner("c1"), want("10.0.0.0/24"))
    with pytest.raises(InvalidRequest, match=f"'{other}' overlaps '10.0.0.0/24'"):
        give(connection, owner("c2"), want(other))
    with pytest.raises(InvalidRequest), connection:
        add_block(connection, 0, "default", CIDRBlock.parse(other))
    assert give(connection, owner("c2", "other"), want(other)) != []


def test_the_same_block_in_any_spelling_is_one_block(
    connection: apsw.Connection,
) -> None:
    for number, cidr in enumerate(
        ["10.0.0.7/24", "10.0.0.0/24", "::ffff:10.0.0.9/120"]
    ):
        give(connection, owner(f"c{number}"), want(cidr))
    with connection:
        add_block(connection, 0, "default", CIDRBlock.parse("10.0.0.130/24"))
    assert connection.execute("SELECT cidr, total_ips FROM cidr_blocks").fetchall() == [
        ("10.0.0.0/24", 256)
    ]


def test_a_block_is_added_to_the_network_that_asks(connection: apsw.Connection) -> None:
    give(connection, owner("c1"), want("10.0.0.0/24"), now_ms=5)
    give(connection, owner("c1", "other"), want("10.0.0.0/24"))
    rows = connection.execute(
        "SELECT cidr, network, ip_family, total_ips, state FROM cidr_blocks"
    )
    assert rows.fetchall() == [
        ("10.0.0.0/24", "default", "ipv4", 256, "Ready"),
        ("10.0.0.0/24", "other", "ipv4", 256, "Ready"),
    ]


def test_a_huge_block_fits_the_integers_of_sqlite(connection: apsw.Connection) -> None:
    assert give(connection, owner("c1"), want("fd00::/8")) == ["fd00::2"]
    assert connection.execute("SELECT total_ips FROM cidr_blocks").fetchall() == [
        (2**63 - 1,)
    ]


def test_beyond_the_rotation_a_released_address_comes_before_a_fresh_one(
    connection: apsw.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "ROTATION", 256)
    for number in range(254):
        give(connection, owner(f"c{number}"), want("fd00::/64"))
    take_back(connection, owner("c7"))
    late = COOLDOWN_MS
    assert give(connection, owner("a"), IPV6, now_ms=late - 1) == ["fd00::100"]
    take_back(connection, owner("c8"), now_ms=late - 1)
    for number in range(255):  # the rest of the second batch
        give(connection, owner(f"d{number}"), IPV6, now_ms=late - 1)
    assert give(connection, owner("b"), IPV6, now_ms=late) == ["fd00::9"]
    assert give(connection, owner("c"), IPV6, now_ms=late) == ["fd00::200"]


class _Clock:
    def now_ms(self) -> int:
        return 0
