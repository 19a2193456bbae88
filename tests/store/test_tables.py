"""The listings: filters that are never SQL, and pages that fit a message."""

from __future__ import annotations

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metis.errors import InvalidRequest
from metis.model import Pod, TablePage
from metis.store import tables
from metis.store.sql import allocate, release
from metis.store.tables import list_addresses, list_blocks
from tests.store.databases import START_MS, memory_connection, owner, want


@pytest.fixture
def connection() -> apsw.Connection:
    """A /29 on two networks; c1 and c2 hold an address each, c3 gave one back."""
    connection = memory_connection()
    with connection:
        for network in ("default", "blue"):
            for container in ("c1", "c2", "c3"):
                allocate(
                    connection,
                    START_MS + 5,
                    owner(container, network),
                    [want("10.0.0.0/29")],
                    Pod("web 0" if container == "c1" else "db'1", "shop"),
                )
            release(connection, START_MS + 6, owner("c3", network), 1_000)
    return connection


def addresses(connection: apsw.Connection, text: str) -> list[str]:
    page = list_addresses(connection, text, 0, "")
    column = page.headers.index("address")
    return [row[column] for row in page.rows]


def test_blocks_are_listed_as_people_read_them(connection: apsw.Connection) -> None:
    connection.execute("UPDATE cidr_blocks SET created_at = 0, updated_at = 999")
    page = list_blocks(connection, "network = default", 0, "")
    assert page == TablePage(
        (
            "id",
            "cidr",
            "network",
            "ip_family",
            "total_ips",
            "allocated_ips",
            "state",
            "created_at",
            "updated_at",
        ),
        (
            (
                "1",
                "10.0.0.0/29",
                "default",
                "ipv4",
                "8",
                "5",
                "Ready",
                "1970-01-01T00:00:00.000Z",
                "1970-01-01T00:00:00.999Z",
            ),
        ),
    )


def test_addresses_are_listed_with_their_block(connection: apsw.Connection) -> None:
    connection.execute("UPDATE ip_addresses SET updated_at = 0")
    page = list_addresses(connection, "network=blue AND container_id=c1", 0, "")
    assert dict(zip(page.headers, page.rows[0], strict=True)) == {
        "id": "11",
        "address": "10.0.0.2",
        "cidr": "10.0.0.0/29",
        "network": "blue",
        "container_id": "c1",
        "interface_name": "eth0",
        "pod_name": "web 0",
        "pod_namespace": "shop",
        "is_allocated": "true",
        "release_at": "NULL",
        "allocated_at": "2023-11-14T22:13:20.005Z",
        "updated_at": "1970-01-01T00:00:00.000Z",
        "cidr_block_id": "2",
    }
    assert page.next_token == ""


@pytest.mark.damages_database("its times are none")
def test_a_value_that_is_no_time_is_shown_as_it_is(connection: apsw.Connection) -> None:
    connection.execute(
        "UPDATE cidr_blocks SET created_at = 'soon', updated_at = ?", (2**62,)
    )
    row = list_blocks(connection, "", 0, "").rows[0]
    assert row[-2:] == ("soon", str(2**62))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("address=10.0.0.2 AND network=default", ["10.0.0.2"]),
        ("  ADDRESS = '10.0.0.2'  and Network=\"default\" ", ["10.0.0.2"]),
        ("pod_name='web 0'", ["10.0.0.2"] * 2),
        ('pod_name="db\'1" AND network=blue', ["10.0.0.3"]),
        ("network=blue AND container_id=''", ["10.0.0.0", "10.0.0.1", "10.0.0.7"]),
        (
            "network=blue AND container_id=NULL",
            ["10.0.0.4", "10.0.0.5", "10.0.0.6"],
        ),
        ("network=blue AND container_id='NULL'", []),
        (
            "network=blue AND is_allocated=FALSE AND release_at=null",
            [
                "10.0.0.5",
                "10.0.0.6",
            ],
        ),
        ("is_allocated=1 AND cidr_block_id=2 AND container_id=c2", ["10.0.0.3"]),
        ("release_at=2023-11-14T22:13:21.006Z AND network=blue", ["10.0.0.4"]),
        ("release_at='2023-11-14 23:13:21.006+01:00' AND network=blue", ["10.0.0.4"]),
        ("release_at=2023-11-14T22:13:21.006 AND network=blue", ["10.0.0.4"]),
        (f"release_at={START_MS + 1006} AND network=blue", ["10.0.0.4"]),
        ("cidr=10.0.0.0/29 AND id=3", ["10.0.0.2"]),
        ("pod_namespace=a=b", []),
    ],
)
def test_a_filter_selects_the_rows_that_match_all_of_it(
    connection: apsw.Connection, text: str, expected: list[str]
) -> None:
    assert addresses(connection, text) == expected


@pytest.mark.parametrize("text", ["", "   "])
def test_an_empty_filter_selects_every_row(
    connection: apsw.Connection, text: str
) -> None:
    assert len(addresses(connection, text)) == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "cannot be read at 'nonsense'"),
        ("network=", "cannot be read at 'network='"),
        ("=default", "cannot be read at '=default'"),
        ("network='default", "cannot be read"),
        ("network=default AND", "cannot be read at 'network=default AND'"),
        ("network=default AND  ", "cannot be read"),
        ("network=default OR id=1", "cannot be read"),
        ("network=default id=1", "cannot be read"),
        ("network='a'ANDid=1", "cannot be read"),
        ("1=0; DELETE FROM cidr_blocks", "cannot be read"),
        ("colour=red", "'colour', which is no column: use one of id, address, cidr"),
        ("id=one", "'one' does not suit id: write it like id=1"),
        ("id='NULL'", "does not suit id"),
        ("is_allocated=maybe", "write it like is_allocated=true"),
        ("release_at=tomorrow", "write it like release_at=2026-01-31T12:00:00.000Z"),
    ],
)
def test_a_filter_that_cannot_be_read_is_refused_with_the_right_one(
    connection: apsw.Connection, text: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        list_addresses(connection, text, 0, "")
    assert message in str(caught.value)
    assert len(addresses(connection, "")) == 16


@given(
    st.text(max_size=40)
    | st.from_regex(r"(id|network|address)\s*=\s*.*( AND .*)?", fullmatch=True)
)
def test_no_filter_does_more_than_select(text: str) -> None:
    connection = memory_connection()
    with connection:
        allocate(connection, 0, owner("c1"), [want("10.0.0.0/30")], Pod())
    connection.set_authorizer(_only_reading)
    try:
        page = list_addresses(connection, text, 0, "")
    except InvalidRequest:
        return
    assert len(page.rows) <= 4


def _only_reading(operation: int, *_: object) -> int:
    allowed = (apsw.SQLITE_SELECT, apsw.SQLITE_READ, apsw.SQLITE_FUNCTION)
    return apsw.SQLITE_OK if operation in allowed else apsw.SQLITE_DENY


@pytest.mark.parametrize("page_size", [1, 3, 8, 15, 16, 17])
def test_pages_join_to_the_whole_table(
    connection: apsw.Connection, page_size: int
) -> None:
    whole = list_addresses(connection, "", 0, "")
    rows: list[tuple[str, ...]] = []
    token = ""
    while True:
        page = list_addresses(connection, "", page_size, token)
        assert page.headers == whole.headers
        assert len(page.rows) <= page_size
        rows.extend(page.rows)
        token = page.next_token
        if not token:
            break
        assert len(page.rows) == page_size
    assert tuple(rows) == whole.rows


@pytest.mark.damages_database("rows go as nobody takes them")
def test_rows_that_go_between_two_pages_move_no_others(
    connection: apsw.Connection,
) -> None:
    first = list_addresses(connection, "network=blue", 3, "")
    connection.execute("DELETE FROM ip_addresses WHERE address <= '10.0.0.1'")
    second = list_addresses(connection, "network=blue", 3, first.next_token)
    assert [row[1] for row in second.rows] == ["10.0.0.3", "10.0.0.4", "10.0.0.5"]


@pytest.mark.parametrize("page_size", [0, 1000])
def test_a_page_stays_below_its_bytes(
    connection: apsw.Connection, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    monkeypatch.setattr(tables, "PAGE_BYTES", 600)
    rows, token, pages = 0, "", 0
    while token or not pages:
        page = list_addresses(connection, "", page_size, token)
        size = sum(len(value.encode()) for row in page.rows for value in row)
        assert 0 < size <= 600
        rows, token, pages = rows + len(page.rows), page.next_token, pages + 1
    assert rows == 16
    assert pages > 2


def test_a_row_larger_than_a_page_still_comes(
    connection: apsw.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PAGE_BYTES", 1)
    page = list_blocks(connection, "", 0, "")
    assert len(page.rows) == 1
    assert page.next_token == "1"  # noqa: S105  # a place in a table, no secret


@pytest.mark.parametrize("page_token", ["x", "-1", "1.5", "9" * 19, "1; DROP"])
def test_a_token_that_never_was_one_is_refused(
    connection: apsw.Connection, page_token: str
) -> None:
    with pytest.raises(InvalidRequest, match="page token is"):
        list_blocks(connection, "", 0, page_token)


def test_a_negative_page_size_is_refused(connection: apsw.Connection) -> None:
    with pytest.raises(InvalidRequest, match="page size is -1"):
        list_blocks(connection, "", -1, "")


@pytest.mark.parametrize("column", ["id", "updated_at"])
@pytest.mark.parametrize("value", ["9" * 30, "-" + "9" * 30])
def test_a_number_too_large_for_the_database_is_refused(
    connection: apsw.Connection, column: str, value: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"does not suit {column}"):
        list_blocks(connection, f"{column}={value}", 0, "")


def test_a_filter_of_too_many_terms_is_refused(connection: apsw.Connection) -> None:
    assert list_blocks(connection, " AND ".join(["id=1"] * 64), 0, "").rows != ()
    with pytest.raises(InvalidRequest, match="more than 64 terms"):
        list_blocks(connection, " AND ".join(["id=1"] * 65), 0, "")
