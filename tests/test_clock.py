"""Stored time: the boot's clock and an offset, whatever the wall clock does."""

from __future__ import annotations

import re
import time
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metis import clock as clock_module
from metis.clock import Clock, StoredClock, SystemClock


class StandingClock:
    """A clock that stands at one boot time."""

    def __init__(self, boottime: int) -> None:
        self.boottime = boottime

    def boot_id(self) -> str:
        return "boot-1"

    def boottime_ms(self) -> int:
        return self.boottime

    def walltime_ms(self) -> int:
        raise AssertionError


@given(st.integers(0, 2**53), st.integers(-(2**53), 2**53))
def test_stored_time_is_boot_time_plus_the_offset(boottime: int, offset: int) -> None:
    clock = StoredClock(StandingClock(boottime), offset)
    assert clock.now_ms() == boottime + offset


def test_stored_time_moves_with_boot_time_alone() -> None:
    raw = StandingClock(5)
    clock = StoredClock(raw, 100)
    raw.boottime += 7
    assert clock.now_ms() == 112


def test_an_offset_is_fixed_once() -> None:
    clock = StoredClock(StandingClock(0), 0)
    with pytest.raises(FrozenInstanceError):
        clock.offset_ms = 1  # type: ignore[misc]  # that it is refused is the point


def test_the_boot_id_is_the_same_within_a_boot() -> None:
    clock: Clock = SystemClock()
    assert re.fullmatch(r"[0-9a-f-]{36}", clock.boot_id())
    assert clock.boot_id() == SystemClock().boot_id()


@pytest.mark.parametrize("text", [b"", b"\n", b"\xff" * 36, b"boot", None])
def test_what_is_no_boot_id_is_an_error(
    text: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have an empty file in its place."""
    path = tmp_path / "boot_id"
    if text is not None:
        path.write_bytes(text)
    monkeypatch.setattr(clock_module, "BOOT_ID_PATH", str(path))
    with pytest.raises(OSError, match="boot_id"):
        SystemClock().boot_id()


def test_boot_time_counts_milliseconds_and_never_steps_back() -> None:
    clock = SystemClock()
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    readings = [clock.boottime_ms() for _ in range(100)]
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert readings == sorted(readings)
    assert int(before * 1000) <= readings[0] <= readings[-1] <= after * 1000


def test_wall_time_counts_milliseconds_since_the_epoch() -> None:
    before = time.time()
    reading = SystemClock().walltime_ms()
    after = time.time()
    assert int(before * 1000) <= reading <= after * 1000
