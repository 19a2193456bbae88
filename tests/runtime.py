"""A container runtime of a few lines: its CRI, over a transport."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio
from grpclib import GRPCError, Status

import metis
from metis.api.runtime.v1 import (
    ListPodSandboxRequest,
    ListPodSandboxResponse,
    PodSandbox,
    PodSandboxStatus,
    PodSandboxStatusRequest,
    PodSandboxStatusResponse,
    RuntimeServiceBase,
)
from metis.rpc.limits import MIB, Limits
from metis.rpc.server import serve
from metis.rpc.transport import Transport


class FakeRuntime(RuntimeServiceBase):
    """Has sandboxes, and lists them or something else.

    Attributes:
      sandboxes: container ids that there are.
      listed: what it lists; None for all that there are.
      failure: raised by every list, once set.
      hangs: whether lists never end.
      vague: ids about which it fails, asked by name.
      asked: ids that it was asked for by name, in order.
    """

    def __init__(self, *sandboxes: str) -> None:
        self.sandboxes = set(sandboxes)
        self.listed: list[str] | None = None
        self.failure: GRPCError | None = None
        self.hangs = False
        self.vague: set[str] = set()
        self.asked: list[str] = []

    async def list_pod_sandbox(
        self, message: ListPodSandboxRequest
    ) -> ListPodSandboxResponse:
        if self.failure is not None:
            raise self.failure
        if self.hangs:
            await trio.sleep_forever()
        ids = sorted(self.sandboxes) if self.listed is None else self.listed
        return ListPodSandboxResponse(items=[PodSandbox(id=one) for one in ids])

    async def pod_sandbox_status(
        self, message: PodSandboxStatusRequest
    ) -> PodSandboxStatusResponse:
        wanted = message.pod_sandbox_id
        self.asked.append(wanted)
        if wanted in self.vague:
            raise GRPCError(Status.INTERNAL, "its record cannot be read")
        if wanted not in self.sandboxes:
            raise GRPCError(Status.NOT_FOUND, f"there is no sandbox {wanted!r}")
        return PodSandboxStatusResponse(status=PodSandboxStatus(id=wanted))


@asynccontextmanager
async def running(runtime: RuntimeServiceBase) -> AsyncIterator[Transport]:
    """Serve a runtime, as real ones do with up to 16 MiB in a message."""
    transport = metis.MemoryTransport()
    limits = Limits(max_message_bytes=16 * MIB)
    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(serve, [runtime], transport, limits=limits, grace=0)
        )
        yield transport
        nursery.cancel_scope.cancel()
