"""`metis.rpc.channel` and `.client_stream`: what the generated stubs stand on."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
import trio
import trio.testing
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, ProtocolError
from grpclib.metadata import Deadline
from grpclib.server import Stream

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
)
from metis.api.grpc.health.v1 import (
    HealthBase,
    HealthCheckRequest,
    HealthCheckResponse,
    HealthStub,
)
from metis.errors import TransportError
from metis.rpc.channel import CONNECTION_TRIES, Channel, open_channel
from metis.rpc.client_stream import encode_timeout
from metis.rpc.http2 import ErrorCode
from metis.rpc.limits import Limits
from metis.rpc.memory import memory_stream_pair
from metis.rpc.transport import MemoryTransport, Transport, UnixTransport
from tests.rpc.raw import frame, prefixed
from tests.rpc.services import (
    ALLOCATE,
    CHAT,
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

Script = Callable[["RawServer"], Awaitable[None]]

OK_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
OK_TRAILERS = [("grpc-status", "0")]


class RawServer:
    """The server's end of one connection, played by hand."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=False,
                header_encoding="utf-8",
                validate_outbound_headers=False,
            )
        )
        self.resets: list[tuple[int, int]] = []
        self.requests: list[tuple[int, dict[str, str]]] = []
        self.closed = False

    async def flush(self) -> None:
        await self.stream.send_all(self.h2.data_to_send())

    async def receive(self) -> None:
        data = await self.stream.receive_some()
        self.closed = not data
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                assert event.headers is not None
                headers = {str(name): str(value) for name, value in event.headers}
                self.requests.append((event.stream_id, headers))
            elif isinstance(event, h2.events.StreamReset):
                self.resets.append((event.stream_id, int(event.error_code)))

    async def next_request(self) -> int:
        while not self.requests:
            await self.receive()
        return self.requests.pop(0)[0]

    async def answer(
        self,
        headers: Sequence[tuple[str, str]] = OK_HEADERS,
        data: bytes | None = None,
        trailers: Sequence[tuple[str, str]] | None = OK_TRAILERS,
    ) -> None:
        """Answer the next request; without trailers the headers end the call."""
        call = await self.next_request()
        self.h2.send_headers(
            call, headers, end_stream=trailers is None and data is None
        )
        if data is not None:
            self.h2.send_data(call, data, end_stream=trailers is None)
        if trailers is not None:
            self.h2.send_headers(call, trailers, end_stream=True)
        await self.flush()


@asynccontextmanager
async def playing(*scripts: Script) -> AsyncIterator[Channel]:
    """A channel to a server that plays a script on each connection in turn."""
    transport = MemoryTransport()
    [listener] = await transport.listen()

    async def play() -> None:
        for script in scripts:
            async with await listener.accept() as stream:
                server = RawServer(stream)
                server.h2.initiate_connection()
                await server.flush()
                await script(server)

    async with (
        listener,
        trio.open_nursery() as nursery,
        open_channel(transport) as channel,
    ):
        nursery.start_soon(play)
        yield channel


async def allocate(channel: Channel, **options: Any) -> AllocatePodIpResponse:
    return await AdaptiveIpamStub(channel).allocate_pod_ip(request("pod"), **options)


async def failure(script: Script, **options: Any) -> GRPCError:
    """What a call fails with when its server plays this script."""
    async with playing(script) as channel:
        with pytest.raises(GRPCError) as caught:
            await allocate(channel, **options)
    return caught.value


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


# requests


async def test_a_request_is_what_every_grpc_server_expects() -> None:
    seen: dict[str, str] = {}

    async def look(server: RawServer) -> None:
        while not server.requests:
            await server.receive()
        seen.update(server.requests[0][1])
        await server.answer(data=prefixed(bytes(answer("x"))))

    async with playing(look) as channel:
        await allocate(channel, timeout=5, metadata={"x-key": "v", "x-bin": b"\0\xff"})
    timeout = seen.pop("grpc-timeout")
    assert timeout[-1] == "u"
    assert 4_900_000 < int(timeout[:-1]) <= 5_000_000
    assert seen == {
        ":method": "POST",
        ":scheme": "http",
        ":path": ALLOCATE,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "grpc-python-metis",
        "x-key": "v",
        "x-bin": "AP8",
    }


async def test_no_proxy_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")
    async with ipam() as stub:
        assert text_of(await stub.allocate_pod_ip(request("pod"))) == "pod"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0u"),
        (0, "0u"),
        (0.0000004, "0u"),
        (1.5, "1500000u"),
        (99.9999999, "99999999u"),
        (100, "100000m"),
        (99_999.9999, "99999999m"),
        (100_000, "100000S"),
        (1e12, "99999999S"),
    ],
)
def test_timeouts_fit_their_header(seconds: float, text: str) -> None:
    assert encode_timeout(seconds) == text
    assert len(text) <= 9


@pytest.mark.parametrize(
    "metadata", [{"Upper": "x"}, {"grpc-x": "x"}, {"x": "\n"}, {"x-bin": "text"}]
)
async def test_metadata_that_cannot_be_sent_is_refused(
    metadata: dict[str, str],
) -> None:
    async with ipam() as stub:
        with pytest.raises((ValueError, TypeError)):
            await stub.allocate_pod_ip(request(), metadata=metadata)


async def test_a_message_too_large_is_not_sent() -> None:
    service = Ipam()
    async with connected(service, client=Limits(max_message_bytes=100)) as channel:
        stub = AdaptiveIpamStub(channel)
        with pytest.raises(GRPCError, match="has 203 bytes: at most 100") as caught:
            await stub.allocate_pod_ip(request("x" * 200))
        assert text_of(await stub.allocate_pod_ip(request("small"))) == "small"
    assert caught.value.status is Status.RESOURCE_EXHAUSTED
    assert service.calls == 1


async def test_a_message_too_large_is_not_taken() -> None:
    async def large(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        return answer("x" * 200)

    async with ipam(large, client=Limits(max_message_bytes=100)) as stub:
        with pytest.raises(GRPCError, match="206 bytes: at most 100") as caught:
            await stub.allocate_pod_ip(request())
    assert caught.value.status is Status.RESOURCE_EXHAUSTED


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


# responses


@pytest.mark.parametrize(
    ("headers", "data", "trailers", "status", "message"),
    [
        ([(":status", "503")], None, None, Status.UNAVAILABLE, "HTTP status 503"),
        ([(":status", "404")], b"<html>", None, Status.UNIMPLEMENTED, "404"),
        ([(":status", "418")], None, None, Status.UNKNOWN, "418"),
        ([(":status", "200"), ("content-type", "text/html")], b"<html>", None,
         Status.UNKNOWN, "text/html"),
        (OK_HEADERS, prefixed(), None, Status.UNKNOWN, "without a status"),
        (OK_HEADERS, None, None, Status.UNKNOWN, "without a status"),
        ([*OK_HEADERS, ("grpc-status", "5")], None, None, Status.NOT_FOUND, None),
        ([*OK_HEADERS, ("grpc-status", "99")], None, None, Status.UNKNOWN, "'99'"),
        ([*OK_HEADERS, ("grpc-status", "x")], None, None, Status.UNKNOWN, "'x'"),
        (OK_HEADERS, None, [("grpc-status", "7"), ("grpc-message", "no%20way%C3%BC")],
         Status.PERMISSION_DENIED, "no wayü"),
        (OK_HEADERS, None, OK_TRAILERS, Status.UNIMPLEMENTED, "sent none"),
        (OK_HEADERS, prefixed() * 2, OK_TRAILERS, Status.UNIMPLEMENTED, "sent more"),
        (OK_HEADERS, b"\0\0", OK_TRAILERS, Status.INTERNAL, "middle of a message"),
        (OK_HEADERS, prefixed(flag=1), OK_TRAILERS, Status.UNIMPLEMENTED, "compressed"),
        (OK_HEADERS, prefixed(b"\x0a\x05"), OK_TRAILERS, Status.INTERNAL,
         "AllocatePodIPResponse cannot be decoded"),
        ([*OK_HEADERS, ("x-bin", "A")], prefixed(), OK_TRAILERS, Status.INTERNAL,
         "base64"),
        (OK_HEADERS, prefixed(), [*OK_TRAILERS, ("x-bin", "A")], Status.INTERNAL,
         "base64"),
        (OK_HEADERS, None, [("grpc-status", "5"), ("grpc-status-details-bin", "A")],
         Status.NOT_FOUND, None),
    ],
)  # fmt: skip
async def test_a_response_that_is_none_is_a_status(
    headers: list[tuple[str, str]],
    data: bytes | None,
    trailers: list[tuple[str, str]] | None,
    status: Status,
    message: str | None,
) -> None:
    async def play(server: RawServer) -> None:
        await server.answer(headers, data, trailers)
        while not server.closed:
            await server.receive()

    error = await failure(play)
    assert error.status is status
    assert message is None or (error.message and message in error.message)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.NO_ERROR, Status.INTERNAL),
        (ErrorCode.CANCEL, Status.CANCELLED),
        (ErrorCode.REFUSED_STREAM, Status.UNAVAILABLE),
        (ErrorCode.ENHANCE_YOUR_CALM, Status.RESOURCE_EXHAUSTED),
        (ErrorCode.INADEQUATE_SECURITY, Status.PERMISSION_DENIED),
        (ErrorCode.INTERNAL_ERROR, Status.INTERNAL),
        (12345, Status.INTERNAL),
    ],
)
async def test_a_reset_is_a_status_by_its_code(code: int, status: Status) -> None:
    async def reset(server: RawServer) -> None:
        call = await server.next_request()
        server.h2.reset_stream(call, code)
        await server.flush()
        while not server.closed:
            await server.receive()

    error = await failure(reset)
    assert error.status is status
    assert error.message is not None
    assert "reset the call" in error.message


async def test_a_reset_after_the_status_changes_nothing() -> None:
    async def play(server: RawServer) -> None:
        call = await server.next_request()
        server.h2.send_headers(call, OK_HEADERS)
        server.h2.send_data(call, prefixed(bytes(answer("x"))))
        server.h2.send_headers(call, OK_TRAILERS, end_stream=True)
        await server.stream.send_all(
            server.h2.data_to_send() + frame(3, 0, call, bytes(4))
        )
        while not server.closed:
            await server.receive()

    async with playing(play) as channel:
        assert text_of(await allocate(channel)) == "x"


# deadlines and cancellation


class Watched(HealthBase):
    """Answers once, and notes when its stream is cancelled."""

    def __init__(self) -> None:
        self.cancelled = trio.Event()

    async def watch(
        self, message: HealthCheckRequest
    ) -> AsyncIterator[HealthCheckResponse]:
        yield HealthCheckResponse()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()


@pytest.mark.parametrize(
    ("timeout", "deadline"), [(3, None), (None, 3), (3, 1000), (1000, 3)]
)
async def test_a_call_ends_at_its_deadline_even_if_the_server_does_not(
    autojump_clock: trio.testing.MockClock,
    timeout: float | None,  # noqa: ASYNC109  # a parameter of the call under test
    deadline: float | None,
) -> None:
    resets: list[tuple[int, int]] = []

    async def ignore(server: RawServer) -> None:
        call = await server.next_request()
        while not server.resets:
            await server.receive()
        assert server.resets == [(call, ErrorCode.CANCEL)]
        resets.extend(server.resets)

    async with playing(ignore) as channel:
        start = trio.current_time()
        point = None if deadline is None else Deadline.from_timeout(deadline)
        with pytest.raises(GRPCError) as caught:
            await allocate(channel, timeout=timeout, deadline=point)
        # grpclib's Deadline lives on the real clock, a moment of which has passed
        assert trio.current_time() - start == pytest.approx(3, abs=1)
        await trio.testing.wait_all_tasks_blocked()
    assert caught.value.status is Status.DEADLINE_EXCEEDED
    assert resets


async def test_a_cancelled_caller_cancels_the_call_at_the_server() -> None:
    cancelled = trio.Event()

    async def forever(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    async with ipam(forever) as stub, trio.open_nursery() as nursery:
        nursery.start_soon(stub.allocate_pod_ip, request())
        await trio.testing.wait_all_tasks_blocked()
        assert not cancelled.is_set()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True), trio.fail_after(5):
            await cancelled.wait()


async def test_a_stream_left_early_is_cancelled_at_the_server() -> None:
    service = Watched()
    async with connected(service) as channel:
        async with channel.request(
            "/grpc.health.v1.Health/Watch",
            Cardinality.UNARY_STREAM,
            HealthCheckRequest,
            HealthCheckResponse,
        ) as stream:
            await stream.send_message(HealthCheckRequest(), end=True)
            assert await stream.recv_message() == HealthCheckResponse()
        with trio.fail_after(5):
            await service.cancelled.wait()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_generator_dropped_halfway_is_cancelled_at_the_server() -> None:
    service = Watched()
    async with connected(service) as channel:
        responses = HealthStub(channel).watch(HealthCheckRequest(), timeout=1000)
        assert await anext(responses) == HealthCheckResponse()
        del responses
        gc.collect()
        with trio.fail_after(5):
            await service.cancelled.wait()


async def test_a_call_can_be_cancelled_by_its_caller() -> None:
    service = Watched()
    async with connected(service) as channel:
        async with channel.request(
            "/grpc.health.v1.Health/Watch",
            Cardinality.UNARY_STREAM,
            HealthCheckRequest,
            HealthCheckResponse,
        ) as stream:
            await stream.send_message(HealthCheckRequest(), end=True)
            await stream.recv_message()
            await stream.cancel()
        with trio.fail_after(5):
            await service.cancelled.wait()


# streams of requests


async def test_sending_to_a_call_that_has_ended_raises_its_status() -> None:
    async def talk(stream: Stream[Any, Any]) -> None:
        raise GRPCError(Status.ABORTED, "enough")

    async def say(channel: Channel, last: Callable[[Any], Awaitable[None]]) -> None:
        async with chat(channel) as stream:
            await stream.send_request()
            await trio.testing.wait_all_tasks_blocked()
            await last(stream)

    async with connected(Chat(talk)) as channel:
        for last in (lambda s: s.send_message(request()), lambda s: s.end()):
            with pytest.raises(GRPCError, match="enough") as caught:
                await say(channel, last)
            assert caught.value.status is Status.ABORTED


async def test_misuse_is_a_protocol_error_and_not_a_hanging_call() -> None:
    async with connected(Chat()) as channel:
        async with chat(channel) as stream:
            with pytest.raises(ProtocolError, match="not sent yet"):
                await stream.recv_message()
            await stream.send_request()
            with pytest.raises(ProtocolError, match="sent already"):
                await stream.send_request()
            await stream.end()
            with pytest.raises(ProtocolError, match="no message can follow"):
                await stream.send_message(request())
            with pytest.raises(ProtocolError, match="ended already"):
                await stream.end()
        async with chat(channel) as stream:
            await stream.send_message(request())
            assert await stream.recv_message()
            with pytest.raises(ProtocolError, match=r"call end\(\) first"):
                await stream.recv_trailing_metadata()
        with pytest.raises(ProtocolError, match=r"call end\(\) first"):
            async with chat(channel, "/tests.Chat/Collect") as stream:
                await stream.send_message(request())


async def test_a_call_that_was_never_begun_costs_nothing() -> None:
    transport = Counting()
    async with open_channel(transport) as channel, chat(channel):
        pass
    assert transport.connections == 0


def test_the_stub_method_under_test_is_the_generated_one() -> None:
    assert CHAT in Chat().__mapping__()
    assert isinstance(MemoryTransport(), Transport)
