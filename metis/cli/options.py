"""What several commands share: option types, and one way to fail."""

from __future__ import annotations

import errno
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

import click
import trio
from grpclib import GRPCError

from metis.config import DEFAULT_DB_PATH, DEFAULT_SOCKET_PATH, parse_duration
from metis.errors import InvalidRequest, MetisError, sole_error
from metis.paths import refuse_exposed_links

_ENDS = (click.ClickException, SystemExit, KeyboardInterrupt, BrokenPipeError)
"""What click knows how to end a program by."""

RPC_TIMEOUT = 10.0
"""Seconds that a command waits for the daemon, as the original's client does."""


class Duration(click.ParamType[float]):
    """A duration in Go's syntax, given to the command as seconds."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read "1m", "500ms" or "5h"; numbers pass as seconds."""
        if isinstance(value, int | float):
            return float(value)
        try:
            return parse_duration(str(value))
        except InvalidRequest as error:
            self.fail(str(error), param, ctx)


class Given(click.ParamType[str]):
    """A text that is not empty, as a variable is that a script forgot to set."""

    name = "text"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Pass the text on as it is."""
        text = str(value)
        if not text:
            self.fail("it is empty: write a value, or leave the option out", param, ctx)
        return text


class SafePath(click.ParamType[str]):
    """A path of a file that no link takes to where others may write."""

    name = "path"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Pass the path on as it is, if it may be used; see `metis.paths`."""
        path = str(value)
        if not path:
            self.fail("it is empty: write the path of a file", param, ctx)
        try:
            refuse_exposed_links("it", path)
        except InvalidRequest as error:
            self.fail(str(error), param, ctx)
        return path


socket_path_option = click.option(
    "--socket-path",
    type=SafePath(),
    default=DEFAULT_SOCKET_PATH,
    show_default=True,
    help="Unix socket of the daemon.",
)

db_path_option = click.option(
    "--db-path",
    type=SafePath(),
    default=DEFAULT_DB_PATH,
    show_default=True,
    help="SQLite database of the daemon.",
)

release_cooldown_option = click.option(
    "--release-cooldown",
    type=Duration(),
    default="1m",
    show_default=True,
    help="How long addresses rest that lose their owner, or may have one.",
)


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn expected failures into one line on stderr and exit status 1.

    What ends a command from outside, such as Ctrl-C or a reader that went away, comes
    out of its nurseries as itself: click ends the program by it without a traceback.
    """
    try:
        yield
    except (Exception, BaseExceptionGroup) as error:
        sole = sole_error(error)
        if isinstance(sole, MetisError):
            raise click.ClickException(str(sole)) from error
        if isinstance(sole, GRPCError):
            message = sole.message or "the call failed"
            raise click.ClickException(f"{message} ({sole.status.name})") from error
        if isinstance(sole, OSError) and sole.errno == errno.ENOSPC:
            what = sole.filename or "the output"
            raise click.ClickException(
                f"{what} cannot be written: {sole.strerror}"
            ) from error
        if isinstance(sole, _ENDS):
            raise sole from None
        raise


def run_reported(main: Callable[[], Coroutine[object, object, None]]) -> None:
    """Run a command's coroutine under Trio with `reported_errors`."""
    with reported_errors():
        trio.run(main)
