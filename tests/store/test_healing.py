"""Databases that are broken in every way, and what becomes of them and their owners."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from metis.errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreIncompatible,
    StoreUnavailable,
)
from metis.model import CIDRBlock, Owner, Pod
from metis.store import healing, schema
from metis.store.rebuilding import Claim, Report
from tests.store.broken import CIDR, COOLDOWN_MS, PAGE, Place, names, zero_page

pytestmark = pytest.mark.damages_database("what was damaged is kept beside it")

FRAME = PAGE + 24


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A database at rest, with owners and with addresses that cool."""
    (tmp_path / "a").mkdir()
    place = Place(tmp_path / "a")
    with place.opened() as database:
        place.give(database, names(60))
        for name in names(10):
            place.take(database, name)
    return place


@pytest.fixture
def killed(tmp_path: Path, place: Place) -> Place:
    """What a kill leaves: a log whose commits were all answered, and its index."""
    with place.opened() as database:
        place.give(database, names(20, "late"))
        return place.kill(database, tmp_path / "killed")


def claims_of(place: Place) -> Callable[[], list[Claim]]:
    """The node's evidence of all owners."""
    block = CIDRBlock.parse(CIDR)
    return lambda: [
        Claim(Owner("default", name, "eth0"), Pod(name, "ns"), block, address)
        for name, address in place.owners.items()
    ]


def reset(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garble(path: Path) -> None:
    chance = random.Random(7)  # noqa: S311  # the same in every run
    path.write_bytes(chance.randbytes(path.stat().st_size))


BREAKS: dict[str, Callable[[Path], object]] = {
    "0 bytes": reset(b""),
    "4 KiB of blanks": reset(b" " * 4096),
    "4 KiB of zeros": reset(b"\0" * 4096),
    "a text": reset(b"not a database\n" * 500),
    "two bytes": reset(b"xy"),
    "the first half": cut,
    "random": garble,
}


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("thorough", [True, False])
def test_what_is_broken_is_set_aside_and_nobody_is_robbed(
    place: Place, kind: str, thorough: bool, caplog: pytest.LogCaptureFixture
) -> None:
    BREAKS[kind](place.path)
    content = place.path.read_bytes()
    with place.opened(thorough=thorough) as database:
        assert database.healed
        place.check_nobody_is_robbed(database)
        place.check_it_waits(database)
    (aside,) = place.damaged
    assert aside.read_bytes() == content
    assert str(aside) in caplog.text
    assert "wait for one cooldown, until 20" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert Path(f"{aside}.report").read_text() == "".join(
        f"{record.message}\n" for record in caplog.records
    )


@pytest.mark.parametrize("kind", BREAKS)
def test_by_the_evidence_of_the_node_all_owners_come_back(
    place: Place, kind: str
) -> None:
    BREAKS[kind](place.path)
    with place.opened(evidence=claims_of(place)) as database:
        place.check_all_are_there(database)
        place.check_nobody_is_robbed(database)
        place.check_it_waits(database)


def test_whichever_page_is_blank_every_owner_is_kept(
    place: Place, tmp_path: Path
) -> None:
    pages = place.path.stat().st_size // PAGE
    assert pages > 20
    for number in range(1, pages + 1):
        shutil.copytree(place.directory, tmp_path / f"page-{number}")
        broken = Place(tmp_path / f"page-{number}", place.clock, place.owners)
        zero_page(broken.path, number)
        with broken.opened() as database:
            assert database.healed
            broken.check_all_are_there(database)
            broken.check_nobody_is_robbed(database)


@pytest.mark.parametrize(
    "damaged", ["10.0.0.41", "10.0.0.44", "10.0.2.40", "90.0.0.40"]
)
def test_an_owner_whose_address_is_misread_is_not_robbed(
    place: Place, damaged: str
) -> None:
    """A flipped bit makes it another address of the block, a neighbour's, or none."""
    right = {address: name for name, address in place.owners.items()}
    name = right["10.0.0.40"]
    content = place.path.read_bytes()
    cell = f"10.0.0.40{name}".encode()
    assert content.count(cell) == 1
    place.path.write_bytes(content.replace(cell, f"{damaged}{name}".encode()))
    with place.opened() as database:
        assert database.healed
        rows = database._writer.execute(
            "SELECT address, container_id FROM ip_addresses"
            " WHERE is_allocated = TRUE AND container_id > ''"
        )
        holders = {str(address): str(holder) for address, holder in rows}
    assert right.items() <= holders.items()


@pytest.mark.parametrize("thorough", [True, False])
def test_a_database_that_lost_its_version_is_healed(
    place: Place, thorough: bool
) -> None:
    """Otherwise a node would stop for four bytes of a header."""
    with place.path.open("r+b") as file:
        file.seek(60)
        file.write(bytes(4))
    with place.opened(thorough=thorough) as database:
        assert database.healed
        place.check_all_are_there(database)
        place.check_nobody_is_robbed(database)


def test_of_a_database_that_lost_its_version_the_log_counts(killed: Place) -> None:
    with killed.path.open("r+b") as file:
        file.seek(60)
        file.write(bytes(4))
    with killed.opened() as database:
        holders = killed.holders(database)
        assert {name: holders.get(name) for name in killed.owners} == killed.owners


def test_what_is_healed_waits_for_one_cooldown_and_no_longer(place: Place) -> None:
    zero_page(place.path, 1)
    with place.opened() as database:
        place.check_it_waits(database)
    with place.opened() as database:
        assert not database.healed
        assert place.add(database, "next") is not None


def test_a_released_address_rests_as_long_as_it_was_to(place: Place) -> None:
    """The cooldown of a DEL is not forgotten, longer than the cautious one or not."""
    writer = apsw.Connection(str(place.path))
    writer.execute(
        "UPDATE ip_addresses SET release_at = release_at + 3600000"
        " WHERE release_at IS NOT NULL"
    )
    writer.close()
    cut_off = place.path.stat().st_size // PAGE
    zero_page(place.path, cut_off)
    with place.opened() as database:
        assert database.healed
        place.clock.advance(COOLDOWN_MS + 1)
        released = {f"10.0.0.{number}" for number in range(2, 12)}
        given = {place.add(database, name) for name in names(50, "new")}
    assert None not in given
    assert not given & released


def test_a_clock_that_can_be_read_goes_on(place: Place) -> None:
    with place.opened() as database:
        before_ms = database.clock.now_ms()
    place.clock.walltime += 86_400_000
    zero_page(place.path, place.path.stat().st_size // PAGE)
    with place.opened() as database:
        assert database.healed
        assert database.clock.now_ms() == before_ms


def test_after_a_reboot_a_damaged_database_serves_at_once(place: Place) -> None:
    place.clock.boot = "boot-2"
    zero_page(place.path, place.path.stat().st_size // PAGE)
    with place.opened(evidence=claims_of(place)) as database:
        assert database.healed
        assert place.holders(database) == {}
        assert place.add(database, "first") is not None


def test_an_index_that_does_not_match_is_damage(place: Place) -> None:
    writer = apsw.Connection(str(place.path))
    writer.execute("PRAGMA writable_schema = ON")
    writer.execute(
        "UPDATE sqlite_schema SET rootpage ="
        " (SELECT rootpage FROM sqlite_schema WHERE name = 'metis_windows')"
        " WHERE name = 'idx_ip_addresses_owner'"
    )
    writer.close()
    with place.opened() as database:
        assert database.healed
        place.check_all_are_there(database)


def test_a_counter_that_is_wrong_is_corrected_in_place(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    writer = apsw.Connection(str(place.path))
    writer.execute("UPDATE cidr_blocks SET allocated_ips = 7")
    writer.close()
    with place.opened() as database:
        assert not database.healed
        place.check_nobody_is_robbed(database)
    assert place.damaged == []
    assert "counted 7 addresses, and has " in caplog.text


# the log


def test_what_a_kill_leaves_is_whole(killed: Place) -> None:
    with killed.opened() as database:
        assert not database.healed
        killed.check_all_are_there(database)
        assert killed.add(database, "next") is not None


def log_lengths(size: int) -> Iterator[int]:
    """Every frame boundary of a log, and a place between each two."""
    for start in range(32, size, FRAME):
        yield start
        yield start + FRAME // 2
    yield from (0, 10)


def test_wherever_the_log_is_cut_nobody_is_robbed(
    killed: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = Path(f"{killed.path}-wal").stat().st_size
    lengths = sorted(log_lengths(size))
    assert len(lengths) > 20
    for length in lengths:
        caplog.clear()
        directory = tmp_path / f"cut-{length}"
        shutil.copytree(killed.directory, directory)
        broken = Place(directory, killed.clock, killed.owners)
        os.truncate(f"{broken.path}-wal", length)
        with broken.opened() as database:
            broken.check_nobody_is_robbed(database)
            assert broken.add(database, "impatient") is None
            assert not database.healed
        assert "has lost commits" in caplog.text
        assert broken.damaged == []
        assert not Path(f"{broken.path}.lost").exists()


@pytest.mark.parametrize("thorough", [True, False])
def test_a_log_that_was_deleted_is_missed(
    killed: Place, thorough: bool, caplog: pytest.LogCaptureFixture
) -> None:
    os.unlink(f"{killed.path}-wal")
    evidence = claims_of(killed)
    with killed.opened(thorough=thorough, evidence=evidence) as database:
        killed.check_all_are_there(database)
        killed.check_it_waits(database)
    assert "has lost commits" in caplog.text


def test_a_flipped_bit_in_the_log_is_missed_commits(killed: Place) -> None:
    path = Path(f"{killed.path}-wal")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with killed.opened(evidence=claims_of(killed)) as database:
        killed.check_all_are_there(database)
        assert killed.add(database, "impatient") is None


def test_lost_commits_that_were_not_seen_to_are_not_forgotten(
    killed: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed again, after SQLite made a new index and before the owners were asked."""
    os.truncate(f"{killed.path}-wal", 32 + 3 * FRAME)
    with monkeypatch.context() as patch:
        patch.setattr(healing, "see_to_lost_commits", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            killed.connect()
    with killed.opened(evidence=claims_of(killed)) as database:
        killed.check_all_are_there(database)
        assert killed.add(database, "impatient") is None


def test_after_a_reboot_a_log_that_is_cut_is_the_disk_s_matter(
    killed: Place, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(f"{killed.path}-wal", 32 + 3 * FRAME)
    killed.clock.boot = "boot-2"
    with killed.opened() as database:
        assert not database.healed
        assert killed.add(database, "first") is not None
    assert "lost commits" not in caplog.text


def test_a_log_of_which_nothing_was_folded_since_the_reboot_is_missed(
    place: Place, tmp_path: Path
) -> None:
    """The file alone must not pass for one of the boot before."""
    place.clock.boot = "boot-2"
    place.owners.clear()
    with place.opened() as database:
        place.give(database, names(20, "late"))
        killed = place.kill(database, tmp_path / "killed")
    os.unlink(f"{killed.path}-wal")
    with killed.opened() as database:
        killed.check_nobody_is_robbed(database)
        assert killed.add(database, "impatient") is None


@pytest.mark.parametrize("index", ["own", "foreign", "none"])
def test_a_foreign_log_is_set_aside_and_nobody_is_robbed(
    place: Place, tmp_path: Path, index: str
) -> None:
    """Somebody copied files, and did not know that these belong together."""
    (tmp_path / "other").mkdir()
    other = Place(tmp_path / "other", place.clock)
    with other.opened() as database:
        other.give(database, names(90, "other"))
        foreign = other.kill(database, tmp_path / "foreign")
    with place.opened() as database:
        place.give(database, names(5, "late"))
        mine = place.kill(database, tmp_path / "mine")
    shutil.copy(f"{foreign.path}-wal", f"{mine.path}-wal")
    if index == "foreign":
        shutil.copy(f"{foreign.path}-shm", f"{mine.path}-shm")
    elif index == "none":
        os.unlink(f"{mine.path}-shm")
    with mine.opened(evidence=claims_of(mine)) as database:
        mine.check_nobody_is_robbed(database)
        holders = mine.holders(database)
        assert {name: holders.get(name) for name in mine.owners} == mine.owners
        assert mine.add(database, "impatient") is None


def test_a_log_without_its_index_that_says_nothing_new_is_harmless(
    place: Place, tmp_path: Path
) -> None:
    """As a process leaves it that is killed between removing the one and the other."""
    with place.opened() as database:
        place.give(database, names(5, "late"))
        database._checkpoint()
        killed = place.kill(database, tmp_path / "killed")
    os.unlink(f"{killed.path}-shm")
    with killed.opened() as database:
        assert not database.healed
        killed.check_all_are_there(database)
        assert killed.add(database, "next") is not None


# gone


def test_a_database_that_is_gone_is_made_anew_by_the_evidence_of_the_node(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.path.unlink()
    with place.opened(evidence=claims_of(place)) as database:
        assert database.healed
        place.check_all_are_there(database)
        place.check_it_waits(database)
    assert "it is gone, and was in use" in caplog.text


def test_a_first_database_serves_at_once(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with place.opened(evidence=list) as database:
        assert not database.healed
        assert place.add(database, "first") == "10.0.0.2"


def test_what_a_database_that_is_gone_left_in_its_log_is_used(killed: Place) -> None:
    killed.path.unlink()
    with killed.opened() as database:
        assert database.healed
        assert killed.add(database, "impatient") is None
        holders = killed.holders(database)
    late = {name for name in killed.owners if name.startswith("late")}
    assert late <= holders.keys()
    assert not Path(f"{killed.path}-wal").exists()


def test_a_database_that_is_gone_is_missed_by_the_index_of_its_log(
    killed: Place,
) -> None:
    killed.path.unlink()
    os.unlink(f"{killed.path}-wal")
    with killed.opened() as database:
        assert database.healed
        killed.check_it_waits(database)


@pytest.mark.parametrize(
    ("text", "damaged"),
    [
        ("OLD.updated", "OND.updated"),
        ("REFERENCES ip_addresses (", "REFERENCES ip_addresse  ("),
        ("REFERENCES cidr_blocks (", "REFERENCES cidr_block  ("),
    ],
)
def test_a_rule_whose_text_is_damaged_is_damage(
    place: Place, text: str, damaged: str
) -> None:
    """SQLite's own check passes triggers and references, and writes would fail."""
    connection = apsw.Connection(str(place.path))
    connection.pragma("writable_schema", 1)
    connection.execute(
        "UPDATE sqlite_schema SET sql = replace(sql, ?, ?)", (text, damaged)
    )
    connection.close()
    with place.opened() as database:
        assert database.healed
        place.check_all_are_there(database)
        place.check_nobody_is_robbed(database)


def test_a_clock_that_is_no_number_is_damage(place: Place) -> None:
    connection = apsw.Connection(str(place.path))
    connection.execute("UPDATE metis_boot SET offset_ms = 'default'")
    connection.close()
    with place.opened(thorough=False) as database:
        assert database.healed
        place.check_all_are_there(database)
        place.check_it_waits(database)


@pytest.mark.parametrize(
    "garble",
    [
        "UPDATE ip_addresses SET pod_name = CAST(x'a4' AS TEXT) WHERE id = 20",
        "UPDATE metis_boot SET boot_id = CAST(x'a4' AS TEXT)",
        "UPDATE sqlite_schema SET name = CAST(x'a4' AS TEXT)"
        " WHERE name = 'metis_history'",
    ],
)
def test_text_that_is_none_hinders_no_healing(place: Place, garble: str) -> None:
    connection = apsw.Connection(str(place.path))
    connection.pragma("writable_schema", 1)
    connection.execute(garble)
    # And a page is damaged, so that it is healed in any case.
    connection.execute("UPDATE sqlite_schema SET rootpage = 3 WHERE type = 'index'")
    connection.close()
    with place.opened() as database:
        assert database.healed
        place.check_all_are_there(database)
        place.check_nobody_is_robbed(database)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (apsw.IOError, StoreUnavailable),
        (apsw.FullError, StoreUnavailable),
        (apsw.BusyError, StoreBusy),
    ],
)
def test_a_disk_that_fails_is_no_damage(
    killed: Place,
    monkeypatch: pytest.MonkeyPatch,
    error: type[apsw.Error],
    expected: type[StoreError],
) -> None:
    def fail(*_: object) -> None:
        raise error("of the disk")

    with monkeypatch.context() as patch:
        patch.setattr(schema, "check_compatible", fail)
        with pytest.raises(expected):
            killed.connect()
    assert killed.damaged == []
    with killed.opened() as database:
        assert not database.healed
        killed.check_all_are_there(database)


# left alone


def test_a_newer_version_that_is_damaged_is_left_as_it_is(place: Place) -> None:
    writer = apsw.Connection(str(place.path))
    writer.pragma("user_version", 2)
    writer.close()
    for number in (1, 5):
        content = bytearray(place.path.read_bytes())
        content[100 + (number - 1) * PAGE : number * PAGE] = bytes(PAGE - 100)
        place.path.write_bytes(content[: place.path.stat().st_size])
        before = place.path.read_bytes()
        with pytest.raises((StoreIncompatible, StoreDamaged)):
            place.connect()
        assert place.path.read_bytes() == before
        assert place.damaged == []


@pytest.mark.parametrize("thorough", [True, False])
def test_a_damaged_database_that_others_have_open_is_left_to_them(
    place: Place, thorough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metis.store.opening.OPENING_SECONDS", 0.05)
    other = place.connect()
    os.truncate(place.path, 3 * PAGE)
    before = place.path.read_bytes()
    with pytest.raises(StoreUnavailable, match="is damaged, and others still have it"):
        place.connect(thorough=thorough)
    assert place.path.read_bytes() == before
    assert place.damaged == []
    other._close()


def test_a_database_that_is_gone_while_others_have_it_open_is_not_made_twice(
    place: Place,
) -> None:
    other = place.connect()
    place.path.unlink()
    with pytest.raises(StoreUnavailable, match="is gone, and others still have it"):
        place.connect()
    other._close()


def test_a_database_that_is_gone_while_an_original_has_it_open_is_not_made_twice(
    place: Place,
) -> None:
    """Who has it open gives addresses out of a file that has no name any more."""
    code = (
        "import apsw, sys; connection = apsw.Connection(sys.argv[1]);"
        "connection.execute('SELECT * FROM cidr_blocks').fetchall();"
        "print('there', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(place.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as original:
        assert original.stdout is not None
        assert original.stdout.readline() == b"there\n"
        place.path.unlink()
        with pytest.raises(StoreUnavailable, match="is gone, and others still have it"):
            place.connect()
        original.kill()
    with place.opened() as database:
        assert database.healed


def test_whoever_opens_a_database_while_it_is_healed_keeps_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that knows none of our locks, as the file is looked at."""
    zero_page(place.path, 3)
    before = place.path.read_bytes()
    make = healing._make
    come: list[apsw.Connection] = []

    def make_and_come(*arguments: Any, **keywords: Any) -> Report:
        come.append(apsw.Connection(str(place.path)))
        come[0].execute("SELECT * FROM cidr_blocks").fetchall()
        return make(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(healing, "_make", make_and_come)
        with pytest.raises(StoreUnavailable, match="others have opened it meanwhile"):
            place.connect()
    assert place.path.read_bytes() == before
    assert place.damaged == []
    come[0].close()
    with place.opened() as database:
        assert database.healed
        place.check_all_are_there(database)


def test_the_journal_of_another_program_does_not_undo_what_was_healed(
    place: Place,
) -> None:
    writer = apsw.Connection(str(place.path))
    writer.pragma("journal_mode", "persist")
    writer.pragma("cache_size", 1)  # so that pages are written before the commit
    writer.execute("BEGIN; UPDATE ip_addresses SET updated_at = 7")
    journal = Path(f"{place.path}-journal")
    hot = journal.read_bytes()
    writer.execute("ROLLBACK")
    writer.close()
    place.path.write_bytes(b"")
    journal.write_bytes(hot)
    with place.opened(evidence=claims_of(place)) as database:
        assert database.healed
        place.check_all_are_there(database)
    assert not journal.exists()
    (aside,) = [one for one in place.damaged if one.name.endswith("-journal")]
    assert aside.read_bytes() == hot


# steps


@pytest.mark.parametrize("call", range(1, 40))
def test_whoever_is_killed_while_healing_leaves_it_to_the_next(
    killed: Place, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Each call that changes a name is the last one that is carried out."""

    class Killed(BaseException):
        pass

    left = call

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def function(*arguments: object, **keywords: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return real(*arguments, **keywords)

        return function

    content = killed.path.read_bytes()
    broken = content[: 12 * PAGE] + bytes(PAGE) + content[13 * PAGE :]
    killed.path.write_bytes(broken)
    with monkeypatch.context() as patch:
        for name in ("link", "unlink", "rename", "mknod"):
            patch.setattr(os, name, counted(getattr(os, name)))
        with contextlib.suppress(Killed):
            killed.connect()._close()
    with killed.opened() as database:
        holders = killed.holders(database)
        assert {name: holders.get(name) for name in killed.owners} == killed.owners
        killed.check_nobody_is_robbed(database)
        assert killed.add(database, "impatient") is None
    assert killed.damaged
    assert all(each.read_bytes() == broken for each in killed.damaged)
    left_over = {each.name for each in killed.directory.iterdir()}
    assert not [name for name in left_over if "salvage" in name or "healed" in name]


HEALING = """
import sys
from metis.clock import SystemClock
from metis.store.database import connect
connect(sys.argv[1], SystemClock(), 60_000, "NORMAL", thorough=True)._close()
"""


def test_of_many_that_find_it_damaged_one_heals_it(place: Place) -> None:
    place.path.write_bytes(b"")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HEALING), str(place.path)],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(6)
    ]
    said = [process.communicate()[1] for process in processes]
    assert {process.returncode for process in processes} == {0}
    assert sum(b"is damaged: it is empty" in text for text in said) == 1
    assert len(place.damaged) == 1


def test_a_full_disk_leaves_the_damaged_database_where_it_is(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero_page(place.path, 3)
    before = place.path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "x")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mknod", full)
        with pytest.raises(StoreUnavailable, match="No space left"):
            place.connect()
    assert place.path.read_bytes() == before
    with place.opened() as database:
        assert database.healed
        place.check_all_are_there(database)


def test_the_latest_damaged_databases_are_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "MOST_DAMAGED", 3)
    for number in range(5):
        place.path.write_bytes(b"%d" % number)
        place.connect()._close()
    assert sorted(each.read_bytes() for each in place.damaged) == [b"2", b"3", b"4"]
    reports = [each for each in place.directory.iterdir() if each.suffix == ".report"]
    assert len(reports) == 3


def test_a_disk_that_stays_full_drives_out_no_damaged_database(
    killed: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "MOST_DAMAGED", 2)
    zero_page(killed.path, 3)
    older = [f"{killed.path}.damaged-20260101T00000{number}Z" for number in (1, 2)]
    for name in older:
        Path(name).touch()
    link = os.link

    def full(source: str, name: str) -> None:
        if ".damaged-" in name and name.endswith("-wal"):
            raise OSError(errno.ENOSPC, "No space left on device", name)
        link(source, name)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="No space left"):
                killed.connect()
    assert [str(each) for each in killed.damaged] == older
    killed.connect()._close()
    assert len(killed.damaged) == 2


def test_where_names_cannot_be_doubled_files_are_copied(
    killed: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    zero_page(killed.path, 3)
    content = killed.path.read_bytes()
    with killed.opened() as database:
        assert database.healed
        holders = killed.holders(database)
        assert {name: holders.get(name) for name in killed.owners} == killed.owners
    (aside,) = killed.damaged
    assert aside.read_bytes() == content
    (tmp_path / "new").mkdir()
    with Place(tmp_path / "new").opened() as database:
        assert not database.healed


def test_what_is_set_aside_is_for_the_owner_alone(place: Place) -> None:
    place.path.write_bytes(b"")
    place.path.chmod(0o644)
    place.connect()._close()
    for each in place.directory.iterdir():
        assert each.stat().st_mode & 0o777 == 0o600, each


@pytest.mark.parametrize(
    "where",
    ["ip_addresses.container_id", "ip_addresses.pod_name", "cidr_blocks.state"],
)
def test_a_text_that_is_none_is_damage(place: Place, where: str) -> None:
    """SQLite's own check does not look at it, and whoever reads it fails."""
    table, column = where.split(".")
    writer = apsw.Connection(str(place.path))
    writer.execute(
        f"UPDATE {table} SET {column} = CAST(x'63c5' AS TEXT)"  # noqa: S608  # from above
        f" WHERE id = (SELECT max(id) FROM {table} WHERE {column} > '')"
    )
    assert writer.pragma("integrity_check") == "ok"
    writer.close()
    with place.opened(evidence=claims_of(place)) as database:
        assert database.healed
        place.check_all_are_there(database)
