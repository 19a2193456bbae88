"""The gRPC services of the daemon: messages in, values to the engine, and back.

This is the border at which `metis.errors` become gRPC statuses; below it
nothing knows gRPC, above it nothing knows the rules for addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio
from grpclib import GRPCError, Status

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
from metis.api.admin.v1 import (
    AdminBase,
    AdminTableDumpResponse,
    ListCidrBlocksRequest,
    ListIpAddressesRequest,
    Row,
)
from metis.api.google.rpc import ErrorInfo
from metis.engine import Engine
from metis.errors import (
    AddressTaken,
    InvalidRequest,
    MetisError,
    NotAllocated,
    OwnerDeleted,
    PoolExhausted,
    StoreBusy,
    StoreDamaged,
    StoreUnavailable,
)
from metis.model import DEFAULT_NETWORK, Allocation, Owner, Pod, TablePage
from metis.requests import (
    allocation_response,
    netns_path_of,
    owner_of,
    wanted_of,
)
from metis.store.store import Store

ERROR_DOMAIN = "metis"
"""`ErrorInfo.domain` of everything that this daemon reports."""


class AdaptiveIpamService(AdaptiveIpamBase):
    """`adaptiveipam.v1.AdaptiveIpam` over an engine.

    The deadline of a call is that of the cancel scope in which the server runs
    its handler (`grpc-timeout`), so the engine knows how long it may wait.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def allocate_pod_ip(
        self, message: AllocatePodIpRequest
    ) -> AllocatePodIpResponse:
        """Give the owner one address per set or family asked for, all or none.

        Raises:
          GRPCError: INVALID_ARGUMENT for a request that can never be granted,
            RESOURCE_EXHAUSTED when no address is free, ABORTED when the owner was
            deleted since the call began, UNAVAILABLE when the database cannot be
            used now, INTERNAL when it is broken.
        """
        with statuses():
            wanted = wanted_of(message)
            allocations = await self._engine.allocate(
                owner_of(message),
                wanted,
                Pod(message.pod_name, message.pod_namespace),
                deadline=deadline_of_call(),
                sticky=message.sticky,
                started_ms=self._engine.stored_ms(
                    message.started_boottime_ms, message.boot_id
                ),
                netns_path=netns_path_of(message),
            )
            return allocation_response(wanted, allocations)

    async def deallocate_pod_ip(
        self, message: DeallocatePodIpRequest
    ) -> DeallocatePodIpResponse:
        """Take back what the owner holds; holding nothing is success.

        With `only_allocation_id` it takes back that allocation alone, and the
        owner does not count as deleted.

        Raises:
          GRPCError: as `allocate_pod_ip`, without RESOURCE_EXHAUSTED.
        """
        with statuses():
            owner = _owner(message)
            ends = deadline_of_call()
            if message.only_allocation_id:
                await self._engine.give_back(
                    owner, message.only_allocation_id, deadline=ends
                )
            else:
                await self._engine.deallocate(owner, deadline=ends)
        return DeallocatePodIpResponse()

    async def check_pod_ip(self, message: CheckPodIpRequest) -> CheckPodIpResponse:
        """Answer with what the owner holds.

        Raises:
          GRPCError: NOT_FOUND when it holds nothing; else as
            `deallocate_pod_ip`.
        """
        with statuses():
            held = await self._engine.check(_owner(message))
        return CheckPodIpResponse(held=[_pod_ip(allocation) for allocation in held])


class AdminService(AdminBase):
    """`admin.v1.Admin`: pages of the store's tables, as text."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def list_cidr_blocks(
        self, message: ListCidrBlocksRequest
    ) -> AdminTableDumpResponse:
        """One page of the CIDR blocks.

        Raises:
          GRPCError: INVALID_ARGUMENT for a filter or a page token that cannot
            be read.
        """
        with statuses():
            return _table(
                await self._store.list_blocks(
                    message.filter, message.page_size, message.page_token
                )
            )

    async def list_ip_addresses(
        self, message: ListIpAddressesRequest
    ) -> AdminTableDumpResponse:
        """One page of the addresses; raises as `list_cidr_blocks`."""
        with statuses():
            return _table(
                await self._store.list_addresses(
                    message.filter, message.page_size, message.page_token
                )
            )


@contextmanager
def statuses() -> Iterator[None]:
    """Turn the errors of metis into gRPC statuses."""
    try:
        yield
    except MetisError as error:
        raise grpc_error(error) from error


def grpc_error(error: MetisError) -> GRPCError:
    """The gRPC status that stands for an error, its figures in the details."""
    details: list[ErrorInfo] | None = None
    match error:
        case InvalidRequest():
            status = Status.INVALID_ARGUMENT
        case PoolExhausted():
            status = Status.RESOURCE_EXHAUSTED
            figures = {
                "network": error.network,
                "family": error.family,
                "owned": str(error.owned),
                "cooling": str(error.cooling),
                "reserved": str(error.reserved),
            }
            if error.wait_ms is not None:
                figures["wait_ms"] = str(error.wait_ms)
            details = [
                ErrorInfo(
                    reason="POOL_EXHAUSTED", domain=ERROR_DOMAIN, metadata=figures
                )
            ]
        case AddressTaken():
            status = Status.RESOURCE_EXHAUSTED
        case OwnerDeleted():
            status = Status.ABORTED
        case NotAllocated():
            status = Status.NOT_FOUND
        case StoreBusy() | StoreUnavailable() | StoreDamaged():
            status = Status.UNAVAILABLE
        case _:
            status = Status.INTERNAL
    return GRPCError(status, str(error), details)


def deadline_of_call() -> float | None:
    """The call's deadline in Trio's time; None when the caller set none."""
    deadline = trio.current_effective_deadline()
    return None if deadline == float("inf") else deadline


def _owner(message: DeallocatePodIpRequest | CheckPodIpRequest) -> Owner:
    return Owner(
        message.network or DEFAULT_NETWORK,
        message.container_id,
        message.interface_name,
    )


def _pod_ip(allocation: Allocation) -> PodIp:
    return PodIp(ip_address=allocation.address, cidr=allocation.cidr)


def _table(page: TablePage) -> AdminTableDumpResponse:
    return AdminTableDumpResponse(
        headers=list(page.headers),
        rows=[Row(values=list(row)) for row in page.rows],
        next_page_token=page.next_token,
    )
