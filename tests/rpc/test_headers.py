"""`metis.rpc.headers`: what of a request is read, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metis.rpc.headers import MalformedRequest, Request, metadata_of

GOOD = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a/b"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"grpc-timeout", b"1S"),
]


def test_fields_and_metadata_are_told_apart() -> None:
    request = Request.read([*GOOD, (b"x-key", b"1"), (b"x-key", b"2")])
    assert request.fields == dict(GOOD)
    assert request.metadata == [(b"x-key", b"1"), (b"x-key", b"2")]


@pytest.mark.parametrize(
    "headers",
    [
        [header for header in GOOD if header[0] != b":authority"],
        [(n, b"" if n == b":authority" else v) for n, v in GOOD],
        [header for header in GOOD if header[0] != b":scheme"],
    ],
)
def test_authority_and_scheme_may_be_absent_or_empty(
    headers: list[tuple[bytes, bytes]],
) -> None:
    assert Request.read(headers).fields[b":path"] == b"/a/b"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([h for h in GOOD if h[0] != b":path"], "required"),
        ([h for h in GOOD if h[0] != b":method"], "required"),
        ([(n, b"" if n == b":path" else v) for n, v in GOOD], "required"),
        ([], "required"),
        ([(b":path", b"/twice"), *GOOD], ":path"),
        ([*GOOD, (b":late", b"x")], ":late"),
        ([(b":status", b"200"), *GOOD], ":status"),
        ([GOOD[4], *GOOD[:4]], ":method"),
        ([*GOOD, (b"Upper", b"x")], "Upper"),
        ([*GOOD, (b"", b"x")], "header b''"),
        ([*GOOD, (b"connection", b"close")], "connection"),
        ([*GOOD, (b"transfer-encoding", b"chunked")], "transfer-encoding"),
        ([*GOOD, (b"x", b"a\r\nb")], "control character"),
        ([*GOOD, (b"x", b"a\0b")], "control character"),
    ],
)
def test_a_malformed_request_is_named(
    headers: list[tuple[bytes, bytes]], reason: str
) -> None:
    with pytest.raises(MalformedRequest, match=reason):
        Request.read(headers)


def test_metadata_is_decoded_as_grpc_has_it() -> None:
    metadata = metadata_of(
        [(b"x-text", b"a"), (b"x-text", b"b"), (b"x-bin", b"AAH/"), (b"x-bin", b"AA")]
    )
    assert metadata.getall("x-text") == ["a", "b"]
    assert metadata.getall("x-bin") == [b"\0\1\xff", b"\0"]


@pytest.mark.parametrize("value", [b"A", b"\xff\xff"])
def test_broken_binary_metadata_is_a_value_error(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of several kinds, each clear
        metadata_of([(b"x-bin", value)])


@given(st.lists(st.tuples(st.binary(max_size=8), st.binary(max_size=8)), max_size=6))
def test_any_headers_are_read_or_refused(headers: list[tuple[bytes, bytes]]) -> None:
    try:
        request = Request.read([*GOOD, *headers])
    except MalformedRequest:
        return
    assert len(request.fields) + len(request.metadata) <= len(GOOD) + len(headers)
