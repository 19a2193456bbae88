"""How far a block has rows, and that a large one costs no more than a small one."""

from __future__ import annotations

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metis.model import CIDRBlock
from metis.store import seeding
from metis.store.blocks import insert_block
from tests.store.databases import check_invariants, memory_connection


def block_of(connection: apsw.Connection, cidr: str) -> CIDRBlock:
    block = CIDRBlock.parse(cidr)
    with connection:
        insert_block(connection, 0, "default", block)
    return block


def rows(connection: apsw.Connection) -> list[tuple[str, bool]]:
    """(address, whether it is reserved), in the order of picking."""
    found = connection.execute(
        "SELECT address, is_allocated FROM ip_addresses ORDER BY id"
    )
    return [(str(address), bool(reserved)) for address, reserved in found]


def extend(
    connection: apsw.Connection, block: CIDRBlock, seeded_ips: int | None
) -> int | None:
    with connection:
        stop = seeding.extend(connection, 5, 1, block, seeded_ips)
    check_invariants(connection)
    return stop


def test_a_slash_24_is_whole_at_once() -> None:
    connection = memory_connection()
    block = block_of(connection, "10.0.0.0/24")
    assert extend(connection, block, 0) == 256
    assert extend(connection, block, 256) is None
    got = rows(connection)
    assert [address for address, _ in got] == [f"10.0.0.{n}" for n in range(256)]
    assert [address for address, reserved in got if reserved] == [
        "10.0.0.0",
        "10.0.0.1",
        "10.0.0.255",
    ]
    assert connection.execute(
        "SELECT allocated_ips, seeded_ips FROM cidr_blocks"
    ).fetchall() == [(3, 256)]
    assert connection.execute(
        "SELECT DISTINCT container_id FROM ip_addresses WHERE is_allocated"
    ).fetchall() == [("",)]


@pytest.mark.parametrize("cidr", ["10.0.0.0/8", "fd00::/8"])
def test_batches_double_up_to_a_bound(cidr: str) -> None:
    connection = memory_connection()
    block = block_of(connection, cidr)
    stops = []
    stop: int | None = 0
    for _ in range(7):
        stop = extend(connection, block, stop)
        stops.append(stop)
    assert stops == [256, 512, 1024, 2048, 4096, 8192, 12288]
    assert len(rows(connection)) == 12288


@pytest.mark.parametrize(
    "cidr", ["0.0.0.0/21", "9.255.255.0/24", "127.255.248.0/21", "255.255.248.0/21"]
)
def test_sqlite_spells_addresses_as_the_block_does(cidr: str) -> None:
    connection = memory_connection()
    block = block_of(connection, cidr)
    stop: int | None = 0
    while stop is not None:
        stop = extend(connection, block, stop)
    assert [address for address, _ in rows(connection)] == [
        block.address_at(offset) for offset in range(block.size)
    ]


def test_the_last_batch_ends_with_the_block() -> None:
    connection = memory_connection()
    block = block_of(connection, "10.0.0.0/22")
    assert [extend(connection, block, stop) for stop in (0, 256, 512, 1024)] == [
        256,
        512,
        1024,
        None,
    ]
    assert [address for address, reserved in rows(connection) if reserved] == [
        "10.0.0.0",
        "10.0.0.1",
        "10.0.3.255",
    ]


@pytest.mark.parametrize(
    ("cidr", "expected"),
    [
        ("fd00::ff00/120", ("fd00::ff00", "fd00::ff01", "fd00::ff02")),
        ("2001:db8:0:0:1::/80", ("2001:db8:0:0:1::", "2001:db8::1:0:0:1")),
        ("::/64", ("::", "::1", "::2")),
    ],
)
def test_ipv6_rows_are_spelled_canonically(cidr: str, expected: tuple[str]) -> None:
    connection = memory_connection()
    extend(connection, block_of(connection, cidr), 0)
    assert (
        tuple(address for address, _ in rows(connection))[: len(expected)] == expected
    )


def test_rows_that_are_there_already_stay_as_they_are() -> None:
    connection = memory_connection()
    block = block_of(connection, "10.0.0.0/24")
    with connection:
        connection.execute(
            "INSERT INTO ip_addresses (address, cidr_block_id, is_allocated,"
            " container_id, interface_name, allocated_at) VALUES"
            " ('10.0.0.9', 1, TRUE, 'c1', 'eth0', 1),"
            " ('10.0.0.4', 1, TRUE, 'c2', 'eth0', 1)"
        )
        connection.execute("UPDATE cidr_blocks SET allocated_ips = 2")
    assert extend(connection, block, 0) == 256
    owners = connection.execute(
        "SELECT address, container_id FROM ip_addresses"
        " WHERE container_id <> '' ORDER BY id"
    )
    assert owners.fetchall() == [
        ("10.0.0.9", "c1"),
        ("10.0.0.4", "c2"),
    ]
    assert len(rows(connection)) == 256


def test_reserving_a_free_row_counts_it_once() -> None:
    connection = memory_connection()
    block = block_of(connection, "10.0.0.0/24")
    extend(connection, block, 0)
    with connection:
        for _ in range(2):
            seeding.reserve(connection, 0, 1, "10.0.0.7")
    check_invariants(connection)
    assert connection.execute("SELECT allocated_ips FROM cidr_blocks").fetchall() == [
        (4,)
    ]


def test_a_count_never_falls_below_nothing() -> None:
    connection = memory_connection()
    block_of(connection, "10.0.0.0/24")
    seeding.count(connection, 0, 1, -1)
    assert connection.execute("SELECT allocated_ips FROM cidr_blocks").fetchall() == [
        (0,)
    ]


@given(present=st.integers(0, 300), known=st.integers(0, 300) | st.none())
def test_the_frontier_is_what_was_noted_or_else_where_the_rows_end(
    present: int, known: int | None
) -> None:
    connection = memory_connection()
    block = block_of(connection, "10.0.0.0/24")
    with connection:
        for offset in range(min(present, block.size)):
            connection.execute(
                "INSERT INTO ip_addresses (address, cidr_block_id) VALUES (?, 1)",
                (block.address_at(offset),),
            )
    expected = min(present, block.size) if known is None else known
    assert seeding.frontier(connection, 1, block, known) == expected
