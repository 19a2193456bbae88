"""Who had which address, from when to when, and why it ended."""

from __future__ import annotations

import apsw
import pytest

from metis.errors import InvalidRequest
from metis.model import Family, Pod, Wanted
from metis.store import garbage, history
from metis.store.history import Entry, Selection, select
from metis.store.sql import allocate, release
from tests.store.databases import START_MS, memory_connection, owner, want

COOLDOWN_MS = 1000
WEB = Pod("web", "shop")


def give(connection: apsw.Connection, now_ms: int, name: str, pod: Pod = WEB) -> str:
    with connection:
        (got,) = allocate(connection, now_ms, owner(name), [want("10.0.0.0/24")], pod)
    return got.address


def end(connection: apsw.Connection, now_ms: int, name: str) -> None:
    with connection:
        release(connection, now_ms, owner(name), COOLDOWN_MS, deleted_at=now_ms)


def entries(connection: apsw.Connection, **selected: object) -> list[Entry]:
    return list(select(connection, Selection(**selected)).entries)  # type: ignore[arg-type]  # the fields' types, each test's own


def test_an_ownership_that_lasts_has_no_end() -> None:
    connection = memory_connection()
    address = give(connection, START_MS, "c1")
    assert entries(connection) == [
        Entry("default", address, "c1", "eth0", "web", "shop", START_MS, None, "")
    ]


def test_an_ownership_that_ended_says_when_and_why() -> None:
    connection = memory_connection()
    address = give(connection, START_MS, "c1")
    end(connection, START_MS + 5, "c1")
    assert entries(connection) == [
        Entry(
            *("default", address, "c1", "eth0", "web", "shop"),
            *(START_MS, START_MS + 5, "deleted"),
        )
    ]


def test_a_repeated_call_does_not_begin_an_ownership_anew() -> None:
    connection = memory_connection()
    give(connection, START_MS, "c1")
    give(connection, START_MS + 70, "c1")
    end(connection, START_MS + 99, "c1")
    (entry,) = entries(connection)
    assert (entry.given_at, entry.ended_at) == (START_MS, START_MS + 99)


def test_an_ownership_does_not_begin_after_its_end() -> None:
    connection = memory_connection()
    give(connection, START_MS + 1000, "c1")
    end(connection, START_MS, "c1")
    (entry,) = entries(connection)
    assert (entry.given_at, entry.ended_at) == (START_MS, START_MS)


def test_what_was_given_back_and_what_was_collected_is_told_apart() -> None:
    connection = memory_connection()
    give(connection, START_MS, "c1")
    give(connection, START_MS, "c2")
    with connection:
        (got,) = allocate(connection, START_MS, owner("c1"), [want("10.0.0.0/24")], WEB)
        release(
            connection,
            START_MS + 1,
            owner("c1"),
            COOLDOWN_MS,
            only_allocation_id=got.allocation_id,
        )
        garbage.collect(
            connection, START_MS + 2, [owner("c2")], START_MS + 2, COOLDOWN_MS
        )
    assert [(entry.container_id, entry.reason) for entry in entries(connection)] == [
        ("c2", "garbage collected"),
        ("c1", "given back"),
    ]


def test_who_had_an_address_at_a_time_is_one_owner() -> None:
    connection = memory_connection()
    address = give(connection, START_MS, "c1")
    end(connection, START_MS + 10, "c1")
    with connection:
        allocate(
            connection,
            START_MS + 10 + COOLDOWN_MS,
            owner("c2"),
            [Wanted(Family.IPV4, None, address)],
            Pod(),
        )

    def at(moment: int) -> list[str]:
        return [
            entry.container_id
            for entry in entries(connection, address=address, at_ms=moment)
        ]

    assert at(START_MS - 1) == []
    assert at(START_MS) == ["c1"]
    assert at(START_MS + 9) == ["c1"]
    assert at(START_MS + 10) == []
    assert at(START_MS + 10 + COOLDOWN_MS) == ["c2"]


def test_an_address_may_be_spelled_in_any_way() -> None:
    connection = memory_connection()
    with connection:
        (got,) = allocate(connection, START_MS, owner("c1"), [want("fd00::/64")], WEB)
    assert got.address == "fd00::2"
    assert len(entries(connection, address="FD00:0:0::0002")) == 1
    with pytest.raises(InvalidRequest, match=r"10\.0\.0"):
        Selection(address="10.0.0")


@pytest.mark.parametrize(
    ("selected", "found"),
    [
        ({"container_id": "c1"}, 1),
        ({"container_id": "c9"}, 0),
        ({"pod_name": "web", "pod_namespace": "shop"}, 2),
        ({"pod_name": "web", "pod_namespace": "other"}, 0),
        ({"network": "default"}, 2),
        ({"network": "other"}, 0),
    ],
)
def test_everything_that_is_set_must_match(
    selected: dict[str, object], found: int
) -> None:
    connection = memory_connection()
    give(connection, START_MS, "c1")
    end(connection, START_MS + 1, "c1")
    give(connection, START_MS + 2, "c2")
    assert len(entries(connection, **selected)) == found


def test_pages_have_every_entry_once_the_latest_first() -> None:
    connection = memory_connection()
    for number in range(7):
        give(connection, START_MS + number, f"c{number}")
        if number < 4:
            end(connection, START_MS + number, f"c{number}")
    found: list[str] = []
    token, pages = "", 0
    while token or not pages:
        page = select(connection, Selection(), 2, token)
        assert len(page.entries) <= 2
        found += [entry.container_id for entry in page.entries]
        token, pages = page.next_token, pages + 1
    assert found == ["c6", "c5", "c4", "c3", "c2", "c1", "c0"]


@pytest.mark.parametrize("token", ["x", "0", "2-1; DROP TABLE", "1-" + "9" * 19])
def test_a_page_token_that_is_none_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest, match="page token"):
        select(memory_connection(), Selection(), 0, token)


def test_old_entries_make_room_by_number_and_by_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "MOST_ENTRIES", 5)
    monkeypatch.setattr(history, "_PRUNED_EVERY", 1)
    connection = memory_connection()
    for number in range(20):
        give(connection, START_MS + number, f"c{number}")
        end(connection, START_MS + number, f"c{number}")
    kept = [entry.container_id for entry in entries(connection)]
    assert kept == ["c19", "c18", "c17", "c16", "c15"]
    later = START_MS + history.KEPT_MS + 1000
    give(connection, later, "c20")
    end(connection, later, "c20")
    give(connection, later, "c21")
    end(connection, later, "c21")
    assert [entry.container_id for entry in entries(connection)] == ["c21", "c20"]


def test_entries_are_looked_at_now_and_then_by_more_than_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "MOST_ENTRIES", 5)
    connection = memory_connection()
    counts = []
    for number in range(3 * history._PRUNED_EVERY):
        give(connection, START_MS + number, f"c{number}")
        end(connection, START_MS + number, f"c{number}")
        counts.append(len(entries(connection)))
    assert max(counts) < 5 + history._PRUNED_EVERY
    assert counts[-1] == 5


def test_the_history_outlives_its_block() -> None:
    connection = memory_connection()
    give(connection, START_MS, "c1")
    end(connection, START_MS + 1, "c1")
    with connection:
        connection.execute("DELETE FROM cidr_blocks")
    assert len(entries(connection)) == 1


def test_a_time_beyond_all_clocks_is_refused() -> None:
    """It comes as an unsigned number from the wire, and SQLite has none."""
    with pytest.raises(InvalidRequest, match="time is 9223372036854775808"):
        Selection(at_ms=2**63)
    assert entries(memory_connection(), at_ms=2**63 - 1) == []
