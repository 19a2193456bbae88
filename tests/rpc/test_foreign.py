"""grpcio's C core on both sides: an implementation that owes us nothing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import trio
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from trio.testing import MockClock

from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
)
from metis.api.google.rpc import ErrorInfo
from metis.api.grpc.health.v1 import (
    HealthBase,
    HealthCheckRequest,
    HealthCheckResponse,
    HealthCheckResponseServingStatus,
)
from metis.rpc.channel import open_channel
from metis.rpc.limits import MAX_MESSAGE_BYTES
from metis.rpc.transport import UnixTransport
from tests.rpc.services import ALLOCATE, Ipam, answer, request, serving, text_of

T = TypeVar("T")

SECONDS = 120.0
"""Real time that a call gets which is expected to succeed, on a busy machine."""


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run blocking code of a foreign client beside the server."""
    return await trio.to_thread.run_sync(function, *args)


@contextmanager
def foreign_channel(path: str) -> Iterator[grpc.Channel]:
    # each test has a server of its own at the end of its own path
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        yield channel


def allocate(channel: grpc.Channel, name: str = "pod", **options: Any) -> str:
    """One call, with messages of ours as plain bytes."""
    method = channel.unary_unary(
        ALLOCATE,
        request_serializer=bytes,
        response_deserializer=AllocatePodIpResponse.parse,
    )
    return text_of(method(request(name), **{"timeout": SECONDS} | options))


def code_of(channel: grpc.Channel, **options: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        allocate(channel, **options)
    code: grpc.StatusCode = caught.value.code()
    return code


@asynccontextmanager
async def served(tmp_path: Path, *services: Any) -> AsyncIterator[str]:
    path = str(tmp_path / "s")
    async with serving(*services, transport=UnixTransport(path), grace=1):
        yield path


async def test_a_unary_call(tmp_path: Path) -> None:
    def client() -> str:
        with foreign_channel(path) as channel:
            return allocate(channel)

    async with served(tmp_path, Ipam()) as path:
        assert await in_thread(client) == "pod"


class Counting(HealthBase):
    async def watch(
        self, message: HealthCheckRequest
    ) -> AsyncIterator[HealthCheckResponse]:
        for number in range(3):
            yield HealthCheckResponse(HealthCheckResponseServingStatus(number))


async def test_a_stream_of_responses(tmp_path: Path) -> None:
    def client() -> list[int]:
        with foreign_channel(path) as channel:
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
            return [
                int(HealthCheckResponse.parse(data).status)
                for data in watch(b"", timeout=SECONDS)
            ]

    async with served(tmp_path, Counting()) as path:
        assert await in_thread(client) == [0, 1, 2]


async def forever(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
    await trio.sleep_forever()
    raise AssertionError


async def test_a_deadline(tmp_path: Path) -> None:
    begun, ended = threading.Event(), trio.Event()

    async def slow(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    def client(seconds: float) -> grpc.StatusCode:
        with foreign_channel(path) as channel:
            return code_of(channel, timeout=seconds)

    async with served(tmp_path, Ipam(slow)) as path:
        seconds = 0.2
        while not begun.is_set():  # a busy machine may need longer to get there
            code = await in_thread(client, seconds)
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            seconds *= 4
        with trio.fail_after(SECONDS):
            await ended.wait()


async def test_a_cancellation(tmp_path: Path) -> None:
    begun, ended = threading.Event(), trio.Event()

    async def slow(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    def client() -> bool:
        with foreign_channel(path) as channel:
            call = channel.unary_unary(ALLOCATE).future(b"", timeout=SECONDS)
            assert begun.wait(SECONDS)
            call.cancel()
            return bool(call.cancelled())

    async with served(tmp_path, Ipam(slow)) as path:
        assert await in_thread(client)
        with trio.fail_after(SECONDS):
            await ended.wait()


async def test_metadata_both_ways(tmp_path: Path) -> None:
    class Meta(Ipam):
        def __mapping__(self) -> Any:
            [(path, handler), *_] = super().__mapping__().items()

            async def talk(stream: Any) -> None:
                await stream.recv_message()
                seen = stream.metadata
                await stream.send_initial_metadata(
                    metadata={"x-text": seen["x-text"], "x-bin": seen["x-bin"]}
                )
                await stream.send_message(answer("x"))
                await stream.send_trailing_metadata(metadata={"x-end-bin": b"\xff\0"})

            return {path: handler._replace(func=talk)}

    def client() -> tuple[dict[str, Any], dict[str, Any]]:
        with foreign_channel(path) as channel:
            metadata = (("x-text", "a value"), ("x-bin", b"\0\1\xfe\xff"))
            call = channel.unary_unary(ALLOCATE)
            _, done = call.with_call(b"", timeout=SECONDS, metadata=metadata)
            return dict(done.initial_metadata()), dict(done.trailing_metadata())

    async with served(tmp_path, Meta()) as path:
        first, last = await in_thread(client)
    assert first["x-text"] == "a value"
    assert first["x-bin"] == b"\0\1\xfe\xff"
    assert last["x-end-bin"] == b"\xff\0"


async def test_error_details(tmp_path: Path) -> None:
    async def full(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        info = ErrorInfo(
            reason="POOL_EXHAUSTED", domain="metis", metadata={"owned": "9"}
        )
        raise GRPCError(Status.RESOURCE_EXHAUSTED, "kein Platz für 100 %", [info])

    def client() -> status_pb2.Status:
        with foreign_channel(path) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                allocate(channel)
            assert caught.value.details() == "kein Platz für 100 %"
            return rpc_status.from_call(caught.value)

    async with served(tmp_path, Ipam(full)) as path:
        status = await in_thread(client)
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("POOL_EXHAUSTED", "metis")
    assert dict(info.metadata) == {"owned": "9"}


async def test_an_unknown_method(tmp_path: Path) -> None:
    def client() -> tuple[grpc.StatusCode, str]:
        with foreign_channel(path) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/no.Such/Method")(b"", timeout=SECONDS)
            return caught.value.code(), caught.value.details()

    async with served(tmp_path, Ipam()) as path:
        code, message = await in_thread(client)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "/no.Such/Method" in message


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compression_is_not_implemented(
    tmp_path: Path, kind: grpc.Compression
) -> None:
    def client() -> grpc.StatusCode:
        with foreign_channel(path) as channel:
            return code_of(channel, name="x" * 1000, compression=kind)

    async with served(tmp_path, Ipam()) as path:
        assert await in_thread(client) is grpc.StatusCode.UNIMPLEMENTED


async def test_messages_up_to_the_limit_both_ways_and_not_beyond(
    tmp_path: Path,
) -> None:
    most = MAX_MESSAGE_BYTES - 20

    def client() -> tuple[int, grpc.StatusCode]:
        with foreign_channel(path) as channel:
            length = len(allocate(channel, "x" * most))
            return length, code_of(channel, name="x" * (MAX_MESSAGE_BYTES + 1))

    async with served(tmp_path, Ipam()) as path:
        length, code = await in_thread(client)
    assert length == most
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_hundreds_of_calls_at_once_on_one_connection(tmp_path: Path) -> None:
    together = trio.Event()
    names: set[str] = set()

    async def gather(message: AllocatePodIpRequest) -> AllocatePodIpResponse:
        names.add(message.pod_name)
        if len(names) == 300:
            together.set()
        await together.wait()
        return answer(message.pod_name)

    def client() -> int:
        with foreign_channel(path) as channel:
            method = channel.unary_unary(ALLOCATE, request_serializer=bytes)
            calls = [
                method.future(request(f"pod-{number}"), timeout=SECONDS)
                for number in range(300)
            ]
            return len([call.result() for call in calls])

    async with served(tmp_path, Ipam(gather)) as path:
        assert await in_thread(client) == 300
    assert len(names) == 300


async def test_many_connections(tmp_path: Path) -> None:
    def client() -> list[str]:
        with foreign_channel(path) as channel:
            return [allocate(channel, f"pod-{number}") for number in range(3)]

    async with served(tmp_path, Ipam()) as path, trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(in_thread, client)


@pytest.mark.real_time("a call takes its time while the server stops")
async def test_a_stop_is_seen_and_the_next_server_found(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    transport = UnixTransport(path)
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
    ]
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        for _ in range(3):
            begun = trio.Event()

            async def slow(
                message: AllocatePodIpRequest, begun: trio.Event = begun
            ) -> AllocatePodIpResponse:
                if message.pod_name == "slow":
                    begun.set()
                    await trio.sleep(0.2)
                return answer(message.pod_name)

            call = partial(allocate, channel, wait_for_ready=True)
            results: list[str] = []

            async def in_flight(
                call: Callable[[str], str] = call, into: list[str] = results
            ) -> None:
                into.append(await in_thread(call, "slow"))

            async with (
                trio.open_nursery() as nursery,
                serving(Ipam(slow), transport=transport, grace=SECONDS),
            ):
                assert await in_thread(call) == "pod"
                nursery.start_soon(in_flight)
                await begun.wait()
            assert results == ["slow"]


# our channel against a foreign server


@contextmanager
def foreign_server(
    path: str, behaviour: Callable[[bytes, Any], bytes]
) -> Iterator[None]:
    service, method = ALLOCATE.strip("/").split("/")
    handler = grpc.method_handlers_generic_handler(
        service, {method: grpc.unary_unary_rpc_method_handler(behaviour)}
    )
    server = grpc.server(futures.ThreadPoolExecutor(8), [handler])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


@asynccontextmanager
async def calling(
    tmp_path: Path, behaviour: Callable[[bytes, Any], bytes]
) -> AsyncIterator[AdaptiveIpamStub]:
    path = str(tmp_path / "s")
    with foreign_server(path, behaviour):
        async with open_channel(UnixTransport(path)) as channel:
            yield AdaptiveIpamStub(channel)


def echo(data: bytes, _: Any) -> bytes:
    return bytes(answer(AllocatePodIpRequest.parse(data).pod_name))


async def test_our_channel_calls_a_foreign_server(tmp_path: Path) -> None:
    async with calling(tmp_path, echo) as stub:
        for size in (1, 100_000, 4_000_000):
            response = await stub.allocate_pod_ip(request("x" * size), timeout=SECONDS)
            assert len(text_of(response)) == size


async def test_our_channel_calls_it_many_times_at_once(tmp_path: Path) -> None:
    numbers = itertools.count()

    async with calling(tmp_path, echo) as stub, trio.open_nursery() as nursery:

        async def call() -> None:
            name = f"pod-{next(numbers)}"
            response = await stub.allocate_pod_ip(request(name), timeout=SECONDS)
            assert text_of(response) == name

        for _ in range(200):
            nursery.start_soon(call)


async def test_our_channel_understands_its_errors_and_their_details(
    tmp_path: Path,
) -> None:
    def fail(_: bytes, context: Any) -> bytes:
        status = status_pb2.Status(code=9, message="später ü%")
        info = error_details_pb2.ErrorInfo(reason="R", domain="d", metadata={"k": "v"})
        status.details.add().Pack(info)
        context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError

    async with calling(tmp_path, fail) as stub:
        with pytest.raises(GRPCError) as caught:
            await stub.allocate_pod_ip(request(), timeout=SECONDS)
    assert caught.value.status is Status.FAILED_PRECONDITION
    assert caught.value.message == "später ü%"
    assert caught.value.details == [
        ErrorInfo(reason="R", domain="d", metadata={"k": "v"})
    ]


async def test_our_deadline_and_cancellation_reach_it(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def slow(_: bytes, context: Any) -> bytes:
        context.add_callback(ended.set)
        begun.set()
        ended.wait(SECONDS)
        return b""

    async with calling(tmp_path, slow) as stub:

        async def call() -> None:
            with pytest.raises(GRPCError) as caught:
                await stub.allocate_pod_ip(request(), timeout=SECONDS)
            assert caught.value.status is Status.DEADLINE_EXCEEDED

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            assert await in_thread(begun.wait, SECONDS)
            mock_clock.jump(SECONDS)  # for us alone: its own clock goes on
        assert await in_thread(ended.wait, SECONDS)
        begun.clear()
        ended.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stub.allocate_pod_ip, request())
            assert await in_thread(begun.wait, SECONDS)
            nursery.cancel_scope.cancel()
        assert await in_thread(ended.wait, SECONDS)


async def test_our_channel_finds_its_successor(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with open_channel(UnixTransport(path)) as channel:
        stub = AdaptiveIpamStub(channel)
        for _ in range(3):
            with foreign_server(path, echo):
                response = await stub.allocate_pod_ip(request("pod"), timeout=SECONDS)
                assert text_of(response) == "pod"
