"""`metis daemon`: the daemon as a service of its own.

Adds to `metis.serve` what belongs to a process: flags, signals, logs on
stderr, the service manager's notifications and the limit of open files.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator

import click
import trio

import metis
from metis.cli.logs import set_up_logging
from metis.cli.options import Duration, SafePath, run_reported
from metis.cli.sd_notify import sd_notify
from metis.cli.watchdog import feed_watchdog, watchdog_seconds
from metis.config import (
    DEFAULT_DB_PATH,
    DEFAULT_SOCKET_PATH,
    LAST_UID,
    SYNCHRONOUS_LEVELS,
    DaemonConfig,
)
from metis.errors import InvalidRequest
from metis.paths import exposed_directory_of

log = logging.getLogger("metis.daemon")

_DEFAULTS = DaemonConfig()

GARBAGE_THRESHOLDS = (20_000, 50, 100)
"""Objects made since the last search of the youngest generation, and searches of
one generation before the next older one is searched as well (module gc)."""


UID_DIGITS = 10
"""Digits of the highest uid."""


class Uid(click.ParamType[int]):
    """The number of a user. A name might mean another one tomorrow."""

    name = "uid"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read decimal digits."""
        text = str(value)
        is_number = text.isascii() and text.isdigit() and len(text) <= UID_DIGITS
        if not is_number or int(text) > LAST_UID:
            self.fail(
                f"{text!r} is not a uid: write the user's number, "
                "as `id -u NAME` tells it",
                param,
                ctx,
            )
        return int(text)


SHORTEST_INTERVAL = 0.1
"""Seconds. One who looks at the node more often does little else, and what was
mistyped, 1ms for 1m, takes two looks at one moment for two strikes."""


class Interval(Duration):
    """How often something is done; 0 is never."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a duration that is 0 or not too short."""
        seconds = super().convert(value, param, ctx)
        if 0 < seconds < SHORTEST_INTERVAL:
            self.fail(
                f"{value!r} is too short: write 100ms or more, for example '1m', "
                "or 0 for never",
                param,
                ctx,
            )
        return seconds


class CriSocket(SafePath):
    """The runtime's socket: a path, also in the form in which the kubelet has it."""

    name = "path"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Take "unix:///run/containerd/containerd.sock" for the path in it."""
        path = str(value).removeprefix("unix://")
        return super().convert(path, param, ctx) if path else ""


@click.command("daemon")
@click.option(
    "--db-path",
    type=SafePath(),
    default=DEFAULT_DB_PATH,
    show_default=True,
    help="SQLite database; made when it does not exist.",
)
@click.option(
    "--socket-path",
    type=SafePath(),
    default=DEFAULT_SOCKET_PATH,
    show_default=True,
    help="Unix socket to serve on (mode 0600, with --allow-uid 0666).",
)
@click.option(
    "--allow-uid",
    "allow_uids",
    type=Uid(),
    multiple=True,
    help="Serve this user as well as root and the daemon's own; may be repeated.",
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
    "--reclaim-interval",
    type=Interval(),
    default="1m",
    show_default=True,
    help="How often to look for pods that are gone without a DEL; 0 is never.",
)
@click.option(
    "--reclaim-grace",
    type=Duration(),
    default="5m",
    show_default=True,
    help="How long a pod is left alone after it asked for its address.",
)
@click.option(
    "--reclaim-limit",
    type=click.IntRange(min=0),
    default=_DEFAULTS.reclaim_limit,
    show_default=True,
    help="Most addresses that are taken back at once; if there are more, none is.",
)
@click.option(
    "--cri-socket",
    type=CriSocket(),
    default=_DEFAULTS.cri_socket,
    metavar="PATH",
    help="Unix socket of the container runtime, to ask which pods there are.",
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
    faulthandler.enable()  # whoever aborts a daemon that hangs learns where
    raise_open_file_limit()
    spare_garbage_collection()

    try:
        config = DaemonConfig(**settings)  # type: ignore[arg-type]  # click has converted each to the field's type
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from None

    async def run() -> None:
        warn_of_exposed_directories(config)
        await run_until_signal(config)

    run_reported(run)


async def run_until_signal(config: DaemonConfig) -> None:
    """Serve until SIGTERM or SIGINT, then stop in order."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            # From the first: a start may have much to restore.
            nursery.start_soon(_stop_at_signal, signals, nursery.cancel_scope)
            daemon = await nursery.start(metis.serve, config)
            sd_notify("READY=1", f"STATUS=serving on {config.socket_path}")
            watchdog = watchdog_seconds(os.environ, os.getpid())
            if watchdog is not None:
                nursery.start_soon(
                    feed_watchdog,
                    watchdog,
                    # The store of that moment: a damaged one is replaced.
                    lambda: daemon.store.list_blocks(page_size=1),
                )
    log.info("stopped")


async def _stop_at_signal(
    signals: AsyncIterator[int], daemon: trio.CancelScope
) -> None:
    """Wait for a signal, then have the daemon stop."""
    number = await anext(signals)
    log.info("stopping", extra={"signal": signal.Signals(number).name})
    sd_notify("STOPPING=1")
    daemon.cancel()


def warn_of_exposed_directories(config: DaemonConfig) -> None:
    """Say where others could put a database or a socket of theirs.

    Nothing is changed: the directory may be shared on purpose, and is not ours.
    """
    paths = (config.db_path, config.socket_path)
    for directory in sorted({exposed_directory_of(path) or "" for path in paths}):
        if directory:
            log.warning(
                "anybody may replace files in this directory: "
                "let its owner alone write to it",
                extra={"directory": directory},
            )


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
