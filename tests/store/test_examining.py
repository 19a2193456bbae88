"""The look through a whole database, piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import apsw
import pytest

from metis.model import Pod
from metis.store import examining, sql
from tests.store.databases import START_MS, memory_connection, owner, want

CIDRS = ("10.1.0.0/28", "10.2.0.0/28", "fd00::/125")


@pytest.fixture
def connection() -> Iterator[apsw.Connection]:
    """Three blocks, and some owners in each."""
    connection = memory_connection()
    for number in range(3):
        for cidr in CIDRS:
            allocate(connection, f"c{number}", cidr)
    yield connection
    connection.close()


@pytest.fixture(params=[1, 3, 1024])
def rows_at_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of one row, pieces that end within a block, and one for all."""
    monkeypatch.setattr(examining, "_ROWS_AT_ONCE", request.param)


def allocate(connection: apsw.Connection, container: str, cidr: str) -> None:
    network = f"of {cidr}"
    with connection:
        sql.allocate(
            connection,
            START_MS,
            owner(container, network),
            [want(cidr)],
            Pod("pod", "ns"),
        )


def examine(connection: apsw.Connection) -> str:
    return examining.examine(connection, START_MS, "the database")


def counters(connection: apsw.Connection) -> list[object]:
    query = "SELECT allocated_ips FROM cidr_blocks ORDER BY id"
    return [count for (count,) in connection.execute(query)]


def spoil(connection: apsw.Connection, column: str, text: bytes, row: int) -> None:
    """Write bytes in place of a text, as they would be after a bit has flipped."""
    connection.execute(
        f"UPDATE ip_addresses SET {column} = CAST(? AS TEXT) WHERE id = ?",  # noqa: S608  # columns of this module
        (text, row),
    )


@pytest.mark.usefixtures("rows_at_once")
def test_a_whole_database_is_found_whole_and_not_written_to(
    connection: apsw.Connection,
) -> None:
    before = connection.total_changes()
    assert examine(connection) == ""
    assert connection.total_changes() == before
    assert not connection.in_transaction


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_counter_of_each_block_is_corrected(
    connection: apsw.Connection, wrong: int, caplog: pytest.LogCaptureFixture
) -> None:
    right = counters(connection)
    connection.execute(
        "UPDATE cidr_blocks SET allocated_ips = 9 WHERE cidr = ?", (CIDRS[wrong],)
    )
    with caplog.at_level(logging.ERROR):
        assert examine(connection) == ""
    assert counters(connection) == right
    [record] = caplog.records
    assert CIDRS[wrong] in record.getMessage()


@pytest.mark.usefixtures("rows_at_once")
def test_the_counters_of_blocks_without_rows_are_corrected(
    connection: apsw.Connection,
) -> None:
    connection.execute("DELETE FROM ip_addresses")
    assert examine(connection) == ""
    assert counters(connection) == [0, 0, 0]


@pytest.mark.usefixtures("rows_at_once")
def test_a_broken_text_is_found_in_every_row(connection: apsw.Connection) -> None:
    rows: Any = connection.execute("SELECT id FROM ip_addresses").fetchall()
    for (row,) in rows:
        spoil(connection, "pod_name", b"p\xff", row)
        assert "a text in ip_addresses is none" in examine(connection)
        spoil(connection, "pod_name", b"pod", row)
    assert examine(connection) == ""


@pytest.mark.usefixtures("rows_at_once")
def test_two_broken_texts_do_not_make_a_whole_one(connection: apsw.Connection) -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    spoil(connection, "pod_name", b"pod" + first, 3)
    spoil(connection, "pod_namespace", second + b"ns", 3)
    assert "a text in ip_addresses is none" in examine(connection)
    for column in ("pod_name", "pod_namespace"):
        spoil(connection, column, b"pod", 3)
    # The last text of a row and the first of the next.
    spoil(connection, "netns_path", b"/run/" + first, 3)
    spoil(connection, "address", second + b"10.1.0.9", 4)
    assert "a text in ip_addresses is none" in examine(connection)


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("row", [-(2**63), -1, 2**40, 2**63 - 1])
def test_rows_are_read_whatever_their_number(
    connection: apsw.Connection, row: int
) -> None:
    connection.execute("UPDATE ip_addresses SET id = ? WHERE id = 5", (row,))
    assert examine(connection) == ""
    spoil(connection, "boot_id", b"\xc3", row)
    assert "a text in ip_addresses is none" in examine(connection)
