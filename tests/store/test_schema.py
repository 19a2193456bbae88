"""What becomes of a database when it is opened, and which ones are left alone."""

from __future__ import annotations

import apsw
import pytest

from metis.errors import StoreIncompatible
from metis.model import Pod
from metis.store import caution, schema, sql
from tests.store.databases import START_MS, memory_connection, owner, want

COOLDOWN_MS = 60_000


def prepare(
    connection: apsw.Connection,
    *,
    boot_id: str = "boot-1",
    boottime_ms: int = 0,
    walltime_ms: int = START_MS,
) -> int:
    connection.execute("BEGIN IMMEDIATE")
    try:
        return schema.prepare(
            connection,
            boot_id=boot_id,
            boottime_ms=boottime_ms,
            walltime_ms=walltime_ms,
            cooldown_ms=COOLDOWN_MS,
        )
    finally:
        connection.execute("COMMIT")


def test_a_new_database_becomes_version_1() -> None:
    connection = apsw.Connection(":memory:")
    assert not schema.check_compatible(connection)
    prepare(connection)
    assert connection.pragma("user_version") == 1
    assert schema.check_compatible(connection)
    assert not connection.in_transaction


def test_the_tables_are_those_of_the_original() -> None:
    connection = memory_connection()
    columns = 'SELECT name, type, "notnull", dflt_value FROM pragma_table_info(?)'
    assert connection.execute(columns, ("cidr_blocks",)).fetchall() == [
        ("id", "INTEGER", 0, None),
        ("cidr", "TEXT", 1, None),
        ("network", "TEXT", 1, None),
        ("ip_family", "TEXT", 1, None),
        ("total_ips", "INTEGER", 1, None),
        ("allocated_ips", "INTEGER", 0, "0"),
        ("state", "TEXT", 1, "'Ready'"),
        ("created_at", "INTEGER", 0, "CAST(unixepoch('subsec') * 1000 AS INTEGER)"),
        ("updated_at", "INTEGER", 0, "CAST(unixepoch('subsec') * 1000 AS INTEGER)"),
        ("seeded_ips", "INTEGER", 0, None),
    ]
    assert connection.execute(columns, ("ip_addresses",)).fetchall() == [
        ("id", "INTEGER", 0, None),
        ("address", "TEXT", 1, None),
        ("cidr_block_id", "INTEGER", 1, None),
        ("container_id", "TEXT", 0, None),
        ("pod_name", "TEXT", 0, None),
        ("pod_namespace", "TEXT", 0, None),
        ("interface_name", "TEXT", 0, None),
        ("is_allocated", "BOOLEAN", 0, "FALSE"),
        ("release_at", "INTEGER", 0, None),
        ("allocated_at", "INTEGER", 0, None),
        ("updated_at", "INTEGER", 0, "CAST(unixepoch('subsec') * 1000 AS INTEGER)"),
        ("allocation_id", "TEXT", 0, None),
        ("sort_key", "BLOB", 0, None),
        ("boot_id", "TEXT", 0, None),
        ("netns_path", "TEXT", 0, None),
        ("given_at", "INTEGER", 0, None),
    ]
    indexes = connection.execute(
        "SELECT group_concat(i.name), l.partial FROM pragma_index_list('ip_addresses')"
        " AS l, pragma_index_info(l.name) AS i WHERE l.origin = 'c'"
        " GROUP BY l.name ORDER BY l.name"
    )
    assert set(indexes.fetchall()) == {
        ("cidr_block_id,id", 1),
        ("container_id,interface_name", 0),
        ("cidr_block_id,release_at,id", 1),
        ("cidr_block_id,release_at,sort_key", 1),
    }


def test_a_block_takes_its_addresses_with_it() -> None:
    connection = memory_connection()
    connection.execute(
        "INSERT INTO cidr_blocks (cidr, network, ip_family, total_ips)"
        " VALUES ('10.0.0.0/24', 'default', 'ipv4', 256)"
    )
    connection.execute(
        "INSERT INTO ip_addresses (address, cidr_block_id) VALUES ('10.0.0.2', 1)"
    )
    with pytest.raises(apsw.ConstraintError):
        connection.execute(
            "INSERT INTO ip_addresses (address, cidr_block_id) VALUES ('10.0.0.3', 2)"
        )
    connection.execute("DELETE FROM cidr_blocks")
    assert connection.execute("SELECT * FROM ip_addresses").fetchall() == []


@pytest.mark.parametrize(
    ("told", "untold", "query"),
    [
        (
            "UPDATE cidr_blocks SET state = 'Draining', updated_at = 2",
            "UPDATE cidr_blocks SET state = 'Deleting'",
            "SELECT updated_at FROM cidr_blocks",
        ),
        (
            "UPDATE ip_addresses SET pod_name = 'a', updated_at = 2",
            "UPDATE ip_addresses SET pod_name = 'b'",
            "SELECT updated_at FROM ip_addresses",
        ),
    ],
)
def test_updated_at_follows_an_update_that_does_not_set_it(
    told: str, untold: str, query: str
) -> None:
    connection = memory_connection()
    connection.execute(
        "INSERT INTO cidr_blocks (cidr, network, ip_family, total_ips, updated_at)"
        " VALUES ('10.0.0.0/24', 'default', 'ipv4', 256, 1)"
    )
    connection.execute(
        "INSERT INTO ip_addresses (address, cidr_block_id, updated_at)"
        " VALUES ('10.0.0.2', 1, 1)"
    )
    connection.execute(told)
    assert connection.execute(query).fetchall() == [(2,)]
    connection.execute(untold)
    ((updated_at,),) = connection.execute(query).fetchall()
    assert isinstance(updated_at, int)
    assert updated_at > START_MS


def test_a_newer_version_is_refused_and_both_versions_are_named() -> None:
    connection = apsw.Connection(":memory:")
    connection.pragma("user_version", 2)
    with pytest.raises(StoreIncompatible, match=r"version 2.*serves version 1"):
        schema.check_compatible(connection)
    assert connection.execute("SELECT * FROM sqlite_schema").fetchall() == []


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ("CREATE TABLE songs (id)", "holds 'songs'"),
        ("CREATE TABLE songs (id); PRAGMA user_version = 1", "no cidr_blocks"),
        (
            "CREATE TABLE cidr_blocks (id, cidr, network, ip_family, total_ips,"
            " allocated_ips, state, created_at, updated_at);"
            "CREATE TABLE ip_addresses (id, address); PRAGMA user_version = 1",
            "no ip_addresses.allocated_at",
        ),
    ],
)
def test_a_database_of_something_else_is_refused(statements: str, message: str) -> None:
    connection = apsw.Connection(":memory:")
    connection.execute(statements)
    before = connection.execute("SELECT sql FROM sqlite_schema").fetchall()
    with pytest.raises(StoreIncompatible, match=message):
        schema.check_compatible(connection)
    with pytest.raises(StoreIncompatible, match=message):
        prepare(connection)
    assert connection.execute("SELECT sql FROM sqlite_schema").fetchall() == before


def test_the_first_to_open_after_a_boot_fixes_the_clock() -> None:
    connection = apsw.Connection(":memory:")
    assert prepare(connection, boottime_ms=5_000) == START_MS - 5_000
    stepped = START_MS + 86_400_000
    assert prepare(connection, boottime_ms=9_000, walltime_ms=stepped) == (
        START_MS - 5_000
    )
    assert schema.clock_offset(connection, "boot-1") == START_MS - 5_000
    assert schema.clock_offset(connection, "boot-2") is None


def test_only_the_current_boot_is_remembered() -> None:
    connection = memory_connection()
    assert prepare(connection, boot_id="boot-2", boottime_ms=10) == START_MS - 10
    assert connection.execute("SELECT * FROM metis_boot").fetchall() == [
        ("boot-2", START_MS - 10)
    ]


@pytest.mark.parametrize(
    ("release_at", "expected"),
    [
        (None, None),
        (START_MS - 1, START_MS - 1),
        (START_MS + COOLDOWN_MS, START_MS + COOLDOWN_MS),
        (START_MS + 86_400_000, START_MS + COOLDOWN_MS),
    ],
)
def test_after_a_boot_no_cooldown_is_longer_than_the_configured_one(
    release_at: int | None, expected: int | None
) -> None:
    connection = memory_connection()
    connection.execute(
        "INSERT INTO cidr_blocks (cidr, network, ip_family, total_ips)"
        " VALUES ('10.0.0.0/24', 'default', 'ipv4', 256)"
    )
    connection.execute(
        "INSERT INTO ip_addresses (address, cidr_block_id, release_at)"
        " VALUES ('10.0.0.2', 1, ?)",
        (release_at,),
    )
    prepare(connection)  # the same boot
    query = "SELECT release_at FROM ip_addresses"
    assert connection.execute(query).fetchall() == [(release_at,)]
    prepare(connection, boot_id="boot-2")
    assert connection.execute(query).fetchall() == [(expected,)]


@pytest.mark.parametrize(
    ("allocated_at", "expected"),
    [
        pytest.param(
            None, None, marks=pytest.mark.damages_database("was allocated at no time")
        ),
        (START_MS, START_MS),
        (START_MS + 1, START_MS - 9_000),
    ],
)
def test_after_a_boot_with_a_clock_set_back_nothing_was_allocated_in_the_future(
    allocated_at: int | None, expected: int | None
) -> None:
    connection = memory_connection()
    with connection:
        sql.allocate(connection, 0, owner("a"), [want("10.0.0.0/24")], Pod())
    connection.execute(
        "UPDATE ip_addresses SET allocated_at = ?, boot_id = 'boot-2'"
        " WHERE container_id = 'a'",
        (allocated_at,),
    )
    query = "SELECT allocated_at FROM ip_addresses WHERE container_id = 'a'"
    prepare(connection, boottime_ms=9_000)  # the same boot
    assert connection.execute(query).fetchall() == [(allocated_at,)]
    prepare(connection, boot_id="boot-2", boottime_ms=9_000)
    assert connection.execute(query).fetchall() == [(expected,)]


def test_after_a_boot_with_a_clock_set_back_claims_still_count() -> None:
    connection = memory_connection()
    later = START_MS + 86_400_000
    pod = Pod("web-0", "shop")
    with connection:
        sql.allocate(connection, later, owner("a"), [want("10.0.0.0/24")], pod)
        before = sql.release(connection, later, owner("a"), COOLDOWN_MS)
    prepare(connection, boot_id="boot-2")
    with connection:
        got = sql.allocate(
            connection, later, owner("b"), [want("10.0.0.0/24")], pod, sticky=True
        )
    assert got == before


def test_a_caution_ends_with_its_boot_whatever_the_clock_says() -> None:
    """It would hold up a whole node as long as the clock is behind."""
    connection = memory_connection()
    with connection:
        caution.begin(connection, START_MS, START_MS + 86_400_000)
    prepare(connection)  # the same boot
    assert caution.until(connection) == START_MS + 86_400_000
    prepare(connection, boot_id="boot-2", walltime_ms=START_MS - 86_400_000)
    assert caution.until(connection) == 0


def test_a_database_of_an_earlier_metis_gets_the_columns_that_it_lacks() -> None:
    connection = memory_connection()
    connection.execute("DROP INDEX metis_ip_addresses_by_key")
    connection.execute("DROP INDEX metis_former_owners_by_pod")
    connection.execute("DROP TRIGGER metis_ip_addresses_of_another")
    connection.execute("DROP TRIGGER metis_ip_addresses_of_nobody")
    for table, column in (
        ("ip_addresses", "sort_key"),
        ("ip_addresses", "allocation_id"),
        ("metis_former_owners", "pod_name"),
    ):
        connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    assert not schema.check_compatible(connection)
    prepare(connection)
    assert schema.check_compatible(connection)


def test_an_error_that_ended_the_transaction_is_told_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(connection: apsw.Connection) -> bool:
        connection.execute("ROLLBACK")  # as SQLite does by itself on some errors
        raise apsw.FullError("disk full")

    monkeypatch.setattr(schema, "_is_complete", lost)
    with pytest.raises(apsw.FullError):
        schema.check_compatible(apsw.Connection(":memory:"))
