"""`metis daemon`: the daemon as a service of its own.

Adds to `metis.serve` what belongs to a process: flags, signals, logs on
stderr, the service manager's notifications and the limit of open files.
"""

from __future__ import annotations

import gc
import logging
import resource
import signal

import click
import trio

import metis
from metis.cli.logs import set_up_logging
from metis.cli.options import Duration, run_reported
from metis.cli.sd_notify import sd_notify
from metis.config import (
    DEFAULT_DB_PATH,
    DEFAULT_SOCKET_PATH,
    SYNCHRONOUS_LEVELS,
    DaemonConfig,
)

log = logging.getLogger("metis.daemon")

_DEFAULTS = DaemonConfig()

GARBAGE_THRESHOLDS = (20_000, 50, 100)
"""Objects made since the last search of the youngest generation, and searches of
one generation before the next older one is searched as well (module gc)."""


@click.command("daemon")
@click.option(
    "--db-path",
    default=DEFAULT_DB_PATH,
    show_default=True,
    help="SQLite database; made when it does not exist.",
)
@click.option(
    "--socket-path",
    default=DEFAULT_SOCKET_PATH,
    show_default=True,
    help="Unix socket to serve on (mode 0600).",
)
@click.option(
    "--release-cooldown",
    type=Duration(),
    default="1m",
    show_default=True,
    help="How long a released address rests before another pod may get it; 0 is none.",
)
@click.option(
    "--monitor-interval",
    type=Duration(),
    default="2s",
    show_default=True,
    help="How often capacity is looked at.",
)
@click.option(
    "--draining-expiration",
    type=Duration(),
    default="5h",
    show_default=True,
    help="How long a draining CIDR block may stay.",
)
@click.option(
    "--sustained-low-utilization-duration",
    type=Duration(),
    default="8h",
    show_default=True,
    help="How long a network is nearly empty before a block of it drains.",
)
@click.option(
    "--synchronous",
    type=click.Choice(SYNCHRONOUS_LEVELS, case_sensitive=False),
    default=_DEFAULTS.synchronous,
    show_default=True,
    help="FULL also survives a power cut, at one disk flush a commit.",
)
@click.option(
    "--shutdown-grace",
    type=Duration(),
    default="5s",
    show_default=True,
    help="How long calls in flight may take once the daemon is told to stop.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Form of the log lines on stderr.",
)
@click.option("-v", "--verbose", count=True, help="Log more; may be repeated.")
def command(log_format: str, verbose: int, **settings: object) -> None:
    """Serve addresses on a Unix socket until SIGTERM or SIGINT.

    Durations are in Go's syntax: 1m, 500ms, 5h. The three about capacity are
    accepted as the original's flags and have no effect yet.
    """
    set_up_logging(log_format, verbose)
    raise_open_file_limit()
    spare_garbage_collection()

    async def run() -> None:
        await run_until_signal(DaemonConfig(**settings))  # type: ignore[arg-type]  # click has converted each to the field's type

    run_reported(run)


async def run_until_signal(config: DaemonConfig) -> None:
    """Serve until SIGTERM or SIGINT, then stop in order."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(metis.serve, config)
            sd_notify("READY=1", f"STATUS=serving on {config.socket_path}")
            async for number in signals:
                log.info("stopping", extra={"signal": signal.Signals(number).name})
                sd_notify("STOPPING=1")
                nursery.cancel_scope.cancel()
                break
    log.info("stopped")


def spare_garbage_collection() -> None:
    """Look for cycles of garbage less often than Python does by itself.

    What a call leaves behind is freed by reference counting; searching for cycles
    after every 700 objects took a tenth of the daemon's time and the longest of
    its pauses, and found next to nothing.
    """
    gc.set_threshold(*GARBAGE_THRESHOLDS)


def raise_open_file_limit() -> None:
    """Use as many descriptors as the system allows.

    Every connection takes one, and the usual soft limit of 1,024 is kept low
    only for programs that call select(2), which Trio does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
