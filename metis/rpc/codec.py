"""Messages and error details to bytes and back: betterproto2 under grpclib.

Pure. `MessageCodec` and `DetailsCodec` are what grpclib's streams call;
`frame` and `MessageBuffer` are the five-byte prefix that gRPC puts before every
message. Faults of the peer come out as `GRPCError`, ready to be answered.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import betterproto2
from grpclib.const import Status
from grpclib.encoding.base import CodecBase, StatusDetailsCodecBase
from grpclib.exceptions import GRPCError

from metis.api.google.rpc import Any as PackedDetail
from metis.api.google.rpc import Status as PackedStatus
from metis.api.message_pool import default_message_pool
from metis.rpc.wire import decode, encode

PREFIX_BYTES = 5
"""One byte that says whether the message is compressed, four of length."""

_PREFIX = struct.Struct(">BI")


def type_name(message_type: type[betterproto2.Message]) -> str:
    """The full protobuf name of a message type, "google.rpc.Status"."""
    url = default_message_pool.type_to_url.get(message_type)
    return url.rpartition("/")[2] if url else message_type.__name__


def check_size(what: str, size: int, limit: int) -> None:
    """Refuse a message above the limit.

    Raises:
      GRPCError: RESOURCE_EXHAUSTED, naming both.
    """
    if size > limit:
        raise GRPCError(
            Status.RESOURCE_EXHAUSTED,
            f"{what} message has {size} bytes: at most {limit} are allowed",
        )


def frame(message: bytes) -> bytes:
    """A message with gRPC's prefix, uncompressed."""
    return _PREFIX.pack(0, len(message)) + message


class MessageBuffer:
    """The body of a stream as it comes in, cut into messages.

    Args:
      limit: largest message accepted, in bytes.
    """

    __slots__ = ("_data", "_limit")

    def __init__(self, limit: int) -> None:
        self._data = bytearray()
        self._limit = limit

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._data += data

    def next_message(self) -> bytes | None:
        """The next message, without its prefix; None when it is not whole yet.

        Raises:
          GRPCError: it is compressed (UNIMPLEMENTED) or larger than the limit
            (RESOURCE_EXHAUSTED); known from the prefix alone.
        """
        data = self._data
        if len(data) < PREFIX_BYTES:
            return None
        compressed, size = _PREFIX.unpack_from(data)
        if compressed:
            raise GRPCError(
                Status.UNIMPLEMENTED,
                "a compressed message was received: send messages uncompressed",
            )
        check_size("the received", size, self._limit)
        end = PREFIX_BYTES + size
        if len(data) < end:
            return None
        message = bytes(data[PREFIX_BYTES:end])
        del data[:end]
        return message


class MessageCodec(CodecBase):
    """betterproto2 messages as grpclib's streams want them."""

    __content_subtype__ = "proto"

    def encode(
        self, message: betterproto2.Message, message_type: type[betterproto2.Message]
    ) -> bytes:
        """The message as protobuf bytes.

        Raises:
          TypeError: it is not of the type that the method is declared with.
        """
        if not isinstance(message, message_type):
            raise TypeError(
                f"a {type_name(message_type)} is to be sent, not {message!r:.100}"
            )
        return encode(message)

    def decode(self, data: bytes, message_type: type[betterproto2.Message]) -> Any:
        """The message that the bytes hold.

        Raises:
          GRPCError: INVALID_ARGUMENT; they hold none.
        """
        try:
            return decode(data, message_type)
        except ValueError as exc:
            raise GRPCError(
                Status.INVALID_ARGUMENT,
                f"{type_name(message_type)} cannot be decoded: {_problem(exc)}",
            ) from exc


def _problem(exc: Exception) -> str:
    if isinstance(exc, UnicodeDecodeError):
        return f"invalid UTF-8 ({exc.reason} at byte {exc.start} of a string)"
    return str(exc) or type(exc).__name__


class DetailsCodec(StatusDetailsCodecBase):
    """Error details: a list of messages in a google.rpc.Status.

    The encoding of `grpc-status-details-bin` that all gRPC implementations
    share: each detail is a google.protobuf.Any with the URL of its type.
    """

    def encode(
        self,
        status: Status,
        message: str | None,
        details: Sequence[betterproto2.Message],
    ) -> bytes:
        """The google.rpc.Status as bytes.

        Raises:
          KeyError: a detail is not a message generated into `metis.api`.
        """
        packed = [
            PackedDetail(
                type_url=default_message_pool.type_to_url[type(detail)],
                value=encode(detail),
            )
            for detail in details
        ]
        return encode(
            PackedStatus(code=status.value, message=message or "", details=packed)
        )

    def decode(
        self, status: Status, message: str | None, data: bytes
    ) -> list[betterproto2.Message]:
        """The details that are known here; an unknown one stays packed.

        Nothing is raised for bytes that are no google.rpc.Status: the call has
        failed already, and its own status says more than this could.
        """
        try:
            packed = decode(data, PackedStatus)
            return [_unpack(detail) for detail in packed.details]
        except ValueError:
            return []


def _unpack(detail: PackedDetail) -> Any:
    message_type = default_message_pool.url_to_type.get(detail.type_url)
    return detail if message_type is None else decode(detail.value, message_type)
