"""One call's HTTP/2 stream on Trio: what grpclib calls `protocol.Stream`.

It has the few methods that grpclib's upper half calls, over the `Session` of
its connection. All waiting of a call happens here: for a message, for the
peer's window, for room in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import trio
from grpclib.exceptions import StreamTerminatedError

from metis.rpc.codec import PREFIX_BYTES, MessageBuffer, check_size
from metis.rpc.connection import Connection, StreamClosed
from metis.rpc.http2 import ErrorCode


class Carrier(Protocol):
    """What a call needs of the session that carries it; see `Session`."""

    http2: Connection
    starved: set[CallStream]
    messages_received: int
    messages_sent: int

    def flush(self) -> None:
        """Have what was put into the output sent."""

    def writable_now(self) -> bool:
        """Whether the output may be added to."""

    async def writable(self) -> None:
        """Wait until it may."""

    def release(self, call: CallStream, code: int) -> None:
        """Forget the call."""


class CallStream:
    """One HTTP/2 stream: what grpclib calls `protocol.Stream`, on Trio.

    Attributes:
      id: the HTTP/2 stream id.
      connection: the session; grpclib counts messages on it.
      headers: of the response, on the client's side, once they are here.
      trailers: the last headers of the peer, once they are here.
      ended: whether the peer has said all it will say.
      failure: why the call cannot go on, or None.
    """

    __slots__ = (
        "_limit",
        "_news",
        "_received",
        "_unacknowledged",
        "connection",
        "ended",
        "failure",
        "headers",
        "id",
        "trailers",
    )

    def __init__(self, session: Carrier, stream_id: int, limit: int) -> None:
        self.id = stream_id
        self.connection = session
        self.headers: Sequence[tuple[bytes, bytes]] | None = None
        self.trailers: Sequence[tuple[bytes, bytes]] | None = None
        self.ended = False
        self.failure: Exception | None = None
        self._limit = limit
        self._received = MessageBuffer(limit)
        self._unacknowledged = 0
        self._news: trio.Event | None = None

    # what the session tells

    def feed(self, data: bytes, size: int) -> None:
        """Take a piece of the body that took `size` bytes of the window."""
        self._received.feed(data)
        self._unacknowledged += size

    def fail(self, failure: Exception) -> None:
        """End the call for a reason of the peer's or the connection's."""
        if self.failure is None:
            self.failure = failure
        self.notify()

    def notify(self) -> None:
        """Let whoever waits on this stream look again."""
        if self._news is not None:
            self._news.set()
            self._news = None

    # what a call does

    async def news(self) -> None:
        """Wait until something has happened on the stream."""
        if self._news is None:
            self._news = trio.Event()
        await self._news.wait()

    async def receive_message(self) -> bytes | None:
        """The next message of the peer; None when there are no more.

        The window is given back as the pieces of a message come in, so that a
        message may be larger than the window.

        Raises:
          GRPCError: too large or compressed, or the stream has failed.
          EOFError: the stream ended inside a message.
        """
        while True:
            message = self._received.next_message()
            self.acknowledge()
            if message is not None:
                return message
            if self.ended:
                if self._received:
                    raise EOFError("the stream ended in the middle of a message")
                return None
            if self.failure is not None:
                raise self.failure
            await self.news()

    async def receive_end(self) -> bool:
        """Wait for the end of the stream; False if the peer says more before it."""
        while not (self.ended or self._received):
            if self.failure is not None:
                raise self.failure
            await self.news()
        return not self._received

    def acknowledge(self) -> None:
        """Give the window of all that was received back to the peer."""
        if self._unacknowledged:
            http2 = self.connection.http2
            before = http2.pending
            http2.acknowledge(self.id, self._unacknowledged, ended=self.ended)
            self._unacknowledged = 0
            if http2.pending > before:
                self.connection.flush()

    async def send_headers(
        self,
        headers: Sequence[tuple[str | bytes, str | bytes]],
        end_stream: bool = False,
    ) -> None:
        """Send headers; trailers never wait, so that a call can always end.

        Raises:
          StreamTerminatedError: the stream is closed.
        """
        if not end_stream:
            await self.connection.writable()
        try:
            self.connection.http2.send_headers(self.id, headers, end=end_stream)
        except StreamClosed as exc:
            self._refuse(exc)
        self.connection.flush()

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Send one message with its prefix, as the peer's window allows.

        Raises:
          GRPCError: RESOURCE_EXHAUSTED, it is larger than the limit.
          StreamTerminatedError: the stream is closed.
        """
        self.check_sendable(data)
        session = self.connection
        rest = memoryview(data)
        try:
            while True:
                await session.writable()
                window = session.http2.sendable(self.id)
                if window >= len(rest):
                    session.http2.send_data(self.id, rest, end=end_stream)
                    session.flush()
                    return
                if window:
                    session.http2.send_data(self.id, rest[:window])
                    session.flush()
                    rest = rest[window:]
                else:
                    await self._more_window()
        except StreamClosed as exc:
            self._refuse(exc)

    def check_sendable(self, data: bytes) -> None:
        """Refuse a message, with its prefix, that no peer would take.

        Raises:
          GRPCError: RESOURCE_EXHAUSTED, it is larger than the limit.
        """
        check_size("the", len(data) - PREFIX_BYTES, self._limit)

    def reply_nowait(self, head: bytes, body: bytes, trailers: bytes) -> bool:
        """Send a whole response if nothing has to be waited for.

        See `Connection.send_reply`; False when something has to, or when the client
        has not said all yet. It leaves when the call is released, which has to
        follow at once.
        """
        session = self.connection
        return (
            self.ended
            and session.writable_now()
            and session.http2.send_reply(self.id, head, body, trailers)
        )

    async def _more_window(self) -> None:
        starved = self.connection.starved
        starved.add(self)
        try:
            await self.news()
        finally:
            starved.discard(self)
        if self.failure is not None:
            raise StreamTerminatedError(str(self.failure))

    async def end(self) -> None:
        """Say that nothing more will be sent.

        Raises:
          StreamTerminatedError: the stream is closed.
        """
        await self.connection.writable()
        try:
            self.connection.http2.send_data(self.id, b"", end=True)
        except StreamClosed as exc:
            self._refuse(exc)
        self.connection.flush()

    def _refuse(self, cause: Exception) -> NoReturn:
        reason = str(self.failure) if self.failure else "the stream is closed"
        raise StreamTerminatedError(reason) from cause

    @property
    def closable(self) -> bool:
        """Whether either side may still send."""
        return self.connection.http2.is_open(self.id)

    def reset_nowait(self, error_code: int = ErrorCode.NO_ERROR) -> None:
        """Abort the stream, if it is not over already."""
        self.connection.http2.reset(self.id, error_code)
        self.connection.flush()

    async def reset(self, error_code: int = ErrorCode.NO_ERROR) -> None:
        """As `reset_nowait`; grpclib awaits it."""
        self.reset_nowait(error_code)
