"""Claims: the address that an owner asks for, and the one that it had."""

from __future__ import annotations

import dataclasses

import apsw
import pytest

from metis.errors import AddressTaken, InvalidRequest, PoolExhausted
from metis.model import CIDRBlock, Owner, Pod, Wanted
from metis.store.sql import allocate, release
from tests.store.databases import check_invariants, memory_connection, owner, want

COOLDOWN_MS = 60_000
BLOCK = "10.0.0.0/28"


@pytest.fixture
def connection() -> apsw.Connection:
    return memory_connection()


def asked(address: str, cidr: str = BLOCK) -> Wanted:
    return dataclasses.replace(want(cidr), address=address)


def give(
    connection: apsw.Connection, who: Owner, *wanted: Wanted, now_ms: int = 0
) -> list[str]:
    with connection:
        got = allocate(connection, now_ms, who, wanted, Pod())
    check_invariants(connection)
    return [allocation.address for allocation in got]


def take_back(connection: apsw.Connection, who: Owner, now_ms: int = 0) -> None:
    with connection:
        release(connection, now_ms, who, COOLDOWN_MS)
    check_invariants(connection)


def test_an_owner_that_comes_back_in_time_gets_what_it_had(
    connection: apsw.Connection,
) -> None:
    both = (want(BLOCK), want("fd00::/64"))
    before = give(connection, owner("a"), *both)
    take_back(connection, owner("a"))
    assert give(connection, owner("b"), *both) != before
    assert give(connection, owner("a"), *both, now_ms=COOLDOWN_MS - 1) == before


def test_it_has_no_claim_once_the_cooldown_has_ended(
    connection: apsw.Connection,
) -> None:
    before = give(connection, owner("a"), want(BLOCK))
    take_back(connection, owner("a"))
    assert give(connection, owner("a"), want(BLOCK), now_ms=COOLDOWN_MS) != before


@pytest.mark.parametrize(
    "other",
    [
        owner("b"),
        dataclasses.replace(owner("a"), interface_name="net1"),
        dataclasses.replace(owner("a"), network="other"),
    ],
)
def test_nobody_else_has_its_claim(connection: apsw.Connection, other: Owner) -> None:
    give(connection, owner("a"), want("10.0.0.0/30"))
    take_back(connection, owner("a"))
    if other.network == "other":
        # Its own network has the address free: not by a claim, but as the first.
        assert give(connection, other, want("10.0.0.0/30")) == ["10.0.0.2"]
    else:
        with pytest.raises(PoolExhausted), connection:
            allocate(connection, 1, other, [want("10.0.0.0/30")], Pod())


def test_a_claim_ends_when_the_original_has_used_the_row(
    connection: apsw.Connection,
) -> None:
    before = give(connection, owner("a"), want(BLOCK))
    take_back(connection, owner("a"))
    # Allocated and released by another program, which knows of no notes.
    connection.execute(
        "UPDATE ip_addresses SET release_at = ? WHERE address = ?",
        (COOLDOWN_MS + 5, before[0]),
    )
    assert give(connection, owner("a"), want(BLOCK), now_ms=10) != before


def test_a_block_that_is_not_ready_honours_no_claim(
    connection: apsw.Connection,
) -> None:
    give(connection, owner("a"), want(BLOCK))
    take_back(connection, owner("a"))
    connection.execute("UPDATE cidr_blocks SET state = 'Draining'")
    with pytest.raises(PoolExhausted), connection:
        allocate(connection, 1, owner("a"), [want(BLOCK)], Pod())


def test_a_requested_address_is_given(connection: apsw.Connection) -> None:
    assert give(connection, owner("a"), asked("10.0.0.9")) == ["10.0.0.9"]
    assert give(connection, owner("a"), asked("10.0.0.9")) == ["10.0.0.9"]
    assert give(connection, owner("b"), want(BLOCK)) == ["10.0.0.2"]


def test_addresses_beyond_the_rows_can_be_requested_and_none_is_lost(
    connection: apsw.Connection,
) -> None:
    cidr = "10.0.0.0/22"
    far = ["10.0.1.0", "10.0.1.2", "10.0.1.4", "10.0.3.0"]
    for number, address in enumerate(far):
        got = give(connection, owner(f"far-{number}"), asked(address, cidr))
        assert got == [address]
    everything = {CIDRBlock.parse(cidr).address_at(i) for i in range(2, 1023)}
    rest = {
        give(connection, owner(f"c{number}"), want(cidr))[0]
        for number in range(len(everything) - len(far))
    }
    assert rest == everything - set(far)
    with pytest.raises(PoolExhausted), connection:
        allocate(connection, 0, owner("late"), [want(cidr)], Pod())


def test_a_held_address_is_refused_to_others(connection: apsw.Connection) -> None:
    give(connection, owner("a"), asked("10.0.0.9"))
    with pytest.raises(AddressTaken, match=r"'10\.0\.0\.9'.*held"), connection:
        allocate(connection, 0, owner("b"), [asked("10.0.0.9")], Pod())
    check_invariants(connection)


def test_a_cooling_address_is_refused_to_all_but_its_former_owner(
    connection: apsw.Connection,
) -> None:
    give(connection, owner("a"), asked("10.0.0.9"))
    take_back(connection, owner("a"))
    with pytest.raises(AddressTaken, match=r"cooling.*60\.0 s"), connection:
        allocate(connection, 0, owner("b"), [asked("10.0.0.9")], Pod())
    assert give(connection, owner("a"), asked("10.0.0.9")) == ["10.0.0.9"]
    take_back(connection, owner("a"))
    assert give(connection, owner("b"), asked("10.0.0.9"), now_ms=COOLDOWN_MS)


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("10.0.0.0", "network, gateway or broadcast"),
        ("10.0.0.1", "network, gateway or broadcast"),
        ("10.0.0.15", "network, gateway or broadcast"),
        ("10.0.0.16", "one of 10.0.0.0/28"),
        ("192.0.2.1", "one of 10.0.0.0/28"),
    ],
)
def test_an_address_that_no_pod_may_have_is_refused(
    connection: apsw.Connection, address: str, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught, connection:
        allocate(connection, 0, owner("a"), [asked(address)], Pod())
    assert repr(address) in str(caught.value)
    assert connection.execute("SELECT * FROM cidr_blocks").fetchall() == []


def test_who_holds_another_address_is_told_to_release_it(
    connection: apsw.Connection,
) -> None:
    give(connection, owner("a"), want(BLOCK))
    with pytest.raises(InvalidRequest, match=r"holds '10\.0\.0\.2'"), connection:
        allocate(connection, 0, owner("a"), [asked("10.0.0.9")], Pod())
