"""The server: generated service bases on any transport, under Trio nurseries.

    serve        hears the cancellation; lives until the last connection is over
      connections  one task a connection, and in it one a call; cut off at
                   stop + grace
        accepting    one task a listener; first to stop

Nothing that happens on one connection reaches another.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import trio
from betterproto2.grpclib import ServiceBase
from grpclib.const import Handler
from grpclib.exceptions import StreamTerminatedError

from metis.rpc.call import Opener, opener, run_call
from metis.rpc.events import GoAwayReceived, RequestReceived, ResponseReceived
from metis.rpc.headers import Headers
from metis.rpc.http2 import ErrorCode
from metis.rpc.limits import DEFAULT_LIMITS, Limits
from metis.rpc.session import Session
from metis.rpc.stream import CallStream
from metis.rpc.transport import Listener, Transport

log = logging.getLogger("metis.rpc")

GRACE_SECONDS = 5.0
"""How long calls in flight may take after a stop, unless the caller says."""

ACCEPT_PAUSE_SECONDS = 0.1
"""Pause after accept failed for want of a descriptor or of memory: connections
that end free some meanwhile."""

ROOM_CONNECTIONS = 16
"""Idle connections that are ended at each such pause."""

ACCEPT_RETRIED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class ServerSession(Session):
    """A connection's server end: every request becomes a task."""

    def __init__(
        self, stream: trio.abc.Stream, open_call: Opener, limits: Limits
    ) -> None:
        super().__init__(stream, client=False, limits=limits)
        self._open_call = open_call
        self._scopes: dict[int, trio.CancelScope] = {}

    def on_headers(
        self, event: RequestReceived | ResponseReceived, nursery: trio.Nursery
    ) -> None:
        """Start a task for the request, if there is room for one."""
        if self.draining or len(self.calls) >= self.limits.max_concurrent_calls:
            self.http2.reset(event.stream_id, ErrorCode.REFUSED_STREAM)
            return
        call = CallStream(self, event.stream_id, self.limits.max_message_bytes)
        call.ended = event.ended
        self.calls[call.id] = call
        scope = self._scopes[call.id] = trio.CancelScope()
        nursery.start_soon(self._serve_call, call, event.headers, scope)

    async def _serve_call(
        self, call: CallStream, headers: Headers, scope: trio.CancelScope
    ) -> None:
        try:
            await run_call(self._open_call, call, headers, scope)
        finally:
            del self._scopes[call.id]
            self.release(call, ErrorCode.NO_ERROR)

    def on_reset(self, call: CallStream, code: int) -> None:
        """Cancel the call's task: nobody waits for its result."""
        self.on_end(call, "the client cancelled the call")

    def on_end(self, call: CallStream, reason: str) -> None:
        """Cancel the call's task."""
        call.fail(StreamTerminatedError(reason))
        self._scopes[call.id].cancel()

    def on_settings(self) -> None:
        """Nothing: a server opens no streams."""

    def on_go_away(self, event: GoAwayReceived) -> None:
        """Nothing: it forbids streams that a gRPC server never opens."""


async def serve(
    services: Collection[ServiceBase],
    transport: Transport,
    *,
    grace: float = GRACE_SECONDS,
    limits: Limits = DEFAULT_LIMITS,
    task_status: trio.TaskStatus[Sequence[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled from outside, then stop in good order.

    A stop closes the listeners, sends GOAWAY on every connection, lets calls
    in flight go on for `grace` seconds, cancels those that are left (their
    clients get UNAVAILABLE), and passes the cancellation on.

    Args:
      services: instances of the generated `...Base` classes.
      transport: where to listen.
      grace: seconds that calls in flight get after the cancellation.
      limits: the bounds of connections, calls and messages.
      task_status: gets the addresses of the listeners once clients can connect.

    Raises:
      AddressInUse: somebody listens there already.
      TransportError: the place cannot be listened on.
    """
    server = _Server(opener(_methods_of(services)), limits)
    stopping = trio.Event()
    async with contextlib.AsyncExitStack() as listening:
        listeners = await transport.listen()
        for listener in listeners:
            listening.push_async_callback(trio.aclose_forcefully, listener)
        async with trio.open_nursery() as outside:
            outside.start_soon(_tell_of_cancellation, stopping)
            with trio.CancelScope(shield=True) as lifetime:
                async with trio.open_nursery() as connections:
                    async with trio.open_nursery() as accepting:
                        for listener in listeners:
                            accepting.start_soon(server.accept, listener, connections)
                        task_status.started([each.address for each in listeners])
                        await stopping.wait()
                        accepting.cancel_scope.cancel()
                    await listening.aclose()
                    for session in server.sessions:
                        session.stop("the server is stopping")
                    lifetime.deadline = trio.current_time() + grace


def _methods_of(services: Collection[ServiceBase]) -> dict[str, Handler]:
    methods: dict[str, Handler] = {}
    for service in services:
        # every generated class has it, though their base does not say so
        methods.update(service.__mapping__())  # type: ignore[attr-defined]
    return methods


async def _tell_of_cancellation(stopping: trio.Event) -> None:
    """Turn a cancellation into an event, for those who are shielded from it."""
    try:
        await trio.sleep_forever()
    finally:
        stopping.set()


@dataclass(eq=False, slots=True)
class _Server:
    """What all connections of one `serve` share."""

    open_call: Opener
    limits: Limits
    sessions: set[ServerSession] = field(default_factory=set)

    async def accept(self, listener: Listener, connections: trio.Nursery) -> None:
        """Accept for ever; each connection becomes a task of `connections`."""
        failing = False
        while True:
            try:
                stream = await listener.accept()
            except OSError as exc:
                if exc.errno not in ACCEPT_RETRIED:
                    raise
                if not failing:
                    log.error("cannot accept connections for now: %s", exc.strerror)
                failing = True
                self.make_room(ROOM_CONNECTIONS)
                await trio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            failing = False
            if len(self.sessions) >= self.limits.max_connections and (
                not self.make_room(1)
            ):
                log.error("a connection was refused: %d are busy", len(self.sessions))
                await trio.aclose_forcefully(stream)
                continue
            session = ServerSession(stream, self.open_call, self.limits)
            self.sessions.add(session)
            connections.start_soon(self.drive, session)

    def make_room(self, number: int) -> bool:
        """End the connections that have been idle for longest, if there are any.

        Their clients, if they still want anything, connect again at their next
        call. So idle connections, however many, keep nobody out. The younger
        half is spared: it may be about to call.
        """
        idle = [each for each in self.sessions if not (each.calls or each.draining)]
        idle.sort(key=lambda session: session.idle_since)
        for session in idle[: min(number, (len(idle) + 1) // 2)]:
            session.stop("room is needed for others")
        return bool(idle)

    async def drive(self, session: ServerSession) -> None:
        """Run one connection; a bug met on it is logged and stays there."""
        try:
            await session.run()
        except Exception:
            log.exception("a connection failed")
        finally:
            self.sessions.discard(session)
