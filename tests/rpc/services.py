"""Services, servers and clients that the tests of `metis.rpc` share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from betterproto2.grpclib import ServiceBase
from grpclib.const import Cardinality, Handler
from grpclib.server import Stream

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamBase,
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    CheckPodIpRequest,
    CheckPodIpResponse,
    PodIp,
)
from metis.rpc.channel import Channel, open_channel
from metis.rpc.limits import DEFAULT_LIMITS, Limits
from metis.rpc.server import serve
from metis.rpc.transport import MemoryTransport, Transport

ALLOCATE = "/adaptiveipam.v1.AdaptiveIpam/AllocatePodIP"
CHAT = "/tests.Chat/Talk"
COLLECT = "/tests.Chat/Collect"

Allocate = Callable[[AllocatePodIpRequest], Awaitable[AllocatePodIpResponse]]


def answer(text: str) -> AllocatePodIpResponse:
    return AllocatePodIpResponse(ipv4=PodIp(ip_address=text))


def text_of(response: AllocatePodIpResponse) -> str:
    assert response.ipv4 is not None
    return response.ipv4.ip_address


class Ipam(AdaptiveIpamBase):
    """Echoes the pod name; or does what a test puts in its place."""

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate
        self.calls = 0

    async def allocate_pod_ip(
        self, message: AllocatePodIpRequest
    ) -> AllocatePodIpResponse:
        self.calls += 1
        if self._allocate is not None:
            return await self._allocate(message)
        return answer(message.pod_name)

    async def check_pod_ip(self, message: CheckPodIpRequest) -> CheckPodIpResponse:
        raise ZeroDivisionError("a secret of the implementation")


class Chat(ServiceBase):
    """Methods with streams of requests, which the project itself has none of."""

    def __init__(
        self, talk: Callable[[Stream[Any, Any]], Awaitable[None]] | None = None
    ) -> None:
        self._talk = talk or self.echo

    async def echo(self, stream: Stream[Any, Any]) -> None:
        async for message in stream:
            await stream.send_message(answer(message.pod_name))

    async def collect(self, stream: Stream[Any, Any]) -> None:
        names = [message.pod_name async for message in stream]
        await stream.send_message(answer(",".join(names)))

    def __mapping__(self) -> dict[str, Handler]:
        kinds = (AllocatePodIpRequest, AllocatePodIpResponse)
        return {
            CHAT: Handler(self._talk, Cardinality.STREAM_STREAM, *kinds),
            COLLECT: Handler(self.collect, Cardinality.STREAM_UNARY, *kinds),
        }


def request(name: str = "p", **fields: Any) -> AllocatePodIpRequest:
    return AllocatePodIpRequest(pod_name=name, **fields)


@asynccontextmanager
async def serving(
    *services: Any,
    transport: Transport | None = None,
    limits: Limits = DEFAULT_LIMITS,
    grace: float = 5.0,
) -> AsyncIterator[Transport]:
    """Serve until the block is left; yields the transport."""
    transport = transport or MemoryTransport()
    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(serve, services, transport, limits=limits, grace=grace)
        )
        yield transport
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def connected(
    *services: Any, limits: Limits = DEFAULT_LIMITS, client: Limits = DEFAULT_LIMITS
) -> AsyncIterator[Channel]:
    """A channel to a server with these services, in memory."""
    async with (
        serving(*services, limits=limits) as transport,
        open_channel(transport, limits=client) as channel,
    ):
        yield channel


@asynccontextmanager
async def ipam(
    allocate: Allocate | None = None, **settings: Any
) -> AsyncIterator[AdaptiveIpamStub]:
    """A stub of a server whose AllocatePodIP does what `allocate` does."""
    async with connected(Ipam(allocate), **settings) as channel:
        yield AdaptiveIpamStub(channel)


def chat(channel: Channel, method: str = CHAT, **options: Any) -> Any:
    """Open a call with a stream of requests."""
    cardinality = (
        Cardinality.STREAM_STREAM if method == CHAT else Cardinality.STREAM_UNARY
    )
    return channel.request(
        method, cardinality, AllocatePodIpRequest, AllocatePodIpResponse, **options
    )
