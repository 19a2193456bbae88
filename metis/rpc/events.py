"""What bytes of an HTTP/2 peer mean to gRPC, one value an event.

Pure. `metis.rpc.shortcuts` makes them, `metis.rpc.session` acts on them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from metis.rpc.headers import Headers


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
