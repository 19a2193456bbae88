"""The state of one HTTP/2 connection: bytes in, events out, and the reverse.

Pure: no socket, no clock, no task. Both roles, over h2. Whoever drives a
`Connection` feeds it what the peer sent, handles the events in order, and
sends what `data_to_send` gives. Everything that h2 raises is translated here:

  ConnectionFailed  the peer broke HTTP/2; send what is left and hang up
  StreamClosed      the call is gone; drop what was to be said on it

Header validation by h2 is switched off: it closes the whole connection over one
bad request, and refuses the absent and empty `:authority` that gRPC clients
send over Unix sockets. What has to be checked is checked in `metis.rpc.headers`,
and costs the peer that one stream.
"""

from __future__ import annotations

import contextlib
import functools

import h2.config
import h2.exceptions
import h2.settings

from metis.rpc.events import Event, SettingsReceived
from metis.rpc.headers import AnyHeaders
from metis.rpc.http2 import ErrorCode, SettingCode
from metis.rpc.limits import DEFAULT_LIMITS, LEAST_WINDOW_BYTES, Limits
from metis.rpc.shortcuts import BrokenFrame, ShortH2

UNKNOWN_PEER_CALLS = 100
"""Calls a client opens before it knows the server's own limit: the least that
a server should allow (RFC 9113 section 6.5.2)."""

REMEMBERED_PROTOTYPES = 4
"""Of servers with different limits; a process has one or two."""

_CONFIGS = {
    client: h2.config.H2Configuration(
        client_side=client,
        header_encoding=None,
        validate_inbound_headers=False,
        validate_outbound_headers=False,
        normalize_inbound_headers=False,
        normalize_outbound_headers=False,
    )
    for client in (True, False)
}
"""How h2 is told to be, by role."""


class ConnectionFailed(Exception):
    """The peer broke the rules of HTTP/2; the connection cannot go on."""


class StreamClosed(Exception):
    """The stream is closed, by either side; nothing more can be sent on it."""


def _greeting(client: bool, limits: Limits) -> ShortH2:
    """h2's side of a connection that has greeted its peer and heard nothing of it."""
    connection = ShortH2(_CONFIGS[client], limits.max_header_list_bytes)
    settings = {
        SettingCode.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
        SettingCode.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
    }
    if client:
        settings[SettingCode.ENABLE_PUSH] = 0
    else:
        settings[SettingCode.MAX_CONCURRENT_STREAMS] = limits.max_concurrent_calls
    connection.local_settings = h2.settings.Settings(
        client=client, initial_values=settings
    )
    connection.decoder.max_header_list_size = limits.max_header_list_bytes
    connection.initiate_connection()
    extra = limits.connection_window_bytes - LEAST_WINDOW_BYTES
    if extra > 0:
        connection.increment_flow_control_window(extra)
    return connection


@functools.lru_cache(maxsize=REMEMBERED_PROTOTYPES)
def _prototype(limits: Limits) -> ShortH2:
    """What the connections of a server with such limits begin as."""
    return _greeting(client=False, limits=limits)


class Connection:
    """One HTTP/2 connection, seen from one of its ends.

    Its output begins with the preface, SETTINGS and the connection's window.

    Args:
      client: which end.
      limits: windows, header list and concurrent calls to announce.

    Attributes:
      peer_ready: whether the peer's SETTINGS have arrived.
    """

    def __init__(self, *, client: bool, limits: Limits = DEFAULT_LIMITS) -> None:
        self._h2 = _greeting(True, limits) if client else _prototype(limits).twin()
        self._connection_window = limits.connection_window_bytes
        self._owed = 0
        self.peer_ready = False

    def receive(self, data: bytes) -> list[Event]:
        """Take bytes of the peer; a piece may end anywhere.

        Returns:
          What they mean, in order.

        Raises:
          ConnectionFailed: they break HTTP/2. A GOAWAY that says so stands in
            the output, unless the peer does not speak HTTP/2 at all; the events
            of the same piece are lost.
        """
        try:
            events = self._h2.take(data)
        except BrokenFrame as exc:
            self._h2.close_connection(exc.code)
            raise ConnectionFailed(str(exc)) from exc
        except h2.exceptions.ProtocolError as exc:
            self._h2.close()
            raise ConnectionFailed(str(exc) or type(exc).__name__) from exc
        if not self.peer_ready:
            self.peer_ready = any(type(each) is SettingsReceived for each in events)
        return events

    @property
    def pending(self) -> int:
        """How many bytes `data_to_send` would give."""
        return self._h2.pending

    def data_to_send(self) -> bytes:
        """Everything that is to be sent now; the output is empty afterwards."""
        return self._h2.data_to_send()

    @property
    def peer_call_limit(self) -> int:
        """How many streams the peer lets us have open."""
        if not self.peer_ready:
            return UNKNOWN_PEER_CALLS
        return self._h2.remote_settings.max_concurrent_streams

    def open_stream(self, headers: AnyHeaders, *, end: bool = False) -> int:
        """Open a stream with a request; the caller keeps to `peer_call_limit`.

        Returns:
          The stream's id.

        Raises:
          ConnectionFailed: the connection has used up all its stream ids.
        """
        try:
            stream_id = self._h2.get_next_available_stream_id()
        except h2.exceptions.NoAvailableStreamIDError as exc:
            raise ConnectionFailed("the stream ids are used up") from exc
        self._h2.send_headers(stream_id, headers, end_stream=end)
        return stream_id

    def send_headers(
        self, stream_id: int, headers: AnyHeaders, *, end: bool = False
    ) -> None:
        """Put headers or trailers of a stream into the output.

        Raises:
          StreamClosed: the stream is closed for us.
        """
        if stream_id not in self._h2.streams:
            raise StreamClosed(stream_id)  # h2 would open a new one
        try:
            self._h2.send_headers(stream_id, headers, end_stream=end)
        except h2.exceptions.ProtocolError as exc:
            raise StreamClosed(stream_id) from exc

    def sendable(self, stream_id: int) -> int:
        """How many bytes one DATA frame of the stream may have now, 0 or more.

        Raises:
          StreamClosed: the stream is closed.
        """
        stream = self._h2.streams.get(stream_id)
        if stream is None or stream.closed:
            raise StreamClosed(stream_id)
        window = min(
            stream.outbound_flow_control_window,
            self._h2.outbound_flow_control_window,
            self._h2.max_outbound_frame_size,
        )
        return max(0, window)  # a window is below 0 when the peer has shrunk it

    def send_data(
        self, stream_id: int, data: bytes | memoryview, *, end: bool = False
    ) -> None:
        """Put one DATA frame of at most `sendable` bytes into the output.

        Raises:
          StreamClosed: the stream is closed for us.
        """
        try:
            self._h2.send_data(stream_id, data, end_stream=end)
        except (h2.exceptions.ProtocolError, KeyError) as exc:
            # KeyError: h2 looks a forgotten stream up before it checks
            raise StreamClosed(stream_id) from exc

    def send_reply(
        self, stream_id: int, head: bytes, body: bytes, trailers: bytes
    ) -> bool:
        """Put a whole response into the output, if that can be done at once.

        Args:
          stream_id: a stream of whose request nothing is to come.
          head: its headers, as `metis.rpc.http2.response_block` encodes them.
          body: of at most `sendable` bytes.
          trailers: encoded likewise.

        Returns:
          False, and nothing has happened, when the window is too small, or part of
          the response was sent, or the stream is closed.
        """
        return self._h2.send_reply(stream_id, head, body, trailers)

    def acknowledge(self, stream_id: int, size: int, *, ended: bool) -> None:
        """Give `size` bytes of window back to the peer, now that they are used.

        Args:
          stream_id: the stream on which they came.
          size: what they took of the windows.
          ended: nothing more can come on the stream, so its own window is of no
            use; that of the connection is given back by the quarter.
        """
        if self._h2.closed:
            return  # h2 does not ask here
        if not ended:
            self._h2.acknowledge_received_data(size, stream_id)
            return
        self._owed += size
        if self._owed >= self._connection_window // 4:
            self._h2.increment_flow_control_window(self._owed)
            self._owed = 0

    def reset(self, stream_id: int, code: int) -> None:
        """Abort a stream; nothing happens when it is closed already."""
        if self.is_open(stream_id):
            with contextlib.suppress(h2.exceptions.ProtocolError):
                # the whole connection may have failed since
                self._h2.reset_stream(stream_id, code)

    def is_open(self, stream_id: int) -> bool:
        """Whether either side may still send on the stream."""
        stream = self._h2.streams.get(stream_id)
        return stream is not None and not stream.closed

    def go_away(self, code: int = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Tell the peer that no stream beyond the present ones is taken."""
        self._h2.close_connection(code, reason.encode())
        self._h2.stay_open()
