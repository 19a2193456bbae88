"""`metis.rpc.client_stream`: one call, as the generated stubs make it."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

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
from metis.rpc.channel import Channel, open_channel
from metis.rpc.client_stream import encode_timeout
from metis.rpc.http2 import ErrorCode
from metis.rpc.limits import Limits
from metis.rpc.transport import MemoryTransport
from tests.rpc.raw import frame, prefixed
from tests.rpc.raw_server import (
    OK_HEADERS,
    OK_TRAILERS,
    RawServer,
    allocate,
    failure,
    playing,
)
from tests.rpc.services import (
    ALLOCATE,
    Chat,
    Ipam,
    answer,
    chat,
    connected,
    ipam,
    request,
    text_of,
)

# requests


async def test_a_request_is_what_every_grpc_server_expects(
    mock_clock: trio.testing.MockClock,
) -> None:
    seen: dict[str, str] = {}

    async def look(server: RawServer) -> None:
        while not server.requests:
            await server.receive()
        seen.update(server.requests[0][1])
        await server.answer(data=prefixed(bytes(answer("x"))))

    async with playing(look) as channel:
        await allocate(channel, timeout=5, metadata={"x-key": "v", "x-bin": b"\0\xff"})
    assert seen == {
        ":method": "POST",
        ":scheme": "http",
        ":path": ALLOCATE,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "grpc-python-metis",
        "grpc-timeout": "5000000u",
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
        (OK_HEADERS, b"\0\0", None, Status.INTERNAL, "middle of a message"),
        (OK_HEADERS, b"\0\0", [("grpc-status", "14"), ("grpc-message", "stopping")],
         Status.UNAVAILABLE, "stopping"),
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
    monkeypatch: pytest.MonkeyPatch,
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

    # grpclib's deadlines live on the real clock.
    trio_s = SimpleNamespace(monotonic=trio.current_time)
    monkeypatch.setattr("grpclib.metadata.time", trio_s)
    async with playing(ignore) as channel:
        start = trio.current_time()
        point = None if deadline is None else Deadline.from_timeout(deadline)
        with pytest.raises(GRPCError) as caught:
            await allocate(channel, timeout=timeout, deadline=point)
        assert trio.current_time() - start == pytest.approx(3)
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


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Trio's, of the dropping
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
    async with open_channel(MemoryTransport()) as channel, chat(channel):
        pass
