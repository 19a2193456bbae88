"""A daemon of a few lines, reached over the memory transport."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import trio
from grpclib import GRPCError

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamBase,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    CheckPodIpRequest,
    CheckPodIpResponse,
    DeallocatePodIpRequest,
    DeallocatePodIpResponse,
    PodIp,
)
from metis.api.metis.v1 import (
    CollectGarbageRequest,
    CollectGarbageResponse,
    FamilyCapacity,
    GetCapacityRequest,
    GetCapacityResponse,
    NodeBase,
    Released,
)
from metis.cni.client import OpenChannel
from metis.health import HealthService
from metis.model import CIDRBlock
from metis.rpc.channel import Channel
from metis.rpc.server import serve


class FakeIpam(AdaptiveIpamBase):
    """Gives everybody the same addresses and remembers what it was asked.

    Attributes:
      asked: every message in order.
      answer: what an allocation answers with; None makes it from the request.
      held: what a check answers with.
      failure: raised by every call, once set.
      hangs: whether calls never end.
      original: whether it knows nothing of what the original does not know.
    """

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answer: AllocatePodIpResponse | None = None
        self.held: list[PodIp] = []
        self.failure: GRPCError | None = None
        self.hangs = False
        self.original = False

    async def allocate_pod_ip(
        self, message: AllocatePodIpRequest
    ) -> AllocatePodIpResponse:
        await self._ask(message)
        if self.answer is not None:
            return self.answer
        response = AllocatePodIpResponse()
        if message.ipv4_config:
            response.ipv4 = PodIp(ip_address="10.240.0.2", cidr="10.240.0.0/22")
        if message.ipv6_config:
            response.ipv6 = PodIp(ip_address="fd00:10::2", cidr="fd00:10::/64")
        if not self.original:
            response.allocation_id = f"a{len(self.asked)}"
            for one in message.sets:
                block = CIDRBlock.parse(one.alternatives[0].subnet)
                address = one.requested_ip or block.address_at(2 % block.size)
                gateway = one.alternatives[0].gateway or block.gateway
                response.ips.append(
                    PodIp(ip_address=address, cidr=block.cidr, gateway=gateway)
                )
        return response

    async def deallocate_pod_ip(
        self, message: DeallocatePodIpRequest
    ) -> DeallocatePodIpResponse:
        await self._ask(message)
        return DeallocatePodIpResponse()

    async def check_pod_ip(self, message: CheckPodIpRequest) -> CheckPodIpResponse:
        await self._ask(message)
        return CheckPodIpResponse(held=self.held)

    async def _ask(self, message: Any) -> None:
        self.asked.append(message)
        if self.hangs:
            await trio.sleep_forever()
        if self.failure is not None:
            raise self.failure


class FakeNode(NodeBase):
    """Says of a network what it was told to say.

    Attributes:
      asked: every message in order.
      released: what a collection answers with.
      capacity: what is answered about the families.
      failure: raised by every call, once set.
      hangs: whether calls never end.
    """

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.released: list[Released] = []
        self.capacity: list[FamilyCapacity] = []
        self.failure: GRPCError | None = None
        self.hangs = False

    async def collect_garbage(
        self, message: CollectGarbageRequest
    ) -> CollectGarbageResponse:
        await self._ask(message)
        return CollectGarbageResponse(released=self.released)

    async def get_capacity(self, message: GetCapacityRequest) -> GetCapacityResponse:
        await self._ask(message)
        return GetCapacityResponse(families=self.capacity)

    async def _ask(self, message: Any) -> None:
        self.asked.append(message)
        if self.hangs:
            await trio.sleep_forever()
        if self.failure is not None:
            raise self.failure


def reach(
    ipam: FakeIpam,
    health: HealthService | None = None,
    node: FakeNode | None = None,
) -> OpenChannel:
    """Channels to a fake, which serves for as long as each one is open.

    So it works under a `trio.run` of the plugin's own, too. Without a node it is
    as the original is there: it does not have that service.
    """
    services = [ipam, health or HealthService([]), *([node] if node else [])]

    @asynccontextmanager
    async def open_served() -> AsyncIterator[Channel]:
        transport = metis.MemoryTransport()
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, services, transport)
            async with metis.open_channel(transport) as channel:
                yield channel
            nursery.cancel_scope.cancel()

    def open_channel(
        _path: str, _patience: float
    ) -> AbstractAsyncContextManager[Channel]:
        return open_served()

    return open_channel


class Unreachable:
    """A place where nobody listens for a number of tries.

    Attributes:
      tries: when it was tried, in Trio's time.
    """

    def __init__(self, failures: int | None = None, then: OpenChannel | None = None):
        self.tries: list[float] = []
        self._failures = failures
        self._then = then

    def __call__(
        self, path: str, patience: float
    ) -> AbstractAsyncContextManager[Channel]:
        return self._open(path, patience)

    @asynccontextmanager
    async def _open(self, path: str, patience: float) -> AsyncIterator[Channel]:
        self.tries.append(trio.current_time())
        if self._failures is None or len(self.tries) <= self._failures:
            raise metis.TransportError(f"nobody listens at {path}")
        assert self._then is not None
        async with self._then(path, patience) as channel:
            yield channel
