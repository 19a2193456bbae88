"""h2 and what it lacks for a server that stays up.

Pure. `H2` is h2's own connection with its public seams set for this use;
`FrameGuard` and `PeerSettings` bound what h2 would keep for a hostile peer.
"""

from __future__ import annotations

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings

ErrorCode = h2.errors.ErrorCodes
"""HTTP/2 error codes, RFC 9113 section 7."""

SettingCode = h2.settings.SettingCodes
"""HTTP/2 settings, RFC 9113 section 6.5.2."""

PREFACE_BYTES = 24
"""What a client sends before its first frame, RFC 9113 section 3.4."""

FRAME_HEADER_BYTES = 9
"""Length, type, flags and stream of a frame, RFC 9113 section 4.1."""

MAX_FRAME_BYTES = 16_384
"""Longest payload of a frame unless we allow more, which we do not (RFC 9113
section 4.2)."""

CONTINUATION = 9
HEADER_BLOCK_STARTS = frozenset({1, 5})
"""Frame types HEADERS and PUSH_PROMISE."""

HEADER_TABLE_BYTES = 4096
"""Size of a header compression table unless a peer allows more (RFC 7541); more
would make every unknown header slower to look up."""

SWEEP_STREAMS = 64
"""Closed streams that h2 may keep before they are looked for and forgotten."""

REMEMBERED_STREAMS = 4096
"""Closed streams of which h2 remembers how they ended.

Frames for a stream that was reset may still be on their way; h2 would remember
65,536, some six megabytes on a connection that lives long.
"""


class StateMachine(h2.connection.H2ConnectionStateMachine):
    """h2's, except that GOAWAY does not close the connection.

    Streams in flight live on after a GOAWAY of either side (RFC 9113 section
    6.8); h2 would refuse every frame from then on.
    """

    def process_input(
        self, input_: h2.connection.ConnectionInputs
    ) -> list[h2.events.Event]:
        """As h2 has it, but for GOAWAY."""
        if input_ in _GOAWAY_INPUTS:
            return []
        return super().process_input(input_)


_GOAWAY_INPUTS = (
    h2.connection.ConnectionInputs.SEND_GOAWAY,
    h2.connection.ConnectionInputs.RECV_GOAWAY,
)


class PeerSettings(h2.settings.Settings):
    """h2's record of the peer's settings, without what could grow on our side.

    h2 would keep all 65,536 settings that nobody knows, and let the peer have
    our header compressor remember gigabytes.
    """

    def __setitem__(self, key: int, value: int) -> None:
        if key == SettingCode.HEADER_TABLE_SIZE:
            value = min(value, HEADER_TABLE_BYTES)
        if key in _KNOWN_SETTINGS:
            super().__setitem__(key, value)


_KNOWN_SETTINGS = frozenset(map(int, SettingCode))


class FrameGuard:
    """Looks at the lengths of frames before h2 buffers them.

    h2 waits for the whole of a frame, up to 16 MiB, before it finds that it is
    too long, and joins up to 64 of them into one header block before it looks
    at the sum.

    Args:
      preface: bytes that come before the first frame.
      max_header_block: longest header block, in all its frames.
    """

    def __init__(self, preface: int, max_header_block: int) -> None:
        self._to_skip = preface
        self._head = b""
        self._max_header_block = max_header_block
        self._header_block = 0

    def check(self, data: bytes) -> int | None:
        """Follow the frames in the next bytes.

        Returns:
          The error code that the peer deserves, or None.
        """
        data = self._head + data
        pos, end = self._to_skip, len(data)
        while pos + FRAME_HEADER_BYTES <= end:
            length = int.from_bytes(data[pos : pos + 3], "big")
            if length > MAX_FRAME_BYTES:
                return ErrorCode.FRAME_SIZE_ERROR
            kind = data[pos + 3]
            if kind == CONTINUATION:
                self._header_block += length
            elif kind in HEADER_BLOCK_STARTS:
                self._header_block = length
            if self._header_block > self._max_header_block:
                return ErrorCode.ENHANCE_YOUR_CALM
            pos += FRAME_HEADER_BYTES + length
        self._to_skip = max(0, pos - end)
        self._head = data[pos:]
        return None


class H2(h2.connection.H2Connection):
    """h2's connection, with three of its public seams set for this use."""

    MAX_CLOSED_STREAMS = REMEMBERED_STREAMS

    def __init__(self, config: h2.config.H2Configuration) -> None:
        super().__init__(config)
        self.state_machine = StateMachine()
        self._sweep_at = SWEEP_STREAMS

    @property
    def open_inbound_streams(self) -> int:
        """0, see `_sweep_is_due`."""
        if self._sweep_is_due():
            _ = super().open_inbound_streams
        return 0

    @property
    def open_outbound_streams(self) -> int:
        """0, see `_sweep_is_due`."""
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
