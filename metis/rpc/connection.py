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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hpack

from metis.rpc.headers import AnyHeaders, Headers
from metis.rpc.limits import DEFAULT_LIMITS, Limits

ErrorCode = h2.errors.ErrorCodes
"""HTTP/2 error codes, RFC 9113 section 7."""

SWEEP_STREAMS = 64
"""Closed streams that h2 may keep before they are looked for and forgotten."""

REMEMBERED_STREAMS = 4096
"""Closed streams of which h2 remembers how they ended.

Frames for a stream that was reset may still be on their way; h2 would remember
65,536, some six megabytes on a connection that lives long.
"""

UNKNOWN_PEER_CALLS = 100
"""Calls a client opens before it knows the server's own limit: the least that
a server should allow (RFC 9113 section 6.5.2)."""

DEFAULT_WINDOW_BYTES = 65_535
"""Window of a new connection, RFC 9113 section 6.9.2."""


class ConnectionFailed(Exception):
    """The peer broke the rules of HTTP/2; the connection cannot go on."""


class StreamClosed(Exception):
    """The stream is closed, by either side; nothing more can be sent on it."""


class RequestReceived(NamedTuple):
    """A client opened a stream."""

    stream_id: int
    headers: Headers
    ended: bool


class ResponseReceived(NamedTuple):
    """A server sent the first headers of a stream."""

    stream_id: int
    headers: Headers
    ended: bool


class TrailersReceived(NamedTuple):
    """The peer sent its last headers; the stream has ended for it."""

    stream_id: int
    headers: Headers


class DataReceived(NamedTuple):
    """A piece of the body; `size` is what it took of the window."""

    stream_id: int
    data: bytes
    size: int
    ended: bool


class StreamReset(NamedTuple):
    """The peer (or h2, over a fault of the peer) aborted a stream."""

    stream_id: int
    code: int


class WindowOpened(NamedTuple):
    """More may be sent on a stream; on all of them when `stream_id` is 0."""

    stream_id: int


class SettingsReceived(NamedTuple):
    """The peer announced settings: it is there and speaks HTTP/2."""


class GoAwayReceived(NamedTuple):
    """The peer takes no more streams above `last_stream_id`."""

    last_stream_id: int
    code: int
    reason: bytes


Event: TypeAlias = (
    RequestReceived
    | ResponseReceived
    | TrailersReceived
    | DataReceived
    | StreamReset
    | WindowOpened
    | SettingsReceived
    | GoAwayReceived
)


class _StateMachine(h2.connection.H2ConnectionStateMachine):
    """h2's, except that GOAWAY does not close the connection.

    Streams in flight live on after a GOAWAY of either side (RFC 9113 section
    6.8); h2 would refuse every frame from then on.
    """

    def process_input(
        self, input_: h2.connection.ConnectionInputs
    ) -> list[h2.events.Event]:
        if input_ in _GOAWAY_INPUTS:
            return []
        return super().process_input(input_)


_GOAWAY_INPUTS = (
    h2.connection.ConnectionInputs.SEND_GOAWAY,
    h2.connection.ConnectionInputs.RECV_GOAWAY,
)


class _Decoder(hpack.Decoder):
    """hpack's, with a bound on the encoded block as well."""

    def decode(self, data: bytes, raw: bool = False) -> Iterable[hpack.HeaderTuple]:
        if len(data) > self.max_header_list_size:
            raise hpack.OversizedHeaderListError(
                f"a header block of {len(data)} bytes: "
                f"at most {self.max_header_list_size} are allowed"
            )
        return super().decode(data, raw)


class _H2(h2.connection.H2Connection):
    """h2's connection, with three of its public seams set for this use."""

    MAX_CLOSED_STREAMS = REMEMBERED_STREAMS

    def __init__(self, config: h2.config.H2Configuration) -> None:
        super().__init__(config)
        self.state_machine = _StateMachine()
        self.decoder = _Decoder()
        self._sweep_at = SWEEP_STREAMS

    @property
    def open_inbound_streams(self) -> int:
        if self._sweep_is_due():
            _ = super().open_inbound_streams
        return 0

    @property
    def open_outbound_streams(self) -> int:
        if self._sweep_is_due():
            _ = super().open_outbound_streams
        return 0

    def _sweep_is_due(self) -> bool:
        """Whether h2 shall walk its streams now.

        h2 does so at every new stream, to count those that are open, and
        forgets closed ones on the way; over a limit it closes the connection.
        Here the limit is kept elsewhere, stream by stream, so the answer is 0
        and the walk is taken for the sake of forgetting alone, once the
        streams have doubled since the last.
        """
        if len(self.streams) < self._sweep_at:
            return False
        still_open = sum(not stream.closed for stream in self.streams.values())
        self._sweep_at = SWEEP_STREAMS + 2 * still_open
        return True

    def clear_outbound_data_buffer(self) -> None:
        """Keep it: h2 calls this on GOAWAY, after which calls go on here."""


class Connection:
    """One HTTP/2 connection, seen from one of its ends.

    Args:
      client: which end.
      limits: windows, header list and concurrent calls to announce.

    Attributes:
      peer_ready: whether the peer's SETTINGS have arrived.
    """

    def __init__(self, *, client: bool, limits: Limits = DEFAULT_LIMITS) -> None:
        self._h2 = h2_ = _H2(
            h2.config.H2Configuration(
                client_side=client,
                header_encoding=None,
                validate_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_inbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        settings = {
            h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
        }
        if client:
            settings[h2.settings.SettingCodes.ENABLE_PUSH] = 0
        else:
            settings[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS] = (
                limits.max_concurrent_calls
            )
        h2_.local_settings = h2.settings.Settings(
            client=client, initial_values=settings
        )
        h2_.decoder.max_header_list_size = limits.max_header_list_bytes
        self._connection_window = limits.connection_window_bytes
        self.peer_ready = False

    def initiate(self) -> None:
        """Put the preface, SETTINGS and the connection's window into the output."""
        self._h2.initiate_connection()
        extra = self._connection_window - DEFAULT_WINDOW_BYTES
        if extra > 0:
            self._h2.increment_flow_control_window(extra)

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
            received = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError as exc:
            raise ConnectionFailed(str(exc) or type(exc).__name__) from exc
        events: list[Event] = []
        for event in received:
            translate = _TRANSLATORS.get(type(event))
            if translate is not None:
                events.append(translate(event))
                if type(event) is h2.events.RemoteSettingsChanged:
                    self.peer_ready = True
        return events

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

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Give `size` bytes of window back to the peer, now that they are used."""
        self._h2.acknowledge_received_data(size, stream_id)

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


_TRANSLATORS: dict[type[h2.events.Event], Callable[[Any], Event]] = {
    h2.events.RequestReceived: lambda e: RequestReceived(
        e.stream_id, e.headers, e.stream_ended is not None
    ),
    h2.events.ResponseReceived: lambda e: ResponseReceived(
        e.stream_id, e.headers, e.stream_ended is not None
    ),
    h2.events.TrailersReceived: lambda e: TrailersReceived(e.stream_id, e.headers),
    h2.events.DataReceived: lambda e: DataReceived(
        e.stream_id, e.data, e.flow_controlled_length, e.stream_ended is not None
    ),
    h2.events.StreamReset: lambda e: StreamReset(e.stream_id, int(e.error_code)),
    h2.events.WindowUpdated: lambda e: WindowOpened(e.stream_id),
    h2.events.RemoteSettingsChanged: lambda _: SettingsReceived(),
    h2.events.ConnectionTerminated: lambda e: GoAwayReceived(
        e.last_stream_id, int(e.error_code), e.additional_data or b""
    ),
}
"""What h2 reports and anybody here wants to know. The rest (PING, priorities,
1xx responses, acknowledgements) is answered by h2 or means nothing to gRPC."""
