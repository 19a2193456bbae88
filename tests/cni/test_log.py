"""The plugin's log: one line a call, and never in a pod's way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from metis.cni.log import MAX_VALUE_LENGTH, CallRecord, append


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
