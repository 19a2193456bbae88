"""`metis.rpc.channel`: connections that come and go as calls need them."""

from __future__ import annotations

from pathlib import Path

import h2.config
import h2.connection
import h2.events
import h2.settings
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
from metis.errors import TransportError
from metis.rpc.channel import CONNECTION_TRIES, Channel, open_channel
from metis.rpc.limits import Limits
from metis.rpc.memory import memory_stream_pair
from metis.rpc.transport import MemoryTransport, UnixTransport
from tests.rpc.raw import frame, prefixed
from tests.rpc.raw_server import RawServer, Script, allocate, failure, playing
from tests.rpc.services import Ipam, answer, connected, request, serving, text_of

# connecting


async def test_nothing_is_connected_until_a_call_wants_it() -> None:
    async with open_channel(MemoryTransport()):
        pass


@pytest.mark.parametrize("place", ["missing", "dead"])
async def test_no_server_is_unavailable_with_the_place_and_the_reason(
    tmp_path: Path, place: str
) -> None:
    path = str(tmp_path / place)
    if place == "dead":
        async with serving(transport=UnixTransport(path)):
            (tmp_path / "kept").hardlink_to(path)
        (tmp_path / "kept").rename(path)
    async with open_channel(UnixTransport(path)) as channel:
        with pytest.raises(GRPCError, match=path) as caught:
            await allocate(channel)
        assert caught.value.status is Status.UNAVAILABLE
        assert isinstance(caught.value.__cause__, TransportError)
        with pytest.raises(TransportError, match=path):
            await channel.connect()


async def test_the_first_call_after_the_server_came_up_succeeds() -> None:
    transport = MemoryTransport()
    async with open_channel(transport) as channel:
        for _ in range(3):
            with pytest.raises(GRPCError):
                await allocate(channel)
            async with serving(Ipam(), transport=transport):
                assert text_of(await allocate(channel)) == "pod"


async def test_a_channel_can_be_connected_in_advance() -> None:
    transport = Counting()
    async with serving(Ipam(), transport=transport), open_channel(transport) as channel:
        await channel.connect()
        await channel.connect()
        assert transport.connections == 1
        assert text_of(await allocate(channel)) == "pod"
        assert transport.connections == 1


class Counting(MemoryTransport):
    """Counts connections, and makes each take a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = 0

    async def connect(self) -> trio.abc.Stream:
        self.connections += 1
        await trio.testing.wait_all_tasks_blocked()
        return await super().connect()


async def test_calls_that_come_at_once_share_one_connection() -> None:
    transport = Counting()
    async with (
        serving(Ipam(), transport=transport),
        open_channel(transport) as channel,
        trio.open_nursery() as nursery,
    ):
        for _ in range(50):
            nursery.start_soon(allocate, channel)
    assert transport.connections == 1


async def test_calls_that_come_at_once_share_one_failure() -> None:
    transport = Counting()
    failures = 0

    async def call() -> None:
        nonlocal failures
        with pytest.raises(GRPCError):
            await allocate(channel)
        failures += 1

    async with open_channel(transport) as channel, trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(call)
    assert (transport.connections, failures) == (1, 50)


async def test_a_call_given_up_while_connecting_does_no_harm(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Slow(MemoryTransport):
        async def connect(self) -> trio.abc.Stream:
            await trio.sleep(10)
            return await super().connect()

    transport = Slow()
    async with serving(Ipam(), transport=transport), open_channel(transport) as channel:
        with pytest.raises(GRPCError) as caught:
            await allocate(channel, timeout=1)
        assert caught.value.status is Status.DEADLINE_EXCEEDED
        with trio.move_on_after(1):
            await allocate(channel)
        assert text_of(await allocate(channel)) == "pod"
        assert trio.current_time() < 11


async def test_a_new_connection_follows_a_lost_one() -> None:
    async def vanish(server: RawServer) -> None:
        await server.next_request()

    async def serve_one(server: RawServer) -> None:
        await server.answer(data=prefixed(bytes(answer("second"))))
        await server.receive()

    async with playing(vanish, serve_one) as channel:
        with pytest.raises(GRPCError, match="the connection was lost") as caught:
            await allocate(channel)
        assert caught.value.status is Status.UNAVAILABLE
        assert text_of(await allocate(channel)) == "second"


async def test_a_new_connection_follows_a_goaway_while_old_calls_go_on() -> None:
    old_may_end = trio.Event()

    async def leave(server: RawServer) -> None:
        call = await server.next_request()
        await server.stream.send_all(
            server.h2.data_to_send()
            + frame(7, 0, 0, call.to_bytes(4, "big") + bytes(4))
        )
        await old_may_end.wait()
        server.requests.append((call, {}))
        await server.answer(data=prefixed(bytes(answer("first"))))
        await server.receive()

    async def serve_one(server: RawServer) -> None:
        await server.answer(data=prefixed(bytes(answer("second"))))
        while not server.closed:
            await server.receive()

    transport = MemoryTransport()
    [listener] = await transport.listen()
    results = []
    async with listener, trio.open_nursery() as nursery:

        async def play(script: Script) -> None:
            async with await listener.accept() as stream:
                server = RawServer(stream)
                server.h2.initiate_connection()
                await server.flush()
                await script(server)

        async def first() -> None:
            results.append(text_of(await allocate(channel)))

        async with open_channel(transport) as channel, trio.open_nursery() as calls:
            nursery.start_soon(play, leave)
            calls.start_soon(first)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(play, serve_one)
            results.append(text_of(await allocate(channel)))
            old_may_end.set()
    assert results == ["second", "first"]


async def test_a_call_that_the_leaving_server_did_not_take_is_unavailable() -> None:
    async def leave(server: RawServer) -> None:
        await server.next_request()
        await server.stream.send_all(frame(7, 0, 0, bytes(8) + b"maintenance"))
        while not server.closed:
            await server.receive()

    error = await failure(leave)
    assert error.status is Status.UNAVAILABLE
    assert error.message == "the server did not take the call: maintenance"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_a_server_that_ends_every_connection_is_not_tried_for_ever(
    said: bytes,
) -> None:
    tries = 0

    class Ending(MemoryTransport):
        async def connect(self) -> trio.abc.Stream:
            nonlocal tries
            tries += 1
            ours, theirs = memory_stream_pair()
            await theirs.send_all(said)
            await theirs.aclose()
            return ours

    async with open_channel(Ending()) as channel:
        with pytest.raises(GRPCError) as caught:
            await allocate(channel)
    assert caught.value.status is Status.UNAVAILABLE
    assert 1 <= tries <= CONNECTION_TRIES


async def test_a_server_that_says_nothing_is_unavailable_in_the_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    transport = MemoryTransport()
    [listener] = await transport.listen()
    limits = Limits(handshake_seconds=10)
    async with listener, open_channel(transport, limits=limits) as channel:
        with pytest.raises(GRPCError) as caught:
            await allocate(channel)
    assert caught.value.status is Status.UNAVAILABLE
    assert trio.current_time() >= 10


async def test_the_exception_of_the_block_is_not_wrapped_into_a_group() -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_channel(MemoryTransport()):
            raise ZeroDivisionError
    with pytest.raises(GRPCError):
        async with open_channel(MemoryTransport()) as channel:
            await allocate(channel)


async def test_a_closed_channel_says_so() -> None:
    async with open_channel(MemoryTransport()) as channel:
        pass
    with pytest.raises(trio.ClosedResourceError, match="channel is closed"):
        await allocate(channel)


async def test_closing_a_channel_fails_the_calls_of_other_tasks() -> None:
    outcomes = []

    async def forever(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        await trio.sleep_forever()
        raise AssertionError

    async def call(channel: Channel) -> None:
        with pytest.raises(GRPCError) as caught:
            await allocate(channel)
        outcomes.append(caught.value.status)

    async with (
        serving(Ipam(forever)) as transport,
        trio.open_nursery() as nursery,
        open_channel(transport) as channel,
    ):
        nursery.start_soon(call, channel)
        await trio.testing.wait_all_tasks_blocked()
    assert outcomes == [Status.UNAVAILABLE]


async def test_closing_a_channel_fails_the_calls_that_wait_to_connect() -> None:
    class Never(MemoryTransport):
        async def connect(self) -> trio.abc.Stream:
            await trio.sleep_forever()
            raise AssertionError

    async def call(channel: Channel) -> None:
        with pytest.raises(GRPCError, match="channel was closed") as caught:
            await allocate(channel)
        assert caught.value.status is Status.UNAVAILABLE

    async with trio.open_nursery() as nursery, open_channel(Never()) as channel:
        nursery.start_soon(call, channel)
        await trio.testing.wait_all_tasks_blocked()


# places on a connection


async def test_the_limit_of_the_server_is_kept_first_come_first_served() -> None:
    begun: list[str] = []
    gates = {str(number): trio.Event() for number in range(6)}

    async def gated(message: AllocatePodIpRequest) -> AllocatePodIpResponse:
        begun.append(message.pod_name)
        await gates[message.pod_name].wait()
        return answer(message.pod_name)

    limits = Limits(max_concurrent_calls=2)
    async with connected(Ipam(gated), limits=limits) as channel:
        await channel.connect()
        await trio.testing.wait_all_tasks_blocked()
        stub = AdaptiveIpamStub(channel)
        async with trio.open_nursery() as nursery:
            for name in gates:
                nursery.start_soon(stub.allocate_pod_ip, request(name))
                await trio.testing.wait_all_tasks_blocked()
            assert begun == ["0", "1"]
            for position, name in enumerate(["1", "0", "2", "3", "4", "5"], start=3):
                gates[name].set()
                await trio.testing.wait_all_tasks_blocked()
                assert begun == list(gates)[:position]


async def test_a_limit_of_none_holds_calls_back_until_it_grows(
    autojump_clock: trio.testing.MockClock,
) -> None:
    done = trio.Event()

    async def tight(server: RawServer) -> None:
        setting = h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS
        server.h2.update_settings({setting: 0})
        await server.flush()
        await done.wait()
        server.h2.update_settings({setting: 1})
        await server.flush()
        await server.answer(data=prefixed(bytes(answer("x"))))

    async with playing(tight) as channel:
        await channel.connect()
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1) as scope:
            await allocate(channel)
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(allocate, channel)
            await trio.testing.wait_all_tasks_blocked()
            done.set()
