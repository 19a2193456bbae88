"""When a process began, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from metis.clock import SystemClock
from metis.cni.origin import Origin, read_origin
from tests.store.databases import ManualClock


def stat_of(tmp_path: Path, ticks: str, name: str = "python3") -> str:
    path = tmp_path / "stat"
    fields = ["S", *["0"] * 18, ticks, "0", "0"]
    path.write_text(f"4711 ({name}) {' '.join(fields)}\n")
    return str(path)


def test_this_process_began_before_now_and_on_this_boot() -> None:
    origin = read_origin()
    assert origin.boot_id == SystemClock().boot_id()
    assert 0 < origin.started_boottime_ms <= SystemClock().boottime_ms()


@pytest.mark.parametrize("name", ["metis", "a b", "x) S 1 (y", ") R 9"])
def test_a_program_s_name_misleads_nobody(name: str, tmp_path: Path) -> None:
    path = stat_of(tmp_path, "120", name)
    clock = ManualClock(boottime=5_000)
    assert read_origin(clock, path, 100) == Origin("boot-1", 1_210, 1_200)


def test_the_end_of_the_tick_counts_unless_it_lies_in_the_future(
    tmp_path: Path,
) -> None:
    # So that an ADD which follows a DEL within a tick is not taken for older.
    path = stat_of(tmp_path, "500")
    assert read_origin(ManualClock(boottime=5_003), path, 100).started_boottime_ms == (
        5_003
    )
    assert read_origin(ManualClock(boottime=5_050), path, 100).started_boottime_ms == (
        5_010
    )
    assert read_origin(ManualClock(boottime=9_000), path, 250).started_boottime_ms == (
        2_004
    )


@pytest.mark.parametrize("text", ["", "1 (x) S", "1 (x) " + "z " * 30])
def test_what_the_kernel_does_not_tell_is_unknown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "stat"
    path.write_text(text)
    assert read_origin(ManualClock(), str(path), 100) == Origin()
    assert read_origin(ManualClock(), str(tmp_path / "absent"), 100) == Origin()
