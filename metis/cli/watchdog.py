"""The service manager's watchdog (sd_watchdog_enabled(3)): a sign of life, if alive.

A service manager restarts a process that it has not heard of for a while. A restart
mends what hangs in the process itself, so that is what a sign of life vouches for:
the event loop turns, and the store answers a read. It mends neither a full disk nor
another process's write lock, which reads do not notice; nor a database that answers
with an error, which is an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import trio

from metis.cli.sd_notify import sd_notify
from metis.errors import StoreError

log = logging.getLogger("metis.daemon")


def watchdog_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """How often the service manager wants to hear of this process.

    Args:
      environ: the environment: WATCHDOG_USEC has the time in microseconds, and
        WATCHDOG_PID, where it is set, whose it is.
      pid: this process.

    Returns:
      Seconds, or None when nobody waits for this process.
    """
    microseconds = environ.get("WATCHDOG_USEC", "")
    if not microseconds or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    if not (microseconds.isascii() and microseconds.isdigit()) or not int(microseconds):
        log.warning(
            "the watchdog is not fed: WATCHDOG_USEC must be microseconds from 1 up",
            extra={"value": microseconds},
        )
        return None
    return int(microseconds) / 1e6


async def feed_watchdog(
    seconds: float,
    ask_store: Callable[[], Awaitable[object]],
    notify: Callable[[str], object] = sd_notify,
) -> None:
    """Give a sign of life at half the time, for ever, as long as the store answers.

    The other half is the store's: a read that takes longer ends the signs. It is
    waited for and not given up, since its thread could not be either; when it comes
    back after all, so do they.

    Args:
      seconds: the service manager's time, from `watchdog_seconds`.
      ask_store: asks the store something cheap.
      notify: tells the service manager.
    """
    while True:
        try:
            await ask_store()
        except StoreError as error:
            log.debug("the store answered with an error", extra={"error": error})
        notify("WATCHDOG=1")
        await trio.sleep(seconds / 2)
