"""A backup is one whole file, or none."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import apsw
import pytest

from metis.clock import SystemClock
from metis.errors import (
    InvalidRequest,
    StoreDamaged,
    StoreIncompatible,
    StoreUnavailable,
)
from metis.store import connecting
from metis.store.backup import back_up
from metis.store.reading import check_file, read_file
from tests.store.test_reading import allocate, close, opened, owners
from tests.store.test_reading import path as path  # a fixture


def leftovers(path: Path) -> list[str]:
    return [name for name in os.listdir(path.parent) if name.startswith(".")]


def test_it_is_one_file_for_its_owner_alone(path: Path) -> None:
    target = path.parent / "copies" / "one.sqlite"
    target.parent.mkdir()
    size = back_up(str(path), str(target))
    assert os.listdir(target.parent) == ["one.sqlite"]
    assert target.stat().st_size == size
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert read_file(str(target), owners) == 1
    assert os.listdir(target.parent) == ["one.sqlite"]  # to read it takes no log


def test_beside_a_daemon_it_has_what_was_committed(path: Path) -> None:
    database = opened(path)
    allocate(database, "b")
    target = path.parent / "copy.sqlite"
    with database._writer:
        database._writer.execute("DELETE FROM ip_addresses")
        back_up(str(path), str(target))
        database._writer.execute("ROLLBACK; BEGIN")
    allocate(database, "c")
    assert read_file(str(target), owners) == 2
    assert check_file(str(target), SystemClock()).violations == ()
    close(database)


def test_where_it_does_not_fit_the_copy_is_named_and_gone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = connecting.connect

    def connect_small(name: str, flags: int) -> apsw.Connection:
        connection = connect(name, flags)
        if flags & apsw.SQLITE_OPEN_READWRITE:
            connection.pragma("max_page_count", 3)
        return connection

    monkeypatch.setattr(connecting, "connect", connect_small)
    target = path.parent / "copy.sqlite"
    with pytest.raises(StoreUnavailable, match="No space left on device") as refused:
        back_up(str(path), str(target))
    assert f"backup '{target}' cannot be written" in str(refused.value)
    assert not target.exists()
    assert leftovers(target) == []


def test_a_daemon_can_take_it_over(path: Path) -> None:
    target = path.parent / "copy.sqlite"
    back_up(str(path), str(target))
    database = opened(target)
    allocate(database, "b")
    close(database)
    assert read_file(str(target), owners) == 2


def test_a_file_that_is_there_is_replaced_by_force_alone(path: Path) -> None:
    target = path.parent / "copy.sqlite"
    target.write_text("precious")
    with pytest.raises(InvalidRequest, match="--force"):
        back_up(str(path), str(target))
    assert target.read_text() == "precious"
    back_up(str(path), str(target), force=True)
    assert read_file(str(target), owners) == 1
    assert leftovers(path) == []


def test_the_database_itself_is_never_replaced(path: Path) -> None:
    link = path.parent / "link.sqlite"
    link.symlink_to(path)
    for target in (path, link):
        with pytest.raises(InvalidRequest, match="is the database itself"):
            back_up(str(path), str(target), force=True)


def test_a_database_in_use_is_never_replaced(path: Path) -> None:
    other = path.parent / "other.sqlite"
    database = opened(other)
    allocate(database, "b")
    with pytest.raises(InvalidRequest, match=r"other\.sqlite-wal"):
        back_up(str(path), str(other), force=True)
    close(database)


def test_a_directory_is_no_file(path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is a directory"):
        back_up(str(path), str(path.parent), force=True)


def test_without_a_database_or_a_directory_nothing_is_made(path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="does not exist"):
        back_up(str(path.parent / "none"), str(path.parent / "copy"))
    with pytest.raises(StoreUnavailable, match="No such file or directory"):
        back_up(str(path), str(path.parent / "none" / "copy"))
    assert leftovers(path) == []


def test_of_another_version_there_is_no_backup(tmp_path: Path) -> None:
    path = tmp_path / "newer.sqlite"
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA user_version = 2; CREATE TABLE t (c)")
    connection.close()
    with pytest.raises(StoreIncompatible):
        back_up(str(path), str(tmp_path / "copy"))
    assert os.listdir(tmp_path) == ["newer.sqlite"]


@pytest.mark.damages_database("a page is overwritten")
def test_of_a_damaged_database_there_is_no_backup(path: Path) -> None:
    image = bytearray(path.read_bytes())
    middle = len(image) // 2 // 4096 * 4096
    image[middle : middle + 4096] = b"\xff" * 4096
    path.write_bytes(image)
    with pytest.raises(StoreDamaged):
        back_up(str(path), str(path.parent / "copy.sqlite"))
    assert sorted(name for name in os.listdir(path.parent) if "copy" in name) == []


def test_what_fails_half_way_leaves_what_was_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = path.parent / "copy.sqlite"
    target.write_text("precious")

    def fail(_: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(connecting, "flush", fail)
    with pytest.raises(StoreUnavailable, match="No space left on device"):
        back_up(str(path), str(target), force=True)
    assert target.read_text() == "precious"
    assert leftovers(path) == []
