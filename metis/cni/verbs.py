"""The verbs ADD, DEL, CHECK, GC and STATUS, over the daemon's generated stubs.

A verb gets a checked `Request`, asks the daemon, and either returns the
addresses that the call was about or raises the one `CNIError` that the runtime
is told.

May touch: /proc, to see whose namespace is whose. Standard output only through
the function that is passed in, the daemon only through its client.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

import trio

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
)
from metis.cni import node, spool
from metis.cni.client import DaemonClient, OpenChannel, Unreachable, open_daemon
from metis.cni.messages import allocate_request, canonical, given_addresses
from metis.cni.origin import Origin
from metis.cni.protocol import (
    INVALID_NETNS,
    IO_FAILURE,
    NOT_ALLOCATED,
    OTHER_ADDRESS,
    TRY_AGAIN_LATER,
    CNIError,
    shown,
)
from metis.cni.resolver import read_resolv_conf
from metis.cni.result import result_text
from metis.cni.spec import Request
from metis.model import Family, Owner
from metis.rpc.channel import Channel

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
      origin: when the call began.
    """

    request: Request
    emit: Callable[[str], None]
    daemon: DaemonClient
    origin: Origin = field(default_factory=Origin)

    @property
    def owner(self) -> Owner:
        """Whose addresses the call is about, if it is about one interface."""
        env = self.request.env
        return Owner(self.request.network, env.container_id, env.interface)


OpenDirect = Callable[[Request], AbstractAsyncContextManager[Channel]]
"""From a request to a channel to its database, without a daemon."""


async def perform(
    request: Request,
    emit: Callable[[str], None],
    open_channel: OpenChannel = open_daemon,
    *,
    open_direct: OpenDirect | None = None,
    origin: Origin | None = None,
) -> tuple[str, ...]:
    """Carry out a request.

    Args:
      request: what the runtime wants.
      emit: writes the result to standard output.
      open_channel: how the daemon is reached.
      open_direct: what is done without it; None for nothing.
      origin: when the call began; without it, when the daemon hears of it.

    Returns:
      The addresses that were given (ADD), found (CHECK) or released (GC), for
      the log.

    Raises:
      CNIError: what the runtime must be told.
    """
    daemon = DaemonClient(
        request.socket_path,
        open_channel,
        request.db_path,
        None if open_direct is None else lambda: open_direct(request),
    )
    call = Call(request, emit, daemon, origin or Origin())
    if open_direct is not None and _has_kept_del(call):
        # The daemon may not have looked since. Whoever opens the database does.
        passed_over = "a DEL of this container waits to be applied to the database"
        call = replace(call, daemon=replace(daemon, passed_over=passed_over))
    return await VERBS[request.env.command](call)


async def add(call: Call) -> tuple[str, ...]:
    """Take an address of every family wanted and print the result.

    Section 2, "ADD". Whatever goes wrong after the daemon gave the addresses
    gives them back: an answer that the runtime never read would hold them until
    somebody reconciles.
    """
    request = call.request
    _refuse_own_netns(request)
    dns = read_resolv_conf(request.resolv_conf) if request.resolv_conf else request.dns
    message = allocate_request(request)
    message.started_boottime_ms = call.origin.started_boottime_ms
    message.boot_id = call.origin.boot_id
    response = await call.daemon.ask(
        lambda channel, timeout: AdaptiveIpamStub(channel).allocate_pod_ip(
            message, timeout=timeout
        )
    )
    try:
        addresses = given_addresses(request, response)
        _emit(call, result_text(request, addresses, dns))
    except BaseException:
        with trio.move_on_after(CLEANUP_TIMEOUT, shield=True):
            await _give_back(call, response.allocation_id)
        raise
    return tuple(map(str, addresses))


async def delete(call: Call) -> tuple[str, ...]:
    """Give back whatever the interface holds; nothing held is success.

    Section 2, "DEL": neither the namespace nor prevResult is needed, and one that
    nobody can carry out now is written down for whoever can.
    """
    try:
        await _deallocate(call)
    except Unreachable as error:
        _keep(call, error)
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
    held = tuple(canonical(entry) for entry in response.held)
    if held:  # the original does not say what is held
        _compare(request, held)
    return held


async def collect_garbage(call: Call) -> tuple[str, ...]:
    """Have what is not in the runtime's list released (section 2, "GC")."""
    return await node.collect_garbage(call.request, call.daemon, call.origin)


async def status(call: Call) -> tuple[str, ...]:
    """Succeed in silence when an ADD could be served now (section 2, "STATUS")."""
    return await node.status(call.request, call.daemon)


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


def _emit(call: Call, text: str) -> None:
    try:
        call.emit(text)
    except OSError as error:
        raise CNIError(
            IO_FAILURE, f"the result cannot be written to stdout: {error}"
        ) from error


async def _deallocate(call: Call, only_allocation_id: str = "") -> None:
    request = call.request
    message = DeallocatePodIpRequest(
        network=request.network,
        interface_name=request.env.interface,
        container_id=request.env.container_id,
        pod_name=request.pod.name,
        pod_namespace=request.pod.namespace,
        only_allocation_id=only_allocation_id,
    )
    await call.daemon.ask(
        lambda channel, timeout: AdaptiveIpamStub(channel).deallocate_pod_ip(
            message, timeout=timeout
        )
    )


async def _give_back(call: Call, allocation_id: str) -> None:
    """Undo an ADD that fails anyway; its own error is the one to report.

    The id keeps this from taking what the owner was given since, by another ADD
    that somebody reads the result of. An original daemon tells none.
    """
    try:
        await _deallocate(call, allocation_id)
    except CNIError:
        return  # the runtime's DEL, or reconciliation, tries again


def _has_kept_del(call: Call) -> bool:
    """Whether an earlier DEL of the interface was only written down so far."""
    if call.request.env.command in ("GC", "STATUS"):
        return False  # they are about no interface, and their variables unchecked
    return bool(spool.pending(call.request.db_path, call.owner))


def _keep(call: Call, error: Unreachable) -> None:
    """Write a DEL down, which counts as done then."""
    try:
        spool.keep(call.request.db_path, call.owner)
    except OSError as problem:
        raise CNIError(
            TRY_AGAIN_LATER, f"{error.message}; nor can the DEL be kept: {problem}"
        ) from error


def _compare(request: Request, held: tuple[str, ...]) -> None:
    missing = [address for address in held if address not in request.previous]
    if missing:
        raise CNIError(
            OTHER_ADDRESS,
            f"the daemon holds {', '.join(missing)} for this interface, "
            f"prevResult has {', '.join(request.previous) or 'no address'}",
        )
    for family in sorted({wanted.family for wanted in request.wanted}):
        expected = _of_family(family, request.previous)
        if expected and not _of_family(family, held):
            raise CNIError(
                NOT_ALLOCATED,
                f"prevResult has {', '.join(expected)}, "
                f"the daemon holds no {family} address for this interface",
            )


def _of_family(family: Family, addresses: tuple[str, ...]) -> list[str]:
    return [one for one in addresses if (":" in one) is (family is Family.IPV6)]
