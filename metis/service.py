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
    IpConfig,
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
    PoolExhausted,
    StoreBusy,
    StoreUnavailable,
)
from metis.model import (
    DEFAULT_NETWORK,
    Allocation,
    CIDRBlock,
    Family,
    Owner,
    Pod,
    TablePage,
    Wanted,
    format_address,
    parse_address,
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
        """Give the owner one address per family asked for, all or none.

        Raises:
          GRPCError: INVALID_ARGUMENT for a request that can never be granted,
            RESOURCE_EXHAUSTED when no address is free, UNAVAILABLE when the
            database cannot be used now, INTERNAL when it is broken.
        """
        with _statuses():
            owner, wanted = _owner_and_wanted(message)
            pod = Pod(message.pod_name, message.pod_namespace)
            held = await self._engine.allocate(owner, wanted, pod, deadline=_deadline())
        by_family = {allocation.family: _pod_ip(allocation) for allocation in held}
        return AllocatePodIpResponse(
            ipv4=by_family.get(Family.IPV4), ipv6=by_family.get(Family.IPV6)
        )

    async def deallocate_pod_ip(
        self, message: DeallocatePodIpRequest
    ) -> DeallocatePodIpResponse:
        """Take back what the owner holds; holding nothing is success.

        Raises:
          GRPCError: as `allocate_pod_ip`, without RESOURCE_EXHAUSTED.
        """
        with _statuses():
            owner = _owner(message)
            await self._engine.deallocate(owner, deadline=_deadline())
        return DeallocatePodIpResponse()

    async def check_pod_ip(self, message: CheckPodIpRequest) -> CheckPodIpResponse:
        """Answer with what the owner holds.

        Raises:
          GRPCError: NOT_FOUND when it holds nothing; else as
            `deallocate_pod_ip`.
        """
        with _statuses():
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
        with _statuses():
            return _table(
                await self._store.list_blocks(
                    message.filter, message.page_size, message.page_token
                )
            )

    async def list_ip_addresses(
        self, message: ListIpAddressesRequest
    ) -> AdminTableDumpResponse:
        """One page of the addresses; raises as `list_cidr_blocks`."""
        with _statuses():
            return _table(
                await self._store.list_addresses(
                    message.filter, message.page_size, message.page_token
                )
            )


@contextmanager
def _statuses() -> Iterator[None]:
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
        case NotAllocated():
            status = Status.NOT_FOUND
        case StoreBusy() | StoreUnavailable():
            status = Status.UNAVAILABLE
        case _:
            status = Status.INTERNAL
    return GRPCError(status, str(error), details)


def _deadline() -> float | None:
    """The call's deadline in Trio's time; None when the caller set none."""
    deadline = trio.current_effective_deadline()
    return None if deadline == float("inf") else deadline


def _owner(message: DeallocatePodIpRequest | CheckPodIpRequest) -> Owner:
    return Owner(
        message.network or DEFAULT_NETWORK,
        message.container_id,
        message.interface_name,
    )


def _owner_and_wanted(message: AllocatePodIpRequest) -> tuple[Owner, list[Wanted]]:
    """Read the owner and the families from the one or two IPConfigs."""
    configs = [
        (family, config)
        for family, config in (
            (Family.IPV4, message.ipv4_config),
            (Family.IPV6, message.ipv6_config),
        )
        if config is not None
    ]
    if not configs:
        raise InvalidRequest(
            "the request has neither ipv4_config nor ipv6_config: set one or both"
        )
    network = message.network or DEFAULT_NETWORK
    owners = {
        Owner(network, config.container_id, config.interface_name)
        for _, config in configs
    }
    if len(owners) > 1:
        raise InvalidRequest(
            "ipv4_config and ipv6_config name different interfaces or containers: "
            + " and ".join(
                repr(f"{config.container_id}/{config.interface_name}")
                for _, config in configs
            )
        )
    requested = _requested(message.requested_ips, [family for family, _ in configs])
    return owners.pop(), [
        _wanted(family, config, requested.get(family)) for family, config in configs
    ]


def _requested(addresses: list[str], families: list[Family]) -> dict[Family, str]:
    """The requested addresses by family, in canonical form."""
    requested: dict[Family, str] = {}
    for text in addresses:
        family = Family.of(text)
        try:
            address = format_address(family, parse_address(family, text))
        except ValueError:
            raise InvalidRequest(
                f"requested address {text[:64]!r} is not an IP address: "
                "write it without a prefix, for example '10.240.0.9'"
            ) from None
        if family not in families or family in requested:
            raise InvalidRequest(
                f"requested address {address!r} is one too many: at most one of each "
                f"family asked for ({', '.join(families)}) can be requested"
            )
        requested[family] = address
    return requested


def _wanted(family: Family, config: IpConfig, address: str | None) -> Wanted:
    cidr = config.initial_pod_cidr
    return Wanted(family, CIDRBlock.parse(cidr, family) if cidr else None, address)


def _pod_ip(allocation: Allocation) -> PodIp:
    return PodIp(ip_address=allocation.address, cidr=allocation.cidr)


def _table(page: TablePage) -> AdminTableDumpResponse:
    return AdminTableDumpResponse(
        headers=list(page.headers),
        rows=[Row(values=list(row)) for row in page.rows],
        next_page_token=page.next_token,
    )
