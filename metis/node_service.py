"""`metis.v1.Node`: a network of this node as a whole, for GC and STATUS."""

from __future__ import annotations

from metis.api.metis.v1 import (
    CollectGarbageRequest,
    CollectGarbageResponse,
    FamilyCapacity,
    GetCapacityRequest,
    GetCapacityResponse,
    NodeBase,
    Released,
)
from metis.engine import Engine
from metis.errors import InvalidRequest
from metis.model import DEFAULT_NETWORK, Family, IPUsage, checked_name
from metis.service import deadline_of_call, statuses


class NodeService(NodeBase):
    """`metis.v1.Node` over an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def collect_garbage(
        self, message: CollectGarbageRequest
    ) -> CollectGarbageResponse:
        """Take back what is held on the network by whoever is not in the list.

        Raises:
          GRPCError: INVALID_ARGUMENT for an attachment without a container id or
            interface name, before anything is taken back; UNAVAILABLE when the
            database cannot be used now, INTERNAL when it is broken.
        """
        with statuses():
            kept = {
                (
                    checked_name("container id", one.container_id),
                    checked_name("interface name", one.interface_name),
                )
                for one in message.valid_attachments
            }
            collected = await self._engine.collect_garbage(
                _network(message),
                kept,
                taken_ms=self._engine.stored_ms(
                    message.started_boottime_ms, message.boot_id
                ),
                deadline=deadline_of_call(),
            )
        return CollectGarbageResponse(
            released=[
                Released(
                    container_id=owner.container_id,
                    interface_name=owner.interface_name,
                    ip_address=allocation.address,
                )
                for owner, allocation in collected
            ]
        )

    async def get_capacity(self, message: GetCapacityRequest) -> GetCapacityResponse:
        """How the addresses of the network are spent, from a reader.

        Raises:
          GRPCError: INVALID_ARGUMENT for a family that there is not; else as
            `collect_garbage`.
        """
        with statuses():
            families = [_family(name) for name in message.families] or list(Family)
            found = await self._engine.capacity(_network(message))
        now_ms = self._engine.now_ms()
        return GetCapacityResponse(
            families=[
                _capacity(family, found[family], now_ms)
                for family in families
                if family in found
            ]
        )


def _network(message: CollectGarbageRequest | GetCapacityRequest) -> str:
    return checked_name("network", message.network or DEFAULT_NETWORK)


def _family(name: str) -> Family:
    try:
        return Family(name)
    except ValueError:
        raise InvalidRequest(
            f"{name[:64]!r} is no address family: write 'ipv4' or 'ipv6'"
        ) from None


def _capacity(family: Family, usage: IPUsage, now_ms: int) -> FamilyCapacity:
    free_at = usage.next_free_ms
    return FamilyCapacity(
        family=family,
        owned=usage.owned,
        cooling=usage.cooling,
        reserved=usage.reserved,
        available=free_at is not None and free_at <= now_ms,
    )
