"""h2 and what it lacks for a server that stays up.

Pure. `H2` is h2's own connection with its public seams set for this use;
`PeerSettings` bounds what h2 would keep for a hostile peer; `ResponseEncoder` spares
it the same work over and over. `metis.rpc.shortcuts` goes further.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import hpack
from hpack.table import HeaderTable

from metis.rpc.headers import Headers

T = TypeVar("T")

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

REMEMBERED_BLOCKS = 128
"""Encoded header blocks that are kept; two make up nearly all responses."""

REMEMBERED_REQUESTS = 8
"""Received header blocks that a connection remembers: it calls few methods."""

REMEMBERED_REQUEST_BYTES = 256
"""Longest received block that is remembered; indexed ones, which come again and
again, have a dozen bytes. Both bounds together keep a connection small."""

REMEMBERED_FIRSTS = 64
"""First header blocks that are remembered for all connections together."""

REMEMBERED_FIRST_BYTES = 1024
"""Longest first block that is remembered; those of gRPC clients have 300 bytes or
so. With the headers it stands for it takes a few kilobytes."""

NO_TABLE = b"\x20"
"""What tells a decoder that our table has no room, RFC 7541 section 6.3."""

SWEEP_STREAMS = 64
"""Closed streams that h2 may keep before they are looked for and forgotten."""

REMEMBERED_STREAMS = 4096
"""Closed streams of which h2 remembers how they ended.

Frames for a stream that was reset may still be on their way; h2 would remember
65,536, some six megabytes on a connection that lives long.
"""


def copy_of(thing: T) -> T:
    """Another object with the same attributes; quicker than `copy.copy`."""
    twin = object.__new__(type(thing))
    twin.__dict__ = thing.__dict__.copy()
    return twin


class PeerSettings(h2.settings.Settings):
    """h2's record of the peer's settings, of those alone that mean anything.

    h2 would keep all 65,536 that a peer may think of.
    """

    def __setitem__(self, key: int, value: int) -> None:
        if key in _KNOWN_SETTINGS:
            super().__setitem__(key, value)

    def twin(self) -> PeerSettings:
        """Another one with the same values."""
        twin = copy_of(self)
        values = {key: each.copy() for key, each in self._settings.items()}
        twin._settings = values  # noqa: SLF001  # its own class
        return twin


_KNOWN_SETTINGS = frozenset(map(int, SettingCode))


class _WatchedTable(HeaderTable):
    """hpack's table, and how many entries it was ever given."""

    added = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.added += 1
        super().add(name, value)

    def state(self) -> tuple[int, int, int]:
        """What differs whenever the entries or the room for them do."""
        return self.added, len(self.dynamic_entries), self.maxsize

    def adopt(self, entries: Sequence[tuple[bytes, bytes]], size: int) -> None:
        """Take the entries of a table of which nothing was ever dropped.

        Args:
          entries: the latest first.
          size: what they take together.
        """
        self.added = len(entries)
        self.dynamic_entries = deque(entries)
        self._current_size = size


class RememberingDecoder(hpack.Decoder):
    """Remembers what header blocks mean, for as long as they mean it.

    That depends on the block and on the table. So a block is remembered when it left
    the table as it was, and all are forgotten as soon as another one changes it. Of
    the first block of a connection it is known beforehand what the table was.
    """

    def __init__(self) -> None:
        super().__init__()
        self._table = _WatchedTable()
        self.header_table = self._table
        self._known: dict[bytes, Headers] = {}

    def twin(self) -> RememberingDecoder:
        """Another one in the state of this one, which has decoded nothing yet."""
        twin = copy_of(self)
        table = copy_of(self._table)
        table.dynamic_entries = deque()
        twin.__dict__.update(header_table=table, _table=table, _known={})
        return twin

    def recall(self, block: bytes) -> Headers | None:
        """Decode a block if that is known already; None, and no change, if not.

        Never blocks from which h2 reads more than their headers: the length of a
        body, or that a response is not the final one.
        """
        headers = self._known.get(block)
        if headers is None and self._table.state() == _UNTOUCHED:
            first = _FIRSTS.get((block, self.max_header_list_size))
            if first is not None:
                headers, entries, size = first
                self._table.adopt(entries, size)
        return headers

    def decode(self, data: bytes, raw: bool = False) -> Any:
        """As hpack's; h2 always asks for `raw` headers."""
        table, before = self._table, self._table.state()
        headers = super().decode(data, raw)
        after = table.state()
        if after != before:
            self._known.clear()
        if any(map(_steers_h2, headers)):
            return headers
        if before == _UNTOUCHED:
            added, kept, room = after
            if (
                len(data) <= REMEMBERED_FIRST_BYTES
                and kept == added
                and room == _UNTOUCHED[2]
            ):
                if len(_FIRSTS) >= REMEMBERED_FIRSTS:
                    del _FIRSTS[next(iter(_FIRSTS))]
                _FIRSTS[bytes(data), self.max_header_list_size] = (
                    tuple(headers),
                    tuple(table.dynamic_entries),
                    table._current_size,  # noqa: SLF001  # no other way to it
                )
        elif (
            after == before
            and len(data) <= REMEMBERED_REQUEST_BYTES
            and len(self._known) < REMEMBERED_REQUESTS
        ):
            self._known[bytes(data)] = tuple(headers)
        return headers


_UNTOUCHED = _WatchedTable().state()

_FIRSTS: dict[tuple[bytes, int], tuple[Headers, Headers, int]] = {}
"""What a block means to an untouched table, and what it then puts there. It depends
on the block alone (and on the longest list allowed), so all connections share it."""


def _steers_h2(header: Any) -> bool:
    name, value = header
    return bool(name == b"content-length" or (name == b":status" and value[:1] == b"1"))


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
        return self.announce(response_block(tuple(headers)))

    def announce(self, block: bytes) -> bytes:
        """A block of `response_block` as the next one."""
        prefix, self._prefix = self._prefix, b""
        return prefix + block


@functools.lru_cache(maxsize=REMEMBERED_BLOCKS)
def response_block(headers: tuple[tuple[str | bytes, str | bytes], ...]) -> bytes:
    """The header block of a response or of trailers, for any connection."""
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
