"""The services through a real daemon: what a caller gets for what it sends."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpclib import GRPCError, Status

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
    IpConfig,
)
from metis.api.admin.v1 import (
    AdminStub,
    ListCidrBlocksRequest,
    ListIpAddressesRequest,
)
from metis.api.google.rpc import ErrorInfo
from metis.errors import (
    AddressTaken,
    InvalidRequest,
    MetisError,
    NotAllocated,
    OwnerDeleted,
    PoolExhausted,
    StoreBusy,
    StoreError,
    StoreUnavailable,
)
from metis.service import grpc_error
from tests.serving import serving

V4 = "10.1.0.0/24"
V6 = "fd00:1::/64"


def request(
    container_id: str = "c1",
    *,
    v4: str | None = V4,
    v6: str | None = None,
    network: str = "",
    interface: str = "eth0",
) -> AllocatePodIpRequest:
    def config(cidr: str | None) -> IpConfig | None:
        if cidr is None:
            return None
        return IpConfig(
            interface_name=interface, container_id=container_id, initial_pod_cidr=cidr
        )

    return AllocatePodIpRequest(
        network=network,
        ipv4_config=config(v4),
        ipv6_config=config(v6),
        pod_name="pod",
        pod_namespace="ns",
    )


def addresses(answer: AllocatePodIpResponse) -> tuple[str | None, str | None]:
    return (
        answer.ipv4.ip_address if answer.ipv4 else None,
        answer.ipv6.ip_address if answer.ipv6 else None,
    )


async def test_each_family_that_is_asked_for_is_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        stub = AdaptiveIpamStub(channel)
        only_v4 = await stub.allocate_pod_ip(request("c1"))
        only_v6 = await stub.allocate_pod_ip(request("c2", v4=None, v6=V6))
        both = await stub.allocate_pod_ip(request("c3", v6=V6))
    assert addresses(only_v4) == ("10.1.0.2", None)
    assert addresses(only_v6) == (None, "fd00:1::2")
    assert addresses(both) == ("10.1.0.3", "fd00:1::3")
    assert both.ipv6 is not None
    assert both.ipv6.cidr == V6


async def test_an_empty_network_is_the_default_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        stub = AdaptiveIpamStub(channel)
        first = await stub.allocate_pod_ip(request())
        again = await stub.allocate_pod_ip(request(network="default"))
        other = await stub.allocate_pod_ip(request(network="other"))
        blocks = await AdminStub(channel).list_cidr_blocks(ListCidrBlocksRequest())
    assert addresses(first) == addresses(again) == addresses(other)
    network = blocks.headers.index("network")
    assert [row.values[network] for row in blocks.rows] == ["default", "other"]


async def test_check_answers_with_what_is_held_and_not_found_afterwards(
    tmp_path: Path,
) -> None:
    who = {"container_id": "c1", "interface_name": "eth0"}
    async with serving(tmp_path) as (channel, _):
        stub = AdaptiveIpamStub(channel)
        await stub.allocate_pod_ip(request(v6=V6))
        held = await stub.check_pod_ip(CheckPodIpRequest(**who))
        await stub.deallocate_pod_ip(DeallocatePodIpRequest(**who))
        await stub.deallocate_pod_ip(DeallocatePodIpRequest(**who))
        with pytest.raises(GRPCError) as caught:
            await stub.check_pod_ip(CheckPodIpRequest(**who))
    assert {ip.ip_address for ip in held.held} == {"10.1.0.2", "fd00:1::2"}
    assert caught.value.status is Status.NOT_FOUND
    assert "c1" in str(caught.value.message)


BAD_REQUESTS = {
    "no family": (request(v4=None), "neither ipv4_config nor ipv6_config"),
    "empty id": (request(""), "container id is empty"),
    "empty interface": (request(interface=""), "interface name is empty"),
    "long id": (request("x" * 100_000), "100000 bytes long: at most 1024"),
    "control character": (request("a\nb"), r"container id 'a\nb'"),
    "long network": (request(network="n" * 2000), "network 'nnn"),
    "no prefix": (request(v4="10.0.0.0"), "'10.0.0.0' is not a CIDR block"),
    "not an address": (request(v4="10.0.0.256/24"), "10.0.0.256/24"),
    "wrong family": (request(v4=V6), "is an ipv6 block where an ipv4 block"),
    "wrong family v6": (request(v4=None, v6=V4), "is an ipv4 block where an ipv6"),
    "two owners": (
        AllocatePodIpRequest(
            ipv4_config=IpConfig(interface_name="eth0", container_id="a"),
            ipv6_config=IpConfig(interface_name="eth0", container_id="b"),
        ),
        "'a/eth0' and 'b/eth0'",
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
async def test_a_bad_request_is_named_and_leaves_nothing(
    tmp_path: Path, case: str
) -> None:
    message, expected = BAD_REQUESTS[case]
    async with serving(tmp_path) as (channel, _):
        with pytest.raises(GRPCError) as caught:
            await AdaptiveIpamStub(channel).allocate_pod_ip(message)
        blocks = await AdminStub(channel).list_cidr_blocks(ListCidrBlocksRequest())
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert expected in str(caught.value.message)
    assert blocks.rows == []


async def test_an_overlapping_block_is_refused_with_both_named(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        stub = AdaptiveIpamStub(channel)
        await stub.allocate_pod_ip(request("c1", v4="10.1.0.0/24"))
        for other in ("10.1.0.0/25", "10.1.0.0/23"):
            with pytest.raises(GRPCError) as caught:
                await stub.allocate_pod_ip(request("c2", v4=other))
            assert caught.value.status is Status.INVALID_ARGUMENT
            assert "10.1.0.0/24" in str(caught.value.message)
            assert other in str(caught.value.message)
        masked = await stub.allocate_pod_ip(request("c3", v4="10.1.0.77/24"))
        elsewhere = await stub.allocate_pod_ip(
            request("c4", v4="10.1.0.0/25", network="other")
        )
        blocks = await AdminStub(channel).list_cidr_blocks(ListCidrBlocksRequest())
    assert addresses(masked) == ("10.1.0.3", None)
    assert addresses(elsewhere) == ("10.1.0.2", None)
    assert len(blocks.rows) == 2


async def test_a_full_pool_answers_with_counts_for_people_and_programs(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, release_cooldown=3600) as (channel, _):
        stub = AdaptiveIpamStub(channel)
        await stub.allocate_pod_ip(request("c1", v4="10.1.0.0/30"))
        with pytest.raises(GRPCError) as owned:
            await stub.allocate_pod_ip(request("c2", v4="10.1.0.0/30"), timeout=10)
        await stub.deallocate_pod_ip(
            DeallocatePodIpRequest(container_id="c1", interface_name="eth0")
        )
        with pytest.raises(GRPCError) as cooling:
            await stub.allocate_pod_ip(request("c2", v4="10.1.0.0/30"), timeout=10)
    assert owned.value.status is Status.RESOURCE_EXHAUSTED
    assert "1 owned, 0 cooling, 3 reserved" in str(owned.value.message)
    assert "0 owned, 1 cooling, 3 reserved" in str(cooling.value.message)
    [info] = cooling.value.details
    assert isinstance(info, ErrorInfo)
    assert (info.reason, info.domain) == ("POOL_EXHAUSTED", "metis")
    assert info.metadata["cooling"] == "1"
    assert 3_590_000 < int(info.metadata["wait_ms"]) <= 3_600_000


async def test_the_tables_show_names_and_take_a_filter(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        await AdaptiveIpamStub(channel).allocate_pod_ip(request("c1"))
        admin = AdminStub(channel)
        page = await admin.list_ip_addresses(
            ListIpAddressesRequest(filter="pod_namespace=ns AND pod_name=pod")
        )
        nothing = await admin.list_ip_addresses(
            ListIpAddressesRequest(filter="pod_namespace=other")
        )
        with pytest.raises(GRPCError) as caught:
            await admin.list_ip_addresses(
                ListIpAddressesRequest(filter="1=0; DELETE FROM cidr_blocks")
            )
        blocks = await admin.list_cidr_blocks(ListCidrBlocksRequest())
    [row] = page.rows
    record = dict(zip(page.headers, row.values, strict=True))
    assert record["address"] == "10.1.0.2"
    assert (record["container_id"], record["interface_name"]) == ("c1", "eth0")
    assert record["release_at"] == "NULL"
    assert record["allocated_at"].endswith("Z")
    assert nothing.rows == []
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert len(blocks.rows) == 1


async def test_a_requested_address_is_given_or_refused_by_name(tmp_path: Path) -> None:
    def asking(
        container_id: str, *ips: str, v6: str | None = None
    ) -> AllocatePodIpRequest:
        message = request(container_id, v6=v6)
        message.requested_ips = list(ips)
        return message

    async with serving(tmp_path) as (channel, _):
        stub = AdaptiveIpamStub(channel)
        both = await stub.allocate_pod_ip(
            asking("c1", "FD00:1::0009", "10.1.0.9", v6=V6)
        )
        assert addresses(both) == ("10.1.0.9", "fd00:1::9")
        refusals = {
            ("10.1.0.9",): (Status.RESOURCE_EXHAUSTED, "held by another owner"),
            ("10.1.0.1",): (Status.INVALID_ARGUMENT, "gateway"),
            ("10.2.0.1",): (Status.INVALID_ARGUMENT, "10.1.0.0/24"),
            ("10.1.0.9/24",): (Status.INVALID_ARGUMENT, "'10.1.0.9/24'"),
            ("fd00:1::1",): (Status.INVALID_ARGUMENT, "one too many"),
            ("10.1.0.7", "10.1.0.8"): (Status.INVALID_ARGUMENT, "'10.1.0.8'"),
        }
        for ips, (status, named) in refusals.items():
            with pytest.raises(GRPCError) as caught:
                await stub.allocate_pod_ip(asking("c2", *ips))
            assert caught.value.status is status
            assert named in str(caught.value.message)


async def test_pages_lead_from_one_to_the_next(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        await AdaptiveIpamStub(channel).allocate_pod_ip(request("c1"))
        admin, seen, token = AdminStub(channel), [], ""
        while True:
            page = await admin.list_ip_addresses(
                ListIpAddressesRequest(page_size=100, page_token=token)
            )
            assert len(page.rows) <= 100
            seen += [row.values[page.headers.index("address")] for row in page.rows]
            token = page.next_page_token
            if not token:
                break
    assert seen == [f"10.1.0.{n}" for n in range(256)]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("x"), Status.INVALID_ARGUMENT),
        (AddressTaken("x"), Status.RESOURCE_EXHAUSTED),
        (OwnerDeleted("x"), Status.ABORTED),
        (NotAllocated("x"), Status.NOT_FOUND),
        (StoreBusy("x"), Status.UNAVAILABLE),
        (StoreUnavailable("x"), Status.UNAVAILABLE),
        (StoreError("x"), Status.INTERNAL),
        (MetisError("x"), Status.INTERNAL),
    ],
)
def test_every_error_has_its_status(error: MetisError, status: Status) -> None:
    assert grpc_error(error).status is status
    assert grpc_error(error).message == "x"


def test_an_exhausted_network_without_a_block_says_so() -> None:
    error = PoolExhausted(
        "n",
        "ipv4",
        owned=0,
        cooling=0,
        reserved=0,
        next_free_ms=None,
        wait_ms=None,
    )
    assert "has no CIDR block of this family" in str(error)
    assert "wait_ms" not in grpc_error(error).details[0].metadata
