"""Reading a database file leaves no trace, whoever else has it open."""

from __future__ import annotations

import os
from pathlib import Path

import apsw
import pytest

from metis.clock import SystemClock
from metis.errors import StoreDamaged, StoreIncompatible, StoreUnavailable
from metis.model import Pod
from metis.store import reading, sql
from metis.store.database import Database, connect
from metis.store.reading import check_file, read_file
from tests.store.broken import Place, names
from tests.store.databases import owner, want


def opened(path: Path) -> Database:
    return connect(str(path), SystemClock(), 60_000, "NORMAL")


def close(database: Database) -> None:
    database._close()


def allocate(database: Database, name: str) -> None:
    with database._writer:
        sql.allocate(
            database._writer,
            database.clock.now_ms(),
            owner(name),
            [want("10.0.0.0/24")],
            Pod(),
        )


def files(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything in the directory of a database: time, inode and content."""
    return {
        one.name: (one.stat().st_mtime_ns, one.stat().st_ino, one.read_bytes())
        for one in path.parent.iterdir()
    }


def owners(connection: apsw.Connection) -> int:
    rows = connection.execute(
        "SELECT count(*) FROM ip_addresses WHERE container_id > ''"
    )
    return int(str(rows.fetchall()[0][0]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "metis.sqlite"
    database = opened(path)
    allocate(database, "a")
    close(database)
    return path


def test_a_file_at_rest_stays_as_it_is_and_gets_no_company(path: Path) -> None:
    before = files(path)
    assert read_file(str(path), owners) == 1
    assert check_file(str(path), SystemClock()).violations == ()
    assert files(path) == before


def test_beside_a_daemon_what_was_committed_is_seen(path: Path) -> None:
    database = opened(path)
    allocate(database, "b")
    log = Path(f"{path}-wal").stat()
    assert read_file(str(path), owners) == 2
    after = Path(f"{path}-wal").stat()
    assert (log.st_size, log.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    allocate(database, "c")
    close(database)


def test_a_daemon_in_the_middle_of_a_write_is_not_waited_for(path: Path) -> None:
    database = opened(path)
    with database._writer:
        database._writer.execute("DELETE FROM ip_addresses")
        assert read_file(str(path), owners) == 1
        database._writer.execute("ROLLBACK; BEGIN")
    close(database)


def test_a_log_that_a_crash_left_is_read_and_not_folded(path: Path) -> None:
    database = opened(path)
    allocate(database, "b")
    files_then = {
        suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal")
    }
    close(database)
    for suffix, content in files_then.items():
        Path(f"{path}{suffix}").write_bytes(content)
    assert read_file(str(path), owners) == 2
    for suffix, content in files_then.items():
        assert Path(f"{path}{suffix}").read_bytes() == content


@pytest.mark.damages_database("commits are lost with the log")
def test_what_tells_of_lost_commits_survives_being_read(tmp_path: Path) -> None:
    """Whoever looks after a kill, before the daemon is back, hides nothing from it."""
    (tmp_path / "a").mkdir()
    place = Place(tmp_path / "a")
    with place.opened() as database:
        place.give(database, names(20))
        killed = place.kill(database, tmp_path / "killed")
    Path(f"{killed.path}.users").touch()
    os.truncate(f"{killed.path}-wal", 32)
    before = files(killed.path)
    check_file(str(killed.path), killed.clock)
    after = files(killed.path)
    del after["metis.sqlite.opening"]
    assert {name: one[1:] for name, one in after.items()} == {
        name: one[1:] for name, one in before.items()
    }
    with killed.opened() as database:
        killed.check_nobody_is_robbed(database)
        assert killed.add(database, "impatient") is None


def test_a_file_that_changes_while_it_is_read_is_read_again(path: Path) -> None:
    seen: list[int] = []

    def work(connection: apsw.Connection) -> int:
        seen.append(owners(connection))
        if len(seen) == 1:
            database = opened(path)
            allocate(database, "b")
            close(database)
        return seen[-1]

    assert read_file(str(path), work) == 2
    assert seen == [1, 2]


def test_a_file_that_never_rests_is_read_with_its_log(path: Path) -> None:
    times: list[int] = []

    def work(connection: apsw.Connection) -> int:
        database = opened(path)
        allocate(database, f"n{len(times)}")
        close(database)
        times.append(owners(connection))
        return times[-1]

    read_file(str(path), work)
    assert len(times) == reading._TRIES_AT_REST + 1


def test_a_failure_that_is_due_to_a_change_is_tried_again(path: Path) -> None:
    def work(connection: apsw.Connection) -> int:
        if owners(connection) == 1:
            database = opened(path)
            allocate(database, "b")
            close(database)
            raise apsw.CorruptError("half of the old pages, half of the new ones")
        return 7

    assert read_file(str(path), work) == 7


def test_a_failure_of_a_file_at_rest_is_told(path: Path) -> None:
    def work(_: apsw.Connection) -> int:
        raise apsw.CorruptError("a page is not what it seems")

    with pytest.raises(
        StoreDamaged, match=r"metis.sqlite.* a page is not what it seems"
    ):
        read_file(str(path), work)


def test_the_stored_time_is_that_of_this_boot_alone(path: Path) -> None:
    class OtherBoot(SystemClock):
        def boot_id(self) -> str:
            return "another"

    now = read_file(
        str(path), lambda connection: reading.now(connection, SystemClock())
    )
    assert now is not None
    assert abs(now - SystemClock().walltime_ms()) < 60_000
    other = read_file(
        str(path), lambda connection: reading.now(connection, OtherBoot())
    )
    assert other is None


@pytest.mark.damages_database("files that are none, or empty ones")
@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (None, StoreUnavailable, "does not exist"),
        (b"", StoreDamaged, "it is empty"),
        (b"no database at all, of some length" * 100, StoreIncompatible, "no database"),
        (bytes(4096), StoreDamaged, "not a database"),
    ],
)
def test_what_is_no_database_is_named(
    tmp_path: Path, content: bytes | None, error: type[Exception], words: str
) -> None:
    path = tmp_path / "metis.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=rf"metis\.sqlite.*{words}"):
        check_file(str(path), SystemClock())
    assert os.listdir(tmp_path) == ([] if content is None else ["metis.sqlite"])


def test_a_directory_is_not_a_database(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="is not a file"):
        check_file(str(tmp_path), SystemClock())


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        ("PRAGMA user_version = 2; CREATE TABLE t (c)", "version 2"),
        ("CREATE TABLE songs (name)", "database of something else"),
    ],
)
def test_a_database_that_is_not_of_this_version_is_named(
    tmp_path: Path, statements: str, words: str
) -> None:
    path = tmp_path / "other.sqlite"
    with apsw.Connection(str(path)) as connection:
        connection.execute(statements)
    connection.close()
    with pytest.raises(StoreIncompatible, match=words):
        check_file(str(path), SystemClock())


def test_text_that_is_none_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "metis.sqlite"
    database = opened(path)
    database._writer.execute("CREATE TABLE note (text)")
    database._writer.execute("INSERT INTO note VALUES (CAST(x'a4' AS TEXT))")
    close(database)
    with pytest.raises(StoreDamaged, match="text that is none"):
        read_file(str(path), lambda c: c.execute("SELECT text FROM note").fetchall())
