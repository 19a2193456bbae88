"""What h2 reports, as our events.

Pure. For the frames that `metis.rpc.shortcuts` leaves to h2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import h2.events

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
