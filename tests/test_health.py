"""Health checks: at once by Check, and on every change by Watch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio
from grpclib import GRPCError, Status

import metis
from metis.api.grpc.health.v1 import HealthCheckRequest, HealthStub
from metis.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING, HealthService
from metis.rpc.channel import Channel
from tests.serving import serving


@pytest.mark.parametrize("service", ["", "adaptiveipam.v1.AdaptiveIpam"])
async def test_a_serving_daemon_says_so(tmp_path: Path, service: str) -> None:
    async with serving(tmp_path) as (channel, _):
        answer = await HealthStub(channel).check(HealthCheckRequest(service=service))
    assert answer.status == SERVING


async def test_an_unknown_service_is_not_found_by_check(tmp_path: Path) -> None:
    async with serving(tmp_path) as (channel, _):
        with pytest.raises(GRPCError) as caught:
            await HealthStub(channel).check(HealthCheckRequest(service="nope"))
    assert caught.value.status is Status.NOT_FOUND
    assert "'nope'" in str(caught.value.message)


async def test_watch_tells_the_status_now_and_after_each_change() -> None:
    service = HealthService(["s"])
    watch = service.watch(HealthCheckRequest(service="s"))
    assert (await anext(watch)).status == SERVING
    seen = []

    async def next_status() -> None:
        seen.append((await anext(watch)).status)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(next_status)
        await trio.testing.wait_all_tasks_blocked()
        assert seen == []
        service.set_status(NOT_SERVING)
    assert seen == [NOT_SERVING]
    await watch.aclose()  # type: ignore[attr-defined]  # an async generator


@pytest.mark.parametrize("service", ["s", "nope"])
async def test_a_stop_is_told_to_every_watch_and_ends_it(service: str) -> None:
    health = HealthService(["s"])
    seen = []

    async def watch() -> None:
        request = HealthCheckRequest(service=service)
        seen.extend([answer.status async for answer in health.watch(request)])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await trio.testing.wait_all_tasks_blocked()
        health.stop()
    assert seen == ([SERVING, NOT_SERVING] if service == "s" else [SERVICE_UNKNOWN])


async def test_a_watch_does_not_hold_a_stopping_daemon_up(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async def watch(channel: Channel, seen: trio.Event) -> None:
        async for _ in HealthStub(channel).watch(HealthCheckRequest()):
            seen.set()

    transport = metis.MemoryTransport()
    config = metis.DaemonConfig(
        db_path=str(tmp_path / "db.sqlite"), shutdown_grace=1000.0
    )
    async with trio.open_nursery() as clients, metis.open_channel(transport) as channel:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(metis.serve, config, transport=transport))
            seen = trio.Event()
            clients.start_soon(watch, channel, seen)
            await seen.wait()
            before = trio.current_time()
            nursery.cancel_scope.cancel()
        assert trio.current_time() - before < 1000


async def test_watch_of_an_unknown_service_says_so_and_waits() -> None:
    service = HealthService([])
    watch = service.watch(HealthCheckRequest(service="nope"))
    assert (await anext(watch)).status == SERVICE_UNKNOWN
    service.set_status(NOT_SERVING)
    with trio.move_on_after(0):
        await anext(watch)
        pytest.fail("an unknown service has no further status")
