"""`metis.v1.Node`: a network of this node as a whole, for GC and STATUS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpclib import GRPCError, Status

from metis.api.metis.v1 import (
    CollectGarbageRequest,
    CollectGarbageResponse,
    FamilyCapacity,
    GetCapacityRequest,
    GetCapacityResponse,
    HistoryEntry,
    ListHistoryRequest,
    ListHistoryResponse,
    NodeBase,
    ReclaimRequest,
    ReclaimResponse,
    Released,
)
from metis.api.metis.v1 import (
    Verdict as VerdictMessage,
)
from metis.engine import Engine
from metis.errors import InvalidRequest
from metis.model import DEFAULT_NETWORK, Family, IPUsage, checked_name
from metis.service import deadline_of_call, statuses
from metis.store.history import Entry, Selection
from metis.store.store import Store

if TYPE_CHECKING:
    # a plugin in direct mode has this service, but nobody who looks for lost owners
    from metis.reclaim import Finding, Reclaimer

MOST_VERDICT_BYTES = 2 * 1024 * 1024
"""Most bytes of names and reasons in an answer about owners: half of what a gRPC
message may have, and some 10,000 owners."""


class NodeService(NodeBase):
    """`metis.v1.Node` over an engine and its store.

    Args:
      engine: the rules.
      store: what is known.
      reclaimer: who looks for owners that are gone; None for nobody.
    """

    def __init__(
        self, engine: Engine, store: Store, reclaimer: Reclaimer | None = None
    ) -> None:
        self._engine = engine
        self._store = store
        self._reclaimer = reclaimer

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

    async def reclaim(self, message: ReclaimRequest) -> ReclaimResponse:
        """Make one round of reclaim, or explain what it would find.

        The verdicts on owners that are gone come first.

        Raises:
          GRPCError: UNIMPLEMENTED where nobody looks for owners that are gone; else
            as `get_capacity`. What was taken back before stays so.
        """
        if self._reclaimer is None:
            raise GRPCError(Status.UNIMPLEMENTED, "only a daemon makes rounds")
        limit = message.limit or None
        with statuses():
            if message.dry_run:
                report = await self._reclaimer.explain(limit)
            else:
                report = await self._reclaimer.make_round(limit)
        findings = sorted(
            report.findings, key=lambda one: (not one.released, not one.verdict.gone)
        )
        verdicts: list[VerdictMessage] = []
        size = 0
        for finding in findings:
            verdict = _verdict(finding)
            size += _text_bytes(verdict)
            if size > MOST_VERDICT_BYTES:
                break
            verdicts.append(verdict)
        return ReclaimResponse(
            verdicts=verdicts,
            held_back=report.held_back,
            left_out=len(findings) - len(verdicts),
        )

    async def list_history(self, message: ListHistoryRequest) -> ListHistoryResponse:
        """One page of who had which address, the latest first.

        Raises:
          GRPCError: INVALID_ARGUMENT for an address or a page token that cannot be
            read; else as `collect_garbage`.
        """
        with statuses():
            page = await self._store.list_history(
                Selection(
                    message.ip_address,
                    message.network,
                    message.container_id,
                    message.pod_name,
                    message.pod_namespace,
                    message.at_ms or None,
                ),
                message.page_size,
                message.page_token,
            )
        return ListHistoryResponse(
            entries=[_history_entry(entry) for entry in page.entries],
            next_page_token=page.next_token,
        )


def _history_entry(entry: Entry) -> HistoryEntry:
    return HistoryEntry(
        network=entry.network,
        ip_address=entry.address,
        container_id=entry.container_id,
        interface_name=entry.interface_name,
        pod_name=entry.pod_name,
        pod_namespace=entry.pod_namespace,
        given_at_ms=max(entry.given_at or 0, 0),
        ended_at_ms=max(entry.ended_at or 0, 0),
        reason=entry.reason,
    )


def _verdict(finding: Finding) -> VerdictMessage:
    holding = finding.holding
    return VerdictMessage(
        network=holding.owner.network,
        container_id=holding.owner.container_id,
        interface_name=holding.owner.interface_name,
        pod_name=holding.pod.name,
        pod_namespace=holding.pod.namespace,
        ip_address=holding.address,
        gone=finding.verdict.gone,
        reason=finding.verdict.reason,
        strikes=finding.strikes,
        released=finding.released,
        wait_ms=finding.wait_ms,
    )


VERDICT_BYTES = 64
"""What a verdict takes beside its texts: tags, lengths and numbers."""


def _text_bytes(verdict: VerdictMessage) -> int:
    """About how many bytes a verdict takes in a message, and never fewer."""
    texts = (
        verdict.network,
        verdict.container_id,
        verdict.interface_name,
        verdict.pod_name,
        verdict.pod_namespace,
        verdict.ip_address,
        verdict.reason,
    )
    return VERDICT_BYTES + sum(len(text.encode()) for text in texts)


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
