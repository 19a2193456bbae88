"""Who is at a database, in this process and in others."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

from metis.errors import StoreBusy, StoreUnavailable
from metis.store import opening
from metis.store.opening import enter, is_unattended
from tests.store.broken import Place, names

SHORT = 0.03
"""Seconds that are waited for a lock that nobody gives back."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "metis.sqlite")


def test_the_first_is_alone_and_admits_others(path: str) -> None:
    first = enter(path)
    assert first.alone
    with pytest.raises(StoreBusy, match=r"has been opening database '.*' for 0\.03 s"):
        enter(path, seconds=SHORT)
    first.admit_others()
    assert not first.alone
    second = enter(path)
    assert not second.alone
    second.admit_others()
    first.leave()
    second.leave()
    third = enter(path)
    assert third.alone
    third.leave()


def test_whoever_must_be_alone_waits_until_the_others_have_left(path: str) -> None:
    first = enter(path)
    first.admit_others()
    with pytest.raises(StoreUnavailable, match="others still have it open"):
        enter(path, alone=True, seconds=SHORT)
    leaving = threading.Timer(SHORT, first.leave)
    leaving.start()
    alone = enter(path, alone=True)
    assert alone.alone
    alone.leave()
    leaving.join()


def test_what_is_tried_in_vain_leaves_no_lock(path: str) -> None:
    first = enter(path)
    first.admit_others()
    with pytest.raises(StoreUnavailable):
        enter(path, alone=True, seconds=0)
    second = enter(path, seconds=0)
    second.leave()
    first.leave()
    assert enter(path, seconds=0).alone


def test_leaving_twice_does_no_harm(path: str) -> None:
    first = enter(path)
    first.leave()
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT)
    first.leave()
    os.fstat(descriptor)  # it is not the one that was closed
    os.close(descriptor)


@pytest.mark.parametrize("content", [b"", b"4711\n", bytes(range(256)) * 100])
def test_what_the_lock_files_contain_means_nothing(path: str, content: bytes) -> None:
    for suffix in (".opening", ".users"):
        Path(path + suffix).write_bytes(content)
    attendance = enter(path, seconds=0)
    assert attendance.alone
    attendance.leave()
    assert Path(f"{path}.opening").read_bytes() == content


def test_the_lock_files_are_for_the_owner_alone_and_for_no_child(path: str) -> None:
    attendance = enter(path)
    for suffix in (".opening", ".users"):
        assert stat.S_IMODE(os.stat(path + suffix).st_mode) == 0o600
    for descriptor in (attendance._opening, attendance._users):
        assert descriptor is not None
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    attendance.leave()


def test_a_lock_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"lock '.*\.opening' .*No such file"):
        enter(str(tmp_path / "missing" / "metis.sqlite"))
    (tmp_path / "metis.sqlite.users").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable, match=r"lock '.*\.users' .*symbolic links"):
        enter(str(tmp_path / "metis.sqlite"))
    assert not (tmp_path / "elsewhere").exists()


HOLDING = """
import sys
from metis.store.opening import enter
attendance = enter(sys.argv[1])
if sys.argv[2] == "open":
    attendance.admit_others()
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        yield process
        process.kill()


@pytest.mark.parametrize("step", ["opening", "open"])
def test_a_kill_at_any_step_leaves_nothing_that_the_next_one_waits_for(
    path: str, step: str
) -> None:
    with another_process(HOLDING, path, step) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    attendance = enter(path, seconds=0)
    assert attendance.alone
    attendance.leave()


def test_another_process_is_noticed(path: str) -> None:
    with another_process(HOLDING, path, "open"):
        attendance = enter(path)
        assert not attendance.alone
        attendance.leave()
        with pytest.raises(StoreUnavailable, match="others still have it open"):
            enter(path, alone=True, seconds=SHORT)


FOREIGN = """
import apsw, sys
connection = apsw.Connection(sys.argv[1])
connection.execute("SELECT * FROM cidr_blocks").fetchall()
print("there", flush=True)
sys.stdin.read()
"""


def test_a_program_that_knows_no_locks_of_ours_is_noticed(tmp_path: Path) -> None:
    """An original daemon, for instance."""
    place = Place(tmp_path)
    place.connect()._close()
    path = str(place.path)
    assert is_unattended(path)
    with another_process(FOREIGN, path):
        assert not is_unattended(path)
        with pytest.raises(StoreUnavailable, match="others still have it open"):
            enter(path, alone=True, seconds=SHORT)
    assert is_unattended(path)


def test_a_program_that_only_reads_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`metis check`, for instance, which must not keep a daemon from starting."""
    answers = [False, False, True]
    monkeypatch.setattr(opening, "is_unattended", lambda _: answers.pop(0))
    enter(str(tmp_path / "metis.sqlite"), alone=True).leave()
    assert answers == []


def test_a_file_system_without_locks_is_named(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreUnavailable, match=r"database '.*' cannot be locked: No"):
        enter(path)


def test_a_connection_of_this_process_keeps_its_locks(tmp_path: Path) -> None:
    """Were the files looked at by plain reads, their end would drop them."""
    place = Place(tmp_path)
    with place.opened() as database:
        place.give(database, names(1))
    locking = apsw.Connection(str(place.path))
    locking.execute("BEGIN IMMEDIATE")
    assert not is_unattended(str(place.path))
    with place.opened(thorough=False):
        other = subprocess.run(
            [sys.executable, "-c", LOCKED, str(place.path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
    locking.execute("ROLLBACK")
    locking.close()
    assert other.returncode == 7


LOCKED = """
import apsw, sys
try:
    apsw.Connection(sys.argv[1]).execute("BEGIN IMMEDIATE")
except apsw.BusyError:
    sys.exit(7)
"""


def test_many_take_turns(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPENING_SECONDS", 20.0)
    inside, most = 0, 0

    def open_and_close() -> None:
        nonlocal inside, most
        for _ in range(20):
            attendance = enter(path)
            inside += 1
            most = max(most, inside)
            inside -= 1
            attendance.admit_others()
            attendance.leave()

    threads = [threading.Thread(target=open_and_close) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
