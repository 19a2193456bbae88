"""`metis.rpc.http2`: what a peer cannot make us keep."""

from __future__ import annotations

import struct
from typing import Any

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metis.rpc.connection import Connection, ConnectionFailed
from metis.rpc.http2 import (
    MAX_FRAME_BYTES,
    ErrorCode,
    FrameGuard,
    PeerSettings,
    ResponseEncoder,
    SettingCode,
)
from tests.rpc.raw import EMPTY_SETTINGS, PREFACE, frame

HEADERS, SETTINGS, CONTINUATION = 1, 4, 9


def verdict(data: bytes, piece: int, preface: int = 0) -> int | None:
    guard = FrameGuard(preface, max_header_block=1000)
    for start in range(0, len(data), piece):
        code = guard.check(data[start : start + piece])
        if code is not None:
            return code
    return None


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 900)), max_size=8),
    st.integers(1, 2000),
    st.booleans(),
)
def test_frames_within_the_bounds_pass_whatever_the_pieces(
    frames: list[tuple[int, int]], piece: int, preface: bool
) -> None:
    data = PREFACE if preface else b""
    for kind, length in frames:
        kind = 0 if kind == CONTINUATION else kind
        data += frame(kind, 0, 1, bytes(length))
    assert verdict(data, piece, len(PREFACE) if preface else 0) is None


@pytest.mark.parametrize("piece", [1, 3, 7, 100_000])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_frame_too_long_is_known_by_its_header_alone(piece: int, before: int) -> None:
    data = frame(6, 0, 0, bytes(8)) * before
    long = frame(0, 0, 1, bytes(MAX_FRAME_BYTES + 1))
    assert verdict(data + long[:9], piece) == ErrorCode.FRAME_SIZE_ERROR
    assert verdict(data + long[:8], piece) is None
    longest = frame(0, 0, 1, bytes(MAX_FRAME_BYTES))
    assert verdict(data + longest + data, piece) is None


@pytest.mark.parametrize("piece", [1, 100_000])
def test_a_header_block_counts_with_its_continuations(piece: int) -> None:
    start = frame(HEADERS, 0, 1, bytes(500))
    more = frame(CONTINUATION, 0, 1, bytes(250))
    assert verdict(start + 2 * more, piece) is None
    assert verdict(start + 3 * more, piece) == ErrorCode.ENHANCE_YOUR_CALM
    assert verdict((start + 2 * more) * 3, piece) is None


def test_an_endless_frame_ends_the_connection_before_it_is_kept() -> None:
    server = Connection(client=False)
    server.receive(PREFACE + EMPTY_SETTINGS)
    server.data_to_send()
    with pytest.raises(ConnectionFailed, match="FRAME_SIZE_ERROR"):
        server.receive(b"\xff\xff\xff\0\0\0\0\0\1")
    assert server.data_to_send()[3] == 7  # a GOAWAY frame
    server.acknowledge(1, 100, ended=False)
    server.reset(1, ErrorCode.CANCEL)
    assert server.data_to_send() == b""


def test_settings_that_nobody_knows_are_not_kept() -> None:
    server = Connection(client=False)
    server.receive(PREFACE + EMPTY_SETTINGS)
    for first in range(0, 60_000, 2000):
        payload = b"".join(
            struct.pack(">HI", code, 1) for code in range(first + 100, first + 2100)
        )
        server.receive(frame(SETTINGS, 0, 0, payload))
    assert len(server._h2.remote_settings) < 10


def test_a_response_is_encoded_without_a_table_whatever_the_peer_allows() -> None:
    server = Connection(client=False)
    client = hpack.Decoder()
    client.max_allowed_table_size = 0
    encoder = server._h2.encoder
    for size in (2**32 - 1, 100, 0, 4096):
        server.receive(
            (PREFACE if size == 2**32 - 1 else b"")
            + frame(SETTINGS, 0, 0, struct.pack(">HI", 1, size))
        )
        assert encoder.header_table_size == 0
        for _ in range(2):
            headers = [(":status", "200"), ("grpc-status", "0"), ("x", "y" * 50)]
            decoded: Any = client.decode(encoder.encode(headers))
            assert list(decoded) == headers
    assert len(client.header_table.dynamic_entries) == 0


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from([":status", "content-type", "grpc-status", "x-other"]),
                st.text(st.characters(codec="ascii"), max_size=20),
            ),
            max_size=4,
        ),
        max_size=300,
    )
)
def test_what_a_server_encodes_is_what_a_client_decodes(
    blocks: list[list[tuple[str, str]]],
) -> None:
    encoder, decoder = ResponseEncoder(), hpack.Decoder()
    for block in blocks:
        decoded: Any = decoder.decode(encoder.encode(block))
        assert list(decoded) == block


def test_known_settings_are_kept() -> None:
    settings = PeerSettings(client=True)
    settings[SettingCode.MAX_CONCURRENT_STREAMS] = 5
    settings.acknowledge()
    assert settings.max_concurrent_streams == 5
