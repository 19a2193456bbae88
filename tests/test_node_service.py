"""Garbage collection and capacity through a real daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from grpclib import GRPCError, Status

from metis import node_service
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
    ListHistoryRequest,
    NodeStub,
    ReclaimRequest,
)
from metis.clock import SystemClock
from metis.cni.direct import open_direct
from tests.serving import serving
from tests.store.databases import ManualClock


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


def lost(container_id: str, directory: Path) -> AllocatePodIpRequest:
    """The request of a pod with its network namespace in a directory."""
    return request(
        container_id,
        pod_name=f"pod-{container_id}",
        pod_namespace="shop",
        netns_path=str(directory / container_id),
    )


async def test_lost_pods_are_explained_struck_twice_and_freed(tmp_path: Path) -> None:
    netns = tmp_path / "netns"
    netns.mkdir()
    (netns / "c1").touch()
    clock = ManualClock()
    async with serving(
        tmp_path, clock, reclaim_interval=0, reclaim_grace=10, reclaim_limit=1
    ) as (channel, _):
        stub, node = AdaptiveIpamStub(channel), NodeStub(channel)
        for container in ("c1", "c2", "c3"):
            await stub.allocate_pod_ip(lost(container, netns))
        clock.advance(10_000)

        dry = await node.reclaim(ReclaimRequest(dry_run=True))
        assert [
            (one.container_id, one.gone, one.strikes, one.wait_ms)
            for one in dry.verdicts
        ] == [("c2", True, 0, 60_000), ("c3", True, 0, 60_000), ("c1", False, 0, 0)]
        first = dry.verdicts[0]
        assert (first.network, first.interface_name) == ("default", "eth0")
        assert (first.pod_namespace, first.pod_name) == ("shop", "pod-c2")
        assert first.ip_address == "10.1.0.3"
        assert first.reason == f"its network namespace {netns / 'c2'} is gone"

        assert [
            one.strikes for one in (await node.reclaim(ReclaimRequest())).verdicts
        ] == [1, 1, 0]
        clock.advance(60_000)
        held_back = await node.reclaim(ReclaimRequest())
        assert "the limit is 1" in held_back.held_back
        assert not any(one.released for one in held_back.verdicts)
        answer = await node.reclaim(ReclaimRequest(limit=2))
        assert [(one.container_id, one.released) for one in answer.verdicts] == [
            ("c2", True),
            ("c3", True),
            ("c1", False),
        ]
        assert (answer.held_back, answer.left_out) == ("", 0)
        history = await node.list_history(ListHistoryRequest(container_id="c2"))
        assert [one.reason for one in history.entries] == [
            f"reclaimed: its network namespace {netns / 'c2'} is gone"
        ]
        await stub.check_pod_ip(
            CheckPodIpRequest(container_id="c1", interface_name="eth0")
        )


async def test_the_daemon_frees_lost_pods_by_itself(tmp_path: Path) -> None:
    netns = tmp_path / "netns"
    netns.mkdir()
    (netns / "c1").touch()
    async with serving(tmp_path, reclaim_interval=0.01, reclaim_grace=0.01) as (
        channel,
        daemon,
    ):
        stub, node = AdaptiveIpamStub(channel), NodeStub(channel)
        await stub.allocate_pod_ip(lost("c1", netns))
        await stub.allocate_pod_ip(lost("c2", netns))
        with trio.fail_after(10):
            while len((await daemon.store.holdings(None, 9))[0]) > 1:
                await trio.lowlevel.checkpoint()
        (kept,) = (await node.reclaim(ReclaimRequest(dry_run=True))).verdicts
    assert kept.container_id == "c1"


async def test_what_does_not_fit_is_counted_and_the_lost_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netns = tmp_path / "netns"
    netns.mkdir()
    (netns / "c1").touch()
    clock = ManualClock()
    monkeypatch.setattr(node_service, "MOST_VERDICT_BYTES", 400)
    async with serving(tmp_path, clock, reclaim_grace=0) as (channel, _):
        for container in ("c1", "c2", "c3"):
            await AdaptiveIpamStub(channel).allocate_pod_ip(lost(container, netns))
        clock.advance(1)
        answer = await NodeStub(channel).reclaim(ReclaimRequest(dry_run=True))
    assert answer.left_out == 3 - len(answer.verdicts) > 0
    assert answer.verdicts[0].gone


async def test_without_a_daemon_nobody_is_looked_for(tmp_path: Path) -> None:
    async with open_direct(str(tmp_path / "metis.sqlite"), 60) as channel:
        with pytest.raises(GRPCError, match="only a daemon makes rounds") as caught:
            await NodeStub(channel).reclaim(ReclaimRequest())
    assert caught.value.status is Status.UNIMPLEMENTED
