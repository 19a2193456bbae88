"""One call of the plugin as a process: environment in, exit status out.

Standard output gets the result or the error object and nothing else, whatever
happens: every exception ends here, as the error object and a line in the log.

VERSION is answered before anything heavy is imported; runtimes ask for it often.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from metis.cni.protocol import (
    INTERNAL,
    INVALID_CONFIGURATION,
    IO_FAILURE,
    CNIError,
    error_text,
    version_text,
)

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from metis.cni.client import OpenChannel
    from metis.cni.log import CallRecord
    from metis.cni.origin import Origin
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
    _occupy_closed_descriptors()
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    try:
        return run(
            os.environ,
            read=_read_stdin,
            write=lambda text: _write_to_parent(parent, text),
            complain=_complain,
            program=PROGRAM if name in NAMELESS else name,
            open_direct=_open_direct,
            read_origin=_read_origin,
        )
    except BaseException as error:
        # Only what `run` imports before its own guard gets here, from a broken
        # installation for instance; nothing has been written yet.
        _written(_write_stdout, error_text(_internal(error), None))
        return 1


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

    Returns:
      0, or 1 after an error object was written.
    """
    if environ.get("CNI_COMMAND") == "VERSION":
        # No log: nothing happens, and no configuration tells where it is.
        return 0 if _written(write, version_text()) else 1

    import time
    from functools import partial

    from metis.cni.log import CallRecord, append

    start = time.perf_counter()
    call = CallRecord(
        verb=environ.get("CNI_COMMAND", ""),
        container=environ.get("CNI_CONTAINERID", ""),
        interface=environ.get("CNI_IFNAME", ""),
    )
    emitted = False

    def emit(text: str) -> None:
        # Set first: even half a result must not be followed by an error object.
        nonlocal emitted
        emitted = True
        write(text)

    def carry_out(request: Request) -> tuple[str, ...]:
        import trio

        from metis.cni import client, verbs

        return trio.run(
            partial(
                verbs.perform,
                open_direct=open_direct,
                origin=read_origin and read_origin(),
            ),
            request,
            emit,
            open_channel or client.open_daemon,
        )

    failure: CNIError | None = None
    try:
        _perform(call, environ, read, program, carry_out)
    except CNIError as error:
        failure = error
    except BaseException as error:
        # The border of the process: whatever it is, the runtime gets an error
        # object. An interrupt ends the call as well, only with an answer.
        failure = _unexpected(call, error)
    if failure is not None:
        call.outcome = f"{failure.code}: {failure.message}"
        call.details = failure.details
        if not emitted:
            _written(write, error_text(failure, call.version))
    if call.complaint:
        complain(call.complaint)
    try:
        if call.log_path and call.is_wanted:
            seconds = time.perf_counter() - start
            append(call.log_path, call.line(at=time.time(), seconds=seconds))
    except BaseException as error:
        # The runtime has its answer: nothing about a log may change it now.
        complain(f"metis: the log {call.log_path!a} cannot be written: {error}")
    return 0 if failure is None else 1


def _perform(
    call: CallRecord,
    environ: Mapping[str, str],
    read: Callable[[], bytes],
    program: str,
    carry_out: Callable[[Request], tuple[str, ...]],
) -> None:
    """Check the call, carry it out, and note in its record what is known."""
    from metis.cni import environment, spec

    env = environment.read_environment(environ)
    try:
        stdin = read()
    except OSError as error:
        raise CNIError(IO_FAILURE, f"stdin cannot be read: {error}") from error
    call.netns, call.args, call.stdin = env.netns, env.args, stdin
    config = spec.decode_configuration(stdin)
    call.set_level(spec.log_level(config))
    call.version = spec.answer_version(config)
    # Before anything that may fail: that would be logged.
    call.log_path = spec.log_path(config)
    exposed_log = _exposed("logFile", call.log_path)
    if exposed_log:
        call.log_path = ""
    request = spec.read_request(env, config, program=program)
    _refuse_exposed(request)
    if exposed_log and env.command not in spec.FREEING:
        raise CNIError(INVALID_CONFIGURATION, exposed_log)
    if exposed_log:
        call.complaint = f"metis: {exposed_log}"
    call.pod = "/".join(filter(None, (request.pod.namespace, request.pod.name)))
    call.note = request.note
    call.addresses = carry_out(request)


def _refuse_exposed(request: Request) -> None:
    """Refuse paths of the configuration by which others decide what is opened.

    Raises:
      CNIError: code 7, naming the key.
    """
    for key, path in (
        ("daemonSocket", request.socket_path),
        ("dbPath", request.db_path),
        ("resolvConf", request.resolv_conf),
    ):
        problem = _exposed(key, path)
        if problem:
            raise CNIError(INVALID_CONFIGURATION, problem)


def _exposed(key: str, path: str) -> str:
    """What is wrong about a path of the configuration; as a rule, nothing."""
    from metis.errors import InvalidRequest
    from metis.paths import refuse_exposed_links

    try:
        refuse_exposed_links(key, path)
    except InvalidRequest as error:
        return str(error)
    return ""


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


def _unexpected(call: CallRecord, error: BaseException) -> CNIError:
    """The answer to an error that nobody foresaw; its traceback goes to the log."""
    import traceback

    call.traceback = "".join(traceback.format_exception(error))
    where = f"the traceback is in {call.log_path}" if call.log_path else ""
    return _internal(error, where)


def _internal(error: BaseException, details: str = "") -> CNIError:
    """An unforeseen error in one line."""
    lines = str(error).splitlines()
    message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return CNIError(INTERNAL, message, details)


def _written(write: Callable[[str], None], text: str) -> bool:
    """Write to standard output; False when nobody reads it any more."""
    try:
        write(text)
    except OSError:
        return False
    return True


def _read_stdin() -> bytes:
    with open(0, "rb", closefd=False) as stdin:
        return stdin.read()


def _write_stdout(text: str) -> None:
    _write(1, text)


def _write_to_parent(parent: int, text: str) -> None:
    """Write to standard output, if whoever started this process still lives.

    A runtime that gives up kills the main plugin and not its delegates. Such a
    one has a new parent, which knows nothing of the call, and would tell nobody.

    Raises:
      BrokenPipeError: nobody will read it.
    """
    if os.getppid() != parent:
        raise BrokenPipeError(
            errno.EPIPE, "the process that started the plugin is gone"
        )
    _write_stdout(text)


def _write(descriptor: int, text: str) -> None:
    """Write all of a text without a buffer, which could fail again at exit."""
    data = text.encode()
    while data:
        data = data[os.write(descriptor, data) :]


def _complain(line: str) -> None:
    try:
        _write(2, f"{line}\n")
    except OSError:
        return  # nobody listens, and there is nobody else to tell


def _occupy_closed_descriptors() -> None:
    """Keep files and sockets off the numbers 0, 1 and 2.

    A runtime that closed one of them would otherwise have the result written
    into whatever is opened next. What is put there reads as empty and cannot
    be written to.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # the lowest free number
