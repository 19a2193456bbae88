"""The verbs ADD, DEL, CHECK, GC and STATUS, over the daemon's generated stubs.

A verb gets a checked `Request`, asks the daemon, and either returns the
addresses that the call was about or raises the one `CNIError` that the runtime
is told.

May touch: /proc, to see whose namespace is whose. Standard output only through
the function that is passed in, the daemon only through its client.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import trio

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
    IpConfig,
    PodIp,
)
from metis.api.grpc.health.v1 import (
    HealthCheckRequest,
    HealthCheckResponseServingStatus,
    HealthStub,
)
from metis.cni.client import DaemonClient, OpenChannel, open_daemon
from metis.cni.protocol import (
    INTERNAL,
    INVALID_ENVIRONMENT,
    INVALID_NETNS,
    IO_FAILURE,
    NOT_ALLOCATED,
    NOT_AVAILABLE,
    OTHER_ADDRESS,
    CNIError,
    shown,
)
from metis.cni.result import result_text
from metis.cni.spec import Request
from metis.errors import InvalidRequest
from metis.model import Allocation, CIDRBlock, Family, Wanted

STATUS_TIMEOUT = 0.4
"""Seconds for STATUS, which runtimes poll: with the client's margin under one."""

CLEANUP_TIMEOUT = 2.0
"""Seconds to give back an address that nobody learned of."""

OWN_NETNS = "/proc/self/ns/net"


@dataclass(frozen=True, slots=True)
class Call:
    """A request, and the two ways out of the process.

    Attributes:
      request: what the runtime wants.
      emit: writes the result to standard output; raises OSError when it cannot.
      daemon: who knows about addresses.
    """

    request: Request
    emit: Callable[[str], None]
    daemon: DaemonClient


async def perform(
    request: Request,
    emit: Callable[[str], None],
    open_channel: OpenChannel = open_daemon,
) -> tuple[str, ...]:
    """Carry out a request.

    Returns:
      The addresses that were given (ADD) or found (CHECK), for the log.

    Raises:
      CNIError: what the runtime must be told.
    """
    return await VERBS[request.env.command](
        Call(request, emit, DaemonClient(request.socket_path, open_channel))
    )


async def add(call: Call) -> tuple[str, ...]:
    """Take an address of every family wanted and print the result.

    Section 2, "ADD". Whatever goes wrong after the daemon gave the addresses
    gives them back: an answer that the runtime never read would hold them until
    somebody reconciles.
    """
    request = call.request
    _refuse_own_netns(request)
    message = _allocate_request(request)
    response = await call.daemon.ask(
        lambda channel, timeout: AdaptiveIpamStub(channel).allocate_pod_ip(
            message, timeout=timeout
        )
    )
    try:
        allocations = _allocations(request.wanted, response)
        _emit(call, result_text(request, allocations))
    except BaseException:
        with trio.move_on_after(CLEANUP_TIMEOUT, shield=True):
            await _give_back(call)
        raise
    return tuple(f"{one.address}/{one.cidr.partition('/')[2]}" for one in allocations)


async def delete(call: Call) -> tuple[str, ...]:
    """Give back whatever the interface holds; nothing held is success.

    Section 2, "DEL": neither the namespace nor prevResult is needed.
    """
    try:
        await _deallocate(call)
    except CNIError as error:
        if error.code != NOT_ALLOCATED:
            raise
    return ()


async def check(call: Call) -> tuple[str, ...]:
    """Compare what the daemon holds for the interface with prevResult.

    Section 2, "CHECK". Addresses that a later plugin of the chain added are no
    error: only those that stand in the daemon's record are looked for, and only
    families that are configured can be missing from it.
    """
    request = call.request
    message = CheckPodIpRequest(
        network=request.network,
        interface_name=request.env.interface,
        container_id=request.env.container_id,
        pod_name=request.pod.name,
        pod_namespace=request.pod.namespace,
    )
    response = await call.daemon.ask(
        lambda channel, timeout: AdaptiveIpamStub(channel).check_pod_ip(
            message, timeout=timeout
        )
    )
    held = tuple(_canonical(entry) for entry in response.held)
    if held:  # the original does not say what is held
        _compare(request, held)
    return held


async def collect_garbage(call: Call) -> tuple[str, ...]:
    """Refuse GC: success would claim that something had been freed."""
    raise CNIError(
        INVALID_ENVIRONMENT,
        "CNI_COMMAND GC is not supported yet",
        f"this plugin answers VERSION, {', '.join(sorted(set(VERBS) - {'GC'}))}",
    )


async def status(call: Call) -> tuple[str, ...]:
    """Succeed in silence when an ADD could be served now (section 2, "STATUS")."""
    try:
        response = await call.daemon.ask(
            lambda channel, timeout: HealthStub(channel).check(
                HealthCheckRequest(), timeout=timeout
            ),
            STATUS_TIMEOUT,
        )
    except CNIError as error:
        raise CNIError(NOT_AVAILABLE, error.message, error.details) from error
    if response.status != HealthCheckResponseServingStatus.SERVING:
        raise CNIError(
            NOT_AVAILABLE,
            f"{call.daemon} is not serving",
            f"its health is {response.status!s}",
        )
    return ()


VERBS: Mapping[str, Callable[[Call], Awaitable[tuple[str, ...]]]] = {
    "ADD": add,
    "DEL": delete,
    "CHECK": check,
    "GC": collect_garbage,
    "STATUS": status,
}
"""The commands of `metis.cni.environment.REQUIRED`; VERSION asks no daemon."""


def _refuse_own_netns(request: Request) -> None:
    """Refuse to give the host's own namespace a pod's address.

    libcni checks this after the plugin has done its work, when the address is
    taken already. A path that cannot be looked at is no error, as there.
    """
    if request.env.netns_override:
        return
    try:
        theirs, ours = os.stat(request.env.netns), os.stat(OWN_NETNS)
    except (OSError, ValueError):
        return
    if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
        raise CNIError(
            INVALID_NETNS,
            "plugin's netns and netns from CNI_NETNS should not be the same",
            f"CNI_NETNS is {shown(request.env.netns)}; "
            "CNI_NETNS_OVERRIDE=1 lifts this check",
        )


def _allocate_request(request: Request) -> AllocatePodIpRequest:
    message = AllocatePodIpRequest(
        network=request.network,
        pod_name=request.pod.name,
        pod_namespace=request.pod.namespace,
        requested_ips=list(request.requested),
    )
    for wanted in request.wanted:
        config = IpConfig(
            interface_name=request.env.interface,
            container_id=request.env.container_id,
            initial_pod_cidr=wanted.block.cidr if wanted.block else "",
        )
        if wanted.family is Family.IPV4:
            message.ipv4_config = config
        else:
            message.ipv6_config = config
    return message


def _allocations(
    wanted: tuple[Wanted, ...], response: AllocatePodIpResponse
) -> list[Allocation]:
    """What the daemon gave, which must be one address a family wanted.

    Success without an address would start a pod that nobody can reach.
    """
    given = {Family.IPV4: response.ipv4, Family.IPV6: response.ipv6}
    allocations = []
    for one in wanted:
        entry = given[one.family]
        if entry is None:
            raise CNIError(INTERNAL, f"the daemon gave no {one.family} address")
        try:
            block = CIDRBlock.parse(entry.cidr, one.family)
        except InvalidRequest as error:
            raise CNIError(INTERNAL, f"the daemon's answer: {error}") from None
        if block.offset_of(entry.ip_address) is None:
            raise CNIError(
                INTERNAL,
                f"the daemon gave {shown(entry.ip_address)}, "
                f"which is no address of its block {block.cidr}",
            )
        allocations.append(Allocation(one.family, _canonical(entry), block.cidr))
    return allocations


def _emit(call: Call, text: str) -> None:
    try:
        call.emit(text)
    except OSError as error:
        raise CNIError(
            IO_FAILURE, f"the result cannot be written to stdout: {error}"
        ) from error


async def _deallocate(call: Call) -> None:
    request = call.request
    message = DeallocatePodIpRequest(
        network=request.network,
        interface_name=request.env.interface,
        container_id=request.env.container_id,
        pod_name=request.pod.name,
        pod_namespace=request.pod.namespace,
    )
    await call.daemon.ask(
        lambda channel, timeout: AdaptiveIpamStub(channel).deallocate_pod_ip(
            message, timeout=timeout
        )
    )


async def _give_back(call: Call) -> None:
    """Undo an ADD that fails anyway; its own error is the one to report."""
    try:
        await _deallocate(call)
    except CNIError:
        return  # the runtime's DEL, or reconciliation, tries again


def _compare(request: Request, held: tuple[str, ...]) -> None:
    missing = [address for address in held if address not in request.previous]
    if missing:
        raise CNIError(
            OTHER_ADDRESS,
            f"the daemon holds {', '.join(missing)} for this interface, "
            f"prevResult has {', '.join(request.previous) or 'no address'}",
        )
    for wanted in request.wanted:
        expected = _of_family(wanted.family, request.previous)
        if expected and not _of_family(wanted.family, held):
            raise CNIError(
                NOT_ALLOCATED,
                f"prevResult has {', '.join(expected)}, "
                f"the daemon holds no {wanted.family} address for this interface",
            )


def _of_family(family: Family, addresses: tuple[str, ...]) -> list[str]:
    return [one for one in addresses if (":" in one) is (family is Family.IPV6)]


def _canonical(entry: PodIp) -> str:
    """An address in the spelling in which addresses are compared."""
    try:
        return str(ipaddress.ip_address(entry.ip_address))
    except ValueError:
        return entry.ip_address
