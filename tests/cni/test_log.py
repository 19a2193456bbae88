"""The plugin's log: one line a call, and never in a pod's way."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metis.cni.log import (
    LEVELS,
    MAX_LOG_BYTES,
    MAX_VALUE_LENGTH,
    OLDER,
    OVERFULL,
    CallRecord,
    append,
)


def test_a_line_tells_who_got_what_in_which_time() -> None:
    call = CallRecord(
        verb="ADD",
        container="c1",
        interface="eth0",
        pod="shop/web-0",
        addresses=("10.0.0.2/24", "fd00::2/64"),
    )
    assert call.line(at=0.25, seconds=0.0204) == (
        b"1970-01-01T00:00:00.250Z verb=ADD container=c1 interface=eth0 "
        b"pod=shop/web-0 address=10.0.0.2/24,fd00::2/64 ms=20.4 outcome=ok\n"
    )


def test_a_failure_keeps_to_its_line() -> None:
    call = CallRecord(
        verb="AD\nD", container='"\udcff', outcome="7: a = b", traceback="one\ntwo"
    )
    assert call.line(at=0, seconds=0) == (
        b'1970-01-01T00:00:00.000Z verb="AD\\nD" container="\\"\\udcff" ms=0.0 '
        b'outcome="7: a = b" traceback="one\\ntwo"\n'
    )


def test_a_line_is_bounded() -> None:
    call = CallRecord(verb="ADD", container="c" * 10_000_000)
    assert len(call.line(at=0, seconds=0)) < MAX_VALUE_LENGTH + 200


def test_lines_are_appended_to_a_file_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "cni.log"
    append(str(path), b"one\n")
    append(str(path), b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("mode", "kept"), [(0o644, 0o600), (0o666, 0o600), (0o200, 0o200)]
)
def test_a_log_that_others_may_read_is_closed_to_them(
    tmp_path: Path, mode: int, kept: int
) -> None:
    path = tmp_path / "log"
    path.touch()
    path.chmod(mode)
    append(str(path), b"line\n")
    assert stat.S_IMODE(path.stat().st_mode) == kept


def test_a_log_that_is_no_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    path.chmod(0o622)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    append(str(path), b"line\n")
    assert os.read(reader, 100) == b"line\n"
    os.close(reader)
    assert stat.S_IMODE(path.stat().st_mode) == 0o622


def test_a_log_that_is_a_pipe_without_reader_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device"):
        append(str(path), b"one\n")


def test_a_full_disk_is_told() -> None:
    with pytest.raises(OSError, match="No space left"):
        append("/dev/full", b"one\n")


def test_a_missing_directory_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        append(str(tmp_path / "absent" / "cni.log"), b"one\n")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("place", ["/proc/cni.log", "/sys/cni.log", "/dev/full/x"])
def test_a_place_where_no_file_can_be_made_is_told(place: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - which one is the kernel's choice
        append(place, b"one\n")


@pytest.mark.parametrize(
    ("level", "failed", "noted", "succeeded"),
    [
        ("error", True, False, False),
        ("warning", True, True, False),
        ("info", True, True, True),
        ("debug", True, True, True),
        (None, True, True, True),
    ],
)
def test_a_level_says_which_calls_are_logged(
    level: str | None, failed: bool, noted: bool, succeeded: bool
) -> None:
    for call, wanted in (
        (CallRecord(verb="ADD", outcome="11: no address is free"), failed),
        (CallRecord(verb="GC", note="nothing to do"), noted),
        (CallRecord(verb="ADD"), succeeded),
    ):
        call.set_level(level)
        assert call.is_wanted is wanted
        assert call.complaint == ""


@pytest.mark.parametrize("value", ["loud", 1, True, [], {}, "\ud800", "x" * 1000])
def test_an_unknown_level_is_told_and_the_default_one_used(value: Any) -> None:
    call = CallRecord(verb="ADD")
    call.set_level(value)
    assert call.level == "info"
    assert "error, warning, info, debug; info is used" in call.complaint
    assert len(call.complaint) < 200
    assert call.complaint.isprintable()


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_call_was_told_stands_in_the_debug_log_alone(level: str) -> None:
    call = CallRecord(
        verb="ADD",
        outcome="7: x",
        details="hint",
        netns="/run/netns/n",
        args="K8S_POD_UID=secret",
        stdin=b'{"token": "secret"}\xff',
    )
    call.set_level(level.upper())
    line = call.line(at=0, seconds=0)
    assert (b"secret" in line) is (level == "debug")
    assert (b"details=hint netns=/run/netns/n" in line) is (level == "debug")
    assert line.count(b"\n") == 1


def test_a_full_log_becomes_the_older_generation(tmp_path: Path) -> None:
    path = tmp_path / "cni.log"
    older = tmp_path / f"cni.log{OLDER}"
    for number in range(9):
        append(str(path), b"line %d\n" % number, limit=20)
    assert older.read_bytes() == b"line 3\nline 4\nline 5\n"
    assert path.read_bytes() == b"line 6\nline 7\nline 8\n"
    assert sorted(tmp_path.iterdir()) == [path, older]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_bound_is_some_megabytes() -> None:
    assert 1_000_000 < MAX_LOG_BYTES < 50_000_000


def test_whoever_finds_the_log_being_rotated_writes_on(tmp_path: Path) -> None:
    path = tmp_path / "cni.log"
    append(str(path), b"x" * 20 + b"\n")
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        append(str(path), b"late\n", limit=20)
        assert path.read_bytes().endswith(b"late\n")
        # What cannot be rotated is bounded all the same.
        append(str(path), b"y" * 20 * OVERFULL, limit=20)
        with pytest.raises(OSError, match="full and cannot be rotated"):
            append(str(path), b"too much\n", limit=20)
    append(str(path), b"new\n", limit=20)
    assert path.read_bytes() == b"new\n"


def test_a_log_that_somebody_else_rotated_is_not_rotated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cni.log"
    append(str(path), b"first generation\n")
    flock = fcntl.flock

    def overtaken(descriptor: int, operation: int) -> None:
        path.rename(f"{path}{OLDER}")
        path.write_bytes(b"by somebody else\n")
        flock(descriptor, operation)

    monkeypatch.setattr("metis.cni.log.fcntl.flock", overtaken)
    append(str(path), b"ours\n", limit=10)
    assert path.read_bytes() == b"by somebody else\nours\n"
    assert Path(f"{path}{OLDER}").read_bytes() == b"first generation\n"


WRITER = """
import contextlib, sys
from metis.cni.log import append
path, name, lines, limit = sys.argv[1:]
sys.stdin.read()  # until all are there
for number in range(int(lines)):
    text = f"{name}-{number} " + "x" * 100 + "\\n"
    with contextlib.suppress(OSError):  # as the plugin, which only complains
        append(path, text.encode(), limit=int(limit))
"""

LINE_BYTES = len("49-399 ") + 100 + 1


def write_at_once(path: Path, writers: int, lines: int, limit: int) -> list[str]:
    """Have processes write until all are done; what stands in both generations."""
    read_end, write_end = os.pipe()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(i), str(lines), str(limit)],
            stdin=read_end,
            cwd=Path(__file__).parents[2],
        )
        for i in range(writers)
    ]
    os.close(read_end)
    os.close(write_end)  # which lets them go
    assert [process.wait() for process in processes] == [0] * writers
    older = Path(f"{path}{OLDER}")
    assert sorted(path.parent.iterdir()) == [path, older]
    return (older.read_text() + path.read_text()).splitlines()


def test_fifty_processes_lose_and_tear_no_line_across_a_rotation(
    tmp_path: Path,
) -> None:
    writers, lines = 50, 40
    limit = writers * lines * LINE_BYTES * 6 // 10  # one rotation, and room for more
    found = write_at_once(tmp_path / "cni.log", writers, lines, limit)
    assert sorted(found) == sorted(
        f"{i}-{number} " + "x" * 100 for i in range(writers) for number in range(lines)
    )


def test_any_number_of_rotations_keeps_the_log_bounded_and_its_lines_whole(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cni.log"
    writers, limit = 8, 20 * LINE_BYTES
    found = write_at_once(path, writers, 400, limit)
    assert all(re.fullmatch(r"\d-\d+ x{100}", line) for line in found)
    for file in (path, Path(f"{path}{OLDER}")):
        assert file.stat().st_size <= OVERFULL * limit + writers * LINE_BYTES
