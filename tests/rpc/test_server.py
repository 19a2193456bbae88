"""`metis.rpc.server`: accepting, serving many, and stopping in good order."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
)
from metis.api.grpc.health.v1 import (
    HealthBase,
    HealthCheckRequest,
    HealthCheckResponse,
    HealthCheckResponseServingStatus,
    HealthStub,
)
from metis.errors import AddressInUse, TransportError
from metis.rpc.channel import open_channel
from metis.rpc.limits import Limits
from metis.rpc.server import ACCEPT_PAUSE_SECONDS, serve
from metis.rpc.transport import MemoryTransport, TcpTransport, UnixTransport
from tests.rpc.raw import prefixed, raw_client, replaced
from tests.rpc.services import (
    Chat,
    Ipam,
    answer,
    chat,
    connected,
    ipam,
    request,
    serving,
    text_of,
)


class Counting(HealthBase):
    """Watch counts up to a number, or for ever."""

    def __init__(self, last: int | None) -> None:
        self.last = last

    async def watch(
        self, message: HealthCheckRequest
    ) -> AsyncIterator[HealthCheckResponse]:
        number = 0
        while self.last is None or number < self.last:
            yield HealthCheckResponse(HealthCheckResponseServingStatus(number % 3))
            number += 1
            await trio.sleep(1)


async def test_a_generated_service_and_stub_meet_unchanged() -> None:
    async with ipam() as stub:
        assert text_of(await stub.allocate_pod_ip(request("pod"))) == "pod"


async def test_several_services_share_a_server() -> None:
    async with connected(Ipam(), Chat(), Counting(0)) as channel:
        stub = AdaptiveIpamStub(channel)
        assert text_of(await stub.allocate_pod_ip(request("pod"))) == "pod"
        async with chat(channel) as stream:
            await stream.send_message(request("a"))
            assert text_of(await stream.recv_message()) == "a"
            await stream.send_message(request("b"), end=True)
            assert text_of(await stream.recv_message()) == "b"
            assert await stream.recv_message() is None
        async with chat(channel, "/tests.Chat/Collect") as stream:
            for name in "xyz":
                await stream.send_message(request(name))
            await stream.end()
            assert text_of(await stream.recv_message()) == "x,y,z"


async def test_a_stream_of_responses_comes_as_it_is_made(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with connected(Counting(4)) as channel:
        start = trio.current_time()
        watch = HealthStub(channel).watch(HealthCheckRequest())
        times = [trio.current_time() - start async for _ in watch]
    assert times == pytest.approx([0, 1, 2, 3])


async def test_the_deadline_of_a_stream_holds_from_its_beginning(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with connected(Counting(None)) as channel:
        watch = HealthStub(channel).watch(HealthCheckRequest(), timeout=4.5)
        for _ in range(5):
            await anext(watch)
        with pytest.raises(GRPCError) as caught:
            await anext(watch)
    assert caught.value.status is Status.DEADLINE_EXCEEDED


@pytest.mark.parametrize("kind", ["unix", "tcp", "memory"])
async def test_it_serves_on_every_transport(tmp_path: Path, kind: str) -> None:
    transport = {
        "unix": UnixTransport(str(tmp_path / "s")),
        "tcp": TcpTransport(),
        "memory": MemoryTransport(),
    }[kind]
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(serve, [Ipam()], transport)
        if kind == "tcp":
            transport = TcpTransport(port=int(address.rpartition(":")[2]))
        async with open_channel(transport) as channel:
            stub = AdaptiveIpamStub(channel)
            assert text_of(await stub.allocate_pod_ip(request("pod"))) == "pod"
        nursery.cancel_scope.cancel()


async def test_a_failure_to_listen_is_itself_and_not_a_group(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="No such file"):
        await serve([], UnixTransport(str(tmp_path / "none" / "s")))
    async with serving() as transport:
        with pytest.raises(AddressInUse):
            await serve([], transport)


# stopping


class Slow:
    """AllocatePodIP that takes a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begun = trio.Event()
        self.finished = self.cancelled = False

    async def __call__(self, _: AllocatePodIpRequest) -> AllocatePodIpResponse:
        self.begun.set()
        try:
            await trio.sleep(self.seconds)
        except trio.Cancelled:
            self.cancelled = True
            raise
        self.finished = True
        return answer("done")


async def stop_while(
    slow: Slow, grace: float
) -> tuple[AllocatePodIpResponse | GRPCError, float]:
    """What a call in flight gets when its server stops, and after how long."""
    transport = MemoryTransport()
    outcome: list[AllocatePodIpResponse | GRPCError] = []

    async def call(channel: Any) -> None:
        try:
            outcome.append(await AdaptiveIpamStub(channel).allocate_pod_ip(request()))
        except GRPCError as exc:
            outcome.append(exc)

    async with trio.open_nursery() as outer, trio.open_nursery() as inner:
        await inner.start(partial(serve, [Ipam(slow)], transport, grace=grace))
        channel = await outer.start(hold_channel, transport)
        outer.start_soon(call, channel)
        await slow.begun.wait()
        stopped = trio.current_time()
        inner.cancel_scope.cancel()
    [result] = outcome
    return result, trio.current_time() - stopped


async def hold_channel(
    transport: MemoryTransport,
    *,
    task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
) -> None:
    async with open_channel(transport) as channel:
        task_status.started(channel)
        await trio.sleep(100)


async def test_calls_in_flight_are_finished_within_the_grace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    slow = Slow(3)
    result, _ = await stop_while(slow, grace=5)
    assert isinstance(result, AllocatePodIpResponse)
    assert slow.finished


async def test_calls_that_outlast_the_grace_are_cancelled_and_told(
    autojump_clock: trio.testing.MockClock,
) -> None:
    slow = Slow(30)
    result, _ = await stop_while(slow, grace=5)
    assert isinstance(result, GRPCError)
    assert result.status is Status.UNAVAILABLE
    assert result.message == "the server is stopping"
    assert slow.cancelled


@pytest.mark.parametrize(
    ("seconds", "grace", "expected"),
    [(3, 5, 3), (30, 5, 5), (30, 0, 0), (None, 60, 0)],
)
async def test_a_stop_takes_as_long_as_its_calls_and_no_longer_than_the_grace(
    autojump_clock: trio.testing.MockClock,
    seconds: float | None,
    grace: float,
    expected: float,
) -> None:
    slow = Slow(seconds or 0)
    transport = MemoryTransport()
    async with contextlib.AsyncExitStack() as clients:
        async with trio.open_nursery() as servers:
            await servers.start(partial(serve, [Ipam(slow)], transport, grace=grace))
            for _ in range(3):
                client = await clients.enter_async_context(raw_client(transport))
                if seconds is None:
                    await client.ask()  # and then it is idle
                else:
                    client.open(data=prefixed())
                    await client.flush()
                    await slow.begun.wait()
            await trio.testing.wait_all_tasks_blocked()
            start = trio.current_time()
            servers.cancel_scope.cancel()
        assert trio.current_time() - start == pytest.approx(expected)


async def test_a_stop_says_goaway_refuses_new_calls_and_lets_the_old_ones_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    slow = Slow(3)
    transport = MemoryTransport()
    async with trio.open_nursery() as nursery:
        server = trio.CancelScope()

        async def run(
            task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
        ) -> None:
            with server:
                await serve([Ipam(slow)], transport, task_status=task_status)

        await nursery.start(run)
        async with raw_client(transport) as client:
            old = client.open(data=prefixed())
            await client.flush()
            await slow.begun.wait()
            server.cancel()
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(TransportError):
                await transport.connect()
            late = client.open(data=prefixed())
            await client.flush()
            client.h2.state_machine.process_input = lambda _: []  # type: ignore[method-assign, assignment]
            got = await client.answer(old)
            assert got.status == "0"
            assert client.answers[late].reset == 7  # REFUSED_STREAM
            await client.receive_until_closed()
            assert client.goaway is not None
            assert client.goaway.last_stream_id == old
            assert client.goaway.additional_data == b"the server is stopping"
    assert slow.finished


async def test_the_socket_file_is_gone_before_the_grace_begins(tmp_path: Path) -> None:
    path = tmp_path / "s"
    slow = Slow(0)
    finish = trio.Event()

    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        slow.begun.set()
        await finish.wait()
        return answer(str(path.exists()))

    results = []
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as server:
                await server.start(serve, [Ipam(allocate)], UnixTransport(str(path)))

                async def call() -> None:
                    async with open_channel(UnixTransport(str(path))) as channel:
                        stub = AdaptiveIpamStub(channel)
                        results.append(await stub.allocate_pod_ip(request()))

                nursery.start_soon(call)
                await slow.begun.wait()

                async def let_go() -> None:
                    while path.exists():
                        await trio.testing.wait_all_tasks_blocked()
                    finish.set()

                nursery.start_soon(let_go)
                scope.cancel()
    assert [text_of(result) for result in results] == ["False"]


async def test_it_can_serve_again_on_the_same_transport() -> None:
    transport = MemoryTransport()
    for _ in range(3):
        async with (
            serving(Ipam(), transport=transport),
            open_channel(transport) as channel,
        ):
            stub = AdaptiveIpamStub(channel)
            assert text_of(await stub.allocate_pod_ip(request("pod"))) == "pod"


async def test_the_cancellation_goes_on_outward() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await serve([Ipam()], MemoryTransport())
    assert scope.cancelled_caught


# accepting


class Failing(MemoryTransport):
    """Accept fails now and then, as with no descriptors left."""

    def __init__(self, code: int, times: int) -> None:
        super().__init__()
        self.code = code
        self.times = times

    async def listen(self) -> Any:
        [listener] = await super().listen()
        accept = listener.accept

        async def failing() -> Any:
            if self.times:
                self.times -= 1
                raise OSError(self.code, "no more")
            return await accept()

        listener.accept = failing  # type: ignore[method-assign]
        return [listener]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
async def test_accepting_pauses_when_there_are_no_descriptors(
    autojump_clock: trio.testing.MockClock, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    start = trio.current_time()
    async with (
        serving(Ipam(), transport=Failing(code, 3)) as transport,
        raw_client(transport) as client,
    ):
        assert (await client.ask()).status == "0"
        assert trio.current_time() - start == pytest.approx(3 * ACCEPT_PAUSE_SECONDS)
    assert len(caplog.records) == 1


async def test_another_failure_of_accept_is_not_hidden() -> None:
    with pytest.RaisesGroup(OSError, flatten_subgroups=True):
        await serve([Ipam()], Failing(errno.EBADF, 1))


async def test_a_connection_above_the_limit_takes_the_place_of_the_longest_idle(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with (
        serving(Ipam(), limits=Limits(max_connections=3)) as transport,
        raw_client(transport) as first,
        raw_client(transport) as second,
        raw_client(transport) as third,
    ):
        for client in (first, second, third, first):
            await trio.sleep(1)
            assert (await client.ask()).status == "0"
        async with raw_client(transport) as newcomer:
            assert (await newcomer.ask()).status == "0"
            await second.receive_until_closed()
            assert second.goaway is not None
            assert second.goaway.additional_data == b"room is needed for others"
            for client in (first, third, newcomer):
                assert (await client.ask()).status == "0"


async def test_a_connection_above_the_limit_is_refused_when_all_others_are_busy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = Slow(1000)
    async with (
        serving(Ipam(slow), limits=Limits(max_connections=2), grace=0) as transport,
        raw_client(transport) as first,
        raw_client(transport) as second,
    ):
        for client in (first, second):
            client.open(data=prefixed())
            await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        newcomer = await transport.connect()
        assert await newcomer.receive_some() == b""
        assert (await first.ask(replaced(":path", "/x"))).status == "12"
    assert "a connection was refused: 2 are busy" in caplog.text


async def test_idle_connections_give_way_when_there_are_no_descriptors(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transport = Failing(errno.EMFILE, 0)
    async with (
        serving(Ipam(), transport=transport),
        raw_client(transport) as idle,
        raw_client(transport) as other,
    ):
        assert (await idle.ask()).status == "0"
        await trio.sleep(1)
        assert (await other.ask()).status == "0"
        transport.times = 1
        await trio.sleep(1)
        async with raw_client(transport) as third, raw_client(transport) as newcomer:
            assert (await third.ask()).status == "0"
            assert (await newcomer.ask()).status == "0"
        await idle.receive_until_closed()
        assert idle.goaway is not None


async def test_a_bug_on_one_connection_is_logged_and_leaves_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(Ipam()) as transport, raw_client(transport) as other:
        assert (await other.ask()).status == "0"
        await trio.testing.wait_all_tasks_blocked()
        with monkeypatch.context() as patch:
            patch.setattr(
                "metis.rpc.connection.Connection.receive",
                lambda *_: (_ for _ in ()).throw(ZeroDivisionError("a bug")),
            )
            async with raw_client(transport) as client:
                await client.receive_until_closed()
        assert (await other.ask(replaced(":path", "/x"))).status == "12"
    assert "a connection failed" in caplog.text
