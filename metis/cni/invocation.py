"""One call of the plugin, wherever it is carried out: in steps, with what they found.

    prepare   variables and configuration -> a request
    emitting  then `metis.cni.verbs` carries the request out, and writes the result
    fail      whatever came between; each exception ends here
    conclude  what is left to be written: the error object, a word, the line of the log

A process takes them for itself (`metis.cni.plugin`), the daemon for processes that only
hand over what they were given (`metis.plugin_service`). Both get the same texts.

May touch: what the configuration names, to see where its links lead. Writes nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from metis.cni import environment, spec
from metis.cni.fields import Configuration
from metis.cni.log import CallRecord
from metis.cni.protocol import (
    INVALID_CONFIGURATION,
    IO_FAILURE,
    CNIError,
    error_text,
    internal,
    unread,
)
from metis.cni.spec import Request
from metis.errors import InvalidRequest
from metis.paths import refuse_exposed_links

REMEMBERED_CONFIGURATIONS = 16
"""Network configurations that are not read again: a node has a few, and every pod
comes with the same bytes."""

REMEMBERED_BYTES = 4096
"""Longest one that is remembered, which keeps all of them below a megabyte. What holds
the result of an earlier call is of one pod, and never comes again."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What is left to be written at the end of a call.

    Attributes:
      status: the exit status.
      error: the error object, for standard output; "" for none.
      complaint: a line for standard error; "" for none.
      log_path: the log.
      log_line: what is appended to it; b"" for nothing.
    """

    status: int
    error: str
    complaint: str
    log_path: str
    log_line: bytes


def exposed(key: str, path: str) -> str:
    """What is wrong about a path of the configuration; as a rule, nothing."""
    try:
        refuse_exposed_links(key, path)
    except InvalidRequest as error:
        return str(error)
    return ""


class Invocation:
    """One call of the plugin, from its variables to its end.

    Args:
      environ: the environment, of which CNI_COMMAND is set and not VERSION.
      program: the name under which the plugin was started.
      exposed: tells what is wrong about a path; see the function of that name.

    Attributes:
      record: what the log will say.
      allocation_id: of what an ADD was given, once it was.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        program: str,
        exposed: Callable[[str, str], str] = exposed,
    ) -> None:
        self.record = CallRecord(
            verb=environ.get("CNI_COMMAND", ""),
            container=environ.get("CNI_CONTAINERID", ""),
            interface=environ.get("CNI_IFNAME", ""),
        )
        self.allocation_id = ""
        self._environ = environ
        self._program = program
        self._exposed = exposed
        self._begun = time.perf_counter()
        self._failure: CNIError | None = None
        self._emitted = False

    def prepare(self, read: Callable[[], bytes]) -> Request:
        """Check what the call was given.

        Args:
          read: reads standard input to its end; may raise OSError.

        Raises:
          CNIError: what the runtime must be told.
        """
        record, program = self.record, self._program
        env = environment.read_environment(self._environ)
        try:
            stdin = read()
        except OSError as error:
            raise CNIError(IO_FAILURE, f"stdin cannot be read: {error}") from error
        record.netns, record.args, record.stdin = env.netns, env.args, stdin
        remembers = len(stdin) <= REMEMBERED_BYTES and b'"prevResult"' not in stdin
        config = _decode(stdin) if remembers else spec.decode_configuration(stdin)
        record.set_level(spec.log_level(config))
        record.version = spec.answer_version(config)
        # Before anything that may fail: that would be logged.
        record.log_path = spec.log_path(config)
        exposed_log = self._exposed("logFile", record.log_path)
        if exposed_log:
            record.log_path = ""
        configured = (
            _configure(stdin, env.command, program)
            if remembers
            else spec.read_configured(env.command, config, program)
        )
        request = spec.complete(configured, env)
        self._refuse_exposed(request)
        if exposed_log and env.command not in spec.FREEING:
            raise CNIError(INVALID_CONFIGURATION, exposed_log)
        if exposed_log:
            record.complaint = f"metis: {exposed_log}"
        record.pod = "/".join(filter(None, (request.pod.namespace, request.pod.name)))
        record.note = request.note
        return request

    def _refuse_exposed(self, request: Request) -> None:
        """Refuse paths of the configuration by which others decide what is opened.

        Raises:
          CNIError: code 7, naming the key.
        """
        for key, path in (
            ("daemonSocket", request.socket_path),
            ("dbPath", request.db_path),
            ("resolvConf", request.resolv_conf),
        ):
            problem = path and self._exposed(key, path)
            if problem:
                raise CNIError(INVALID_CONFIGURATION, problem)

    def emitting(self, write: Callable[[str], None]) -> Callable[[str], None]:
        """A writer of the result, after which there will be no error object."""

        def emit(text: str) -> None:
            # Set first: even half a result must not be followed by an error object.
            self._emitted = True
            write(text)

        return emit

    def note_allocation(self, allocation_id: str) -> None:
        """Note what was given."""
        self.allocation_id = allocation_id

    def leave_unread(self, problem: str) -> None:
        """Note that the result could not be written, of which nobody learns now."""
        self._emitted = True
        self.fail(unread(problem))

    def fail(self, error: BaseException) -> None:
        """Note what the call ends with; the traceback of the unforeseen is logged."""
        if isinstance(error, CNIError):
            failure = error
        else:
            import traceback  # here, because it hardly ever happens

            self.record.traceback = "".join(traceback.format_exception(error))
            path = self.record.log_path
            failure = internal(error, f"the traceback is in {path}" if path else "")
        self._failure = failure
        self.record.outcome = f"{failure.code}: {failure.message}"
        self.record.details = failure.details

    def conclude(self) -> Conclusion:
        """What is left to be written."""
        failure, record = self._failure, self.record
        line = b""
        if record.log_path and record.is_wanted:
            seconds = time.perf_counter() - self._begun
            line = record.line(at=time.time(), seconds=seconds)
        return Conclusion(
            status=0 if failure is None else 1,
            error=(
                error_text(failure, record.version)
                if failure is not None and not self._emitted
                else ""
            ),
            complaint=record.complaint,
            log_path=record.log_path,
            log_line=line,
        )


@functools.lru_cache(maxsize=REMEMBERED_CONFIGURATIONS)
def _decode(stdin: bytes) -> Configuration:
    """The network configuration, which nobody changes."""
    return spec.decode_configuration(stdin)


@functools.lru_cache(maxsize=REMEMBERED_CONFIGURATIONS)
def _configure(stdin: bytes, command: str, program: str) -> spec.Configured:
    """What it says about the calls of a command."""
    return spec.read_configured(command, _decode(stdin), program)
