"""GC and STATUS: what is about a network of the node and not about one pod.

May touch the daemon, through its client. Both need `metis.v1.Node`, which an
original daemon does not serve: STATUS then makes do with its health, GC says
that nothing was freed.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from grpclib import GRPCError, Status

from metis.api.grpc.health.v1 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthCheckResponseServingStatus,
    HealthStub,
)
from metis.api.metis.v1 import (
    Attachment,
    CollectGarbageRequest,
    CollectGarbageResponse,
    FamilyCapacity,
    GetCapacityRequest,
    GetCapacityResponse,
    NodeStub,
)
from metis.cni.attachments import KEYS
from metis.cni.client import DaemonClient
from metis.cni.origin import Origin
from metis.cni.protocol import NOT_AVAILABLE, UNSUPPORTED_FIELD, CNIError
from metis.cni.spec import Request
from metis.rpc.channel import Channel

STATUS_TIMEOUT = 0.4
"""Seconds for STATUS, which runtimes poll: with the client's margin under one."""

T = TypeVar("T")


async def collect_garbage(
    request: Request, daemon: DaemonClient, origin: Origin
) -> tuple[str, ...]:
    """Have everything of the network released that is not to stay.

    Section 2, "GC". What was given to somebody since the call began stays, too:
    the runtime's list is older.

    Returns:
      The addresses that were released, for the log; none when the runtime sent
      no list, which is no reason to free anything.

    Raises:
      CNIError: code 2 when the daemon cannot collect, else the client's.
    """
    if request.attachments is None:
        return ()
    message = CollectGarbageRequest(
        network=request.network,
        valid_attachments=[
            Attachment(container_id=container, interface_name=interface)
            for container, interface in sorted(request.attachments)
        ],
        started_boottime_ms=origin.earliest_boottime_ms or origin.started_boottime_ms,
        boot_id=origin.boot_id,
    )
    response: CollectGarbageResponse | None = await daemon.ask(
        lambda channel, timeout: _unless_unimplemented(
            NodeStub(channel).collect_garbage(message, timeout=timeout)
        )
    )
    if response is None:
        raise CNIError(
            UNSUPPORTED_FIELD,
            f"{daemon} cannot collect garbage: {KEYS[0]}, which has "
            f"{len(request.attachments)} entries, was not looked at",
            "it is the original or an older one; nothing was freed",
        )
    return tuple(one.ip_address for one in response.released)


async def status(request: Request, daemon: DaemonClient) -> tuple[str, ...]:
    """Succeed in silence when an ADD could be served now (section 2, "STATUS").

    That every address is taken is no failure by itself: the node would become
    NotReady though DELs could free some, and the pod that mends it could not
    start. The configuration can have it otherwise, with `statusOnExhaustion`.

    Raises:
      CNIError: code 50.
    """
    try:
        health, capacity = await daemon.ask(
            lambda channel, timeout: _health_and_capacity(request, channel, timeout),
            STATUS_TIMEOUT,
        )
    except CNIError as error:
        raise CNIError(NOT_AVAILABLE, error.message, error.details) from error
    if health.status != HealthCheckResponseServingStatus.SERVING:
        raise CNIError(
            NOT_AVAILABLE,
            f"{daemon} is not serving",
            f"its health is {health.status!s}",
        )
    if request.status_on_exhaustion and capacity is not None:
        _refuse_exhaustion(request, capacity)
    return ()


async def _health_and_capacity(
    request: Request, channel: Channel, seconds: float
) -> tuple[HealthCheckResponse, GetCapacityResponse | None]:
    """Both answers, over one connection; no capacity from an original daemon."""
    health = await HealthStub(channel).check(HealthCheckRequest(), timeout=seconds)
    message = GetCapacityRequest(
        network=request.network,
        families=sorted({one.family.value for one in request.wanted}),
    )
    return health, await _unless_unimplemented(
        NodeStub(channel).get_capacity(message, timeout=seconds)
    )


async def _unless_unimplemented(answer: Awaitable[T]) -> T | None:
    """The answer, or None from a daemon that does not have the method."""
    try:
        return await answer
    except GRPCError as error:
        if error.status is Status.UNIMPLEMENTED:
            return None
        raise


def _refuse_exhaustion(request: Request, capacity: GetCapacityResponse) -> None:
    configured = {one.family.value for one in request.wanted if one.ranges}
    for one in capacity.families:
        if one.available or (_is_unknown(one) and one.family in configured):
            continue
        raise CNIError(
            NOT_AVAILABLE,
            f"no {one.family} address is free on network {request.network!r}: "
            f"{one.owned} owned, {one.cooling} cooling, {one.reserved} reserved",
            "statusOnExhaustion is true",
        )


def _is_unknown(one: FamilyCapacity) -> bool:
    """Whether the network has no block of a family yet: the first ADD makes it."""
    return one.owned + one.cooling + one.reserved == 0
