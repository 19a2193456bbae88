"""`metis.cli.watchdog`: signs of life for as long as there is life."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from metis.cli.watchdog import feed_watchdog, watchdog_seconds
from metis.errors import StoreBusy, StoreDamaged, StoreUnavailable

PID = 4321


class Signs(list[float]):
    """When each sign of life was given."""

    def __call__(self, assignment: str) -> None:
        assert assignment == "WATCHDOG=1"
        self.append(trio.current_time())


@asynccontextmanager
async def fed(ask: Callable[[], Awaitable[object]]) -> AsyncIterator[Signs]:
    signs = Signs()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed_watchdog, 10.0, ask, signs)
        yield signs
        nursery.cancel_scope.cancel()


ENVIRONMENTS: dict[str, tuple[dict[str, str], float | None]] = {
    "no service manager": ({}, None),
    "half a minute": ({"WATCHDOG_USEC": "30000000"}, 30.0),
    "for this process": ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "4321"}, 0.5),
    "for another process": ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
    "empty": ({"WATCHDOG_USEC": ""}, None),
}


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_the_environment_says_whether_anybody_waits(case: str) -> None:
    environ, seconds = ENVIRONMENTS[case]
    assert watchdog_seconds(environ, PID) == seconds


@pytest.mark.parametrize("value", ["0", "-1", "1s", "²", "1.5"])
def test_a_time_that_is_none_is_told_and_ignored(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert watchdog_seconds({"WATCHDOG_USEC": value}, PID) is None
    [record] = caplog.records
    assert "WATCHDOG_USEC" in record.getMessage()
    assert vars(record)["value"] == value


async def test_a_store_that_answers_gives_a_sign_at_half_the_time(
    autojump_clock: MockClock,
) -> None:
    async with fed(trio.lowlevel.checkpoint) as signs:
        await trio.sleep(21)
    assert signs == [0, 5, 10, 15, 20]


@pytest.mark.parametrize("error", [StoreBusy, StoreUnavailable, StoreDamaged])
async def test_an_error_is_an_answer_that_a_restart_would_not_change(
    autojump_clock: MockClock, error: type[Exception]
) -> None:
    async def ask() -> None:
        raise error("read-only file system")

    async with fed(ask) as signs:
        await trio.sleep(11)
    assert signs == [0, 5, 10]


async def test_a_store_that_does_not_answer_gives_no_sign_until_it_does(
    autojump_clock: MockClock,
) -> None:
    async def ask() -> None:
        await trio.sleep(100 if trio.current_time() == 5 else 0)

    async with fed(ask) as signs:
        await trio.sleep(111)
    assert signs == [0, 105, 110]


async def test_a_fault_that_nobody_foresaw_is_not_hidden(
    autojump_clock: MockClock,
) -> None:
    async def ask() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await feed_watchdog(10.0, ask, Signs())
