"""Garbage collection and capacity through a real daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpclib import GRPCError, Status

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AddressRange,
    AddressSet,
    AllocatePodIpRequest,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
    IpConfig,
)
from metis.api.grpc.health.v1 import HealthCheckRequest, HealthStub
from metis.api.metis.v1 import (
    Attachment,
    CollectGarbageRequest,
    GetCapacityRequest,
    NodeStub,
)
from metis.clock import SystemClock
from tests.serving import serving


def request(container_id: str, **fields: object) -> AllocatePodIpRequest:
    config = IpConfig(
        interface_name="eth0", container_id=container_id, initial_pod_cidr="10.1.0.0/29"
    )
    return AllocatePodIpRequest(ipv4_config=config, **fields)  # type: ignore[arg-type]  # any field of the message


async def test_garbage_is_what_is_not_on_the_list(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        stub, node = AdaptiveIpamStub(channel), NodeStub(channel)
        for container in ("c1", "c2"):
            await stub.allocate_pod_ip(request(container))
        await stub.allocate_pod_ip(request("c2", network="other"))
        answer = await node.collect_garbage(
            CollectGarbageRequest(
                valid_attachments=[Attachment(container_id="c1", interface_name="eth0")]
            )
        )
        (released,) = answer.released
        assert (released.container_id, released.interface_name) == ("c2", "eth0")
        assert released.ip_address == "10.1.0.3"
        for container, network in (("c1", ""), ("c2", "other")):
            await stub.check_pod_ip(
                CheckPodIpRequest(
                    network=network, container_id=container, interface_name="eth0"
                )
            )
        everything = await node.collect_garbage(CollectGarbageRequest())
        assert [one.container_id for one in everything.released] == ["c1"]
        nothing = await node.collect_garbage(CollectGarbageRequest(network="none"))
        assert nothing.released == []


async def test_what_was_allocated_after_the_list_was_taken_stays(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (channel, _):
        await AdaptiveIpamStub(channel).allocate_pod_ip(request("c1"))
        answer = await NodeStub(channel).collect_garbage(
            CollectGarbageRequest(
                started_boottime_ms=1, boot_id=SystemClock().boot_id()
            )
        )
    assert answer.released == []


async def test_a_malformed_attachment_stops_the_collection(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        await AdaptiveIpamStub(channel).allocate_pod_ip(request("c1"))
        with pytest.raises(GRPCError, match="interface name is empty") as caught:
            await NodeStub(channel).collect_garbage(
                CollectGarbageRequest(valid_attachments=[Attachment(container_id="c2")])
            )
        assert caught.value.status is Status.INVALID_ARGUMENT
        assert (await NodeStub(channel).get_capacity(GetCapacityRequest())).families[
            0
        ].owned == 1


async def test_capacity_is_told_by_family(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        stub, node = AdaptiveIpamStub(channel), NodeStub(channel)
        assert (await node.get_capacity(GetCapacityRequest())).families == []
        for number in range(5):
            assert (
                number == 0
                or (await node.get_capacity(GetCapacityRequest(families=["ipv4"])))
                .families[0]
                .available
            )
            await stub.allocate_pod_ip(request(f"c{number}"))
        await stub.deallocate_pod_ip(
            DeallocatePodIpRequest(container_id="c0", interface_name="eth0")
        )
        answer = await node.get_capacity(GetCapacityRequest(families=["ipv6", "ipv4"]))
        (four,) = answer.families
        assert (four.family, four.owned, four.cooling, four.reserved) == (
            "ipv4",
            4,
            1,
            3,
        )
        assert not four.available
        with pytest.raises(GRPCError, match="'ipx' is no address family"):
            await node.get_capacity(GetCapacityRequest(families=["ipx"]))
        await HealthStub(channel).check(HealthCheckRequest(service="metis.v1.Node"))


async def test_a_late_allocation_of_a_deleted_owner_is_aborted(tmp_path: Path) -> None:
    clock = SystemClock()
    origin = {
        "started_boottime_ms": clock.boottime_ms() - 50,
        "boot_id": clock.boot_id(),
    }
    who = {"container_id": "c1", "interface_name": "eth0"}
    async with serving(tmp_path) as (channel, _):
        await AdaptiveIpamStub(channel).deallocate_pod_ip(DeallocatePodIpRequest(**who))
    async with serving(tmp_path) as (channel, _):  # the record survives
        stub = AdaptiveIpamStub(channel)
        with pytest.raises(GRPCError, match="'c1' was deleted") as caught:
            await stub.allocate_pod_ip(request("c1", **origin))
        assert caught.value.status is Status.ABORTED
        assert await stub.allocate_pod_ip(request("c1"))


async def test_only_the_named_allocation_is_given_back(tmp_path: Path) -> None:
    who = {"container_id": "c1", "interface_name": "eth0"}
    async with serving(tmp_path) as (channel, _):
        stub = AdaptiveIpamStub(channel)
        first = await stub.allocate_pod_ip(request("c1"))
        again = await stub.allocate_pod_ip(request("c1"))
        assert first.ipv4 == again.ipv4
        await stub.deallocate_pod_ip(
            DeallocatePodIpRequest(**who, only_allocation_id=first.allocation_id)
        )
        await stub.check_pod_ip(CheckPodIpRequest(**who))
        await stub.deallocate_pod_ip(
            DeallocatePodIpRequest(**who, only_allocation_id=again.allocation_id)
        )
        with pytest.raises(GRPCError):
            await stub.check_pod_ip(CheckPodIpRequest(**who))


async def test_sets_requested_and_sticky_addresses_on_the_wire(tmp_path: Path) -> None:
    sets = [
        AddressSet(
            alternatives=[
                AddressRange(
                    subnet="10.2.0.0/24", range_start="10.2.0.9", gateway="10.2.0.254"
                )
            ]
        ),
        AddressSet(alternatives=[AddressRange(subnet="10.3.0.0/24")]),
    ]
    names = {"pod_name": "web-0", "pod_namespace": "shop"}
    async with serving(tmp_path) as (channel, _):
        stub = AdaptiveIpamStub(channel)
        got = await stub.allocate_pod_ip(
            request("c1", sets=sets, requested_ips=["10.3.0.77"], **names)
        )
        assert [(one.ip_address, one.gateway) for one in got.ips] == [
            ("10.2.0.9", "10.2.0.254"),
            ("10.3.0.77", "10.3.0.1"),
        ]
        assert got.ipv4 == got.ips[0]
        await stub.deallocate_pod_ip(
            DeallocatePodIpRequest(container_id="c1", interface_name="eth0")
        )
        back = await stub.allocate_pod_ip(
            request("c2", sets=sets, sticky=True, **names)
        )
        assert back.ips == got.ips
        overlapping = [sets[1], sets[1]]
        with pytest.raises(GRPCError, match="overlaps range") as caught:
            await stub.allocate_pod_ip(request("c3", sets=overlapping))
        assert caught.value.status is Status.INVALID_ARGUMENT
