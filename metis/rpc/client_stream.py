"""One call on the client: what a generated stub gets from `Channel.request`.

The counterpart of grpclib's client stream, which is bound to asyncio: the same
methods and attributes, on Trio, in the task of the caller. Every failure is a
`GRPCError`. The deadline holds inside the methods; no cancel scope stays open
between them, so a stream may live in an async generator that is dropped.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeAlias

import trio
from grpclib.const import Cardinality, Status
from grpclib.encoding.base import GRPC_CONTENT_TYPE
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.metadata import decode_bin_value, decode_grpc_message, encode_metadata
from grpclib.stream import StreamIterator, send_message

from metis.rpc.codec import DetailsCodec, MessageCodec
from metis.rpc.headers import AnyHeaders, Headers, metadata_of, text_of
from metis.rpc.http2 import ErrorCode
from metis.rpc.stream import CallStream

MetadataLike: TypeAlias = (
    Mapping[str, str | bytes] | Collection[tuple[str, str | bytes]]
)

OpenCall: TypeAlias = Callable[[Callable[[], AnyHeaders], bool], Awaitable[CallStream]]
"""Opens a stream: takes what makes the headers, and whether they are all."""

AUTHORITY = "localhost"
"""What our requests call the server; some refuse an empty name or a path."""

USER_AGENT = "grpc-python-metis"

MAX_TIMEOUT_SECONDS = 99_999_999
"""Largest number that fits a `grpc-timeout` header, 8 digits; some three years."""

HTTP_STATUS = {
    b"400": Status.INTERNAL,
    b"401": Status.UNAUTHENTICATED,
    b"403": Status.PERMISSION_DENIED,
    b"404": Status.UNIMPLEMENTED,
    b"429": Status.UNAVAILABLE,
    b"502": Status.UNAVAILABLE,
    b"503": Status.UNAVAILABLE,
    b"504": Status.UNAVAILABLE,
}
"""gRPC status of a response without one; UNKNOWN for the rest. From the gRPC
document "HTTP to gRPC Status Code Mapping"."""

_CODEC = MessageCodec()
_DETAILS_CODEC = DetailsCodec()


def encode_timeout(seconds: float) -> str:
    """A duration as `grpc-timeout` has it: at most 8 digits and a unit."""
    if seconds < 100:
        return f"{max(0, int(seconds * 1_000_000))}u"
    if seconds < 100_000:
        return f"{int(seconds * 1000)}m"
    return f"{int(min(seconds, MAX_TIMEOUT_SECONDS))}S"


class ClientStream(StreamIterator[Any]):
    """A call, used as `async with channel.request(...) as stream`.

    Leaving the block normally waits for the status of the call, and raises it
    when it is not OK; a stream of responses that was left before its end is
    cancelled instead, as is any call left by an exception.

    Attributes:
      initial_metadata: from the response's headers, once received.
      trailing_metadata: from its trailers, once received.
    """

    def __init__(
        self,
        open_call: OpenCall,
        method_name: str,
        cardinality: Cardinality,
        send_type: type[Any],
        recv_type: type[Any],
        *,
        expires: float,
        metadata: MetadataLike | None,
    ) -> None:
        self.initial_metadata: Any = None
        self.trailing_metadata: Any = None
        self._open_call = open_call
        self._method_name = method_name
        self._cardinality = cardinality
        self._send_type = send_type
        self._recv_type = recv_type
        self._expires = expires
        self._metadata = encode_metadata(metadata) if metadata else []
        self._call: CallStream | None = None
        self._sent = False
        self._ended = False
        self._received = False
        self._cancelled = False

    # sending

    async def send_request(self, *, end: bool = False) -> None:
        """Open the call; `send_message` does it unasked.

        Args:
          end: there will be no message.

        Raises:
          GRPCError: UNAVAILABLE, there is no connection; DEADLINE_EXCEEDED.
        """
        if self._call is not None:
            raise ProtocolError("the request was sent already")
        with self._until_deadline():
            self._call = await self._open_call(self._headers, end)
        self._ended = end

    def _headers(self) -> AnyHeaders:
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", self._method_name),
            (":authority", AUTHORITY),
            ("te", "trailers"),
            ("content-type", GRPC_CONTENT_TYPE),
            ("user-agent", USER_AGENT),
        ]
        if self._expires != math.inf:
            left = self._expires - trio.current_time()
            headers.append(("grpc-timeout", encode_timeout(left)))
        headers += self._metadata
        return headers

    async def send_message(self, message: Any, *, end: bool = False) -> None:
        """Send a message.

        Args:
          message: of the method's request type.
          end: it is the last; always so for methods that take one.

        Raises:
          GRPCError: as `send_request`; RESOURCE_EXHAUSTED, it is too large; or
            the status with which the server ended the call meanwhile.
        """
        if self._call is None:
            await self.send_request()
        if self._ended:
            raise ProtocolError("the request has ended: no message can follow")
        end = end or not self._cardinality.client_streaming
        with self._until_deadline(), self._status_of_a_closed_call() as call:
            await send_message(
                call,  # type: ignore[arg-type]  # ours in place of grpclib's
                _CODEC,
                message,
                self._send_type,
                end=end,
            )
        self._ended = end

    async def end(self) -> None:
        """Say that there are no more messages.

        Raises:
          GRPCError: the status with which the server ended the call meanwhile.
        """
        if self._ended:
            raise ProtocolError("the request has ended already")
        with self._until_deadline(), self._status_of_a_closed_call() as call:
            await call.end()
        self._ended = True

    # receiving

    async def recv_initial_metadata(self) -> None:
        """Wait for the response's headers; `recv_message` does it unasked.

        Raises:
          GRPCError: the call failed before any message.
        """
        call = self._opened()
        with self._until_deadline():
            while call.headers is None:
                if call.failure is not None:
                    raise call.failure
                await call.news()
        fields = dict(call.headers)
        if fields.get(b":status") != b"200" and b"grpc-status" not in fields:
            code = fields.get(b":status", b"")
            raise GRPCError(
                HTTP_STATUS.get(code, Status.UNKNOWN),
                f"the server answered with HTTP status {text_of(code)}",
            )
        content_type = text_of(fields.get(b"content-type", b""))
        if b"grpc-status" not in fields and not content_type.startswith(
            GRPC_CONTENT_TYPE
        ):
            raise GRPCError(
                Status.UNKNOWN, f"the server answered with content {content_type!r}"
            )
        if call.trailers is call.headers:
            self.initial_metadata = metadata_of(())
            self._take_status(call.headers)
        else:
            self.initial_metadata = _metadata(call.headers)

    async def recv_message(self) -> Any:
        """The next response message; None when there are no more.

        Raises:
          GRPCError: the call failed, or the message is too large or broken.
        """
        if self.initial_metadata is None:
            await self.recv_initial_metadata()
        try:
            with self._until_deadline():
                data = await self._opened().receive_message()
        except EOFError as exc:
            # a server that broke off, at its stop or a deadline, says so
            trailers = self._opened().trailers
            error = None if trailers is None else status_error(dict(trailers))
            raise error or GRPCError(Status.INTERNAL, str(exc)) from exc
        if data is None:
            return None
        self._received = True
        try:
            return _CODEC.decode(data, self._recv_type)
        except GRPCError as exc:
            # the server's fault here, not the caller's
            raise GRPCError(Status.INTERNAL, exc.message) from exc

    async def recv_trailing_metadata(self) -> None:
        """Wait for the status of the call; leaving the block does it unasked.

        Raises:
          GRPCError: the status is not OK, or there is none.
        """
        call = self._opened()
        if not self._ended:
            raise ProtocolError("the request was not ended: call end() first")
        with self._until_deadline():
            only_one = await call.receive_end()
        if not only_one:
            raise GRPCError(
                Status.UNIMPLEMENTED,
                f"{self._method_name} gives one message: the server sent more",
            )
        if self.trailing_metadata is None:
            self._take_status(call.trailers or ())

    def _take_status(self, trailers: Headers) -> None:
        self.trailing_metadata = _metadata(trailers)
        error = status_error(dict(trailers))
        if error is not None:
            raise error

    # ending

    async def cancel(self) -> None:
        """Give the call up; the server is told."""
        self._opened().reset_nowait(ErrorCode.CANCEL)
        self._cancelled = True

    async def __aenter__(self) -> ClientStream:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        call = self._call
        if call is None:
            return
        try:
            if exc is None and not self._cancelled:
                await self._finish(call)
        finally:
            call.connection.release(call, ErrorCode.CANCEL)

    async def _finish(self, call: CallStream) -> None:
        if not (self._ended or self._cardinality.server_streaming or call.ended):
            raise ProtocolError("the request was not ended: call end() first")
        if self.initial_metadata is None:
            await self.recv_initial_metadata()
        if self._cardinality.server_streaming:
            if call.trailers is None:
                return
        elif self.trailing_metadata is None:
            await self.recv_trailing_metadata()
        if self.trailing_metadata is None:
            self._take_status(call.trailers or ())
        if not (self._received or self._cardinality.server_streaming):
            raise GRPCError(
                Status.UNIMPLEMENTED,
                f"{self._method_name} gives one message: the server sent none",
            )

    # what all of them need

    def _opened(self) -> CallStream:
        if self._call is None:
            raise ProtocolError("the request was not sent yet")
        return self._call

    @contextlib.contextmanager
    def _until_deadline(self) -> Iterator[None]:
        with trio.CancelScope(deadline=self._expires) as scope:
            yield
        if scope.cancelled_caught:
            raise GRPCError(
                Status.DEADLINE_EXCEEDED,
                f"no answer to {self._method_name} within its deadline",
            )

    @contextlib.contextmanager
    def _status_of_a_closed_call(self) -> Iterator[CallStream]:
        """Raise the server's status where our message came too late."""
        call = self._opened()
        try:
            yield call
        except StreamTerminatedError as exc:
            error = call.failure
            if call.trailers is not None:
                error = status_error(dict(call.trailers))
            raise error or GRPCError(
                Status.UNAVAILABLE, f"the call ended before its request: {exc}"
            ) from exc


def status_error(fields: Mapping[bytes, bytes]) -> GRPCError | None:
    """The error that trailers speak of; None when the call went well."""
    code = fields.get(b"grpc-status")
    if code is None:
        return GRPCError(Status.UNKNOWN, "the server ended the call without a status")
    try:
        status = Status(int(code))
    except ValueError:
        return GRPCError(
            Status.UNKNOWN, f"the server sent the unknown status {text_of(code)!r}"
        )
    if status is Status.OK:
        return None
    message = None
    if b"grpc-message" in fields:
        message = decode_grpc_message(fields[b"grpc-message"].decode(errors="replace"))
    details = None
    packed = fields.get(b"grpc-status-details-bin")
    if packed is not None:
        with contextlib.suppress(ValueError):  # not base64: the status stands alone
            details = _DETAILS_CODEC.decode(status, message, decode_bin_value(packed))
    return GRPCError(status, message, details)


def _metadata(headers: Headers) -> Any:
    try:
        return metadata_of(headers)
    except ValueError as exc:
        raise GRPCError(
            Status.INTERNAL,
            f"the server sent binary metadata that is not base64: {exc}",
        ) from exc
