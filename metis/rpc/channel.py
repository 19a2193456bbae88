"""The client: a channel for the generated stubs, on any transport.

`open_channel` gives a `Channel` whose tasks live in a nursery of the context
manager's own frame: one that connects when a call wants a connection, and one
session a connection. The calls themselves run in the tasks of their callers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import Deadline

from metis.errors import TransportError
from metis.rpc.client_stream import ClientStream, MetadataLike
from metis.rpc.connection import ConnectionFailed
from metis.rpc.events import GoAwayReceived, RequestReceived, ResponseReceived
from metis.rpc.headers import AnyHeaders
from metis.rpc.http2 import ErrorCode
from metis.rpc.limits import DEFAULT_LIMITS, Limits
from metis.rpc.session import Session
from metis.rpc.stream import CallStream
from metis.rpc.transport import Transport

if TYPE_CHECKING:
    # the generated stubs are annotated with grpclib's channel, of which they
    # use `request` alone
    from grpclib.client import Channel as _Annotated
else:
    _Annotated = object

RESET_STATUS = {
    int(ErrorCode.CANCEL): Status.CANCELLED,
    int(ErrorCode.REFUSED_STREAM): Status.UNAVAILABLE,
    int(ErrorCode.ENHANCE_YOUR_CALM): Status.RESOURCE_EXHAUSTED,
    int(ErrorCode.INADEQUATE_SECURITY): Status.PERMISSION_DENIED,
}
"""Status of a call that the server reset; INTERNAL for the rest. From the gRPC
protocol over HTTP/2, "Errors"."""


CONNECTION_TRIES = 3
"""Connections that one call waits on before it was sent.

The first may be at its end without anybody knowing; a server that ends the
next ones as well will hardly take the call.
"""


class SessionOver(Exception):
    """The connection takes no more calls; another has to be opened."""


class ClientSession(Session):
    """A connection's client end: calls wait here for a place on it."""

    def __init__(self, stream: trio.abc.Stream, limits: Limits) -> None:
        super().__init__(stream, client=True, limits=limits)
        self._queue = trio.lowlevel.ParkingLot()
        self._promised = 0

    async def open_call(
        self, make_headers: Callable[[], AnyHeaders], end: bool
    ) -> CallStream:
        """Open a stream as soon as the server allows; first come, first served.

        Raises:
          SessionOver: the connection takes no more calls.
        """
        if self.http2.peer_ready and not self.calls:
            # a GOAWAY, or the end, may have come while nobody called: one turn
            # for the kernel to say so, one for the receiver to look
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        await self.writable()
        if self._queue or not self._has_place():
            await self._queue.park()
            self._promised -= 1
        if self.draining:
            raise SessionOver
        try:
            stream_id = self.http2.open_stream(make_headers(), end=end)
        except ConnectionFailed as exc:
            self.stop()
            raise SessionOver from exc
        call = CallStream(self, stream_id, self.limits.max_message_bytes)
        self.calls[stream_id] = call
        self.flush()
        return call

    def _has_place(self) -> bool:
        return len(self.calls) + self._promised < self.http2.peer_call_limit

    def _admit(self) -> None:
        """Wake those for whom there is a place, or never will be."""
        while self._queue and (self.draining or self._has_place()):
            self._promised += 1
            self._queue.unpark()

    def release(self, call: CallStream, code: int) -> None:
        """As `Session.release`; the next in the queue gets the place."""
        super().release(call, code)
        self._admit()

    def stop(self, reason: str = "") -> None:
        """As `Session.stop`; the queue moves to the next connection."""
        super().stop(reason)
        self._admit()

    def on_headers(
        self, event: RequestReceived | ResponseReceived, nursery: trio.Nursery
    ) -> None:
        """Note the response, which may be its own trailers."""
        call = self.calls.get(event.stream_id)
        if call is not None:
            call.headers = event.headers
            if event.ended:
                call.trailers = event.headers
                call.ended = True
            call.notify()

    def on_settings(self) -> None:
        """The limit on calls may have grown."""
        self._admit()

    def on_reset(self, call: CallStream, code: int) -> None:
        """Fail the call, unless its status was here first."""
        if not call.ended:
            name = ErrorCode(code).name if code in set(ErrorCode) else str(code)
            call.fail(
                GRPCError(
                    RESET_STATUS.get(code, Status.INTERNAL),
                    f"the server reset the call: {name}",
                )
            )

    def on_go_away(self, event: GoAwayReceived) -> None:
        """Open no more calls here; those that the server took go on."""
        self.draining = True
        for call in self.calls.values():
            if call.id > event.last_stream_id:
                reason = event.reason.decode(errors="replace") or "it is stopping"
                call.fail(_unavailable(f"the server did not take the call: {reason}"))
        if not self.calls:
            self.stop()
        self._admit()

    def on_end(self, call: CallStream, reason: str) -> None:
        """Fail the call."""
        call.fail(_unavailable(reason))

    def _end_calls(self) -> None:
        super()._end_calls()
        self._admit()


@dataclass(eq=False, slots=True)
class _Attempt:
    """One try to connect, and all the calls that wait for it."""

    over: trio.Event = field(default_factory=trio.Event)
    error: TransportError | None = None


def expiry(timeout: float | None, deadline: Deadline | None) -> float:
    """When a call is over, in Trio's time; infinity for never.

    Args:
      timeout: seconds from now for the whole call.
      deadline: the same as a point in time; the earlier one holds.
    """
    expires = math.inf
    if timeout is not None:
        expires = trio.current_time() + timeout
    if deadline is not None:
        expires = min(expires, trio.current_time() + deadline.time_remaining())
    return expires


class Channel(_Annotated):
    """A connection to one server that comes and goes as calls need it.

    Made by `open_channel`; give it to the constructor of a generated stub. The
    first call connects, and so does the first call after a connection was lost
    or the server said that it stops.
    """

    def __init__(self, transport: Transport, limits: Limits) -> None:
        self._transport = transport
        self._limits = limits
        self._session: ClientSession | None = None
        self._attempt: _Attempt | None = None
        # there is one attempt at a time, so that sending never has to wait
        self._orders, self._attempts = trio.open_memory_channel[_Attempt](1)
        self._closed = False

    def request(  # type: ignore[override]  # gives our stream, on Trio
        self,
        name: str,
        cardinality: Cardinality,
        request_type: type[Any],
        reply_type: type[Any],
        *,
        timeout: float | None = None,
        deadline: Deadline | None = None,
        metadata: MetadataLike | None = None,
    ) -> ClientStream:
        """A call, to be entered with `async with`; the generated stubs do it.

        Args:
          name: "/package.Service/Method".
          cardinality: whether each side sends one message or a stream of them.
          request_type: class of the request messages.
          reply_type: class of the response messages.
          timeout: seconds from now for the whole call.
          deadline: the same as a point in time; the earlier one holds.
          metadata: headers to go with the request.
        """
        expires = expiry(timeout, deadline)
        return ClientStream(
            self._open_call,
            name,
            cardinality,
            request_type,
            reply_type,
            expires=expires,
            metadata=metadata,
        )

    async def connect(self) -> None:
        """Connect now, if there is no connection; no call needs this.

        Raises:
          TransportError: nobody listens there, or it cannot be reached.
        """
        await self._session_that_takes_calls()

    async def _open_call(
        self, make_headers: Callable[[], AnyHeaders], end: bool
    ) -> CallStream:
        for _ in range(CONNECTION_TRIES):
            try:
                session = await self._session_that_takes_calls()
            except TransportError as exc:
                raise _unavailable(str(exc)) from exc
            with contextlib.suppress(SessionOver):
                return await session.open_call(make_headers, end)
        raise _unavailable("the server ends every connection before it takes a call")

    async def _session_that_takes_calls(self) -> ClientSession:
        """A session that takes calls, connected for the purpose if need be."""
        while True:
            if self._closed:
                raise trio.ClosedResourceError("the channel is closed")
            if self._session is not None and not self._session.draining:
                return self._session
            if self._attempt is None:
                self._attempt = _Attempt()
                self._orders.send_nowait(self._attempt)
            attempt = self._attempt
            await attempt.over.wait()
            if attempt.error is not None:
                raise attempt.error

    async def run(self, nursery: trio.Nursery) -> None:
        """Connect whenever a call wants it; sessions become tasks of `nursery`.

        `open_channel` starts this; it ends by cancellation alone.
        """
        try:
            async for attempt in self._attempts:
                try:
                    stream = await self._transport.connect()
                except TransportError as exc:
                    attempt.error = exc
                else:
                    self._session = ClientSession(stream, self._limits)
                    nursery.start_soon(self._session.run)
                self._attempt = None
                attempt.over.set()
        finally:
            self._closed = True
            if self._attempt is not None:
                self._attempt.error = TransportError("the channel was closed")
                self._attempt.over.set()


@contextlib.asynccontextmanager
async def open_channel(
    transport: Transport, *, limits: Limits = DEFAULT_LIMITS
) -> AsyncIterator[Channel]:
    """Open a channel to the server at a transport's place.

    Nothing is connected yet, so this cannot fail: a call that cannot connect
    raises GRPCError UNAVAILABLE with the place in its message and the
    TransportError as its cause. `Channel.connect` tells at once.

    Args:
      transport: where the server is.
      limits: the bounds of the connection.

    Yields:
      The channel. When the block is left, calls of other tasks fail.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        channel = Channel(transport, limits)
        nursery.start_soon(channel.run, nursery)
        try:
            yield channel
        except Exception as exc:
            # kept out of the nursery, which would wrap it into a group
            failure = exc
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _unavailable(message: str) -> GRPCError:
    return GRPCError(Status.UNAVAILABLE, message)
