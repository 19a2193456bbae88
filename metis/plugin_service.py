"""`metis.v1.Plugin`: calls of the CNI plugin, where everything is loaded already.

The code is the plugin's own (`metis.cni.invocation`, `metis.cni.verbs`), over a channel
to the daemon's services in the same process. What the process of the plugin alone can
know it sends along; what the daemon's place in the system could answer differently is
refused, and that process does it.
"""

from __future__ import annotations

from contextlib import nullcontext

from grpclib import GRPCError, Status

from metis.api.metis.v1 import PluginBase, RunRequest, RunResponse, UndoRequest
from metis.clock import Clock
from metis.cni import verbs
from metis.cni.client import PassedOver
from metis.cni.fields import is_encodable
from metis.cni.invocation import Invocation, exposed
from metis.cni.origin import origin_of
from metis.cni.protocol import version_text
from metis.cni.relay import text
from metis.cni.spec import Request
from metis.rpc.channel import Channel

MAX_STDIN_BYTES = 16 * 1024
"""Largest configuration, in bytes; it is decoded while every other call waits, which
takes up to a tenth of a second where it is made for that. A usual one has 2 KiB."""


class PluginService(PluginBase):
    """`metis.v1.Plugin` over a daemon's other services.

    Args:
      channel: to those services.
      db_path: the daemon's database.
      clock: where raw time comes from.
      boot_id: of this boot, by that clock.
    """

    def __init__(
        self, channel: Channel, db_path: str, clock: Clock, boot_id: str
    ) -> None:
        self._channel = channel
        self._db_path = db_path
        self._clock = clock
        self._boot_id = boot_id

    async def run(self, message: RunRequest) -> RunResponse:
        """Carry out one call, as far as the plugin's own process need not.

        Raises:
          GRPCError: FAILED_PRECONDITION or RESOURCE_EXHAUSTED, it has to.
        """
        environ = _environment(message)
        if environ.get("CNI_COMMAND") == "VERSION":
            return RunResponse(stdout=version_text().encode())
        call = Invocation(environ, message.program, _exposed)
        stdout: list[str] = []
        try:
            request = self._prepare(call, message)
            call.record.addresses = await verbs.perform(
                request,
                call.emitting(stdout.append),
                self._open,
                hands_over=True,
                origin=origin_of(message.stat, self._clock, self._boot_id),
                own_netns=lambda _path: message.own_netns,
                note_allocation=call.note_allocation,
            )
        except PassedOver as error:
            return RunResponse(passed_over=str(error))
        except GRPCError:
            raise
        except Exception as error:
            call.fail(error)
        return _response(call, "".join(stdout))

    async def undo(self, message: UndoRequest) -> RunResponse:
        """Give back what a call was given whose result could not be written.

        Raises:
          GRPCError: as `run`; INVALID_ARGUMENT when it is not said which call.
        """
        if message.run is None:
            raise GRPCError(Status.INVALID_ARGUMENT, "run is missing")
        environ = _environment(message.run)
        call = Invocation(environ, message.run.program, _exposed)
        try:
            await verbs.undo(
                self._prepare(call, message.run),
                message.allocation_id,
                self._open,
                hands_over=True,
            )
            call.leave_unread(message.problem)
        except PassedOver as error:
            return RunResponse(passed_over=str(error))
        except GRPCError:
            raise
        except Exception as error:
            call.fail(error)
        return _response(call, "")

    def _open(self, _socket_path: str, _patience: float) -> nullcontext[Channel]:
        return nullcontext(self._channel)

    def _prepare(self, call: Invocation, message: RunRequest) -> Request:
        """Check what a call was given, and that it is this daemon's to carry out.

        Raises:
          GRPCError: it is not.
          CNIError: what the runtime must be told.
        """
        if len(message.stdin) > MAX_STDIN_BYTES:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"stdin has {len(message.stdin)} bytes: "
                f"at most {MAX_STDIN_BYTES} are decoded here",
            )
        request = call.prepare(lambda: message.stdin)
        for key, theirs, ours in (
            ("daemonSocket", request.socket_path, message.socket_path),
            ("dbPath", request.db_path, self._db_path),
        ):
            if theirs != ours:
                raise _not_here(f"{key} is {theirs!r}, and not {ours!r}")
        if request.resolv_conf:
            # In the file system of the plugin, which may be another one.
            raise _not_here(f"resolvConf is {request.resolv_conf!r}")
        if not is_encodable(call.record.log_path):
            raise _not_here(f"logFile is {call.record.log_path!r}")
        if verbs.has_kept_del(request):
            raise _not_here("a DEL of this container waits to be applied")
        return request


def _exposed(key: str, path: str) -> str:
    """Nothing: what is wrong about a path is told by the plugin itself.

    It may run for somebody who cannot look where the daemon can.

    Raises:
      GRPCError: something is.
    """
    if exposed(key, path):
        raise _not_here(f"{key} is {path!r}")
    return ""


def _not_here(why: str) -> GRPCError:
    return GRPCError(Status.FAILED_PRECONDITION, f"the plugin does it by itself: {why}")


def _environment(message: RunRequest) -> dict[str, str]:
    pairs = (text(variable).partition("=") for variable in message.environment)
    return {name: value for name, _, value in pairs}


def _response(call: Invocation, stdout: str) -> RunResponse:
    end = call.conclude()
    return RunResponse(
        status=end.status,
        stdout=(stdout + end.error).encode(),
        stderr=f"{end.complaint}\n".encode() if end.complaint else b"",
        log_line=end.log_line,
        log_path=end.log_path if end.log_line else "",
        allocation_id="" if end.status else call.allocation_id,
    )
