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

import functools
import struct
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeAlias

import h2.config
import h2.exceptions
from h2.connection import ConnectionState
from h2.settings import SettingCodes
from h2.stream import H2Stream, StreamClosedBy, StreamState
from h2.utilities import SizeLimitDict

from metis.rpc.events import (
    DataReceived,
    Event,
    RequestReceived,
    ResponseReceived,
    SettingsReceived,
    TrailersReceived,
    WindowOpened,
)
from metis.rpc.http2 import (
    FRAME_HEADER_BYTES,
    H2,
    MAX_FRAME_BYTES,
    PREFACE_BYTES,
    ErrorCode,
    PeerSettings,
    RememberingDecoder,
    ResponseEncoder,
    copy_of,
)
from metis.rpc.translation import translated

DATA, HEADERS, SETTINGS, PUSH_PROMISE, WINDOW_UPDATE, CONTINUATION = 0, 1, 4, 5, 8, 9
"""Frame types."""

ACK, END_STREAM, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
"""Flags of frames."""

HEADER_BLOCKS = frozenset({HEADERS, PUSH_PROMISE, CONTINUATION})

MAX_WINDOW = 2**31 - 1
"""Largest window and increment; stream ids end here as well."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""RFC 9113 section 3.4."""

SETTINGS_ACK = bytes((0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0))

REMEMBERED_SETTINGS = 16
"""First SETTINGS that are remembered; each kind of client sends always the same."""

REMEMBERED_SETTINGS_BYTES = 128
"""Longest payload of them; there are seven settings of six bytes."""

NOTHING = WindowOpened(-1)
"""What a shortcut returns for a frame that is none of anybody's business."""

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
        self.remote_settings: PeerSettings
        self.decoder: RememberingDecoder = RememberingDecoder()
        self._max_header_block = max_header_block
        self._header_block = 0
        self._preface = 0 if config.client_side else PREFACE_BYTES
        self._rest = b""
        # within a header block, all frames are h2's
        self._in_block = False
        # what new streams begin with; None when SETTINGS may have changed it
        self._windows: tuple[int, int] | None = None
        # of a server: nobody has sent SETTINGS; its record of them is shared
        self._unsettled = self._shares_settings = False
        self._open = (
            ConnectionState.CLIENT_OPEN
            if config.client_side
            else ConnectionState.SERVER_OPEN
        )
        self._shortcuts = _OF_CLIENT if config.client_side else _OF_SERVER
        # not bound: a connection that needs none of them shall be no cycle
        self._methods = {
            kind: method.__func__
            for kind, method in self.__dict__.pop("_frame_dispatch_table").items()
        }

    @functools.cached_property
    def _frame_dispatch_table(self) -> Any:  # type: ignore[override]  # made when needed
        """As h2's own, which looks every frame up in it that it gets."""
        return {
            kind: MethodType(method, self) for kind, method in self._methods.items()
        }

    def twin(self) -> ShortH2:
        """Another connection in the state of this one, for a tenth of its price.

        This one is a server's that has greeted its peer and heard nothing of it. Shared
        is what never changes: h2's configuration and our own settings, and the peer's
        until it announces some.
        """
        buffer = copy_of(self.incoming_buffer)
        buffer.__dict__.update(_data=bytearray(), _headers_buffer=[])
        window = copy_of(self._inbound_flow_control_window_manager)
        twin = copy_of(self)
        twin.__dict__.update(
            state_machine=copy_of(self.state_machine),
            streams={},
            encoder=copy_of(self.encoder),
            decoder=self.decoder.twin(),
            incoming_buffer=buffer,
            _header_frames=[],
            _data_to_send=self._data_to_send.copy(),
            _closed_streams=SizeLimitDict(size_limit=self.MAX_CLOSED_STREAMS),
            _inbound_flow_control_window_manager=window,
            _unsettled=True,
            _shares_settings=True,
        )
        return twin

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
        if self._preface == PREFACE_BYTES and data.startswith(PREFACE):
            pos, self._preface = PREFACE_BYTES, 0
            buffer = self.incoming_buffer
            buffer._preamble, buffer._preamble_len = b"", 0  # noqa: SLF001  # see above
        elif self._preface:
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
                event = shortcut(self, flags, stream_id, data, start, stop)
            if event is None:
                self._take_slowly(kind, flags, data[pos:stop], events)
            elif event is not NOTHING:
                events.append(event)
            pos = stop
        self._rest = data[pos:]
        return events

    def _take_slowly(
        self, kind: int, flags: int, frame: bytes, events: list[Event]
    ) -> None:
        """Leave a frame to h2, and translate what it says."""
        if kind == SETTINGS:
            self._own_settings()
        received = super().receive_data(frame)
        if kind in HEADER_BLOCKS:
            self._in_block = not flags & END_HEADERS
        elif kind == SETTINGS:
            self._windows = None
        events += translated(received)

    def _own_settings(self) -> None:
        """Prepare for SETTINGS of the peer that will change its record."""
        self._unsettled = False
        if self._shares_settings:
            self._shares_settings = False
            self.remote_settings = self.remote_settings.twin()

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
            or (stop - start) % 6
            or self.state_machine.state not in (ConnectionState.IDLE, self._open)
        ):
            return None
        if flags & ACK:
            if start < stop:
                return None
            self._local_settings_acked()
            return NOTHING
        payload = data[start:stop]
        first = self._unsettled and not self.streams
        if first and payload in _FIRST_SETTINGS:
            self.remote_settings, self.max_outbound_frame_size = _FIRST_SETTINGS[
                payload
            ]
            self._unsettled, self._windows = False, None
            self._data_to_send += SETTINGS_ACK
            return SettingsReceived()
        settings: dict[SettingCodes | int, int] = dict(_SETTING.iter_unpack(payload))
        try:
            for setting, value in settings.items():
                self.remote_settings.validate_received_setting(setting, value)
        except h2.exceptions.ProtocolError:
            return None
        self._own_settings()
        self.remote_settings.update(settings)
        self._windows = None
        try:
            acknowledgement = self._acknowledge_settings()
        except h2.exceptions.ProtocolError as exc:
            # a window of a stream would be too large; h2 is the one who says so
            self._terminate_connection(exc.error_code)
            raise
        self._prepare_for_sending(acknowledgement)
        if first and len(payload) <= REMEMBERED_SETTINGS_BYTES:
            if len(_FIRST_SETTINGS) >= REMEMBERED_SETTINGS:
                del _FIRST_SETTINGS[next(iter(_FIRST_SETTINGS))]
            _FIRST_SETTINGS[payload] = (
                self.remote_settings,
                self.max_outbound_frame_size,
            )
            self._shares_settings = True
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


_Shortcut: TypeAlias = Callable[[ShortH2, int, int, bytes, int, int], Event | None]

_OF_BOTH: dict[int, _Shortcut] = {
    DATA: ShortH2._take_data,  # noqa: SLF001  # it is of this module
    SETTINGS: ShortH2._take_settings,  # noqa: SLF001
    WINDOW_UPDATE: ShortH2._take_window_update,  # noqa: SLF001
}
_OF_CLIENT = {**_OF_BOTH, HEADERS: ShortH2._take_response}  # noqa: SLF001
_OF_SERVER = {**_OF_BOTH, HEADERS: ShortH2._take_request}  # noqa: SLF001

_FIRST_SETTINGS: dict[bytes, tuple[PeerSettings, int]] = {}
"""What the first SETTINGS that a server gets make of its record of them, and of the
longest frame that it may send. It depends on those bytes alone."""


def _frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    return _FRAME_HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id)
