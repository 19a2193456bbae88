"""Waiting for what announces itself to nobody: the one place that polls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds until a condition counts as failed; on an idle machine most hold at once."""

PAUSE = 0.02
"""Seconds between two looks."""


def until(what: str, look: Callable[[], T]) -> T:
    """Look again and again until there is something to see.

    Args:
      what: the condition, for the error message: "containerd serves".
      look: returns something true once the condition holds. It is called at
        least once, and after the deadline once more.

    Returns:
      What `look` returned.

    Raises:
      TimeoutError: PATIENCE is over.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        late = time.monotonic() > deadline
        if seen := look():
            return seen
        if late:
            raise TimeoutError(f"after {PATIENCE:.0f} s not so: {what} (saw {seen!r})")
        time.sleep(PAUSE)
