"""A channel without a connection: deadlines, statuses and cancellation as over one."""

from __future__ import annotations

import logging

import pytest
import trio
from grpclib import GRPCError, Status
from grpclib.metadata import Deadline

from metis.api.adaptiveipam.v1 import AdaptiveIpamStub, DeallocatePodIpRequest
from metis.api.metis.v1 import GetCapacityRequest, NodeStub
from metis.rpc.local import LocalChannel
from tests.cni.fakes import FakeIpam

ASKED = DeallocatePodIpRequest(container_id="c1")


@pytest.fixture
def ipam() -> FakeIpam:
    return FakeIpam()


@pytest.fixture
async def stub(ipam: FakeIpam) -> AdaptiveIpamStub:
    channel = LocalChannel([ipam])
    await channel.connect()
    return AdaptiveIpamStub(channel)


async def test_a_call_is_its_handler(ipam: FakeIpam, stub: AdaptiveIpamStub) -> None:
    await stub.deallocate_pod_ip(ASKED)
    assert ipam.asked == [ASKED]


async def test_a_status_is_raised(ipam: FakeIpam, stub: AdaptiveIpamStub) -> None:
    ipam.failure = GRPCError(Status.NOT_FOUND, "nothing")
    with pytest.raises(GRPCError) as caught:
        await stub.deallocate_pod_ip(ASKED)
    assert (caught.value.status, caught.value.message) == (Status.NOT_FOUND, "nothing")


async def test_a_method_that_nobody_has_is_unimplemented() -> None:
    with pytest.raises(GRPCError) as caught:
        await NodeStub(LocalChannel([])).get_capacity(GetCapacityRequest())
    assert caught.value.status is Status.UNIMPLEMENTED


async def test_a_bug_is_internal_and_logged(
    ipam: FakeIpam,
    stub: AdaptiveIpamStub,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ipam.failure = RuntimeError("a bug")  # type: ignore[assignment]  # on purpose
    with caplog.at_level(logging.ERROR), pytest.raises(GRPCError) as caught:
        await stub.deallocate_pod_ip(ASKED)
    assert caught.value.status is Status.INTERNAL
    assert "DeallocatePodIP failed" in caplog.text


async def test_a_handler_is_cancelled_at_the_deadline(
    ipam: FakeIpam, stub: AdaptiveIpamStub, autojump_clock: trio.testing.MockClock
) -> None:
    ipam.hangs = True
    for deadline in (None, Deadline.from_timeout(1)):
        with pytest.raises(GRPCError) as caught:
            await stub.deallocate_pod_ip(ASKED, timeout=2, deadline=deadline)
        assert caught.value.status is Status.DEADLINE_EXCEEDED
    assert 2 < trio.current_time() < 4.1


async def test_a_handler_is_cancelled_with_its_caller(
    ipam: FakeIpam, stub: AdaptiveIpamStub
) -> None:
    ipam.hangs = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stub.deallocate_pod_ip, ASKED)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert ipam.asked == [ASKED]
