"""All that is held, and what of it can still be taken back."""

from __future__ import annotations

from dataclasses import replace

import apsw
import pytest

from metis.model import Family, Holding, Owner, Pod
from metis.store import deletions, history, schema, seeding
from metis.store.holdings import Residence
from metis.store.reclaiming import read_holdings, reclaim
from metis.store.sql import allocate, held, release
from tests.store import original
from tests.store.databases import (
    START_MS,
    check_invariants,
    memory_connection,
    owner,
    want,
)

V4, V6 = want("10.0.0.0/24"), want("fd00::/64")


def add(
    connection: apsw.Connection,
    now_ms: int,
    who: Owner,
    netns_path: str = "/run/netns/a",
) -> None:
    with connection:
        allocate(
            connection,
            now_ms,
            who,
            [V4, V6],
            Pod("web-0", "shop"),
            residence=Residence("boot-1", netns_path),
        )


@pytest.fixture
def connection() -> apsw.Connection:
    connection = memory_connection()
    add(connection, 10, owner("a"))
    add(connection, 20, owner("b"))
    return connection


def everything(connection: apsw.Connection) -> list[Holding]:
    found, after = read_holdings(connection, 0, after=None, most=1000)
    assert after is None
    return found


def of(connection: apsw.Connection, who: Owner) -> list[Holding]:
    return [one for one in everything(connection) if one.owner == who]


def test_everything_that_is_known_of_an_owner_is_told(
    connection: apsw.Connection,
) -> None:
    four, six = of(connection, owner("a"))
    assert four.allocation_id
    assert four == Holding(
        owner("a"),
        Pod("web-0", "shop"),
        Family.IPV4,
        "10.0.0.2",
        four.allocation_id,
        10,
        "boot-1",
        "/run/netns/a",
    )
    assert (six.family, six.address) == (Family.IPV6, "fd00::2")


@pytest.mark.parametrize("netns_path", ["/run/netns/b", ""])
def test_an_owner_lives_where_its_last_call_says(
    connection: apsw.Connection, netns_path: str
) -> None:
    add(connection, 30, owner("a"), netns_path)
    assert {one.netns_path for one in of(connection, owner("a"))} == {netns_path}
    assert {one.allocated_at for one in of(connection, owner("a"))} == {30}


def test_free_and_reserved_addresses_are_nobody_s(connection: apsw.Connection) -> None:
    with connection:
        release(connection, 30, owner("b"), 1_000)
    assert {one.owner for one in everything(connection)} == {owner("a")}


def test_owners_that_the_original_let_in_are_known_by_little() -> None:
    connection = apsw.Connection(":memory:")
    original.create(connection)
    block = original.add_block(connection, "10.0.0.0/29", reserves=True)
    original.own(connection, block, "10.0.0.2", "c1")
    seeding.register(connection)
    with connection:
        schema.prepare(
            connection,
            boot_id="boot-1",
            boottime_ms=0,
            walltime_ms=START_MS,
            cooldown_ms=1_000,
        )
    (one,) = everything(connection)
    assert (one.owner, one.address) == (owner("c1"), "10.0.0.2")
    assert (one.allocation_id, one.allocated_at, one.netns_path) == ("", 1, "")
    with connection:
        assert reclaim(connection, START_MS, [([one], "?")], 1_000) == [one]
    check_invariants(connection)


def test_an_owner_that_the_original_put_in_has_nothing_of_its_predecessor(
    connection: apsw.Connection,
) -> None:
    """By which it would be gone: the namespace and the boot are another's."""
    connection.execute(
        "UPDATE ip_addresses SET is_allocated = FALSE, container_id = NULL,"
        " interface_name = NULL, pod_name = NULL, pod_namespace = NULL,"
        " allocated_at = NULL, release_at = 40 WHERE container_id = 'b'"
    )
    connection.execute(
        "UPDATE ip_addresses SET is_allocated = TRUE, container_id = 'c',"
        " interface_name = 'eth0', release_at = NULL, allocated_at = 50"
        " WHERE address = '10.0.0.3'"
    )
    connection.execute(  # where it does not wait for a release
        "UPDATE ip_addresses SET container_id = 'd' WHERE address = '10.0.0.2'"
    )
    connection.execute(
        "UPDATE cidr_blocks SET allocated_ips = allocated_ips - 1"
        " WHERE ip_family = 'ipv6'"
    )
    for name in ("c", "d"):
        (one,) = of(connection, owner(name))
        assert (one.allocation_id, one.boot_id, one.netns_path) == ("", "", "")
    (kept,) = of(connection, owner("a"))
    assert kept.netns_path == "/run/netns/a"


def test_an_owner_that_an_older_metis_put_in_has_nothing_of_its_predecessor(
    connection: apsw.Connection,
) -> None:
    """It clears and sets the allocation's id, and knows no boot and no namespace."""
    connection.execute(
        "UPDATE ip_addresses SET is_allocated = FALSE, container_id = NULL,"
        " interface_name = NULL, pod_name = NULL, pod_namespace = NULL,"
        " allocated_at = NULL, allocation_id = NULL, release_at = 40, updated_at = 40"
        " WHERE address = '10.0.0.2'"
    )
    connection.execute(
        "UPDATE ip_addresses SET is_allocated = TRUE, container_id = 'c',"
        " interface_name = 'eth0', release_at = NULL, allocated_at = 50,"
        " updated_at = 50, allocation_id = 'later' WHERE address = '10.0.0.2'"
    )
    (one,) = of(connection, owner("c"))
    assert (one.allocation_id, one.boot_id, one.netns_path) == ("later", "", "")
    (kept,) = of(connection, owner("a"))
    assert kept.netns_path == "/run/netns/a"


def test_who_is_no_owner_by_our_rules_keeps_its_address(
    connection: apsw.Connection,
) -> None:
    connection.execute(
        "UPDATE ip_addresses SET interface_name = 'eth0' || char(7)"
        " WHERE container_id = 'b'"
    )
    assert {one.owner for one in everything(connection)} == {owner("a")}


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 7, 100])
def test_in_pieces_it_is_the_same_and_no_owner_is_divided(
    connection: apsw.Connection, most: int
) -> None:
    for who in (
        owner("a", interface="eth1"),
        owner("b", network="other"),
        owner("b-2"),
    ):
        add(connection, 30, who)
    connection.execute(  # no owner by our rules: a piece may have nothing else in it
        "UPDATE ip_addresses SET container_id = ? WHERE container_id = 'b'",
        ("b" * 1025,),
    )
    pieces, after = [], None
    while True:
        found, after = read_holdings(connection, 0, after=after, most=most)
        pieces.append(found)
        if after is None:
            break
    together = [held for piece in pieces for held in piece]
    assert together == everything(connection)
    owners = [one for piece in pieces for one in {held.owner for held in piece}]
    assert len(owners) == len(set(owners)) == 3


def test_what_is_taken_back_rests_and_is_written_down(
    connection: apsw.Connection,
) -> None:
    gone = of(connection, owner("a"))
    with connection:
        taken = reclaim(connection, 30, [(gone, "its netns is gone")], 1_000)
    assert taken == gone
    assert held(connection, owner("a")) == ()
    assert len(held(connection, owner("b"))) == 2
    resting = connection.execute(
        "SELECT DISTINCT release_at FROM ip_addresses WHERE release_at IS NOT NULL"
    ).fetchall()
    assert resting == [(1_030,)]
    entries = history.select(connection, history.Selection(container_id="a")).entries
    assert {(one.reason, one.given_at, one.ended_at) for one in entries} == {
        ("reclaimed: its netns is gone", 10, 30)
    }
    check_invariants(connection)


def test_no_call_is_barred_by_it(connection: apsw.Connection) -> None:
    with connection:
        reclaim(connection, 30, [(of(connection, owner("a")), "?")], 1_000)
        deletions.check(connection, owner("a"), started_ms=5)


def test_whoever_asked_again_keeps_all(connection: apsw.Connection) -> None:
    judged = of(connection, owner("a"))
    add(connection, 10, owner("a"))  # in the same millisecond
    with connection:
        assert reclaim(connection, 30, [(judged, "?")], 1_000) == []
    assert len(held(connection, owner("a"))) == 2


def test_whoever_has_more_or_less_than_was_judged_keeps_it(
    connection: apsw.Connection,
) -> None:
    judged = of(connection, owner("a"))
    with connection:
        assert reclaim(connection, 30, [(judged[:1], "?")], 1_000) == []
    more = [*judged, replace(judged[0], address="10.0.0.99")]
    with connection:
        assert reclaim(connection, 30, [(more, "?")], 1_000) == []
    assert len(held(connection, owner("a"))) == 2


def test_whoever_is_gone_already_is_no_error(connection: apsw.Connection) -> None:
    judged = of(connection, owner("a"))
    with connection:
        release(connection, 20, owner("a"), 1_000)
        assert reclaim(connection, 30, [(judged, "?")], 1_000) == []
    check_invariants(connection)


def test_one_that_keeps_its_address_does_not_hold_up_the_others(
    connection: apsw.Connection,
) -> None:
    gone = [(of(connection, owner(name)), "?") for name in ("a", "b")]
    add(connection, 25, owner("a"))
    with connection:
        taken = reclaim(connection, 30, gone, 1_000)
    assert {one.owner for one in taken} == {owner("b")}
    check_invariants(connection)
