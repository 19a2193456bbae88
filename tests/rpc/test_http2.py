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
    ErrorCode,
    PeerSettings,
    ResponseEncoder,
    SettingCode,
)
from tests.rpc.raw import EMPTY_SETTINGS, PREFACE, frame

HEADERS, SETTINGS, CONTINUATION = 1, 4, 9


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
