"""Addresses out of sets of ranges: parts of blocks, gaps, gateways, alternatives."""

from __future__ import annotations

import itertools

import apsw
import pytest

from metis.errors import AddressTaken, InvalidRequest, PoolExhausted
from metis.model import Owner, Pod, Wanted
from metis.ranges import AddressRange, AddressSet
from metis.store import picking, seeding
from metis.store.sql import allocate, assured, held, release
from metis.store.usage import usage
from tests.store.databases import check_invariants, memory_connection, owner, want

COOLDOWN_MS = 60_000
POD = Pod("web-0", "shop")


@pytest.fixture
def connection() -> apsw.Connection:
    return memory_connection()


def out_of(
    *ranges: tuple[str, ...], address: str | None = None, exclude: tuple[str, ...] = ()
) -> Wanted:
    """An address out of ranges of (subnet, first, last, gateway)."""
    alternatives = (
        AddressRange.parse(*(*one, "", "", "")[:4], exclude=exclude)  # type: ignore[misc]  # four texts
        for one in ranges
    )
    return Wanted.out_of(AddressSet(tuple(alternatives)), address)


def give(
    connection: apsw.Connection,
    who: Owner,
    *wanted: Wanted,
    now_ms: int = 0,
    sticky: bool = False,
    pod: Pod = POD,
) -> list[str]:
    with connection:
        got = allocate(connection, now_ms, who, wanted, pod, sticky=sticky)
    return [allocation.address for allocation in got]


def give_all(connection: apsw.Connection, wanted: Wanted, now_ms: int = 0) -> list[str]:
    got: list[str] = []
    try:
        for number in itertools.count():
            got += give(connection, owner(f"c{number}"), wanted, now_ms=now_ms)
    except PoolExhausted:
        return got
    raise AssertionError


def take_back(connection: apsw.Connection, who: Owner, now_ms: int = 0) -> None:
    with connection:
        release(connection, now_ms, who, COOLDOWN_MS)


def ipv4(*numbers: int) -> list[str]:
    return [f"10.0.0.{number}" for number in numbers]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (out_of(("10.0.0.0/29",)), ipv4(2, 3, 4, 5, 6)),
        (out_of(("10.0.0.0/29", "10.0.0.3", "10.0.0.4")), ipv4(3, 4)),
        (out_of(("10.0.0.0/29",), exclude=("10.0.0.3", "10.0.0.6")), ipv4(2, 4, 5)),
        (out_of(("10.0.0.0/29", "", "", "10.0.0.4")), ipv4(1, 2, 3, 5, 6)),
        (out_of(("10.0.0.0/29", "", "10.0.0.3", "10.0.0.6")), ipv4(1, 2, 3)),
        (out_of(("10.0.0.0/29", "", "10.0.0.3", "10.9.0.1")), ipv4(1, 2, 3)),
        (out_of(("10.0.0.4/32",)), ipv4(4)),
        (out_of(("10.0.0.4/31",)), ipv4(4, 5)),
        (out_of(("10.0.0.4/31", "", "", "10.0.0.5")), ipv4(4)),
        (out_of(("fd00::4/127",)), ["fd00::4", "fd00::5"]),
        (out_of(("fd00::4/128",)), ["fd00::4"]),
        (
            out_of(("10.0.0.0/30",), ("10.0.0.8/29", "10.0.0.12"), ("10.0.0.4/31",)),
            ipv4(2, 12, 13, 14, 4, 5),
        ),
        (
            out_of(
                ("10.0.0.0/24", "10.0.0.20", "10.0.0.21"),
                ("10.0.0.0/24", "10.0.0.10", "10.0.0.11"),
            ),
            ipv4(20, 21, 10, 11),
        ),
    ],
)
def test_a_set_gives_exactly_its_addresses_in_order(
    connection: apsw.Connection, wanted: Wanted, expected: list[str]
) -> None:
    assert give_all(connection, wanted) == expected
    check_invariants(connection, named_gateways=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("10.0.0.0/8", "10.200.0.10", "10.200.0.12"),
        ("fd00::/8", "fdff:ffff:ffff:ffff:ffff::a", "fdff:ffff:ffff:ffff:ffff::c"),
    ],
)
def test_a_window_far_into_a_vast_block_costs_its_own_rows_alone(
    connection: apsw.Connection, arguments: tuple[str, ...]
) -> None:
    got = give_all(connection, out_of(arguments))
    assert (got[0], got[-1], len(got)) == (*arguments[1:], 3)
    assert connection.execute("SELECT count(*) FROM ip_addresses").fetchone() == (3,)


def test_a_large_window_grows_in_steps(connection: apsw.Connection) -> None:
    wanted = out_of(("10.0.0.0/8", "10.9.0.0", "10.9.255.255"))
    for number in range(300):
        (got,) = give(connection, owner(f"c{number}"), wanted)
        assert got == f"10.9.{number // 256}.{number % 256}"
    assert connection.execute("SELECT count(*) FROM ip_addresses").fetchone() == (512,)


def test_a_window_gives_what_has_been_free_for_longest(
    connection: apsw.Connection,
) -> None:
    wanted = out_of(("10.0.0.0/24", "10.0.0.3", "10.0.0.6"), exclude=("10.0.0.5",))
    other = out_of(("10.0.0.0/24", "10.0.0.50", "10.0.0.50"))
    assert give(connection, owner("x"), other) == ipv4(50)
    assert give_all(connection, wanted) == ipv4(3, 4, 6)
    take_back(connection, owner("x"))
    for when, number in enumerate([2, 0, 1]):
        take_back(connection, owner(f"c{number}"), now_ms=1 + when)
    with pytest.raises(PoolExhausted, match=r"0 owned, 4 cooling.*60\.0 s") as caught:
        give(connection, owner("late"), wanted, now_ms=1)
    assert caught.value.next_free_ms == 1 + COOLDOWN_MS  # not that of the other
    late = 10 * COOLDOWN_MS
    for number in range(3):
        who = owner(f"d{number}")
        assert give(connection, who, wanted, now_ms=late) == ipv4([6, 3, 4][number])


def test_beyond_the_rotation_a_window_gives_a_released_one_before_a_fresh_one(
    connection: apsw.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "ROTATION", 256)
    wanted = out_of(("10.0.0.0/16", "10.0.1.0"))
    for number in range(256):
        give(connection, owner(f"c{number}"), wanted)
    take_back(connection, owner("c7"))
    assert give(connection, owner("a"), wanted, now_ms=COOLDOWN_MS) == ["10.0.1.7"]
    assert give(connection, owner("b"), wanted, now_ms=COOLDOWN_MS) == ["10.0.2.0"]


def test_a_window_takes_over_what_the_whole_block_has_used(
    connection: apsw.Connection,
) -> None:
    for number in range(4):
        give(connection, owner(f"x{number}"), want("10.0.0.0/24"))
    take_back(connection, owner("x1"))
    wanted = out_of(("10.0.0.0/24", "10.0.0.3", "10.0.0.7"))
    assert give_all(connection, wanted) == ipv4(6, 7)
    assert give(connection, owner("y"), wanted, now_ms=COOLDOWN_MS) == ipv4(3)
    assert give(connection, owner("z"), want("10.0.0.0/24")) == ipv4(8)
    check_invariants(connection)


@pytest.mark.parametrize(
    "query", [picking.FIRST_NEVER_USED_OF_WINDOW, picking.FREE_FOR_LONGEST_OF_WINDOW]
)
def test_picking_in_a_window_follows_its_index_and_sorts_nothing(
    connection: apsw.Connection, query: tuple[str, str]
) -> None:
    plan = [
        str(row[3])
        for row in connection.execute(
            f"EXPLAIN QUERY PLAN {query[0]}", (1, "", 0, b"", b"")
        )
    ]
    assert len(plan) == 1
    assert "SEARCH a USING INDEX metis_ip_addresses_by_key" in plan[0]
    assert "(cidr_block_id=? AND release_at" in plan[0]


def test_a_named_gateway_reaches_no_pod_of_the_block(
    connection: apsw.Connection,
) -> None:
    give(connection, owner("x"), want("10.0.0.0/29"))
    named = out_of(("10.0.0.0/29", "", "", "10.0.0.3"))
    assert give(connection, owner("y"), named) == ipv4(4)
    assert give_all(connection, want("10.0.0.0/29")) == ipv4(5, 6)
    # The address after the network address was set aside first, and stays so.
    take_back(connection, owner("y"))
    assert give_all(connection, named, now_ms=COOLDOWN_MS)[2:] == ipv4(4)
    with pytest.raises(InvalidRequest, match="gateway of another configuration"):
        give(
            connection,
            owner("z"),
            out_of(("10.0.0.0/29", "", "", "10.0.0.3"), address="10.0.0.1"),
        )
    check_invariants(connection)


def test_a_pod_that_holds_what_becomes_a_gateway_keeps_it(
    connection: apsw.Connection,
) -> None:
    give(connection, owner("x"), want("10.0.0.0/29"))
    named = out_of(("10.0.0.0/29", "", "", "10.0.0.2"))
    assert give(connection, owner("y"), named) == ipv4(3)
    assert [one.address for one in held(connection, owner("x"))] == ipv4(2)
    take_back(connection, owner("x"))
    assert "10.0.0.2" not in give_all(connection, named, now_ms=COOLDOWN_MS)


def test_network_plus_one_is_no_pods_once_a_request_needs_it(
    connection: apsw.Connection,
) -> None:
    named = out_of(("10.0.0.0/29", "10.0.0.2", "10.0.0.2", "10.0.0.6"))
    give(connection, owner("x"), named)
    assert give_all(connection, want("10.0.0.0/29")) == ipv4(3, 4, 5)
    whole = out_of(("10.0.0.0/29", "", "", "10.0.0.6"))
    with pytest.raises(PoolExhausted):
        give(connection, owner("y"), whole)


def test_one_address_of_each_set_or_none(connection: apsw.Connection) -> None:
    sets = (
        out_of(("10.0.1.0/24", "10.0.1.9", "10.0.1.9")),
        out_of(("fd00::/64",)),
        out_of(("10.0.0.0/24",)),
    )
    assert give(connection, owner("a"), *sets) == ["10.0.1.9", "fd00::2", "10.0.0.2"]
    before = connection.execute("SELECT * FROM ip_addresses").fetchall()
    with pytest.raises(PoolExhausted) as caught:
        give(connection, owner("b"), *reversed(sets))
    assert caught.value.place == 2
    assert connection.execute("SELECT * FROM ip_addresses").fetchall() == before
    assert give(connection, owner("a"), *reversed(sets)) == [
        "10.0.0.2",
        "fd00::2",
        "10.0.1.9",
    ]


@pytest.mark.parametrize(
    "wanted",
    [
        [out_of(("10.0.0.0/24",)), out_of(("10.0.0.0/24", "10.0.0.9"))],
        [out_of(("10.0.0.0/24",)), want("fd00::/64")],
    ],
)
def test_sets_that_make_no_sense_together_take_nothing(
    connection: apsw.Connection, wanted: list[Wanted]
) -> None:
    with pytest.raises(InvalidRequest):
        give(connection, owner("a"), *wanted)
    assert connection.execute("SELECT * FROM cidr_blocks").fetchall() == []


def test_new_pods_come_from_the_new_range_and_the_old_one_drains(
    connection: apsw.Connection,
) -> None:
    old, new = out_of(("10.0.0.0/24",)), out_of(("10.0.1.0/24",))
    assert give(connection, owner("a"), old) == ipv4(2)
    assert give(connection, owner("b"), new) == ["10.0.1.2"]
    assert [one.address for one in held(connection, owner("a"))] == ipv4(2)
    take_back(connection, owner("a"))
    assert give(connection, owner("a"), new) == ["10.0.1.3"]


def test_a_set_honours_no_block_that_is_not_ready(connection: apsw.Connection) -> None:
    wanted = out_of(("10.0.0.0/29", "10.0.0.4"), ("10.0.1.0/30",))
    give(connection, owner("a"), wanted)
    connection.execute("UPDATE cidr_blocks SET state = 'Draining'")
    assert give_all(connection, wanted)[1:] == []
    assert usage(connection, 0, "default", wanted.family, 1, wanted.ranges) == (
        usage(connection, 0, "default", wanted.family, 2, wanted.ranges)
    )
    with pytest.raises(InvalidRequest, match="is in no CIDR block"):
        give(
            connection,
            owner("z"),
            out_of(("10.0.0.0/29", "10.0.0.4"), address="10.0.0.5"),
        )


def test_a_requested_address_comes_from_its_range(connection: apsw.Connection) -> None:
    ranges = (("10.0.0.0/24", "10.0.0.10", "10.0.0.19"), ("10.0.1.0/24",))
    for address in ("10.0.0.15", "10.0.1.200"):
        assert give(connection, owner(address), out_of(*ranges, address=address)) == [
            address
        ]
        with pytest.raises(AddressTaken):
            give(connection, owner("z"), out_of(*ranges, address=address))
    got = give_all(connection, out_of(ranges[0]))
    assert got == ipv4(10, 11, 12, 13, 14, 16, 17, 18, 19)
    refused = {
        "10.0.0.9": "in no range of its set: it must be in one of 10.0.0.10-10.0.0.19",
        "10.0.1.1": "is the gateway",
        "10.0.1.50": "is excluded",
        "10.0.1.255": "in no range",
    }
    for address, reason in refused.items():
        wanted = out_of(*ranges[1:], address=address, exclude=("10.0.1.50",))
        if address == "10.0.0.9":
            wanted = out_of(*ranges, address=address)
        with pytest.raises(InvalidRequest, match=reason):
            give(connection, owner("z"), wanted)


def test_a_sticky_pod_gets_what_it_had_cooling_or_free(
    connection: apsw.Connection,
) -> None:
    wanted = out_of(("10.0.0.0/24",))
    assert give(connection, owner("s1"), wanted) == ipv4(2)
    assert give(connection, owner("s2"), wanted, sticky=True) == ipv4(3)  # s1 lives
    take_back(connection, owner("s1"))
    assert give(connection, owner("s3"), wanted) == ipv4(4)  # not asked for
    assert give(connection, owner("s4"), wanted, sticky=True) == ipv4(2)
    take_back(connection, owner("s4"))
    take_back(connection, owner("s3"), now_ms=9)
    later = 10 * COOLDOWN_MS
    assert give(connection, owner("s5"), wanted, sticky=True, now_ms=later) == ipv4(4)


@pytest.mark.parametrize(
    ("who", "pod", "cidr"),
    [
        (owner("s2"), Pod("web-1", "shop"), "10.0.0.0/24"),
        (owner("s2"), Pod("web-0", "other"), "10.0.0.0/24"),
        (owner("s2"), Pod(), "10.0.0.0/24"),
        (owner("s2", interface="net1"), POD, "10.0.0.0/24"),
        (owner("s2"), POD, "10.0.9.0/24"),
    ],
)
def test_a_sticky_address_is_that_of_one_pod_interface_and_range(
    connection: apsw.Connection, who: Owner, pod: Pod, cidr: str
) -> None:
    give(connection, owner("s1"), out_of(("10.0.0.0/24",)))
    take_back(connection, owner("s1"))
    got = give(connection, who, out_of((cidr,)), sticky=True, pod=pod)
    assert got != ipv4(2)


def test_a_sticky_address_is_of_its_network(connection: apsw.Connection) -> None:
    wanted = out_of(("10.0.0.0/24",))
    for name in ("s0", "s1"):
        give(connection, owner(name), wanted)
    take_back(connection, owner("s1"))
    assert give(connection, owner("s2", "other"), wanted, sticky=True) == ipv4(2)


def test_what_is_new_held_requested_or_sticky_is_assured(
    connection: apsw.Connection,
) -> None:
    wanted = out_of(("10.0.0.0/24",))
    assert assured(connection, 0, owner("a"), [wanted]) == {0}
    give(connection, owner("a"), wanted)
    assert assured(connection, 0, owner("a"), [wanted]) == {0}
    assert assured(connection, 0, owner("b"), [wanted]) == frozenset()
    named = out_of(("10.0.0.0/24",), address="10.0.0.9")
    new = out_of(("10.0.1.0/24",))
    assert assured(connection, 0, owner("b"), [wanted, named, new]) == {1, 2}
    take_back(connection, owner("a"))
    late = COOLDOWN_MS + 1
    assert assured(connection, late, owner("b"), [wanted], POD) == {0}
    assert assured(connection, late, owner("b"), [wanted]) == frozenset()


def test_a_subnet_may_grow_or_shrink_once_nothing_of_it_is_held_or_cooling(
    connection: apsw.Connection,
) -> None:
    small, large = out_of(("10.0.0.0/28",)), out_of(("10.0.0.0/24",))
    give(connection, owner("a"), small)
    for now_ms in (0, COOLDOWN_MS - 1):
        with pytest.raises(InvalidRequest, match=r"overlaps '10\.0\.0\.0/28'"):
            give(connection, owner("b"), large, now_ms=now_ms)
        if now_ms == 0:
            with connection:
                release(connection, now_ms, owner("a"), COOLDOWN_MS)
    assert give(connection, owner("b"), large, now_ms=COOLDOWN_MS) == ["10.0.0.2"]
    check_invariants(connection)
    blocks = connection.execute("SELECT cidr FROM cidr_blocks").fetchall()
    assert blocks == [("10.0.0.0/24",)]


def test_an_address_by_name_may_be_of_the_subnet_as_it_is_now(
    connection: apsw.Connection,
) -> None:
    give(connection, owner("a"), out_of(("10.0.0.0/28",)))
    with connection:
        release(connection, 0, owner("a"), 0)
    asked = out_of(("10.0.0.0/24",), address="10.0.0.99")
    assert give(connection, owner("b"), asked, now_ms=1) == ["10.0.0.99"]
