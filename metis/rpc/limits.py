"""Every bound of the gRPC layer, each with its reason and unit.

Pure: numbers alone. `Limits` is what a server or a channel is given; the
constants are its defaults, and embedders or tests may set others.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB

MAX_MESSAGE_BYTES = 4 * MIB
"""Largest message, in bytes, in both directions.

The default of every gRPC implementation for received messages: a larger one
would be refused by most peers anyway.
"""

MAX_HEADER_LIST_BYTES = 16 * KIB
"""Largest header list of one request or response, as RFC 9113 section 6.5.2
counts it (names, values and 32 bytes a field).

gRPC C core refuses metadata above 16 KiB, so nothing that reaches a common
server today is shut out. Encoded header blocks have the same bound, so that a
block cannot keep the decoder busy for long.
"""

MAX_CONCURRENT_CALLS = 1000
"""Calls at once on one connection.

A node starts at most a few hundred pods at once and one client may carry them
all; a call costs a few kilobytes. Counted are the streams and also the tasks
of calls that were reset and have not ended yet, so that a client that opens
and resets streams in a hurry (CVE-2023-44487) gains nothing.
"""

MAX_CONNECTIONS = 4096
"""Connections at once on one server.

Far above one connection a pod on the largest nodes. An idle connection costs
about 27 KiB, so that the bound means some 110 MiB.
"""

STREAM_WINDOW_BYTES = 256 * KIB
"""How much a peer may send on one stream ahead of its reader.

Requests of this project are below a kilobyte; four round trips carry the
largest message.
"""

CONNECTION_WINDOW_BYTES = 1 * MIB
"""How much a peer may send on all streams ahead of their readers."""

RECEIVE_BYTES = 32 * KIB
"""Most bytes taken from the socket at once.

The events of one such piece are handled in one go, so this bounds how long a
connection keeps the others waiting.
"""

WRITE_PAUSE_BYTES = 64 * KIB
"""Unsent bytes above which calls wait before they add data of theirs."""

READ_PAUSE_BYTES = 256 * KIB
"""Unsent bytes above which nothing more is read from the peer.

Only answers to what the peer sends (acknowledgements, resets, trailers) get
past WRITE_PAUSE_BYTES, so this is reached by a peer alone that sends without
reading. It stands well above WRITE_PAUSE_BYTES: two honest peers in full spate
can then never wait for one another.
"""

HANDSHAKE_SECONDS = 10.0
"""Time from the connection to the peer's preface and SETTINGS.

Local peers need milliseconds; a loaded node may be slow to schedule them.
"""

IDLE_SECONDS = 600.0
"""How long a connection without calls is kept before GOAWAY.

Long enough for a client that calls every few minutes, short enough that
clients that forgot theirs do not gather. gRPC clients connect again unasked.
"""

FAREWELL_SECONDS = 1.0
"""Time to hand the last bytes (trailers, GOAWAY) to a peer at the very end."""


LEAST_WINDOW_BYTES = 65_535
"""What a peer may send before it has read our SETTINGS (RFC 9113 section 6.9.2);
a smaller window of ours would make an offender of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one server or channel; the constants say what each means.

    Raises:
      ValueError: a window below LEAST_WINDOW_BYTES.
    """

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_header_list_bytes: int = MAX_HEADER_LIST_BYTES
    max_concurrent_calls: int = MAX_CONCURRENT_CALLS
    max_connections: int = MAX_CONNECTIONS
    stream_window_bytes: int = STREAM_WINDOW_BYTES
    connection_window_bytes: int = CONNECTION_WINDOW_BYTES
    handshake_seconds: float = HANDSHAKE_SECONDS
    idle_seconds: float = IDLE_SECONDS

    def __post_init__(self) -> None:
        if min(self.stream_window_bytes, self.connection_window_bytes) < (
            LEAST_WINDOW_BYTES
        ):
            raise ValueError(
                f"windows are {self.stream_window_bytes} and "
                f"{self.connection_window_bytes} bytes: "
                f"they must be {LEAST_WINDOW_BYTES} or more"
            )


DEFAULT_LIMITS = Limits()
