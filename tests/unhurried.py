"""Trio's clock goes slowly in tests, so that no deadline strikes a busy machine.

A deadline of the product is a promise about real time: STATUS has 0.4 s, a daemon
has a second for its first word. Where several tests share two processors that are
taken away for seconds at a time, the promise is broken without any fault of the
product's. So a test runs on one of three clocks:

- `autojump_clock` or `mock_clock`, where time is the point: it passes only when the
  test lets it, or when nothing else is left to happen;
- this one everywhere else, without being asked for: what waits for an event, a thread
  or a process waits for as long as it takes, and a deadline strikes only where
  something hangs, after SLOWNESS times its length;
- real time, with the mark `real_time` and the reason.

Programs that a test starts can be slowed down, too: UNHURRIED.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import trio
from trio.testing import MockClock

MARK = "real_time"
MARK_LINE = f"{MARK}(why): something has to wait for as long as it says"

SLOWNESS = 20
"""Real seconds in one of Trio's: STATUS has 8 then. Few enough that tests in which
the product makes a pause of some milliseconds stay short."""

UNHURRIED = f"""
import functools, trio, trio.testing
trio.run = functools.partial(
    trio.run, clock=trio.testing.MockClock(rate=1 / {SLOWNESS})
)
"""
"""Put before a program in Python: its Trio's clock goes slowly, too."""

_run = trio.run


@functools.wraps(_run)
def run(*args: Any, clock: trio.abc.Clock | None = None, **options: Any) -> Any:
    """`trio.run` on a slow clock, unless it is given one."""
    return _run(*args, clock=clock or MockClock(rate=1 / SLOWNESS), **options)


def in_real_time(item: pytest.Item) -> bool:
    """Whether a test wants real time; it says why."""
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return False
    (why,) = mark.args
    assert isinstance(why, str), f"{item}: say why in the mark {MARK}"
    return True
