"""GC and STATUS against a fake daemon: what about the network, and how fast."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from grpclib import GRPCError, Status
from trio.testing import MockClock

from metis.api.metis.v1 import (
    Attachment,
    CollectGarbageRequest,
    FamilyCapacity,
    GetCapacityRequest,
    Released,
)
from metis.cni.client import OpenChannel
from metis.cni.origin import Origin
from metis.cni.protocol import CNIError
from metis.cni.spec import Request
from metis.cni.verbs import perform
from metis.health import NOT_SERVING, HealthService
from tests.cni.calls import Config, config, ipam, request
from tests.cni.fakes import FakeIpam, FakeNode, Unreachable, reach

DUAL = [[{"subnet": "10.240.0.0/22"}], [{"subnet": "fd00:10::/64"}]]


def printed(_text: str) -> None:
    raise AssertionError("GC and STATUS print nothing")


async def failure(asked: Request, channel: OpenChannel) -> CNIError:
    with pytest.raises(CNIError) as caught:
        await perform(asked, printed, channel)
    return caught.value


def collection(*entries: Any, **changes: Any) -> Request:
    fields = config("1.1.0", **changes)
    return request("GC", {**fields, "cni.dev/valid-attachments": list(entries)})


def attachment(container: str, interface: str = "eth0") -> Config:
    return {"containerID": container, "ifname": interface}


async def test_gc_names_what_stays_on_its_network_and_prints_nothing() -> None:
    node = FakeNode()
    node.released = [
        Released(container_id="c9", interface_name="eth0", ip_address="10.240.0.9"),
        Released(container_id="c9", interface_name="eth0", ip_address="fd00:10::9"),
    ]
    asked = collection(
        attachment("c2"), attachment("c1", "net1"), ipam=ipam(network="blue")
    )
    channel, origin = reach(FakeIpam(), node=node), Origin("b", 1234, 1230)
    released = await perform(asked, printed, channel, origin=origin)
    assert released == ("10.240.0.9", "fd00:10::9")
    assert node.asked == [
        CollectGarbageRequest(
            network="blue",
            valid_attachments=[
                Attachment(container_id="c1", interface_name="net1"),
                Attachment(container_id="c2", interface_name="eth0"),
            ],
            started_boottime_ms=1230,
            boot_id="b",
        )
    ]


async def test_gc_with_an_empty_list_frees_everything() -> None:
    node = FakeNode()
    assert await perform(collection(), printed, reach(FakeIpam(), node=node)) == ()
    assert node.asked == [CollectGarbageRequest(network="default")]


async def test_gc_without_a_list_asks_for_nothing() -> None:
    asked = request("GC", config("1.1.0"))
    assert await perform(asked, printed, Unreachable()) == ()
    assert "no list" in asked.note


async def test_gc_by_an_original_daemon_says_that_nothing_was_freed() -> None:
    error = await failure(collection(attachment("c1")), reach(FakeIpam()))
    assert error.code == 2
    assert "cni.dev/valid-attachments, which has 1 entries" in error.message
    assert "nothing was freed" in error.details


@pytest.mark.parametrize(
    ("status", "code"),
    [(Status.UNAVAILABLE, 11), (Status.INVALID_ARGUMENT, 7), (Status.INTERNAL, 999)],
)
async def test_gc_hands_on_what_the_daemon_says(status: Status, code: int) -> None:
    node = FakeNode()
    node.failure = GRPCError(status, "two addresses could not be released")
    error = await failure(collection(), reach(FakeIpam(), node=node))
    assert error.code == code
    assert error.message == "two addresses could not be released"


async def test_gc_without_a_daemon_is_to_be_tried_again(
    autojump_clock: MockClock,
) -> None:
    assert (await failure(collection(), Unreachable())).code == 11


def capacity(family: str, available: bool, owned: int = 3) -> FamilyCapacity:
    return FamilyCapacity(family=family, owned=owned, available=available)


def polled(**fields: Any) -> Request:
    return request("STATUS", config("1.1.0", ipam=ipam(**fields)))


async def test_status_is_silent_while_the_daemon_serves() -> None:
    daemon, node = FakeIpam(), FakeNode()
    node.capacity = [capacity("ipv4", True)]
    channel = reach(daemon, node=node)
    assert await perform(polled(ranges=DUAL, network="blue"), printed, channel) == ()
    assert daemon.asked == []
    assert node.asked == [GetCapacityRequest(network="blue", families=["ipv4", "ipv6"])]


@pytest.mark.parametrize("strict", [False, True])
async def test_status_of_an_original_daemon_is_its_health(strict: bool) -> None:
    channel = reach(FakeIpam())
    assert await perform(polled(statusOnExhaustion=strict), printed, channel) == ()


async def test_status_counts_exhaustion_when_the_configuration_says_so() -> None:
    node = FakeNode()
    node.capacity = [capacity("ipv4", True), capacity("ipv6", False)]
    channel = reach(FakeIpam(), node=node)
    assert await perform(polled(ranges=DUAL), printed, channel) == ()
    error = await failure(polled(ranges=DUAL, statusOnExhaustion=True), channel)
    assert error.code == 50
    assert "no ipv6 address is free on network 'default': 3 owned" in error.message


async def test_a_family_whose_first_block_is_yet_to_be_made_is_not_exhausted() -> None:
    node = FakeNode()
    node.capacity = [capacity("ipv4", False, owned=0)]
    channel = reach(FakeIpam(), node=node)
    asked = polled(subnet="10.240.0.0/22", statusOnExhaustion=True)
    assert await perform(asked, printed, channel) == ()
    # Without a configured range there is nothing that the next ADD could make.
    assert (await failure(polled(statusOnExhaustion=True), channel)).code == 50


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.INTERNAL])
async def test_status_of_a_daemon_that_cannot_read_its_database_is_code_50(
    status: Status,
) -> None:
    node = FakeNode()
    node.failure = GRPCError(status, "the database cannot be read")
    error = await failure(polled(), reach(FakeIpam(), node=node))
    assert (error.code, error.message) == (50, "the database cannot be read")


async def test_status_of_a_daemon_that_does_not_serve_is_code_50() -> None:
    health = HealthService([])
    health.set_status(NOT_SERVING)
    error = await failure(polled(), reach(FakeIpam(), health))
    assert error.code == 50
    assert "NOT_SERVING" in error.details


async def test_status_of_a_daemon_that_is_away_is_code_50_within_a_second(
    autojump_clock: MockClock,
) -> None:
    start = trio.current_time()
    asked = request("STATUS", config("1.1.0", daemonSocket="/run/x.sock"))
    error = await failure(asked, Unreachable())
    assert error.code == 50
    assert "/run/x.sock" in error.message
    assert trio.current_time() - start < 1


class Hanging(HealthService):
    async def check(self, message: Any) -> Any:
        await trio.sleep_forever()


@pytest.mark.parametrize("where", ["health", "capacity"])
async def test_status_of_a_daemon_that_hangs_is_code_50_within_a_second(
    where: str, autojump_clock: MockClock
) -> None:
    node = FakeNode()
    node.hangs = where == "capacity"
    health = Hanging([]) if where == "health" else None
    start = trio.current_time()
    assert (await failure(polled(), reach(FakeIpam(), health, node))).code == 50
    assert trio.current_time() - start < 1
