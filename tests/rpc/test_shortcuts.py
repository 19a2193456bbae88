"""`metis.rpc.shortcuts`: nobody can tell it from h2, but by the clock."""

from __future__ import annotations

import gc
import re
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from types import FunctionType
from typing import Any

import h2.config
import h2.exceptions
import h2.settings
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metis.rpc.events import DataReceived, Event, RequestReceived, WindowOpened
from metis.rpc.http2 import (
    H2,
    MAX_FRAME_BYTES,
    REMEMBERED_FIRSTS,
    REMEMBERED_REQUEST_BYTES,
    REMEMBERED_REQUESTS,
    ErrorCode,
    RememberingDecoder,
    response_block,
)
from metis.rpc.shortcuts import (
    _FIRST_SETTINGS,
    REMEMBERED_SETTINGS,
    REMEMBERED_SETTINGS_BYTES,
    BrokenFrame,
    ShortH2,
)
from metis.rpc.translation import translated
from tests.rpc.raw import EMPTY_SETTINGS, HEADERS, PREFACE, frame

DATA, HEAD, PRIORITY, RST, SETTINGS, PING, GOAWAY, WINDOW, MORE = (
    0,
    1,
    2,
    3,
    4,
    6,
    7,
    8,
    9,
)
OK = ((":status", "200"), ("content-type", "application/grpc+proto"))
DONE = (("grpc-status", "0"),)

BLOCKS: list[list[tuple[str, str]]] = [
    [(str(name), str(value)) for name, value in HEADERS],
    [(":method", "POST"), (":path", "/a"), ("grpc-timeout", "30S")],
    [(":method", "POST"), (":path", "/a"), ("content-length", "5")],
    [(":method", "POST"), ("content-length", "x")],
    [(":method", "HEAD"), (":path", "/a")],
    [(":status", "100")],
    [(":status", "200"), ("content-type", "application/grpc")],
    [("grpc-status", "0")],
]
RAW_BLOCKS = [
    b"",
    b"\x20",  # no table
    b"\x3f\xe1\x1f\x83",  # a table of 4096 bytes again, :method POST
    b"\x20\x3f\xe1\x1f\x83",  # none, and one again: it is empty then
    b"\x83\x86",
    b"\xbe",  # the latest entry, where there is one
    b"\xff\xff\xff\xff\xff\xff",
    b"\x00\x01a\x01b",  # a literal that enters no table
    b"\x10\x01a\x01b",
    b"\x40\x01a\x01b",  # one that does
]


def config(client: bool) -> h2.config.H2Configuration:
    return h2.config.H2Configuration(
        client_side=client,
        header_encoding=None,
        validate_inbound_headers=False,
        validate_outbound_headers=False,
        normalize_inbound_headers=False,
        normalize_outbound_headers=False,
    )


class Pair:
    """The same connection with shortcuts and without, held against each other."""

    def __init__(self, client: bool) -> None:
        self.client = client
        self.short = ShortH2(config(client), max_header_block=20_000)
        self.plain = H2(config(client))
        self.peer_encoder = hpack.Encoder()
        for one in (self.short, self.plain):
            one.initiate_connection()
        if not client:  # as every server's is
            self.short = self.short.twin()
        if not client:
            self.short.take(PREFACE)
            self.plain.receive_data(PREFACE)

    def receive(self, data: bytes, cut: int) -> None:
        """Take one frame; the connection with shortcuts gets it in two pieces."""

        def shortly() -> list[Event]:
            return self.short.take(data[:cut]) + self.short.take(data[cut:])

        self.same(shortly, lambda: translated(self.plain.receive_data(data)))

    def both(self, action: Callable[[H2], Any]) -> None:
        self.same(lambda: action(self.short), lambda: action(self.plain))

    def same(self, short: Callable[[], Any], plain: Callable[[], Any]) -> None:
        results = []
        for action in (short, plain):
            try:
                results.append(action())
            except (h2.exceptions.ProtocolError, KeyError, ValueError) as exc:
                results.append((type(exc), re.sub("0x[0-9a-f]+", "", str(exc))))
        assert listed(results[0]) == listed(results[1])
        assert self.short.data_to_send() == self.plain.data_to_send()
        assert state(self.short) == state(self.plain)

    def send(self, kind: str, stream_id: int, end: bool, what: Any) -> None:
        """One of the things that this end can do."""
        if kind == "reply" and not self.client:
            self.reply(stream_id, what)
        elif kind == "request" or (
            kind == "headers" and stream_id in self.plain.streams
        ):
            self.both(lambda c: c.send_headers(stream_id, what, end_stream=end))
        elif kind == "data":
            self.both(lambda c: c.send_data(stream_id, bytes(what), end_stream=end))
        elif kind == "reset":
            self.both(lambda c: c.reset_stream(stream_id))
        elif kind == "used" and stream_id:
            self.both(lambda c: c.acknowledge_received_data(what, stream_id))

    def reply(self, stream_id: int, size: int) -> None:
        """A whole response in one step, and in h2's three."""
        body = bytes(size)
        head, tail = response_block(OK), response_block(DONE)
        if self.short.send_reply(stream_id, head, body, tail):
            self.plain.send_headers(stream_id, OK)
            self.plain.send_data(stream_id, body)
            self.plain.send_headers(stream_id, DONE, end_stream=True)
        self.both(lambda _: None)


def listed(result: Any) -> Any:
    """Header lists may be lists or tuples."""
    if not isinstance(result, list):
        return result
    return [
        (type(e), *(list(x) if isinstance(x, tuple) else x for x in e)) for e in result
    ]


def state(connection: H2) -> Any:
    """All that h2 knows of a connection and its streams."""
    streams = {
        stream_id: (
            vars(stream.state_machine),
            stream.max_outbound_frame_size,
            stream.request_method,
            stream.outbound_flow_control_window,
            vars(stream._inbound_window_manager),
            stream._expected_content_length,
            stream._actual_content_length,
        )
        for stream_id, stream in connection.streams.items()
    }
    table = connection.decoder.header_table
    return (
        connection.state_machine.state,
        connection.highest_inbound_stream_id,
        connection.highest_outbound_stream_id,
        connection.outbound_flow_control_window,
        vars(connection._inbound_flow_control_window_manager),
        connection.max_outbound_frame_size,
        dict(connection._closed_streams),
        streams,
        list(table.dynamic_entries),
        table.maxsize,
        dict(connection.remote_settings),
        dict(connection.local_settings),
        connection.max_inbound_frame_size,
        connection.decoder.max_header_list_size,
        connection.decoder.max_allowed_table_size,
    )


def announcement(*pairs: tuple[int, int]) -> bytes:
    """A frame of SETTINGS."""
    return frame(
        SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in pairs)
    )


FIRST_SETTINGS = [
    announcement((2, 0), (4, 100)),
    announcement((1, 0), (5, 20_000), (4, 1), (4, 70_000)),
    announcement((77, 5), (3, 0), (1, 100)),
]

LATEST = -1
STREAMS = st.sampled_from([*([LATEST] * 6), 0, 1, 2, 3, 5, 7, 2**31 + 1])
FLAGS = st.sampled_from([0, 1, 4, 4, 5, 5, 8, 0xD, 0x25, 0xFF])
SIZES = st.sampled_from([0, 1, 5, 100, 16_384])
WORDS = st.sampled_from(
    [b"\0\0\0\0", b"\0\0\0\1", b"\0\0\1\0", b"\x7f\xff\xff\xff", b"\x80\0\0\1", b"\0"]
)
ACTIONS = st.one_of(
    st.tuples(st.just("open"), st.just(0), st.sampled_from([4, 4, 5]), st.just(0)),
    st.tuples(st.just("open"), st.just(0), st.sampled_from([4, 4, 5]), st.just(1)),
    st.tuples(st.just("block"), STREAMS, FLAGS, st.sampled_from(BLOCKS)),
    st.tuples(st.just("block"), STREAMS, FLAGS, st.sampled_from(BLOCKS[:2])),
    st.tuples(st.just(HEAD), STREAMS, FLAGS, st.sampled_from(RAW_BLOCKS)),
    st.tuples(st.just("body"), STREAMS, FLAGS, SIZES),
    st.tuples(st.just("body"), STREAMS, st.just(1), SIZES),
    st.tuples(st.just(WINDOW), STREAMS, st.just(0), WORDS),
    st.tuples(st.just(RST), STREAMS, st.just(0), WORDS),
    st.tuples(st.just(PING), st.just(0), st.sampled_from([0, 1]), st.just(bytes(8))),
    st.tuples(st.just(PRIORITY), STREAMS, st.just(0), st.just(bytes(5))),
    st.tuples(st.just(GOAWAY), st.just(0), st.just(0), st.just(bytes(8))),
    st.tuples(st.just(MORE), STREAMS, FLAGS, st.sampled_from(RAW_BLOCKS)),
    st.tuples(st.just(77), STREAMS, FLAGS, st.just(b"whatever")),
    st.tuples(
        st.just(SETTINGS),
        st.just(0),
        st.sampled_from([0, 0, 1]),
        st.lists(
            st.tuples(st.integers(1, 6), st.sampled_from([0, 1, 100, 16_384, 70_000])),
            max_size=2,
        ).map(lambda pairs: b"".join(struct.pack(">HI", *pair) for pair in pairs)),
    ),
    st.tuples(st.just("reply"), STREAMS, st.just(0), SIZES),
    st.tuples(st.just("reply"), STREAMS, st.just(0), SIZES),
    st.tuples(st.just("headers"), STREAMS, st.sampled_from([0, 1]), st.just(DONE)),
    st.tuples(st.just("data"), STREAMS, st.sampled_from([0, 1]), SIZES),
    st.tuples(st.just("reset"), STREAMS, st.just(0), st.just(0)),
    st.tuples(st.just("used"), STREAMS, st.just(0), SIZES),
)


@settings(max_examples=400)
@given(
    st.booleans(),
    st.sampled_from([*FIRST_SETTINGS, EMPTY_SETTINGS]),
    st.lists(st.tuples(ACTIONS, st.integers(0, 30)), max_size=40),
)
def test_events_bytes_and_state_are_those_of_h2(
    client: bool, first: bytes, actions: list[tuple[tuple[Any, int, int, Any], int]]
) -> None:
    pair = Pair(client)
    pair.receive(first, 4)
    if client:
        for stream_id in (1, 3, 5):
            pair.send("request", stream_id, True, BLOCKS[4 if stream_id == 5 else 0])
    for (kind, stream_id, flags, what), cut in actions:
        if stream_id == LATEST:
            stream_id = pair.plain.highest_inbound_stream_id or 1
        if kind == "open":  # the next request, as it should be
            block = pair.peer_encoder.encode(BLOCKS[what])
            stream_id = pair.plain.highest_inbound_stream_id + 1 | 1
            pair.receive(frame(HEAD, flags, stream_id, block), cut)
        elif kind == "block":
            block = pair.peer_encoder.encode(what)
            pair.receive(frame(HEAD, flags, stream_id, block), cut)
        elif kind == "body":
            pair.receive(frame(DATA, flags, stream_id, bytes(what)), cut)
        elif isinstance(kind, int):
            pair.receive(frame(kind, flags, stream_id, what), cut)
        else:
            pair.send(kind, stream_id, bool(flags), what)
        if pair.short.closed:
            break


@pytest.mark.parametrize("client", [True, False])
def test_settings_that_blow_a_window_up_end_the_connection_with_a_goaway(
    client: bool,
) -> None:
    pair = Pair(client)
    pair.receive(EMPTY_SETTINGS, 4)
    if client:
        pair.send("request", 1, True, BLOCKS[0])
    else:
        pair.receive(frame(HEAD, 4, 1, pair.peer_encoder.encode(BLOCKS[0])), 0)
    pair.receive(frame(WINDOW, 0, 1, b"\x7f\xff\0\0"), 0)
    assert not pair.short.closed
    pair.receive(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31 - 1)), 0)
    assert pair.short.closed


def call(stream_id: int, encoder: hpack.Encoder) -> list[bytes]:
    """The frames of a unary call as grpcio's C core sends them."""
    return [
        frame(HEAD, 4, stream_id, encoder.encode(BLOCKS[0])),
        frame(WINDOW, 0, stream_id, b"\0\0\0\5"),
        frame(DATA, 1, stream_id, bytes(40)),
        frame(WINDOW, 0, 0, b"\0\0\0\5"),
    ]


def test_a_common_call_takes_every_shortcut(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(client=False)
    encoder = hpack.Encoder()
    pair.receive(EMPTY_SETTINGS, 0)
    for stream_id in (1, 3):  # the first fills the table, the second is remembered
        for each in call(stream_id, encoder):
            pair.receive(each, 0)
    monkeypatch.setattr(ShortH2, "_take_slowly", None)
    for stream_id in range(5, 205, 2):
        events = pair.short.take(b"".join(call(stream_id, encoder)))
        assert [type(event) for event in events] == [
            RequestReceived,
            WindowOpened,
            DataReceived,
            WindowOpened,
        ]
        assert pair.short.send_reply(
            stream_id, response_block(OK), bytes(30), response_block(DONE)
        )


def shared(one: Any, other: Any, path: str = "") -> set[str]:
    """Where two objects have the same thing that can be changed."""
    if one is None or isinstance(
        one, bool | int | str | bytes | frozenset | type | FunctionType | Enum
    ):
        return set()
    if one is other:
        return {path}
    if isinstance(one, tuple | list | deque | bytearray):
        mine, theirs = dict(enumerate(one)), dict(enumerate(other))
    elif isinstance(one, dict):
        mine, theirs = one, other
    else:
        mine, theirs = vars(one), vars(other)
    found: set[str] = set()
    for key, value in mine.items():
        found |= shared(value, theirs[key], f"{path}.{key}")
    return found


def test_twins_share_only_what_nobody_changes() -> None:
    one = ShortH2(config(client=False), max_header_block=20_000)
    one.initiate_connection()
    assert shared(one.twin(), one.twin()) == {
        ".config",
        ".local_settings",
        ".remote_settings",  # until the peer announces some
        "._methods",
        "._shortcuts",
        # of the encoder, which works without a state of hpack's
        ".encoder.header_table",
        ".encoder.huffman_coder",
        ".encoder.table_size_changes",
    }


@pytest.mark.parametrize("first", FIRST_SETTINGS)
def test_what_a_peer_announces_is_known_of_that_one_alone(first: bytes) -> None:
    pairs = [Pair(client=False) for _ in range(4)]
    untouched = state(pairs[3].short)
    pairs[0].receive(first, 0)
    pairs[0].receive(announcement((4, 7), (5, 30_000)), 0)
    pairs[1].receive(first, 0)  # remembered by now
    pairs[2].receive(first, 0)
    pairs[1].receive(announcement((4, 9), (1, 9)), 0)
    pairs[2].both(lambda _: None)
    pairs[2].receive(announcement((77, 1)), 0)
    assert state(pairs[3].short) == untouched


def test_first_settings_are_remembered_but_not_without_end() -> None:
    for number in range(REMEMBERED_SETTINGS + 1):
        Pair(client=False).receive(announcement((4, 1000 + number)), 0)
    assert len(_FIRST_SETTINGS) == REMEMBERED_SETTINGS
    long = announcement(*((77, n) for n in range(REMEMBERED_SETTINGS_BYTES // 6 + 1)))
    Pair(client=False).receive(long, 0)
    assert long[9:] not in _FIRST_SETTINGS


def test_a_connection_that_takes_every_shortcut_goes_without_a_search_for_garbage() -> (
    None
):
    prototype = ShortH2(config(client=False), max_header_block=20_000)
    prototype.initiate_connection()
    twin = prototype.twin()
    for _ in range(2):  # the second one finds everything remembered
        twin = prototype.twin()
        twin.take(PREFACE + EMPTY_SETTINGS + frame(HEAD, 5, 1, b"\x83\x86"))
        assert 1 in twin.streams
    remembered = weakref.ref(twin)
    gc.disable()
    try:
        del twin
        assert remembered() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("cut", [0, 1, 23, 24, 25])
def test_a_preface_may_come_in_pieces(cut: int) -> None:
    prototype = ShortH2(config(client=False), max_header_block=20_000)
    twin, data = prototype.twin(), PREFACE + EMPTY_SETTINGS
    assert len(twin.take(data[:cut]) + twin.take(data[cut:])) == 1
    with pytest.raises(h2.exceptions.ProtocolError):
        prototype.twin().take(b"x" + PREFACE)


@given(st.lists(st.integers(0, len(BLOCKS) + len(RAW_BLOCKS) - 1), max_size=60))
def test_what_is_remembered_is_what_would_be_decoded(picks: list[int]) -> None:
    remembering, plain, encoder = RememberingDecoder(), hpack.Decoder(), hpack.Encoder()
    for pick in picks:
        raw = pick - len(BLOCKS)
        block = RAW_BLOCKS[raw] if raw >= 0 else encoder.encode(BLOCKS[pick])
        recalled = remembering.recall(block)
        results: list[Any] = [None if recalled is None else list(recalled)]
        for decoder in (plain, remembering)[: 1 if recalled is not None else 2]:
            try:
                results.append(decoder.decode(block, raw=True))
            except hpack.HPACKError as exc:
                results.append(str(exc))
        assert results[-1] == results[recalled is None]
        assert remembering.header_table.dynamic_entries == (
            plain.header_table.dynamic_entries
        )
        if isinstance(results[-1], str):
            break


def test_few_and_short_blocks_are_remembered() -> None:
    decoder = RememberingDecoder()
    decoder.decode(b"\x40\x01x\x01y", raw=True)
    blocks = [
        b"\x00\x01a\x01" + bytes((97 + i,)) for i in range(2 * REMEMBERED_REQUESTS)
    ]
    long = b"\x00\x01a\x7f\x81\x01" + b"b" * 256
    assert len(long) > REMEMBERED_REQUEST_BYTES
    for block in [long, *blocks]:
        decoder.decode(block, raw=True)
    assert [block for block in blocks if decoder.recall(block)] == (
        blocks[:REMEMBERED_REQUESTS]
    )
    assert decoder.recall(long) is None


def test_first_blocks_are_remembered_for_all_connections_but_not_without_end() -> None:
    blocks = [
        b"\x40\x02ab\x03" + f"{number:03}".encode()
        for number in range(REMEMBERED_FIRSTS + 1)
    ]
    for block in blocks:
        RememberingDecoder().decode(block, raw=True)
    assert RememberingDecoder().recall(blocks[0]) is None
    for block in blocks[1:]:
        decoder = RememberingDecoder()
        value = block[-3:]
        assert decoder.recall(block) == ((b"ab", value),)
        assert decoder.decode(b"\xbe", raw=True) == [(b"ab", value)]
        assert decoder.recall(block) is None
    shorter = RememberingDecoder()
    shorter.max_header_list_size = 36
    assert shorter.recall(blocks[1]) is None
    with pytest.raises(hpack.OversizedHeaderListError):
        shorter.decode(blocks[1], raw=True)


# the lengths of frames


def verdict(frames: Iterable[bytes], piece: int) -> ErrorCode | None:
    """What becomes of a connection that gets these frames in such pieces."""
    connection = ShortH2(config(client=False), max_header_block=1000)
    data = b"".join([PREFACE, EMPTY_SETTINGS, *frames])
    for start in range(0, len(data), piece):
        try:
            connection.take(data[start : start + piece])
        except BrokenFrame as exc:
            return exc.code
        except h2.exceptions.ProtocolError:
            return None
    return None


@given(
    st.lists(st.tuples(st.integers(20, 30), st.integers(0, 900)), max_size=8),
    st.integers(1, 2000),
)
def test_frames_within_the_bounds_pass_whatever_the_pieces(
    frames: list[tuple[int, int]], piece: int
) -> None:
    connection = ShortH2(config(client=False), max_header_block=1000)
    data = PREFACE + EMPTY_SETTINGS
    data += b"".join(frame(kind, 0, 1, bytes(size)) for kind, size in frames)
    data += frame(PING, 0, 0, b"the last")
    for start in range(0, len(data), piece):
        connection.take(data[start : start + piece])
    assert connection.data_to_send().endswith(b"the last")


@pytest.mark.parametrize("piece", [1, 3, 7, 100_000])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_frame_too_long_is_known_by_its_header_alone(piece: int, before: int) -> None:
    frames = [frame(PING, 0, 0, bytes(8))] * before
    long = frame(77, 0, 1, bytes(MAX_FRAME_BYTES + 1))
    assert verdict([*frames, long[:9]], piece) == ErrorCode.FRAME_SIZE_ERROR
    assert verdict([*frames, long[:8]], piece) is None
    longest = frame(77, 0, 1, bytes(MAX_FRAME_BYTES))
    assert verdict([*frames, longest, *frames], piece) is None


@pytest.mark.parametrize("piece", [1, 11, 100_000])
def test_a_header_block_counts_with_its_continuations(piece: int) -> None:
    start = frame(HEAD, 0, 1, b"\x00\x01a\x7f\xf5\x02" + b"b" * 494)
    more = frame(MORE, 0, 1, bytes(250))
    assert verdict([start, more, more], piece) is None
    assert verdict([start, more, more, more], piece) == ErrorCode.ENHANCE_YOUR_CALM
    whole = frame(HEAD, 4, 1, b"\x83" * 600)
    assert verdict([whole, whole], piece) is None
