"""What broken databases still tell, and what is made of it."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metis.model import CIDRBlock, Owner, Pod
from metis.store import caution, pages, salvage
from metis.store.rebuilding import Claim, Report, adopt, rebuild, recount
from metis.store.salvage import Found, FoundBlock, FoundRow, read, scan
from tests.store import original
from tests.store.broken import CIDR, Place, names
from tests.store.databases import (
    START_MS,
    check_invariants,
    memory_connection,
    owner,
    want,
)
from tests.store.test_original import adopted as adopted_original

NETWORK = "default"
BLOCK = CIDRBlock.parse("10.0.0.0/24")
LATER = START_MS + 60_000


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "a").mkdir()
    place = Place(tmp_path / "a")
    with place.opened() as database:
        place.give(database, names(40))
        for name in names(5):
            place.take(database, name)
    return place


def owners(found: Found) -> dict[str, str]:
    return {
        row.container_id: row.address for row in found.rows.values() if row.container_id
    }


def found_with(*rows: FoundRow, source: str = "a source") -> Found:
    return Found(
        source,
        blocks={1: FoundBlock(NETWORK, BLOCK)},
        rows={row.id: row for row in rows},
    )


def row(number: int, container: str, **fields: object) -> FoundRow:
    """The row of an owner of 10.0.0.<number>."""
    one = FoundRow(number, 1, f"10.0.0.{number}", container, "eth0", is_allocated=True)
    return replace(one, **fields)  # type: ignore[arg-type]  # fields by their name


def rebuilt(
    *founds: Found, cautious: bool = True, claims: Sequence[Claim] = ()
) -> tuple[apsw.Connection, Report]:
    connection = memory_connection()
    with connection:
        report = rebuild(
            connection,
            founds,
            now_ms=START_MS,
            cautious_until=LATER if cautious else None,
            claims=claims,
        )
    check_invariants(connection)
    return connection, report


def held(connection: apsw.Connection) -> dict[str, str]:
    query = (
        "SELECT address, container_id FROM ip_addresses"
        " WHERE is_allocated = TRUE AND container_id > ''"
    )
    return {str(address): str(name) for address, name in connection.execute(query)}


def claim(number: int, container: str, block: CIDRBlock = BLOCK) -> Claim:
    who = Owner(NETWORK, container, "eth0")
    return Claim(who, Pod("web", "ns"), block, block.address_at(number), "/n/1")


# reading


def test_a_sound_database_is_read_whole(place: Place) -> None:
    connection = apsw.Connection(str(place.path))
    found = read(connection)
    connection.close()
    assert owners(found) == place.owners
    assert [block.range.cidr for block in found.blocks.values()] == [CIDR]
    assert found.boot == ("boot-1", START_MS - 5_000)
    assert len(found.deleted) == len(found.former) == len(found.history) == 5
    assert found.problems == []
    assert found.owners == len(place.owners)


def test_the_bare_pages_tell_the_same(place: Place) -> None:
    connection = apsw.Connection(str(place.path))
    by_sqlite = read(connection)
    connection.close()
    found = scan(place.path.read_bytes())
    assert found.rows == by_sqlite.rows
    assert found.blocks == by_sqlite.blocks
    assert found.boot == by_sqlite.boot
    assert sorted(found.deleted) == sorted(by_sqlite.deleted)
    assert sorted(found.history) == sorted(by_sqlite.history)


def test_pages_in_the_log_take_the_place_of_those_in_the_file(
    place: Place, tmp_path: Path
) -> None:
    with place.opened() as database:
        place.give(database, names(10, "late"))
        killed = place.kill(database, tmp_path / "killed")
    image, log = killed.path.read_bytes(), Path(f"{killed.path}-wal").read_bytes()
    assert owners(scan(image, log)) == place.owners
    assert len(owners(scan(image))) == len(place.owners) - 10
    assert len(owners(scan(b"", log))) >= 10


def test_a_database_of_the_original_is_read() -> None:
    connection = adopted_original("10.0.0.5/24")
    connection.execute(
        "UPDATE ip_addresses SET container_id = 'c1', interface_name = 'eth0',"
        " is_allocated = TRUE WHERE address = '10.0.0.9'"
    )
    found = read(connection)
    assert owners(found) == {"c1": "10.0.0.9"}
    (block,) = found.blocks.values()
    assert block.range.cidr == "10.0.0.0/24"
    bare = apsw.Connection(":memory:")
    original.create(bare)
    original.add_block(bare, "10.0.0.0/29")
    assert len(read(bare).blocks) == 1


@pytest.mark.parametrize("size", [300, 1024, 3000])
def test_a_record_that_needs_more_than_its_page_is_read(
    tmp_path: Path, size: int
) -> None:
    """The largest names that there may be take three pages."""
    path = tmp_path / "db"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE t (a, b, c, d)")
    values = ("x" * size, "y" * size, 2**40, -1.5)
    connection.execute("INSERT INTO t VALUES (?, ?, ?, ?)", values)
    connection.close()
    image = path.read_bytes()
    assert (1, values) in list(pages.rows(image))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 400))
def test_whatever_the_bytes_are_reading_them_ends_in_rows_that_make_sense(
    seed: int, flips: int
) -> None:
    chance = random.Random(seed)  # noqa: S311  # no secret: hypothesis has the seed
    image = bytearray(SAMPLE)
    for _ in range(flips):
        image[chance.randrange(len(image))] = chance.randrange(256)
    found = scan(bytes(image), bytes(image[100:]))
    for each in found.rows.values():
        assert CIDRBlock.parse(f"{each.address}/32" if "." in each.address else "::/0")
    connection, _ = rebuilt(found)
    connection.close()


def sample() -> bytes:
    """The pages of a small database, as it is in memory."""
    connection = memory_connection()
    with connection:
        from metis.store.sql import allocate

        for name in names(20):
            allocate(connection, START_MS, owner(name), [want("10.0.0.0/26")], Pod())
    return bytes(connection.serialize("main"))


SAMPLE = sample()


def test_pages_that_refer_to_each_other_for_ever_are_left() -> None:
    """A row of which each further page is the same one."""
    page = bytearray(4096)
    page[0:8] = struct.pack(">BHHHB", 0x0D, 0, 1, 4000, 0)
    page[8:10] = struct.pack(">H", 10)
    page[10:14] = bytes([0x83, 0xFF, 0x7F, 1])  # a length of 65,535, rowid 1
    image = bytearray(SAMPLE[:4096]) + page
    struct.pack_into(">I", image, 4096 + 14 + 489, 2)
    assert isinstance(list(pages.rows(bytes(image))), list)


# rebuilding


def test_everybody_who_had_an_address_has_it() -> None:
    found = found_with(row(5, "c5", pod_name="web", allocation_id="a-5"), row(9, "c9"))
    connection, report = rebuilt(found)
    assert held(connection) == {"10.0.0.5": "c5", "10.0.0.9": "c9"}
    assert (report.blocks, report.owners, report.freed) == (1, 2, 0)
    assert report.conflicts == report.adopted == ()
    assert connection.execute(
        "SELECT pod_name, allocation_id, boot_id FROM ip_addresses"
        " WHERE address = '10.0.0.5'"
    ).fetchall() == [("web", "a-5", "boot-1")]


def test_the_caution_begins_where_something_is_missing() -> None:
    connection, report = rebuilt(found_with())
    assert caution.until(connection) == report.cautious_until == LATER
    connection, report = rebuilt(found_with(), cautious=False)
    assert caution.until(connection) == 0
    assert report.cautious_until is None


def test_who_asked_last_has_what_two_sources_give_to_two() -> None:
    first = found_with(row(5, "early", allocated_at=1), row(6, "late", allocated_at=9))
    second = found_with(row(5, "late", allocated_at=2), row(6, "early", allocated_at=8))
    connection, report = rebuilt(first, second)
    assert held(connection) == {"10.0.0.5": "late", "10.0.0.6": "late"}
    assert len(report.conflicts) == 2
    assert "10.0.0.5" in report.conflicts[0]
    assert "early" in report.conflicts[0]


def test_an_owner_in_any_source_is_an_owner() -> None:
    free = FoundRow(5, 1, "10.0.0.5", release_at=LATER + 5)
    for founds in ([free], [row(5, "c5")]), ([row(5, "c5")], [free]):
        connection, _ = rebuilt(*(found_with(*rows) for rows in founds))
        assert held(connection) == {"10.0.0.5": "c5"}


def test_who_has_it_by_the_node_has_what_sources_disagree_about() -> None:
    first = found_with(row(5, "right", allocated_at=1))
    second = found_with(row(5, "wrong", allocated_at=2))
    connection, _ = rebuilt(first, second, claims=[claim(5, "right")])
    assert held(connection) == {"10.0.0.5": "right"}


def test_owners_of_a_former_boot_are_freed() -> None:
    found = found_with(row(5, "c5", boot_id="boot-0"), row(6, "c6"))
    found.boot = ("boot-1", 7)
    connection, report = rebuilt(found, cautious=False)
    assert held(connection) == {"10.0.0.6": "c6"}
    assert report.freed == 1


def test_a_row_whose_block_is_unknown_goes_to_one_that_has_its_address() -> None:
    found = found_with(replace(row(5, "c5"), block_id=77))
    nowhere = replace(row(6, "c6"), address="192.0.2.1")
    found.rows[6] = nowhere
    connection, _ = rebuilt(found)
    assert held(connection) == {"10.0.0.5": "c5"}
    assert found.problems == ["192.0.2.1 lies in no block that is known"]


def test_records_of_deleted_owners_and_history_go_on(place: Place) -> None:
    connection = apsw.Connection(str(place.path))
    found = read(connection)
    connection.close()
    rebuilt_one, _ = rebuilt(found)
    for table in ("metis_deleted_owners", "metis_history", "metis_former_owners"):
        query = f"SELECT count(*) FROM {table}"  # noqa: S608  # a name from above
        assert rebuilt_one.execute(query).fetchall() == [(5,)], table


# adopting


def test_an_address_without_a_row_or_a_block_is_adopted() -> None:
    connection = memory_connection()
    with connection:
        given_now, disputed = adopt(connection, START_MS, [claim(5, "c5")])
    assert (given_now, disputed) == (["10.0.0.5"], [])
    check_invariants(connection)
    assert connection.execute(
        "SELECT container_id, pod_name, boot_id, netns_path, given_at, allocated_at"
        " FROM ip_addresses"
    ).fetchall() == [("c5", "web", "boot-1", "/n/1", START_MS, START_MS)]


def test_adopting_twice_changes_nothing() -> None:
    connection = memory_connection()
    with connection:
        adopt(connection, START_MS, [claim(5, "c5")])
        assert adopt(connection, START_MS + 1, [claim(5, "c5")]) == ([], [])
    assert held(connection) == {"10.0.0.5": "c5"}


def test_an_owner_whom_the_node_does_not_know_gives_way_to_one_it_knows() -> None:
    connection, _ = rebuilt(found_with(row(5, "unknown"), row(6, "known")))
    with connection:
        claims = [claim(5, "c5"), claim(6, "c6"), claim(6, "known")]
        given_now, disputed = adopt(connection, START_MS, claims)
    assert given_now == ["10.0.0.5"]
    assert held(connection) == {"10.0.0.5": "c5", "10.0.0.6": "known"}
    assert "goes to container c5" in disputed[0]
    assert "stays with container known" in disputed[1]
    check_invariants(connection)


def test_a_claim_never_makes_blocks_that_overlap_in_part() -> None:
    connection, _ = rebuilt(found_with())
    wide = CIDRBlock.parse("10.0.0.0/22")
    with connection:
        adopt(connection, START_MS, [claim(7, "in", wide), claim(700, "out", wide)])
    assert held(connection) == {"10.0.0.7": "in", "10.0.2.188": "out"}
    blocks = connection.execute("SELECT cidr FROM cidr_blocks ORDER BY id").fetchall()
    assert blocks == [("10.0.0.0/24",), ("10.0.2.188/32",)]


def test_a_wrong_counter_is_corrected_and_told() -> None:
    connection, _ = rebuilt(found_with(row(5, "c5")))
    with connection:
        assert recount(connection, START_MS) == []
        connection.execute("UPDATE cidr_blocks SET allocated_ips = 9")
        (told,) = recount(connection, START_MS)
    assert told == (
        "block 10.0.0.0/24 of network 'default' counted 9 addresses, and has 1"
    )
    check_invariants(connection)


def test_a_table_that_is_gone_is_told(tmp_path: Path, place: Place) -> None:
    copy = tmp_path / "copy"
    shutil.copy(place.path, copy)
    connection = apsw.Connection(str(copy))
    connection.execute("UPDATE ip_addresses SET address = 'nonsense' WHERE id = 30")
    connection.execute("UPDATE cidr_blocks SET network = char(10)")
    found = salvage.read(connection)
    connection.close()
    copy.unlink()
    assert found.blocks == {}
    assert any("is not an ipv4 address" in problem for problem in found.problems)
    assert any("a block makes no sense" in problem for problem in found.problems)
