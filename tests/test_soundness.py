"""The check after every test finds what a test leaves behind."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from tests.soundness import check_files, damages
from tests.store import databases
from tests.store.databases import memory_connection
from tests.store.test_reading import allocate, close, opened
from tests.store.test_reading import path as path  # a fixture

BROKEN = "a counter is wrong"


@pytest.mark.damages_database(BROKEN)
def test_a_broken_database_in_the_directory_of_a_test_is_found(path: Path) -> None:
    check_files(path.parent)
    database = opened(path)
    allocate(database, "b")
    database._writer.execute("UPDATE cidr_blocks SET allocated_ips = 99")
    close(database)
    with pytest.raises(AssertionError, match="counts 99 allocated"):
        check_files(path.parent)


def test_a_database_of_something_else_and_other_files_are_passed_over(
    tmp_path: Path,
) -> None:
    connection = apsw.Connection(str(tmp_path / "songs.sqlite"))
    connection.execute("CREATE TABLE songs (name)")
    connection.close()
    (tmp_path / "metis.log").write_bytes(b"SQLite")
    (tmp_path / "metis.sqlite.damaged-20260101T000000Z").write_bytes(
        b"SQLite format 3\0 and no more"
    )
    check_files(tmp_path)


@pytest.mark.damages_database(BROKEN)
def test_a_broken_database_in_memory_is_found_and_a_closed_one_passed_over() -> None:
    connection = memory_connection()
    assert databases.MADE[-1] is connection
    connection.execute("INSERT INTO metis_caution VALUES (1), (2)")
    with pytest.raises(AssertionError, match="metis_caution has 2 rows"):
        databases.check_connection(connection)
    connection.close()
    databases.check_connection(connection)


@pytest.mark.damages_database(BROKEN)
def test_of_many_databases_in_memory_the_oldest_are_checked_early() -> None:
    def make(count: int) -> None:
        for _ in range(count):
            memory_connection()

    make(1)
    databases.MADE[-1].execute("INSERT INTO metis_caution VALUES (1), (2)")
    with pytest.raises(AssertionError, match="metis_caution has 2 rows"):
        make(databases.MOST_MADE)


@pytest.mark.damages_database(BROKEN)
def test_a_test_that_says_why_is_not_checked(request: pytest.FixtureRequest) -> None:
    assert damages(request.node)
    memory_connection().execute("INSERT INTO metis_caution VALUES (1), (2)")


def test_one_that_does_not_is(request: pytest.FixtureRequest) -> None:
    assert not damages(request.node)
