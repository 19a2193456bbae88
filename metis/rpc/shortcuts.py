"""The common frames of a unary call past h2, with h2 none the wiser.

Pure. h2 makes a frame object, a flag set, an event and two steps of two state
machines of every frame: two thirds of what a call cost. Here the frames that nearly
every call consists of (a request whose header block is known, DATA, WINDOW_UPDATE,
and the response to them) change h2's state directly, to what h2 would have made of
it. Whatever is in the least unusual goes to h2 itself, frame by frame; so h2 owns
the protocol, and each shortcut begins with the conditions under which it knows what
h2 would do. Tests hold both ways against each other, bytes, events and state, over
random sequences of frames.

RFC 9113 section 6 has the layouts, RFC 7541 the header blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import h2.config
import h2.events
import h2.exceptions
from h2.connection import ConnectionState
from h2.settings import SettingCodes
from h2.stream import H2Stream, StreamClosedBy, StreamState

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
from metis.rpc.http2 import (
    FRAME_HEADER_BYTES,
    H2,
    MAX_FRAME_BYTES,
    PREFACE_BYTES,
    ErrorCode,
    RememberingDecoder,
    ResponseEncoder,
)

DATA, HEADERS, SETTINGS, PUSH_PROMISE, WINDOW_UPDATE, CONTINUATION = 0, 1, 4, 5, 8, 9
"""Frame types."""

ACK, END_STREAM, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
"""Flags of frames."""

HEADER_BLOCKS = frozenset({HEADERS, PUSH_PROMISE, CONTINUATION})

MAX_WINDOW = 2**31 - 1
"""Largest window and increment; stream ids end here as well."""

_SETTING = struct.Struct(">HL")
"""Code, value."""

_FRAME_HEADER = struct.Struct(">HBBBL")
"""Length (in two parts), type, flags, stream."""


class BrokenFrame(Exception):
    """A frame or header block is too long to be taken.

    Attributes:
      code: the error code that the peer deserves.
    """

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(f"a frame or header block is too long: {code!r}")
        self.code = code


class ShortH2(H2):
    """h2's connection with shortcuts, and the bounds that it lacks for frames.

    h2 waits for the whole of a frame, up to 16 MiB, before it finds that it is too
    long, and joins up to 64 of them into one header block before it looks at the
    sum. Here a frame that is too long is known by its header.

    Args:
      config: h2's.
      max_header_block: longest header block, in all its frames, in bytes.
    """

    def __init__(
        self, config: h2.config.H2Configuration, max_header_block: int
    ) -> None:
        super().__init__(config)
        self.decoder: RememberingDecoder = RememberingDecoder()
        self._max_header_block = max_header_block
        self._header_block = 0
        self._preface = 0 if config.client_side else PREFACE_BYTES
        self._rest = b""
        # within a header block, all frames are h2's
        self._in_block = False
        # what new streams begin with; None when SETTINGS may have changed it
        self._windows: tuple[int, int] | None = None
        self._open = (
            ConnectionState.CLIENT_OPEN
            if config.client_side
            else ConnectionState.SERVER_OPEN
        )
        self._shortcuts: dict[
            int, Callable[[int, int, bytes, int, int], Event | None]
        ] = {
            DATA: self._take_data,
            HEADERS: self._take_response if config.client_side else self._take_request,
            SETTINGS: self._take_settings,
            WINDOW_UPDATE: self._take_window_update,
        }

    def take(self, data: bytes) -> list[Event]:
        """Receive bytes of the peer; a piece may end anywhere.

        Returns:
          What they mean, in order.

        Raises:
          BrokenFrame: a frame or header block is too long.
          h2.exceptions.ProtocolError: from h2.
        """
        if self._rest:
            data = self._rest + data
        events: list[Event] = []
        pos, end = 0, len(data)
        if self._preface:
            pos = min(self._preface, end)
            super().receive_data(data[:pos])
            self._preface -= pos
        while end - pos >= FRAME_HEADER_BYTES:
            high, low, kind, flags, stream_id = _FRAME_HEADER.unpack_from(data, pos)
            length = high << 8 | low
            if length > MAX_FRAME_BYTES:
                raise BrokenFrame(ErrorCode.FRAME_SIZE_ERROR)
            if kind in HEADER_BLOCKS:
                self._header_block = (
                    self._header_block + length if kind == CONTINUATION else length
                )
                if self._header_block > self._max_header_block:
                    raise BrokenFrame(ErrorCode.ENHANCE_YOUR_CALM)
            start = pos + FRAME_HEADER_BYTES
            stop = start + length
            if stop > end:
                if kind == CONTINUATION:
                    self._header_block -= length  # it is looked at again
                break
            event = None
            shortcut = self._shortcuts.get(kind)
            if shortcut is not None and not self._in_block:
                event = shortcut(flags, stream_id, data, start, stop)
            if event is not None:
                events.append(event)
            else:
                self._take_slowly(kind, flags, data[pos:stop], events)
            pos = stop
        self._rest = data[pos:]
        return events

    def _take_slowly(
        self, kind: int, flags: int, frame: bytes, events: list[Event]
    ) -> None:
        """Leave a frame to h2, and translate what it says."""
        received = super().receive_data(frame)
        if kind in HEADER_BLOCKS:
            self._in_block = not flags & END_HEADERS
        elif kind == SETTINGS:
            self._windows = None
        events += translated(received)

    # each returns None, and has changed nothing, where h2 shall do it

    def _take_data(
        self, flags: int, stream_id: int, data: bytes, start: int, stop: int
    ) -> Event | None:
        stream = self.streams.get(stream_id)
        if stream is None or flags & PADDED:
            return None
        machine, size = stream.state_machine, stop - start
        ended = bool(flags & END_STREAM)
        of_connection = self._inbound_flow_control_window_manager
        of_stream = stream._inbound_window_manager  # noqa: SLF001  # see above
        if not (
            self.state_machine.state is self._open
            and (
                machine.state is StreamState.OPEN
                or (machine.state is StreamState.HALF_CLOSED_LOCAL and not ended)
            )
            and machine.headers_received
            and stream._expected_content_length is None  # noqa: SLF001  # see above
            and size <= of_connection.current_window_size
            and size <= of_stream.current_window_size
        ):
            return None
        of_connection.current_window_size -= size
        of_stream.current_window_size -= size
        stream._actual_content_length += size  # noqa: SLF001  # see above
        if ended:
            machine.state = StreamState.HALF_CLOSED_REMOTE
        return DataReceived(stream_id, data[start:stop], size, ended)

    def _take_window_update(
        self, _flags: int, stream_id: int, data: bytes, start: int, stop: int
    ) -> Event | None:
        increment = int.from_bytes(data[start:stop], "big")
        if (
            stop - start != 4
            or not 0 < increment <= MAX_WINDOW
            or self.state_machine.state not in (ConnectionState.IDLE, self._open)
        ):
            return None
        if stream_id == 0:
            window = self.outbound_flow_control_window + increment
            if window > MAX_WINDOW:
                return None
            self.outbound_flow_control_window = window
            return WindowOpened(0)
        stream = self.streams.get(stream_id)
        if stream is None or not stream.open:
            return None
        window = stream.outbound_flow_control_window + increment
        if window > MAX_WINDOW:
            return None
        stream.outbound_flow_control_window = window
        return WindowOpened(stream_id)

    def _take_settings(
        self, flags: int, stream_id: int, data: bytes, start: int, stop: int
    ) -> Event | None:
        if (
            stream_id
            or flags & ACK
            or (stop - start) % 6
            or self.state_machine.state not in (ConnectionState.IDLE, self._open)
        ):
            return None
        settings: dict[SettingCodes | int, int] = dict(
            _SETTING.iter_unpack(data[start:stop])
        )
        try:
            for setting, value in settings.items():
                self.remote_settings.validate_received_setting(setting, value)
        except h2.exceptions.ProtocolError:
            return None
        self.remote_settings.update(settings)
        self._windows = None
        self._prepare_for_sending(self._acknowledge_settings())
        return SettingsReceived()

    def _take_request(
        self, flags: int, stream_id: int, data: bytes, start: int, stop: int
    ) -> Event | None:
        if (
            flags & (END_HEADERS | PADDED | PRIORITY) != END_HEADERS
            or not self.highest_inbound_stream_id < stream_id <= MAX_WINDOW
            or not stream_id & 1
            or self.state_machine.state
            not in (ConnectionState.IDLE, ConnectionState.SERVER_OPEN)
        ):
            return None
        if self._windows is None:
            if self.local_settings.max_concurrent_streams < 1:
                return None
            self._windows = (
                self.local_settings.initial_window_size,
                self.remote_settings.initial_window_size,
            )
        headers = self.decoder.recall(data[start:stop])
        if headers is None:
            return None
        _ = self.open_inbound_streams  # forgets streams that are closed
        ended = bool(flags & END_STREAM)
        inbound, outbound = self._windows
        stream = H2Stream(stream_id, self.config, inbound, outbound)
        stream.max_outbound_frame_size = self.max_outbound_frame_size
        machine = stream.state_machine
        machine.client = False
        machine.headers_received = True
        machine.state = StreamState.HALF_CLOSED_REMOTE if ended else StreamState.OPEN
        self.streams[stream_id] = stream
        self.highest_inbound_stream_id = stream_id
        self.state_machine.state = ConnectionState.SERVER_OPEN
        return RequestReceived(stream_id, headers, ended)

    def _take_response(
        self, flags: int, stream_id: int, data: bytes, start: int, stop: int
    ) -> Event | None:
        stream = self.streams.get(stream_id)
        if stream is None or flags & (END_HEADERS | PADDED | PRIORITY) != END_HEADERS:
            return None
        machine = stream.state_machine
        ended = bool(flags & END_STREAM)
        first = not machine.headers_received
        if (
            self.state_machine.state is not ConnectionState.CLIENT_OPEN
            or machine.state is not StreamState.HALF_CLOSED_LOCAL
            or machine.trailers_received
            or stream.request_method == b"HEAD"
            or not (first or ended)
        ):
            return None
        headers = self.decoder.recall(data[start:stop])
        if headers is None:
            return None
        stream._expected_content_length = None  # noqa: SLF001  # see above
        if ended:
            machine.state = StreamState.CLOSED
            machine.stream_closed_by = StreamClosedBy.RECV_END_STREAM
        if first:
            machine.headers_received = True
            return ResponseReceived(stream_id, headers, ended)
        machine.trailers_received = True
        return TrailersReceived(stream_id, headers)

    # sending

    @property
    def pending(self) -> int:
        """Size of the output in bytes."""
        return len(self._data_to_send)

    def send_reply(
        self, stream_id: int, head: bytes, body: bytes, trailers: bytes
    ) -> bool:
        """Put a whole response into the output, and so end a stream.

        Args:
          stream_id: of a request that has ended.
          head: the header block of its headers, as `response_block` makes it.
          body: what goes into its one DATA frame.
          trailers: the header block of its trailers.

        Returns:
          Whether it was put there: not when the stream is in another state or the
          peer's window is too small.
        """
        stream = self.streams.get(stream_id)
        encoder = self.encoder
        if (
            stream is None
            or self.state_machine.state is not ConnectionState.SERVER_OPEN
            or not isinstance(encoder, ResponseEncoder)  # as every server's is
        ):
            return False
        machine, size = stream.state_machine, len(body)
        if (
            machine.state is not StreamState.HALF_CLOSED_REMOTE
            or machine.headers_sent
            or size > stream.outbound_flow_control_window
            or size > self.outbound_flow_control_window
            or size > self.max_outbound_frame_size
        ):
            return False
        machine.headers_sent = machine.trailers_sent = True
        machine.state = StreamState.CLOSED
        machine.stream_closed_by = StreamClosedBy.SEND_END_STREAM
        stream.outbound_flow_control_window -= size
        self.outbound_flow_control_window -= size
        head = encoder.announce(head)
        self._data_to_send += b"".join(
            (
                _frame_header(len(head), HEADERS, END_HEADERS, stream_id),
                head,
                _frame_header(size, DATA, 0, stream_id),
                body,
                _frame_header(
                    len(trailers), HEADERS, END_HEADERS | END_STREAM, stream_id
                ),
                trailers,
            )
        )
        return True


def _frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    return _FRAME_HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def translated(received: Iterable[h2.events.Event]) -> list[Event]:
    """h2's events as ours; those that mean nothing to gRPC are left out."""
    events = []
    for event in received:
        translate = _TRANSLATORS.get(type(event))
        if translate is not None:
            events.append(translate(event))
    return events


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
