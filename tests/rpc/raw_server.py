"""A server that is played by hand, to answer as no library would."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
import trio
import trio.testing
from grpclib.exceptions import GRPCError

from metis.api.adaptiveipam.v1 import AdaptiveIpamStub, AllocatePodIpResponse
from metis.rpc.channel import Channel, open_channel
from metis.rpc.transport import MemoryTransport
from tests.rpc.services import request

Script = Callable[["RawServer"], Awaitable[None]]

OK_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
OK_TRAILERS = [("grpc-status", "0")]


class RawServer:
    """The server's end of one connection, played by hand."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=False,
                header_encoding="utf-8",
                validate_outbound_headers=False,
            )
        )
        self.resets: list[tuple[int, int]] = []
        self.requests: list[tuple[int, dict[str, str]]] = []
        self.closed = False

    async def flush(self) -> None:
        await self.stream.send_all(self.h2.data_to_send())

    async def receive(self) -> None:
        data = await self.stream.receive_some()
        self.closed = not data
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                assert event.headers is not None
                headers = {str(name): str(value) for name, value in event.headers}
                self.requests.append((event.stream_id, headers))
            elif isinstance(event, h2.events.StreamReset):
                self.resets.append((event.stream_id, int(event.error_code)))

    async def next_request(self) -> int:
        while not self.requests:
            await self.receive()
        return self.requests.pop(0)[0]

    async def answer(
        self,
        headers: Sequence[tuple[str, str]] = OK_HEADERS,
        data: bytes | None = None,
        trailers: Sequence[tuple[str, str]] | None = OK_TRAILERS,
    ) -> None:
        """Answer the next request; without trailers the headers end the call."""
        call = await self.next_request()
        self.h2.send_headers(
            call, headers, end_stream=trailers is None and data is None
        )
        if data is not None:
            self.h2.send_data(call, data, end_stream=trailers is None)
        if trailers is not None:
            self.h2.send_headers(call, trailers, end_stream=True)
        await self.flush()


@asynccontextmanager
async def playing(*scripts: Script) -> AsyncIterator[Channel]:
    """A channel to a server that plays a script on each connection in turn."""
    transport = MemoryTransport()
    [listener] = await transport.listen()

    async def play() -> None:
        for script in scripts:
            async with await listener.accept() as stream:
                server = RawServer(stream)
                server.h2.initiate_connection()
                await server.flush()
                await script(server)

    async with (
        listener,
        trio.open_nursery() as nursery,
        open_channel(transport) as channel,
    ):
        nursery.start_soon(play)
        yield channel


async def allocate(channel: Channel, **options: Any) -> AllocatePodIpResponse:
    return await AdaptiveIpamStub(channel).allocate_pod_ip(request("pod"), **options)


async def failure(script: Script, **options: Any) -> GRPCError:
    """What a call fails with when its server plays this script."""
    async with playing(script) as channel:
        with pytest.raises(GRPCError) as caught:
            await allocate(channel, **options)
    return caught.value
