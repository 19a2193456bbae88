"""A client that speaks HTTP/2 by hand, to send what no library would."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import trio

from metis.rpc.transport import Transport
from tests.rpc.services import ALLOCATE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"

Header = tuple[str, str] | tuple[bytes, bytes]

HEADERS: list[Header] = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", ALLOCATE),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    size = struct.pack(">I", len(payload))[1:]
    return size + struct.pack(">BBI", kind, flags, stream_id) + payload


def prefixed(message: bytes = b"", flag: int = 0) -> bytes:
    """One gRPC message with its prefix."""
    return struct.pack(">BI", flag, len(message)) + message


def replaced(name: str, *values: str) -> list[Header]:
    """The usual headers with other values of one; with none it is left out."""
    headers: list[Header] = []
    for header in HEADERS:
        headers += (
            [(name, value) for value in values] if header[0] == name else [header]
        )
    return headers


@dataclass
class Answer:
    """What came back on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> str | None:
        return self.headers.get("grpc-status")

    @property
    def message(self) -> str:
        return self.headers.get("grpc-message", "")


class RawClient:
    """h2 without any of its checks, over a byte stream."""

    def __init__(self, stream: trio.abc.Stream, window: int | None = None) -> None:
        self.stream = stream
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.answers: dict[int, Answer] = {}
        self.goaway: h2.events.ConnectionTerminated | None = None
        self.closed = False

    async def flush(self) -> None:
        await self.stream.send_all(self.h2.data_to_send())

    def open(
        self, headers: Sequence[Header] = HEADERS, data: bytes | None = None
    ) -> int:
        """Put a request into the output; without data it is not ended."""
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, headers)
        if data is not None:
            self.h2.send_data(stream_id, data, end_stream=True)
        self.answers[stream_id] = Answer()
        return stream_id

    async def ask(
        self, headers: Sequence[Header] = HEADERS, data: bytes = b"\0\0\0\0\0"
    ) -> Answer:
        """Send a whole request and wait for all of its answer."""
        stream_id = self.open(headers, data)
        await self.flush()
        return await self.answer(stream_id)

    async def answer(self, stream_id: int) -> Answer:
        """Wait until a stream has ended, one way or the other."""
        answer = self.answers[stream_id]
        while not (answer.ended or answer.reset is not None or self.closed):
            await self.receive()
        return answer

    async def receive(self) -> None:
        """Take one piece of what the server sends."""
        try:
            data = await self.stream.receive_some()
        except trio.BrokenResourceError:
            data = b""
        if not data:
            self.closed = True
            return
        for event in self.h2.receive_data(data):
            self._note(event)
        if not self.goaway:
            with contextlib.suppress(trio.BrokenResourceError):
                await self.flush()

    async def receive_until_closed(self) -> None:
        while not self.closed:
            await self.receive()

    def _note(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                assert event.headers is not None
                self.answers[event.stream_id].headers |= dict(event.headers)  # type: ignore[arg-type]  # header_encoding makes them text
            case h2.events.DataReceived():
                self.answers[event.stream_id].data += event.data
                self.h2.acknowledge_received_data(
                    event.flow_controlled_length, event.stream_id
                )
            case h2.events.StreamEnded():
                self.answers[event.stream_id].ended = True
            case h2.events.StreamReset():
                self.answers[event.stream_id].reset = int(event.error_code)
            case h2.events.ConnectionTerminated():
                self.goaway = event
            case _:
                pass


@asynccontextmanager
async def raw_client(transport: Transport) -> AsyncIterator[RawClient]:
    """A raw client that has sent its preface and SETTINGS."""
    async with await transport.connect() as stream:
        client = RawClient(stream)
        client.h2.initiate_connection()
        await client.flush()
        yield client
