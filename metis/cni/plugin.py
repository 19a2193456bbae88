"""The plugin as a process by itself: environment in, exit status out.

So it runs without the daemon's help: where the daemon cannot give any, or does not
have it (`metis.cni.relay`), and as `metis` with CNI_COMMAND set.

Standard output gets the result or the error object and nothing else, whatever
happens: every exception ends here, as the error object and a line in the log.

VERSION is answered before anything heavy is imported; runtimes ask for it often.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from metis.cni import relay
from metis.cni.protocol import version_text

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from metis.cni.client import OpenChannel
    from metis.cni.origin import Origin
    from metis.cni.relay import Relay
    from metis.cni.spec import Request
    from metis.cni.verbs import OpenDirect
    from metis.rpc.channel import Channel

PROGRAM = "metis"
"""The plugin's name when its command line does not tell."""

NAMELESS = ("", "-", "-c", "__main__.py")
"""What stands in the place of a program's name when Python was given a module."""


def main() -> int:
    """Be the plugin for this process; returns its exit status, 0 or 1."""
    parent = os.getppid()  # first: from here on it is noticed when it goes
    relay.occupy_closed_descriptors()
    return take_over(relay.Relay(sys.argv[0] if sys.argv else "", "", parent))


def take_over(call: Relay) -> int:
    """Go on with a call that the daemon does not carry out; returns the exit status."""

    def read() -> bytes:
        if call.stdin is not None:
            return call.stdin
        if call.problem is not None:
            raise call.problem
        return relay.read_stdin()

    try:
        return run(
            {relay.text(k): relay.text(v) for k, v in os.environb.items()},
            read=read,
            write=lambda text: relay.write_to_parent(call.parent, text.encode()),
            complain=complain_line,
            program=PROGRAM if call.name in NAMELESS else call.name,
            open_direct=_open_direct,
            read_origin=_read_origin,
            passed_over=call.passed_over,
            unread=call.unread,
            interruption=call.problem,
        )
    except BaseException as error:
        # Only what `run` imports before its own guard gets here, from a broken
        # installation for instance; nothing has been written yet.
        return relay.explain(error)


def run(
    environ: Mapping[str, str],
    *,
    read: Callable[[], bytes],
    write: Callable[[str], None],
    complain: Callable[[str], None],
    program: str = PROGRAM,
    open_channel: OpenChannel | None = None,
    open_direct: OpenDirect | None = None,
    read_origin: Callable[[], Origin] | None = None,
    passed_over: str = "",
    unread: tuple[str, str] | None = None,
    interruption: BaseException | None = None,
) -> int:
    """Carry out one call.

    Args:
      environ: the environment, of which CNI_COMMAND is set.
      read: reads standard input to its end; may raise OSError.
      write: writes all of a text to standard output; may raise OSError.
      complain: writes a line to standard error; never raises.
      program: the name under which the plugin was started.
      open_channel: reaches the daemon, instead of its Unix socket.
      open_direct: does without the daemon; None for a plugin that cannot.
      read_origin: tells when the call began; None for when the daemon hears of it.
      passed_over: why the daemon is not asked though it may be there; empty to ask.
      unread: the id of what the daemon gave, and why its result could not be written:
        all that is left to do is to give it back.
      interruption: what the call ends with once it has been read.

    Returns:
      0, or 1 after an error object was written.
    """
    if environ.get("CNI_COMMAND") == "VERSION":
        # No log: nothing happens, and no configuration tells where it is.
        return 0 if _written(write, version_text()) else 1

    from metis.cni.invocation import Invocation

    call = Invocation(environ, program)
    try:
        request = call.prepare(read)
        if interruption is not None:
            raise interruption

        import trio  # now that there is something to ask

        from metis.cni import client, verbs

        reach = open_channel or client.open_daemon
        if unread is not None:
            give_back = partial(
                verbs.undo, open_direct=open_direct, passed_over=passed_over
            )
            trio.run(give_back, request, unread[0], reach)
            call.leave_unread(unread[1])
        else:
            perform = partial(
                verbs.perform,
                open_direct=open_direct,
                passed_over=passed_over,
                origin=read_origin and read_origin(),
            )
            call.record.addresses = trio.run(
                perform, request, call.emitting(write), reach
            )
    except ImportError as error:
        from metis.cni.protocol import internal

        call.fail(internal(error, relay.BROKEN))
    except BaseException as error:
        # The border of the process: whatever it is, the runtime gets an error
        # object. An interrupt ends the call as well, only with an answer.
        call.fail(error)
    end = call.conclude()
    if end.error:
        _written(write, end.error)
    if end.complaint:
        complain(end.complaint)
    if end.log_line:
        append_line(end.log_path, end.log_line, complain)
    return end.status


def append_line(path: str, line: bytes, complain: Callable[[str], None]) -> None:
    """Append a line to the log, if that can be done; never raises.

    Args:
      path: the log, which may be by a link to where others may write: then nothing
        is written.
      line: what to append.
      complain: writes a line to standard error.
    """
    try:
        from metis.cni import log
        from metis.paths import refuse_exposed_links

        refuse_exposed_links("logFile", path)
        log.append(path, line)
    except BaseException as error:
        # The runtime has its answer: nothing about a log may change it now.
        complain(f"metis: the log {path!a} cannot be written: {error}")


def _open_direct(request: Request) -> AbstractAsyncContextManager[Channel]:
    from metis.cni.direct import open_direct

    return open_direct(
        request.db_path,
        request.release_cooldown,
        # Runtimes poll STATUS, which never waits for the write lock.
        apply_kept=request.env.command != "STATUS",
    )


def _read_origin() -> Origin:
    from metis.cni.origin import read_origin

    return read_origin()


def _written(write: Callable[[str], None], text: str) -> bool:
    """Write to standard output; False when nobody reads it any more."""
    try:
        write(text)
    except OSError:
        return False
    return True


def complain_line(line: str) -> None:
    """Write a line to standard error; nobody may listen."""
    relay.complain(f"{line}\n".encode(errors="backslashreplace"))
