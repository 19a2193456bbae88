"""One HTTP/2 connection on Trio: the driver between bytes and calls.

A `Session` owns a byte stream and a `Connection`. Two tasks serve it in the one
nursery of the connection: one receives and hands events to the calls, the other
sends whatever has gathered since its last turn, so that all frames of all calls
of a scheduler turn leave in a single write. When the only call there is ends,
nothing else will gather: then its own task sends, and the sender has no turn. It is
not even started before it is needed, which on the connection of a plugin, which
carries one call, is never. Nor is there a wait before a server's first look at what
came: such a call is there with its connection.

Nobody's memory grows with a slow peer: calls wait before they add to an output
of WRITE_PAUSE_BYTES, and at READ_PAUSE_BYTES nothing more is read.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

import trio

from metis.rpc.connection import Connection, ConnectionFailed
from metis.rpc.events import (
    DataReceived,
    Event,
    GoAwayReceived,
    RequestReceived,
    ResponseReceived,
    SettingsReceived,
    StreamReset,
    TrailersReceived,
    WindowOpened,
)
from metis.rpc.http2 import ErrorCode
from metis.rpc.limits import (
    FAREWELL_SECONDS,
    READ_PAUSE_BYTES,
    RECEIVE_BYTES,
    WRITE_PAUSE_BYTES,
    Limits,
)
from metis.rpc.prompt import PromptStream
from metis.rpc.stream import CallStream

log = logging.getLogger("metis.rpc")

PATIENCE_TURNS = 3
"""Turns that a server's acknowledgements wait for answers to share a write with. In
the first, the task of a call may run after the receiver; in the second, so may what a
call that changes the database waits for. A write too many wakes the client in vain,
and costs it and us a sixth of a plugin's call."""

GONE = (trio.BrokenResourceError, trio.ClosedResourceError)
"""What Trio raises on a byte stream that leads nowhere any more."""


class Peer:
    """Who is at the other end, as grpclib's streams expect to be told."""

    def addr(self) -> None:
        """Unknown: clients of a Unix socket have no address."""

    def cert(self) -> None:
        """None: there is no TLS on one machine."""


PEER = Peer()


class Session(ABC):
    """Drives one connection; the two roles say what requests and replies mean.

    Args:
      stream: the byte stream; closed when `run` ends.
      client: which role the connection has.
      limits: its bounds.

    Attributes:
      http2: the state of the connection. Whoever adds to its output calls
        `flush` afterwards.
      calls: the calls of the connection by stream id, from their first byte
        until their task is through with them.
      starved: the calls that wait for the peer's window.
      draining: a GOAWAY was sent or received; there are no new calls.
      idle_since: Trio's time at which the last call ended, or the beginning.
    """

    # counters that grpclib's streams keep up to date
    messages_sent = 0
    messages_received = 0
    last_message_sent: float | None = None
    last_message_received: float | None = None

    def __init__(
        self, stream: trio.abc.Stream, *, client: bool, limits: Limits
    ) -> None:
        self.http2 = Connection(client=client, limits=limits)
        self.calls: dict[int, CallStream] = {}
        self.starved: set[CallStream] = set()
        self.draining = False
        self.limits = limits
        self._stream = stream
        self._prompt = stream if isinstance(stream, PromptStream) else None
        self._receiving = trio.CancelScope()
        self.idle_since = trio.current_time()
        # of the output: what was taken from the connection and not sent yet, and
        # how much of that is being sent
        self._left = b""
        self._unsent = 0
        # who waits for it to grow and to shrink
        self._more = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        # a server lets its SETTINGS wait for the first bytes of the client, so
        # that they share a write with the first response
        self._patience = 0 if client else PATIENCE_TURNS
        self._awake = client
        self._has_received = client
        self._sender_runs = False
        self._sending = False
        self._last_output = False
        self._lost = False

    def get_peer(self) -> Peer:
        """Who is at the other end."""
        return PEER

    # output

    def flush(self) -> None:
        """Have the connection's output sent in the sender's next turn."""
        if not self._awake:
            self._awake = True
            if self._sender_runs:
                self._more.unpark()
            else:
                self._receiving.cancel()  # the receiver starts it

    def writable_now(self) -> bool:
        """Whether the output is small enough to be added to."""
        return self._unsent + self.http2.pending <= WRITE_PAUSE_BYTES

    async def writable(self) -> None:
        """Wait until it is."""
        while not self.writable_now():
            await self._room.park()

    def _send_now(self) -> None:
        """Send what the stream takes at once; the sender does the rest, if any."""
        if self._awake or self._prompt is None:
            self.flush()
            return
        self._left += self.http2.data_to_send()
        if self._left:
            try:
                sent = self._prompt.send_some(self._left)
            except GONE:
                sent = 0  # the sender will meet the same, and end the connection
            self._left = self._left[sent:]
            self._unsent = len(self._left)
            if self._left:
                self.flush()
            elif self._room:
                self._room.unpark_all()

    async def _send(self, connection_scope: trio.CancelScope) -> None:
        """Send what gathers until the last; a broken stream ends the connection."""
        while True:
            if not self._awake:
                await self._more.park()
            data = self._left + self.http2.data_to_send()
            if not data:
                if self._last_output:
                    return
                self._awake = False
                continue
            self._left = b""
            self._unsent = len(data)
            self._sending = True
            try:
                sent = self._prompt.send_some(data) if self._prompt is not None else 0
                if sent < len(data):
                    await self._stream.send_all(data[sent:])
            except GONE:
                # nothing more can be said, but what the peer said before it went
                # may still be there to be read; then the receiver meets the end
                self._lost = True
                connection_scope.deadline = trio.current_time() + FAREWELL_SECONDS
                return
            self._sending = False
            self._unsent = 0
            if self._room:
                self._room.unpark_all()

    # input

    async def _receive(self, nursery: trio.Nursery) -> None:
        """Take what the peer sends, until there is a reason to stop."""
        while True:
            while self._unsent + self.http2.pending > READ_PAUSE_BYTES:
                await self._room.park()
            data: bytes | bytearray | None = None
            try:
                if self._prompt is not None and not self._has_received:
                    # a plugin's whole request is there when its connection is
                    data = self._prompt.receive_now(RECEIVE_BYTES)
                self._has_received = True
                if data is None:
                    data = await self._stream.receive_some(RECEIVE_BYTES)
            except GONE:
                data = b""
            if not data:
                self._lost = True
                return
            try:
                events = self.http2.receive(bytes(data))
            except ConnectionFailed as exc:
                log.info("a peer broke HTTP/2: %s", exc)
                self.flush()
                return
            for event in events:
                self._handle(event, nursery)
            if self.http2.pending and not self._awake:
                # acknowledgements: sent with the answers of the calls that have
                # just begun, if these are quick
                for _ in range(self._patience):
                    if self.calls:
                        await trio.lowlevel.checkpoint()
                self._send_now()

    def _start_sender(self, nursery: trio.Nursery) -> None:
        """Start it if it is needed now and does not run."""
        if self._awake and not self._sender_runs:
            self._sender_runs = True
            nursery.start_soon(self._send, nursery.cancel_scope)

    async def _receive_patiently(self, nursery: trio.Nursery) -> None:
        """Receive, with an eye on the clock, on orders to stop and on the output.

        The deadline is looked at when it expires and not moved at every call,
        which would cost each of them something.
        """
        started = trio.current_time()
        while self.calls or not self.draining:
            self._start_sender(nursery)
            now = trio.current_time()
            if self.http2.peer_ready:
                since = now if self.calls else self.idle_since
                deadline = since + self.limits.idle_seconds
            else:
                deadline = started + self.limits.handshake_seconds
            if deadline <= now:
                reason = "idle" if self.http2.peer_ready else "no SETTINGS came"
                self.http2.go_away(ErrorCode.NO_ERROR, reason)
                self.flush()
                return
            with trio.CancelScope(deadline=deadline) as self._receiving:
                await self._receive(nursery)
                return

    def _handle(self, event: Event, nursery: trio.Nursery) -> None:
        """Hand one event to the call it concerns."""
        if isinstance(event, DataReceived):
            call = self.calls.get(event.stream_id)
            if call is None:
                # nobody reads it, but the other streams need its window
                self.http2.acknowledge(event.stream_id, event.size, ended=event.ended)
                return
            call.feed(event.data, event.size)
            call.ended |= event.ended
            call.notify()
        elif isinstance(event, TrailersReceived):
            call = self.calls.get(event.stream_id)
            if call is not None:
                call.trailers = event.headers
                call.ended = True
                call.notify()
        elif isinstance(event, StreamReset):
            call = self.calls.get(event.stream_id)
            if call is not None:
                self.on_reset(call, event.code)
        elif isinstance(event, WindowOpened) and event.stream_id:
            call = self.calls.get(event.stream_id)
            if call is not None:
                call.notify()
        elif isinstance(event, WindowOpened | SettingsReceived):
            for call in list(self.starved):
                call.notify()
            self.on_settings()
        elif isinstance(event, GoAwayReceived):
            self.on_go_away(event)
        else:
            self.on_headers(event, nursery)

    # what the roles add

    @abstractmethod
    def on_headers(
        self, event: RequestReceived | ResponseReceived, nursery: trio.Nursery
    ) -> None:
        """A request or a response came; its task, if any, goes into the nursery."""

    @abstractmethod
    def on_settings(self) -> None:
        """The peer changed what it lets us do."""

    @abstractmethod
    def on_reset(self, call: CallStream, code: int) -> None:
        """The peer aborted a call."""

    @abstractmethod
    def on_go_away(self, event: GoAwayReceived) -> None:
        """The peer takes no more streams."""

    @abstractmethod
    def on_end(self, call: CallStream, reason: str) -> None:
        """The connection is over and the call with it."""

    # beginning and end

    async def run(self) -> None:
        """Drive the connection to its end, and close the byte stream.

        It ends when the peer is gone or breaks HTTP/2, when it is idle for too
        long, or when it drains and its last call is over.
        """
        try:
            async with trio.open_nursery() as nursery:
                await self._receive_patiently(nursery)
                self.draining = True
                if self._lost:
                    if self.calls or self._sender_runs:
                        nursery.cancel_scope.cancel()
                else:
                    self._last_output = True
                    self.flush()
                    self._start_sender(nursery)
                    nursery.cancel_scope.deadline = (
                        trio.current_time() + FAREWELL_SECONDS
                    )
                self._end_calls()
        finally:
            self.draining = True
            self._end_calls()
            await self._close()

    def stop(self, reason: str = "") -> None:
        """Take no more calls, and end the connection with the last present one."""
        if not self.draining:
            self.draining = True
            self.http2.go_away(ErrorCode.NO_ERROR, reason)
            self.flush()
        if not self.calls:
            self._receiving.cancel()

    def release(self, call: CallStream, code: int) -> None:
        """Forget a call that its task is through with.

        Args:
          call: the call.
          code: what the peer is told if the stream is not over.
        """
        del self.calls[call.id]
        call.acknowledge()
        self.http2.reset(call.id, code)
        if self.calls:
            self.flush()
        else:
            self._send_now()
            self.idle_since = trio.current_time()
            if self.draining:
                self._receiving.cancel()

    def _end_calls(self) -> None:
        for call in list(self.calls.values()):
            self.on_end(call, "the connection was lost")

    async def _close(self) -> None:
        """Send what is left, if that can still make sense, and close."""
        data = self._left + self.http2.data_to_send()
        try:
            if data and not (self._sending or self._lost):
                with trio.move_on_after(FAREWELL_SECONDS, shield=True):
                    await self._stream.send_all(data)
        except GONE:
            pass
        finally:
            if self._prompt is not None:
                self._prompt.close()
            else:
                await trio.aclose_forcefully(self._stream)
