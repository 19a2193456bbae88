"""One call on the server: from the headers of a request to its status.

`run_call` is the checklist, each step with its exact answer. `Call` is the
stream that a generated handler gets: grpclib's own, over our `CallStream`.
Whatever a handler or a client does wrong ends in a status for this one call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import trio
from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import GRPC_CONTENT_TYPE
from grpclib.events import _DispatchServerEvents
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.metadata import Deadline, decode_timeout, encode_grpc_message
from grpclib.server import Stream

from metis.rpc.codec import DetailsCodec, MessageCodec, frame
from metis.rpc.headers import Headers, MalformedRequest, Request, metadata_of, text_of
from metis.rpc.http2 import ErrorCode, response_block
from metis.rpc.stream import CallStream

log = logging.getLogger("metis.rpc")

MAX_STATUS_MESSAGE_BYTES = 1024
"""Longest status message.

Percent-encoded it may be three times as long, and the details hold it again;
all of it has to stay within the 8 KiB of trailers that gRPC clients accept at
the least.
"""

MAX_TIMEOUT_DIGITS = 8
"""Longest number in a `grpc-timeout` header, by the gRPC protocol."""

CONTENT_TYPES = (GRPC_CONTENT_TYPE.encode(), GRPC_CONTENT_TYPE.encode() + b"+proto")

REMEMBERED_OPENINGS = 64
"""Requests whose headers are not read again. Those of one client differ by method
and timeout; at the longest that headers may be, it is a megabyte."""

_CODEC = MessageCodec()
_DETAILS_CODEC = DetailsCodec()
_DISPATCH = _DispatchServerEvents()

_HEAD = response_block(
    ((":status", "200"), ("content-type", f"{GRPC_CONTENT_TYPE}+proto"))
)
_OK = response_block((("grpc-status", "0"),))


class Call(Stream[Any, Any]):
    """grpclib's server stream, strict about what it gives to a handler.

    The one message of a response is kept until its handler has returned. Nearly
    always headers, message and status can then leave as one; and a handler that
    fails after all sends no half of a response.
    """

    _cardinality: Cardinality
    _stream: CallStream  # type: ignore[assignment]  # ours in place of grpclib's
    _reply: bytes | None = None

    async def recv_message(self) -> Any:
        """The next request message; None at the end of a stream of them.

        Raises:
          GRPCError: INVALID_ARGUMENT, it cannot be decoded; UNIMPLEMENTED, a
            unary method was sent no message or several, or a compressed one;
            RESOURCE_EXHAUSTED, it is too large.
        """
        try:
            data = await self._stream.receive_message()
        except EOFError as exc:
            raise GRPCError(Status.INVALID_ARGUMENT, str(exc)) from exc
        if not self._cardinality.client_streaming:
            if data is None:
                raise GRPCError(
                    Status.UNIMPLEMENTED,
                    f"{self._method_name} takes one message: none was sent",
                )
            if not await self._stream.receive_end():
                raise GRPCError(
                    Status.UNIMPLEMENTED,
                    f"{self._method_name} takes one message: more were sent",
                )
        if data is None:
            return None
        self._stream.connection.messages_received += 1
        return self._codec.decode(data, self._recv_type)

    async def send_message(self, message: Any) -> None:
        """Send a message; the only one of a unary response once its handler is done.

        Raises:
          GRPCError: RESOURCE_EXHAUSTED, it is too large.
        """
        if (
            self._cardinality.server_streaming
            or self._send_message_done
            or self._send_initial_metadata_done
        ):
            await super().send_message(message)
            return
        reply = frame(self._codec.encode(message, self._send_type))
        self._stream.check_sendable(reply)
        self._reply = reply
        self._send_message_done = True
        self._stream.connection.messages_sent += 1

    async def send_reply(self) -> None:
        """Send the message that was kept, if there is one.

        Raises:
          StreamTerminatedError: the client is gone.
        """
        reply, self._reply = self._reply, None
        if reply is None:
            return
        if not self._send_initial_metadata_done:
            if self._stream.reply_nowait(_HEAD, reply, _OK):
                self._send_trailing_metadata_done = True
                return
            await self.send_initial_metadata()
        await self._stream.send_data(reply)

    async def send_trailing_metadata(
        self,
        *,
        status: Status = Status.OK,
        status_message: str | None = None,
        status_details: Any = None,
        metadata: Any = None,
    ) -> None:
        """As grpclib's, after the message that was kept if all is well."""
        reply, self._reply = self._reply, None
        if reply is not None and status is Status.OK:
            if not self._send_initial_metadata_done:
                await self.send_initial_metadata()
            await self._stream.send_data(reply)
        await super().send_trailing_metadata(
            status=status,
            status_message=status_message,
            status_details=status_details,
            metadata=metadata,
        )

    async def finish(
        self, status: Status, message: str | None = None, details: Any = None
    ) -> None:
        """Send the status, unless one was sent or the client is gone."""
        if self._send_trailing_metadata_done or self._cancel_done:
            return
        if status is Status.OK and not (
            self._send_message_done or self._cardinality.server_streaming
        ):
            log.error("%s returned without a response", self._method_name)
            status, message = Status.INTERNAL, "the method gave no response"
        try:
            await self.send_trailing_metadata(
                status=status,
                status_message=message and sendable_text(message),
                status_details=details,
            )
        except StreamTerminatedError:
            pass
        except Exception:
            log.exception("%s: a status cannot be sent", self._method_name)
            with contextlib.suppress(StreamTerminatedError):
                await self.send_trailing_metadata(
                    status=Status.INTERNAL, status_message="the status cannot be sent"
                )


@dataclass(frozen=True, slots=True)
class Refusal(Exception):
    """Why a request reaches no handler.

    Attributes:
      http_status: 200 where gRPC has a status of its own for it.
      status: the gRPC status, or None where there is none to speak of.
      message: what is wrong and what would be right.
    """

    http_status: int
    status: Status | None
    message: str

    def headers(self) -> list[tuple[str, str]]:
        """The whole response."""
        headers = [(":status", str(self.http_status))]
        if self.http_status == 200:
            headers.append(("content-type", GRPC_CONTENT_TYPE))
        if self.status is not None:
            message = encode_grpc_message(sendable_text(self.message))
            headers += [
                ("grpc-status", str(self.status.value)),
                ("grpc-message", message),
                ("grpc-accept-encoding", "identity"),
            ]
        return headers


def find_method(
    request: Request, methods: Mapping[str, Handler]
) -> tuple[str, Handler]:
    """Which method a request asks for.

    Raises:
      Refusal: none, or it asks in a way that gRPC over HTTP/2 does not know.
    """
    fields = request.fields
    if fields[b":method"] != b"POST":
        raise Refusal(405, None, "gRPC requests are POST requests")
    content_type = fields.get(b"content-type")
    if content_type is None:
        raise Refusal(415, Status.UNKNOWN, "the content-type header is missing")
    if content_type not in CONTENT_TYPES:
        raise Refusal(
            415,
            Status.UNKNOWN,
            f"content-type {text_of(content_type)!r}: it must be {GRPC_CONTENT_TYPE}",
        )
    if fields.get(b"te") != b"trailers":
        raise Refusal(400, Status.UNKNOWN, 'the header "te: trailers" is missing')
    name = text_of(fields[b":path"])
    method = methods.get(name)
    if method is None:
        raise Refusal(200, Status.UNIMPLEMENTED, f"there is no method {name}")
    encoding = fields.get(b"grpc-encoding", b"identity")
    if encoding != b"identity":
        raise Refusal(
            200,
            Status.UNIMPLEMENTED,
            f"grpc-encoding {text_of(encoding)!r}: send messages uncompressed",
        )
    return name, method


def read_timeout(request: Request) -> float | None:
    """The seconds that the client gives the call; None when it waits for ever.

    Raises:
      Refusal: the header is malformed.
    """
    value = request.fields.get(b"grpc-timeout")
    if value is None:
        return None
    text = text_of(value)
    try:
        if len(text) > MAX_TIMEOUT_DIGITS + 1:
            raise ValueError(text)
        return decode_timeout(text)
    except ValueError:
        raise Refusal(
            200,
            Status.INVALID_ARGUMENT,
            f"grpc-timeout {text!r}: it must be at most {MAX_TIMEOUT_DIGITS} digits "
            "and one of the units H, M, S, m, u, n",
        ) from None


def read_metadata(request: Request) -> Any:
    """The client's own headers as grpclib's multi-dict.

    Raises:
      Refusal: a binary one is not base64.
    """
    try:
        return metadata_of(request.metadata)
    except ValueError as exc:
        raise Refusal(
            200, Status.INVALID_ARGUMENT, f"binary metadata must be base64: {exc}"
        ) from exc


class Opening(NamedTuple):
    """What the headers of a request ask for.

    Attributes:
      name: the method's path.
      method: its handler.
      timeout: seconds that the client gives the call; None when it waits for ever.
      metadata: the client's own headers.
      user_agent: what the client calls itself.
    """

    name: str
    method: Handler
    timeout: float | None
    metadata: Headers
    user_agent: str


Opener: TypeAlias = Callable[[Headers], Opening]
"""Reads the headers of a request; raises MalformedRequest or Refusal."""


def opener(methods: Mapping[str, Handler]) -> Opener:
    """What reads requests for these methods, and remembers what it has read.

    Args:
      methods: the handlers by path, "/package.Service/Method".
    """

    @functools.lru_cache(maxsize=REMEMBERED_OPENINGS)
    def opening(headers: tuple[tuple[bytes, bytes], ...]) -> Opening:
        request = Request.read(headers)
        name, method = find_method(request, methods)
        timeout = read_timeout(request)
        read_metadata(request)
        return Opening(
            name,
            method,
            timeout,
            request.metadata,
            text_of(request.fields.get(b"user-agent", b"")),
        )

    return lambda headers: opening(tuple(headers))


async def run_call(
    open_call: Opener,
    stream: CallStream,
    headers: Headers,
    scope: trio.CancelScope,
) -> None:
    """Answer one request, come what may.

    Args:
      open_call: reads its headers.
      stream: the call's stream.
      headers: of the request.
      scope: cancelled when the client or its connection is gone; gets the
        call's deadline.
    """
    try:
        name, method, timeout, metadata, user_agent = open_call(headers)
    except MalformedRequest as exc:
        log.info("a malformed request was reset: %s", exc)
        stream.reset_nowait(ErrorCode.PROTOCOL_ERROR)
        return
    except Refusal as refusal:
        await stream.send_headers(refusal.headers(), end_stream=True)
        return
    deadline = None
    if timeout is not None:
        deadline = Deadline.from_timeout(timeout)
        scope.relative_deadline = timeout
    call = Call(
        stream,  # type: ignore[arg-type]  # ours in place of grpclib's
        name,
        method.cardinality,
        method.request_type,
        method.reply_type,
        codec=_CODEC,
        status_details_codec=_DETAILS_CODEC,
        dispatch=_DISPATCH,
        deadline=deadline,
        user_agent=user_agent,
    )
    call.metadata = metadata_of(metadata)
    try:
        with scope:
            await method.func(call)
            await call.send_reply()
    except GRPCError as exc:
        await call.finish(exc.status, exc.message, exc.details)
    except Exception:
        if stream.failure is None:
            log.exception("%s failed", name)
        await call.finish(Status.INTERNAL, "internal error")
    except BaseException:
        await call.finish(Status.UNAVAILABLE, "the server is stopping")
        raise
    else:
        if not scope.cancelled_caught:
            await call.finish(Status.OK)
        elif stream.failure is None:
            await call.finish(
                Status.DEADLINE_EXCEEDED, f"the deadline of {timeout:g} s has passed"
            )


def sendable_text(message: str) -> str:
    """The message as trailers can carry it: valid UTF-8 of bounded length."""
    data = message.encode(errors="replace")[:MAX_STATUS_MESSAGE_BYTES]
    return data.decode(errors="ignore")
