"""`metis.rpc.codec`: messages, their prefix, and error details."""

from __future__ import annotations

import betterproto2
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st

from metis.api.adaptiveipam.v1 import AllocatePodIpRequest, PodIp
from metis.api.google.rpc import Any, ErrorInfo
from metis.rpc.codec import DetailsCodec, MessageBuffer, MessageCodec, frame, type_name

CODEC = MessageCodec()
DETAILS = DetailsCodec()


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 50))
def test_messages_come_out_as_they_went_in_whatever_the_pieces(
    messages: list[bytes], piece: int
) -> None:
    buffer = MessageBuffer(limit=300)
    body = b"".join(map(frame, messages))
    out = []
    for start in range(0, len(body), piece):
        buffer.feed(body[start : start + piece])
        while (message := buffer.next_message()) is not None:
            out.append(message)
    assert out == messages
    assert len(buffer) == 0


def test_a_message_too_large_is_refused_by_its_prefix_alone() -> None:
    buffer = MessageBuffer(limit=10)
    buffer.feed(frame(b"x" * 11)[:5])
    with pytest.raises(GRPCError, match="11 bytes: at most 10") as caught:
        buffer.next_message()
    assert caught.value.status is Status.RESOURCE_EXHAUSTED


def test_a_message_of_exactly_the_limit_is_taken() -> None:
    buffer = MessageBuffer(limit=10)
    buffer.feed(frame(b"x" * 10))
    assert buffer.next_message() == b"x" * 10


def test_a_compressed_message_is_not_implemented() -> None:
    buffer = MessageBuffer(limit=10)
    buffer.feed(b"\1\0\0\0\0")
    with pytest.raises(GRPCError, match="uncompressed") as caught:
        buffer.next_message()
    assert caught.value.status is Status.UNIMPLEMENTED


def test_a_message_survives_the_codec() -> None:
    message = PodIp(ip_address="10.0.0.2", cidr="10.0.0.0/24")
    assert CODEC.decode(CODEC.encode(message, PodIp), PodIp) == message


def test_a_message_of_another_type_is_a_type_error_that_names_both() -> None:
    with pytest.raises(TypeError, match=r"adaptiveipam.v1.PodIP.*ErrorInfo"):
        CODEC.encode(ErrorInfo(), PodIp)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x0a\x02\xff\xfe", "invalid UTF-8"),
        (b"\x0a\x05abc", "cannot be decoded: .+"),
        (b"\xff", "cannot be decoded: .+"),
        (b"\x12\x03\x0a\x01\xff", "invalid UTF-8"),
    ],
)
def test_undecodable_bytes_name_the_message_and_the_problem(
    data: bytes, problem: str
) -> None:
    with pytest.raises(GRPCError, match=problem) as caught:
        CODEC.decode(data, AllocatePodIpRequest)
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert caught.value.message is not None
    assert "adaptiveipam.v1.AllocatePodIPRequest" in caught.value.message


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_an_invalid_argument(data: bytes) -> None:
    status = None
    try:
        CODEC.decode(data, AllocatePodIpRequest)
    except GRPCError as exc:
        status = exc.status
    assert status in (None, Status.INVALID_ARGUMENT)


def test_a_type_has_its_full_protobuf_name() -> None:
    assert type_name(PodIp) == "adaptiveipam.v1.PodIP"
    assert type_name(betterproto2.Message) == "Message"


def test_details_are_what_every_grpc_implementation_reads() -> None:
    info = ErrorInfo(reason="POOL_EXHAUSTED", domain="metis", metadata={"owned": "3"})
    data = DETAILS.encode(Status.RESOURCE_EXHAUSTED, "full", [info])
    status = status_pb2.Status.FromString(data)
    assert (status.code, status.message) == (8, "full")
    [detail] = status.details
    assert detail.type_url == "type.googleapis.com/google.rpc.ErrorInfo"
    unpacked = error_details_pb2.ErrorInfo()
    assert detail.Unpack(unpacked)
    assert unpacked.metadata == {"owned": "3"}
    assert DETAILS.decode(Status.RESOURCE_EXHAUSTED, "full", data) == [info]


def test_an_unknown_detail_stays_packed_and_garbage_is_no_detail() -> None:
    status = status_pb2.Status(code=5)
    status.details.add().Pack(error_details_pb2.DebugInfo(detail="x"))
    [detail] = DETAILS.decode(Status.NOT_FOUND, None, status.SerializeToString())
    assert isinstance(detail, Any)
    assert detail.type_url == "type.googleapis.com/google.rpc.DebugInfo"
    assert DETAILS.decode(Status.NOT_FOUND, None, b"\xff\xff") == []
