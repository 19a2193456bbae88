"""On which clock a test runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio
from trio.testing import MockClock

from tests.unhurried import SLOWNESS, UNHURRIED, in_real_time

SLOW = 1 / SLOWNESS


async def rate() -> float | None:
    """How fast the clock goes; None for Trio's own."""
    clock = trio.lowlevel.current_clock()
    return clock.rate if isinstance(clock, MockClock) else None


async def test_a_deadline_is_as_far_away_as_a_busy_machine_needs() -> None:
    assert await rate() == SLOW


def test_what_runs_trio_itself_is_in_no_hurry_either() -> None:
    assert trio.run(rate) == SLOW


async def test_a_clock_that_a_test_has_is_its_own(mock_clock: MockClock) -> None:
    assert await rate() == 0.0


@pytest.mark.real_time("it is what the mark is for")
async def test_a_test_that_says_why_has_real_time(
    request: pytest.FixtureRequest,
) -> None:
    assert in_real_time(request.node)
    assert await rate() is None


def test_programs_can_be_slowed_down_too() -> None:
    program = (
        f"{UNHURRIED}\n"
        "async def main(): print(trio.lowlevel.current_clock().rate)\n"
        "trio.run(main)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == SLOW
