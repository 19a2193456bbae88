"""h2 and what it lacks for a server that stays up.

Pure. `H2` is h2's own connection with its public seams set for this use;
`FrameGuard` and `PeerSettings` bound what h2 would keep for a hostile peer;
`ResponseEncoder` spares it the same work over and over.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import hpack

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

REMEMBERED_BLOCKS = 128
"""Encoded header blocks that are kept; two make up nearly all responses."""

NO_TABLE = b"\x20"
"""What tells a decoder that our table has no room, RFC 7541 section 6.3."""

SWEEP_STREAMS = 64
"""Closed streams that h2 may keep before they are looked for and forgotten."""

REMEMBERED_STREAMS = 4096
"""Closed streams of which h2 remembers how they ended.

Frames for a stream that was reset may still be on their way; h2 would remember
65,536, some six megabytes on a connection that lives long.
"""


class PeerSettings(h2.settings.Settings):
    """h2's record of the peer's settings, of those alone that mean anything.

    h2 would keep all 65,536 that a peer may think of.
    """

    def __setitem__(self, key: int, value: int) -> None:
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


class ResponseEncoder(hpack.Encoder):
    """Compresses headers without a table, and so without a state.

    A block then depends on its headers alone and can be remembered, for all
    connections: nearly all responses have the same. That saves a server 4 % of
    its time for a call, for some thirty bytes more on the wire, and leaves a
    peer no table of ours to blow up.
    """

    def __init__(self) -> None:
        super().__init__()
        self._prefix = NO_TABLE

    @property
    def header_table_size(self) -> int:
        """0, whatever the peer would allow."""
        return 0

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        """Nothing to do: 0 is within every limit."""

    def encode(self, headers: Iterable[Any], huffman: bool = True) -> bytes:
        """The header block; the first one says that there is no table."""
        prefix, self._prefix = self._prefix, b""
        return prefix + _block_of(tuple(headers))


@functools.lru_cache(maxsize=REMEMBERED_BLOCKS)
def _block_of(headers: tuple[tuple[str | bytes, str | bytes], ...]) -> bytes:
    # "sensitive" headers enter no table
    return hpack.Encoder().encode([(name, value, True) for name, value in headers])


class H2(h2.connection.H2Connection):
    """h2's connection, with its public seams set for this use."""

    MAX_CLOSED_STREAMS = REMEMBERED_STREAMS

    def __init__(self, config: h2.config.H2Configuration) -> None:
        super().__init__(config)
        self.remote_settings = PeerSettings(client=not config.client_side)
        if not config.client_side:
            self.encoder = ResponseEncoder()
        self._sweep_at = SWEEP_STREAMS

    def clear_outbound_data_buffer(self) -> None:
        """Keep it, and stay open: h2 calls this when it has received a GOAWAY."""
        self.stay_open()

    def stay_open(self) -> None:
        """Go on after a GOAWAY, at which h2 would refuse all further frames.

        Streams in flight live on after a GOAWAY of either side (RFC 9113
        section 6.8).
        """
        states = h2.connection.ConnectionState
        self.state_machine.state = (
            states.CLIENT_OPEN if self.config.client_side else states.SERVER_OPEN
        )

    def close(self) -> None:
        """Refuse all further frames, in both directions."""
        self.state_machine.state = h2.connection.ConnectionState.CLOSED

    @property
    def closed(self) -> bool:
        """Whether all frames are refused."""
        return self.state_machine.state is h2.connection.ConnectionState.CLOSED

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
