"""`metis.rpc.connection`: HTTP/2 bytes and events, without any I/O."""

from __future__ import annotations

import re
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metis.rpc.connection import (
    UNKNOWN_PEER_CALLS,
    Connection,
    ConnectionFailed,
    StreamClosed,
)
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
from metis.rpc.http2 import REMEMBERED_STREAMS, SWEEP_STREAMS, ErrorCode
from metis.rpc.limits import LEAST_WINDOW_BYTES, Limits
from tests.rpc.raw import EMPTY_SETTINGS, HEADERS, PREFACE, frame

E = TypeVar("E", bound=Event)

OK = [(b":status", b"200")]
STATUS = [(b"grpc-status", b"0")]


def pair(
    client: Limits | None = None, server: Limits | None = None
) -> tuple[Connection, Connection]:
    """Both ends of a connection, after the exchange of SETTINGS."""
    ends = (
        Connection(client=True, limits=client or Limits()),
        Connection(client=False, limits=server or Limits()),
    )
    pump(*ends)
    return ends


def pump(one: Connection, other: Connection) -> tuple[list[Event], list[Event]]:
    """Carry bytes until both are silent; what the first and the second saw."""
    seen: tuple[list[Event], list[Event]] = ([], [])
    while True:
        there, back = one.data_to_send(), other.data_to_send()
        if not (there or back):
            return seen
        if there:
            seen[1].extend(other.receive(there))
        if back:
            seen[0].extend(one.receive(back))


def only(kind: type[E], events: list[Event]) -> E:
    [event] = [event for event in events if isinstance(event, kind)]
    return event


def opened(client: Connection, server: Connection, *, end: bool = False) -> int:
    stream_id = client.open_stream(HEADERS, end=end)
    pump(client, server)
    return stream_id


def test_a_unary_call_passes_with_all_its_parts() -> None:
    client, server = pair()
    call = client.open_stream(HEADERS)
    client.send_data(call, b"question", end=True)
    _, at_server = pump(client, server)
    assert only(RequestReceived, at_server).ended is False
    assert only(DataReceived, at_server) == DataReceived(call, b"question", 8, True)

    server.send_headers(call, OK)
    server.send_data(call, b"answer")
    server.send_headers(call, STATUS, end=True)
    at_client, _ = pump(client, server)
    assert list(only(ResponseReceived, at_client).headers) == OK
    assert only(DataReceived, at_client) == DataReceived(call, b"answer", 6, False)
    assert list(only(TrailersReceived, at_client).headers) == STATUS
    assert not client.is_open(call)
    assert not server.is_open(call)


def test_a_response_of_trailers_alone_ends_the_stream() -> None:
    client, server = pair()
    call = opened(client, server, end=True)
    server.send_headers(call, OK + STATUS, end=True)
    at_client, _ = pump(client, server)
    assert only(ResponseReceived, at_client).ended


@pytest.mark.parametrize("authority", [None, "", "localhost", "/run/x", "%2Frun%2Fx"])
def test_any_authority_is_taken(authority: str | None) -> None:
    client, server = pair()
    headers = [header for header in HEADERS if header[0] != ":authority"]
    if authority is not None:
        headers.insert(0, (":authority", authority))
    client.open_stream(headers)
    _, at_server = pump(client, server)
    only(RequestReceived, at_server)


def test_a_server_announces_its_limits_and_its_window() -> None:
    limits = Limits(
        max_concurrent_calls=7,
        connection_window_bytes=1_000_000,
        stream_window_bytes=70_000,
    )
    client = Connection(client=True)
    server = Connection(client=False, limits=limits)
    assert client.peer_call_limit == UNKNOWN_PEER_CALLS
    assert not client.peer_ready
    events, _ = pump(client, server)
    only(SettingsReceived, events)
    assert client.peer_ready
    assert server.peer_ready
    assert client.peer_call_limit == 7
    call = client.open_stream(HEADERS)
    sent = 0
    while size := client.sendable(call):
        client.send_data(call, bytes(size))
        sent += size
    assert sent == 70_000


def test_the_bytes_of_a_message_come_in_any_pieces() -> None:
    client, server = pair()
    call = client.open_stream(HEADERS)
    client.send_data(call, b"question", end=True)
    events = []
    for byte in client.data_to_send():
        events += server.receive(bytes([byte]))
    assert only(DataReceived, events).data == b"question"


def test_a_window_closes_and_opens_again_with_acknowledgements() -> None:
    client, server = pair(server=Limits(stream_window_bytes=LEAST_WINDOW_BYTES))
    call = opened(client, server)
    while size := client.sendable(call):
        client.send_data(call, b"x" * size)
    pump(client, server)
    server.acknowledge(call, LEAST_WINDOW_BYTES, ended=False)
    at_client, _ = pump(client, server)
    assert only(WindowOpened, at_client).stream_id == call
    assert client.sendable(call) > 0


def test_the_window_of_the_connection_bounds_all_streams_together() -> None:
    client, server = pair(server=Limits(connection_window_bytes=LEAST_WINDOW_BYTES))
    first, second = (opened(client, server) for _ in range(2))
    sent = 0
    while size := client.sendable(first):
        client.send_data(first, b"x" * size)
        sent += size
    assert sent == LEAST_WINDOW_BYTES
    assert client.sendable(second) == 0
    pump(client, server)
    server.acknowledge(first, sent, ended=False)
    at_client, _ = pump(client, server)
    assert WindowOpened(0) in at_client
    assert client.sendable(second) > 0


def test_more_than_the_window_is_an_error_of_the_connection() -> None:
    client, server = pair(server=Limits(stream_window_bytes=LEAST_WINDOW_BYTES))
    call = opened(client, server)
    for _ in range(LEAST_WINDOW_BYTES // 16_000):
        server.receive(frame(0, 0, call, bytes(16_000)))
    with pytest.raises(ConnectionFailed):
        server.receive(frame(0, 0, call, bytes(16_000)))
    assert only(GoAwayReceived, client.receive(server.data_to_send()))


def test_a_reset_reaches_the_other_side_with_its_code() -> None:
    client, server = pair()
    call = opened(client, server)
    client.reset(call, ErrorCode.CANCEL)
    _, at_server = pump(client, server)
    assert only(StreamReset, at_server) == StreamReset(call, ErrorCode.CANCEL)
    assert not server.is_open(call)
    client.reset(call, ErrorCode.CANCEL)
    assert client.data_to_send() == b""


def test_nothing_can_be_sent_on_a_closed_stream() -> None:
    client, server = pair()
    call = opened(client, server)
    client.reset(call, ErrorCode.CANCEL)
    pump(client, server)
    with pytest.raises(StreamClosed):
        server.send_headers(call, OK)
    with pytest.raises(StreamClosed):
        server.send_data(call, b"late")
    with pytest.raises(StreamClosed):
        server.sendable(call)
    assert server.data_to_send() == b""


def test_a_stream_that_was_forgotten_is_closed_and_not_opened_anew() -> None:
    client, server = pair()
    calls = []
    for _ in range(3 * SWEEP_STREAMS):
        calls.append(call := opened(client, server, end=True))
        server.send_headers(call, OK + STATUS, end=True)
        pump(client, server)
    with pytest.raises(StreamClosed):
        server.send_headers(calls[0], OK)
    with pytest.raises(StreamClosed):
        server.send_data(calls[0], b"late")
    server.reset(calls[0], ErrorCode.CANCEL)
    server.acknowledge(calls[0], 1, ended=False)
    assert server.data_to_send() == b""


def test_closed_streams_are_forgotten_so_that_memory_stays_bounded() -> None:
    client, server = pair()
    for _ in range(REMEMBERED_STREAMS + 3 * SWEEP_STREAMS):
        call = client.open_stream(HEADERS, end=True)
        server.receive(client.data_to_send())
        server.send_headers(call, OK + STATUS, end=True)
        client.receive(server.data_to_send())
    for end in (client, server):
        assert len(end._h2.streams) <= 2 * SWEEP_STREAMS
        assert len(end._h2._closed_streams) <= REMEMBERED_STREAMS


def test_open_streams_survive_the_sweep() -> None:
    client, server = pair()
    lasting = opened(client, server)
    for _ in range(3 * SWEEP_STREAMS):
        call = opened(client, server, end=True)
        server.send_headers(call, OK + STATUS, end=True)
        pump(client, server)
    client.send_data(lasting, b"still here", end=True)
    _, at_server = pump(client, server)
    assert only(DataReceived, at_server).data == b"still here"


def test_no_number_of_streams_closes_the_connection_here() -> None:
    client, server = pair(server=Limits(max_concurrent_calls=2))
    for _ in range(5):
        client.open_stream(HEADERS)
    _, at_server = pump(client, server)
    assert sum(isinstance(event, RequestReceived) for event in at_server) == 5


def test_after_a_goaway_of_the_server_its_calls_go_on() -> None:
    client, server = pair()
    call = opened(client, server, end=True)
    server.go_away(reason="bye")
    at_client, _ = pump(client, server)
    goaway = only(GoAwayReceived, at_client)
    assert goaway == GoAwayReceived(call, ErrorCode.NO_ERROR, b"bye")
    server.send_headers(call, OK)
    server.send_data(call, b"answer")
    server.send_headers(call, STATUS, end=True)
    at_client, _ = pump(client, server)
    only(TrailersReceived, at_client)


def test_a_goaway_does_not_swallow_what_was_to_be_sent() -> None:
    client, server = pair()
    call = client.open_stream(HEADERS)
    server.go_away()
    client.receive(server.data_to_send())
    assert client.data_to_send() != b""
    assert client.is_open(call)


@pytest.mark.parametrize(
    "data",
    [
        PREFACE + frame(4, 0, 1),
        PREFACE + EMPTY_SETTINGS + frame(0, 0, 1, b"data on an idle stream"),
        PREFACE + EMPTY_SETTINGS + frame(1, 4, 2, b"\x82"),
        PREFACE + EMPTY_SETTINGS + frame(1, 4, 1, b"\xff\xff\xff\xff\xff\xff"),
        PREFACE + EMPTY_SETTINGS + frame(9, 4, 1, b"naked continuation"),
        PREFACE + EMPTY_SETTINGS + frame(8, 0, 0, b"\0\0\0\0"),
        PREFACE + EMPTY_SETTINGS + frame(0, 0, 0, b"x" * 17_000),
        PREFACE + EMPTY_SETTINGS + frame(6, 0, 0, b"short"),
    ],
)
def test_broken_http2_is_one_kind_of_error_and_a_goaway(data: bytes) -> None:
    server = Connection(client=False)
    client = Connection(client=True)
    client.receive(server.data_to_send())
    with pytest.raises(ConnectionFailed, match=re.compile(".+")):
        server.receive(data)
    only(GoAwayReceived, client.receive(server.data_to_send()))


def test_a_client_of_another_protocol_is_an_error() -> None:
    server = Connection(client=False)
    with pytest.raises(ConnectionFailed, match="preamble"):
        server.receive(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def test_a_header_list_above_the_limit_ends_the_connection() -> None:
    client, server = pair(server=Limits(max_header_list_bytes=1000))
    client.open_stream([*HEADERS, (b"x", b"y" * 900)])
    with pytest.raises(ConnectionFailed, match="larger than 1000"):
        server.receive(client.data_to_send())


def test_a_header_block_above_the_limit_is_not_even_decoded() -> None:
    _, server = pair(server=Limits(max_header_list_bytes=1000))
    with pytest.raises(ConnectionFailed, match="ENHANCE_YOUR_CALM"):
        server.receive(frame(1, 4, 1, b"\x82" * 1200))


def test_the_stream_ids_of_a_connection_end() -> None:
    client, _ = pair()
    client._h2.highest_outbound_stream_id = 2**31 - 1
    with pytest.raises(ConnectionFailed, match="used up"):
        client.open_stream(HEADERS)


def test_a_ping_is_answered() -> None:
    client, server = pair()
    assert server.receive(frame(6, 0, 0, b"12345678")) == []
    assert server.data_to_send() == frame(6, 1, 0, b"12345678")
    assert client.receive(frame(6, 1, 0, b"12345678")) == []


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_events_or_one_kind_of_error(
    data: bytes, with_preface: bool
) -> None:
    server = Connection(client=False)
    if with_preface:
        data = PREFACE + EMPTY_SETTINGS + data
    try:
        server.receive(data)
    except ConnectionFailed:
        assert server.data_to_send()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 12),
            st.integers(0, 255),
            st.integers(0, 7),
            st.binary(max_size=40),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_random_frames_are_events_or_one_kind_of_error(
    frames: list[tuple[int, int, int, bytes]], client: bool
) -> None:
    end = Connection(client=client)
    end.receive((b"" if client else PREFACE) + EMPTY_SETTINGS)
    if client:
        end.open_stream(HEADERS)
    try:
        for kind, flags, stream_id, payload in frames:
            end.receive(frame(kind, flags, stream_id, payload))
    except ConnectionFailed:
        assert end.data_to_send()
