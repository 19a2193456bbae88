"""The verbs ADD, DEL, CHECK, GC and STATUS, over the daemon's generated stubs.

A verb gets a checked `Request`, asks the daemon, and either returns the
addresses that the call was about or raises the one `CNIError` that the runtime
is told.

May touch: the file system, to see whose namespace is whose and for DELs that were
kept. Standard output only through the function that is passed in, the daemon only
through its client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import trio

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
)
from metis.cni import spool
from metis.cni.client import DaemonClient, OpenChannel, Unreachable, open_daemon
from metis.cni.messages import allocate_request, canonical, given_addresses
from metis.cni.origin import Origin
from metis.cni.protocol import (
    INVALID_NETNS,
    NOT_ALLOCATED,
    OTHER_ADDRESS,
    TRY_AGAIN_LATER,
    CNIError,
    shown,
    unread,
)
from metis.cni.relay import is_own_netns
from metis.cni.resolver import read_resolv_conf
from metis.cni.result import result_text
from metis.cni.spec import Request
from metis.model import Family, Owner
from metis.rpc.channel import Channel

CLEANUP_TIMEOUT = 2.0
"""Seconds to give back an address that nobody learned of."""


def _unnoted(_allocation_id: str) -> None:
    """Nobody but the verb itself wants to know."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request, and the two ways out of the process.

    Attributes:
      request: what the runtime wants.
      emit: writes the result to standard output; raises OSError when it cannot.
      daemon: who knows about addresses.
      origin: when the call began.
      note_allocation: told the id of what was given, before it is printed.
      own_netns: tells whether a path is the namespace of the plugin's process.
    """

    request: Request
    emit: Callable[[str], None]
    daemon: DaemonClient
    origin: Origin = field(default_factory=Origin)
    note_allocation: Callable[[str], None] = _unnoted
    own_netns: Callable[[str], bool] = is_own_netns


OpenDirect = Callable[[Request], AbstractAsyncContextManager[Channel]]
"""From a request to a channel to its database, without a daemon."""


async def perform(
    request: Request,
    emit: Callable[[str], None],
    open_channel: OpenChannel = open_daemon,
    *,
    open_direct: OpenDirect | None = None,
    passed_over: str = "",
    hands_over: bool = False,
    origin: Origin | None = None,
    own_netns: Callable[[str], bool] = is_own_netns,
    note_allocation: Callable[[str], None] = _unnoted,
) -> tuple[str, ...]:
    """Carry out a request.

    Args:
      request: what the runtime wants.
      emit: writes the result to standard output.
      open_channel: how the daemon is reached.
      open_direct: what is done without it; None for nothing.
      passed_over: why the daemon is not asked; empty to ask.
      hands_over: whether somebody else does without it.
      origin: when the call began; without it, when the daemon hears of it.
      own_netns: tells whether a path is the namespace of the plugin's process.
      note_allocation: told the id of what was given, before it is printed.

    Returns:
      The addresses that were given (ADD), found (CHECK) or released (GC), for
      the log.

    Raises:
      PassedOver: somebody else is to do without the daemon.
      CNIError: what the runtime must be told.
    """
    if open_direct is not None and has_kept_del(request):
        # The daemon may not have looked since. Whoever opens the database does.
        passed_over = "a DEL of this container waits to be applied to the database"
    daemon = _daemon(request, open_channel, open_direct, passed_over, hands_over)
    call = Call(request, emit, daemon, origin or Origin(), note_allocation, own_netns)
    return await VERBS[request.env.command](call)


async def undo(
    request: Request,
    allocation_id: str,
    open_channel: OpenChannel = open_daemon,
    *,
    open_direct: OpenDirect | None = None,
    passed_over: str = "",
    hands_over: bool = False,
) -> None:
    """Give back what an ADD got whose result nobody read, as far as that can be done.

    Args:
      request: what the runtime wanted.
      allocation_id: of what was given.
      open_channel: as in `perform`, as are the others.
      open_direct: likewise.
      passed_over: likewise.
      hands_over: likewise.

    Raises:
      PassedOver: somebody else is to do without the daemon.
    """
    daemon = _daemon(request, open_channel, open_direct, passed_over, hands_over)
    with trio.move_on_after(CLEANUP_TIMEOUT, shield=True):
        await _give_back(request, daemon, allocation_id)


def _daemon(
    request: Request,
    open_channel: OpenChannel,
    open_direct: OpenDirect | None,
    passed_over: str,
    hands_over: bool,
) -> DaemonClient:
    return DaemonClient(
        request.socket_path,
        open_channel,
        request.db_path,
        None if open_direct is None else lambda: open_direct(request),
        passed_over,
        hands_over,
    )


async def add(call: Call) -> tuple[str, ...]:
    """Take an address of every family wanted and print the result.

    Section 2, "ADD". Whatever goes wrong after the daemon gave the addresses
    gives them back: an answer that the runtime never read would hold them until
    somebody reconciles.
    """
    request = call.request
    _refuse_own_netns(request, call.own_netns)
    dns = read_resolv_conf(request.resolv_conf) if request.resolv_conf else request.dns
    message = allocate_request(request)
    message.started_boottime_ms = call.origin.started_boottime_ms
    message.boot_id = call.origin.boot_id
    response = await call.daemon.ask(
        lambda channel, timeout: AdaptiveIpamStub(channel).allocate_pod_ip(
            message, timeout=timeout
        )
    )
    call.note_allocation(response.allocation_id)
    try:
        addresses = given_addresses(request, response)
        _emit(call, result_text(request, addresses, dns))
    except BaseException:
        with trio.move_on_after(CLEANUP_TIMEOUT, shield=True):
            await _give_back(request, call.daemon, response.allocation_id)
        raise
    return tuple(map(str, addresses))


async def delete(call: Call) -> tuple[str, ...]:
    """Give back whatever the interface holds; nothing held is success.

    Section 2, "DEL": neither the namespace nor prevResult is needed, and one that
    nobody can carry out now is written down for whoever can.
    """
    try:
        await _deallocate(call.request, call.daemon)
    except Unreachable as error:
        _keep(call.request, error)
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
    # Here, as below: its messages are none that a pod's ADD or DEL needs.
    from metis.cni import node

    return await node.collect_garbage(call.request, call.daemon, call.origin)


async def status(call: Call) -> tuple[str, ...]:
    """Succeed in silence when an ADD could be served now (section 2, "STATUS")."""
    from metis.cni import node

    return await node.status(call.request, call.daemon)


VERBS: Mapping[str, Callable[[Call], Awaitable[tuple[str, ...]]]] = {
    "ADD": add,
    "DEL": delete,
    "CHECK": check,
    "GC": collect_garbage,
    "STATUS": status,
}
"""The commands of `metis.cni.environment.REQUIRED`; VERSION asks no daemon."""


def _refuse_own_netns(request: Request, is_own: Callable[[str], bool]) -> None:
    """Refuse to give the host's own namespace a pod's address.

    libcni checks this after the plugin has done its work, when the address is
    taken already. A path that cannot be looked at is no error, as there.
    """
    if not request.env.netns_override and is_own(request.env.netns):
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
        raise unread(error) from error


async def _deallocate(
    request: Request, daemon: DaemonClient, only_allocation_id: str = ""
) -> None:
    message = DeallocatePodIpRequest(
        network=request.network,
        interface_name=request.env.interface,
        container_id=request.env.container_id,
        pod_name=request.pod.name,
        pod_namespace=request.pod.namespace,
        only_allocation_id=only_allocation_id,
    )
    await daemon.ask(
        lambda channel, timeout: AdaptiveIpamStub(channel).deallocate_pod_ip(
            message, timeout=timeout
        )
    )


async def _give_back(
    request: Request, daemon: DaemonClient, allocation_id: str
) -> None:
    """Undo an ADD that fails anyway; its own error is the one to report.

    The id keeps this from taking what the owner was given since, by another ADD
    that somebody reads the result of. An original daemon tells none.
    """
    try:
        await _deallocate(request, daemon, allocation_id)
    except CNIError:
        return  # the runtime's DEL, or reconciliation, tries again


def has_kept_del(request: Request) -> bool:
    """Whether an earlier DEL of the interface was only written down so far."""
    if request.env.command in ("GC", "STATUS"):
        return False  # they are about no interface, and their variables unchecked
    return spool.may_hold(request.db_path) and bool(
        spool.pending(request.db_path, _owner(request))
    )


def _keep(request: Request, error: Unreachable) -> None:
    """Write a DEL down, which counts as done then."""
    try:
        spool.keep(request.db_path, _owner(request))
    except OSError as problem:
        raise CNIError(
            TRY_AGAIN_LATER, f"{error.message}; nor can the DEL be kept: {problem}"
        ) from error


def _owner(request: Request) -> Owner:
    """Whose addresses the call is about, if it is about one interface."""
    return Owner(request.network, request.env.container_id, request.env.interface)


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
