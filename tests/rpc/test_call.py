"""`metis.rpc.call`: every request gets its exact answer, whatever it is."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from metis.api.adaptiveipam.v1 import (
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
)
from metis.api.google.rpc import ErrorInfo
from metis.rpc.call import MAX_STATUS_MESSAGE_BYTES
from metis.rpc.channel import Channel
from metis.rpc.http2 import ErrorCode
from metis.rpc.limits import Limits
from tests.rpc.raw import HEADERS, Answer, Header, prefixed, raw_client, replaced
from tests.rpc.services import (
    CHAT,
    COLLECT,
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


async def ask(headers: list[Header], data: bytes = prefixed()) -> Answer:
    """What a server of `Ipam` answers to one raw request."""
    async with serving(Ipam()) as transport, raw_client(transport) as client:
        return await client.ask(headers, data)


async def collect(channel: Channel) -> None:
    async with chat(channel, COLLECT) as stream:
        await stream.send_message(request(), end=True)
        await stream.recv_message()


# the checklist


async def test_a_request_by_the_book_is_answered() -> None:
    got = await ask(HEADERS, prefixed(bytes(request("pod-1"))))
    assert got.headers[":status"] == "200"
    assert got.headers["content-type"].startswith("application/grpc")
    assert got.status == "0"
    assert got.data == prefixed(bytes(answer("pod-1")))


@pytest.mark.parametrize(
    "authority",
    [(), ("",), ("localhost",), ("/run/metis.sock",), ("%2Frun%2Fmetis.sock",)],
)
async def test_any_authority_is_served(authority: tuple[str, ...]) -> None:
    assert (await ask(replaced(":authority", *authority))).status == "0"


@pytest.mark.parametrize(
    ("headers", "http", "status", "message"),
    [
        (replaced(":method", "GET"), "405", None, ""),
        (replaced("content-type"), "415", "2", "content-type header is missing"),
        (replaced("content-type", "text/html"), "415", "2", "'text/html'"),
        (replaced("content-type", "application/grpc+json"), "415", "2", "json"),
        (replaced("te"), "400", "2", "trailers"),
        (replaced("te", "gzip"), "400", "2", "trailers"),
        (replaced(":path", "/a.B/C"), "200", "12", "there is no method /a.B/C"),
        (replaced(":path", "*"), "200", "12", "there is no method *"),
        ([*HEADERS, ("grpc-encoding", "gzip")], "200", "12", "'gzip'"),
        ([*HEADERS, ("grpc-timeout", "5")], "200", "3", "'5'"),
        ([*HEADERS, ("grpc-timeout", "-5S")], "200", "3", "'-5S'"),
        ([*HEADERS, ("grpc-timeout", "123456789S")], "200", "3", "8 digits"),
        ([*HEADERS, ("grpc-timeout", "")], "200", "3", "''"),
        ([*HEADERS, ("x-bin", "A")], "200", "3", "base64"),
        ([*HEADERS, ("x-bin", "ÿ")], "200", "3", "base64"),
    ],
)
async def test_a_request_that_reaches_no_handler_is_told_why(
    headers: list[Header], http: str, status: str | None, message: str
) -> None:
    got = await ask(headers)
    assert got.headers[":status"] == http
    assert got.status == status
    assert message in got.message
    assert got.ended


@pytest.mark.parametrize(
    "headers",
    [
        replaced(":path"),
        replaced(":method"),
        replaced(":path", "/a", "/b"),
        [*HEADERS, ("Upper-Case", "x")],
        [*HEADERS, ("connection", "close")],
        [*HEADERS, ("x", "a\nb")],
    ],
)
async def test_a_malformed_request_loses_its_stream_alone(
    headers: list[Header],
) -> None:
    async with serving(Ipam()) as transport, raw_client(transport) as client:
        assert (await client.ask(headers)).reset == ErrorCode.PROTOCOL_ERROR
        assert (await client.ask()).status == "0"


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto"])
async def test_both_names_of_the_content_are_known(kind: str) -> None:
    assert (await ask(replaced("content-type", kind))).status == "0"


async def test_encoding_identity_is_no_encoding() -> None:
    assert (await ask([*HEADERS, ("grpc-encoding", "identity")])).status == "0"


# the message


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"", "12", "takes one message: none was sent"),
        (prefixed() + prefixed(), "12", "takes one message: more were sent"),
        (prefixed() + b"\0", "12", "takes one message: more were sent"),
        (b"\0\0\0", "3", "middle of a message"),
        (prefixed(b"xy")[:6], "3", "middle of a message"),
        (prefixed(flag=1), "12", "uncompressed"),
        (prefixed(b"\x0a\x01\xff"), "3", "AllocatePodIPRequest cannot be decoded"),
        (prefixed(b"\x0a\x01\xff"), "3", "invalid UTF-8"),
        (prefixed(b"\x0a\x05x"), "3", "field 1 is cut off"),
        (prefixed(b"\x08\x01"), "3", "wire type 0"),
    ],
)
async def test_a_message_that_is_none_is_told_so(
    data: bytes, status: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    got = await ask(HEADERS, data)
    assert (got.status, got.ended) == (status, True)
    assert message in got.message
    assert not caplog.records


async def test_a_unary_method_is_not_run_before_its_request_has_ended() -> None:
    service = Ipam()
    async with serving(service) as transport, raw_client(transport) as client:
        call = client.open()
        client.h2.send_data(call, prefixed())
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        assert service.calls == 0
        client.h2.end_stream(call)
        await client.flush()
        assert (await client.answer(call)).status == "0"


async def test_a_request_too_large_is_refused_with_its_size_and_the_limit() -> None:
    async with ipam(limits=Limits(max_message_bytes=1000)) as stub:
        assert text_of(await stub.allocate_pod_ip(request("x" * 900))) == "x" * 900
        with pytest.raises(GRPCError) as caught:
            await stub.allocate_pod_ip(request("x" * 1100))
    assert caught.value.status is Status.RESOURCE_EXHAUSTED
    assert caught.value.message == (
        "the received message has 1103 bytes: at most 1000 are allowed"
    )


async def test_a_response_too_large_is_refused_with_its_size_and_the_limit() -> None:
    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        return answer("x" * 1100)

    async with ipam(allocate, limits=Limits(max_message_bytes=1000)) as stub:
        with pytest.raises(GRPCError, match=r"has 1106 bytes: at most 1000") as caught:
            await stub.allocate_pod_ip(request())
    assert caught.value.status is Status.RESOURCE_EXHAUSTED


# what handlers do


async def test_a_bug_is_internal_logged_and_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ipam() as stub:
        with pytest.raises(GRPCError) as caught:
            await stub.check_pod_ip(CheckPodIpRequest())
        assert text_of(await stub.allocate_pod_ip(request("after"))) == "after"
    assert caught.value.status is Status.INTERNAL
    assert caught.value.message == "internal error"
    [record] = caplog.records
    assert (record.name, record.levelno) == ("metis.rpc", logging.ERROR)
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_a_method_without_an_implementation_is_unimplemented() -> None:
    async with ipam() as stub:
        with pytest.raises(GRPCError) as caught:
            await stub.deallocate_pod_ip(DeallocatePodIpRequest())
    assert caught.value.status is Status.UNIMPLEMENTED


async def test_a_status_comes_with_its_details() -> None:
    info = ErrorInfo(reason="POOL_EXHAUSTED", domain="metis", metadata={"owned": "3"})

    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        raise GRPCError(Status.RESOURCE_EXHAUSTED, "leider voll: ü%", [info])

    async with ipam(allocate) as stub:
        with pytest.raises(GRPCError) as caught:
            await stub.allocate_pod_ip(request())
    assert caught.value.status is Status.RESOURCE_EXHAUSTED
    assert caught.value.message == "leider voll: ü%"
    assert caught.value.details == [info]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("x" * 100_000, "x" * MAX_STATUS_MESSAGE_BYTES),
        ("ü" * 100_000, "ü" * (MAX_STATUS_MESSAGE_BYTES // 2)),
        ("x" + "ü" * 100_000, "x" + "ü" * (MAX_STATUS_MESSAGE_BYTES // 2 - 1)),
        ("half a pair: \ud800", "half a pair: ?"),
        ("two\nlines", "two\nlines"),
        ("", ""),
    ],
)
async def test_any_message_can_be_sent(message: str, told: str) -> None:
    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        raise GRPCError(Status.NOT_FOUND, message)

    async with ipam(allocate) as stub:
        with pytest.raises(GRPCError) as caught:
            await stub.allocate_pod_ip(request())
    assert (caught.value.status, caught.value.message) == (Status.NOT_FOUND, told)


async def test_a_detail_that_cannot_be_sent_costs_the_status_not_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def allocate(message: AllocatePodIpRequest) -> AllocatePodIpResponse:
        if message.pod_name == "good":
            return answer("fine")
        raise GRPCError(Status.NOT_FOUND, "x", ["no message at all"])

    async with ipam(allocate) as stub:
        with pytest.raises(GRPCError, match="cannot be sent") as caught:
            await stub.allocate_pod_ip(request())
        assert text_of(await stub.allocate_pod_ip(request("good"))) == "fine"
    assert caught.value.status is Status.INTERNAL
    assert caplog.records


async def test_a_response_of_another_type_is_internal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        return None  # type: ignore[return-value]

    async with ipam(allocate) as stub:
        with pytest.raises(GRPCError, match="internal error"):
            await stub.allocate_pod_ip(request())
    assert "None" in str(caplog.records[0].exc_info)


async def test_a_handler_that_forgets_to_answer_is_internal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Forgetful(Chat):
        async def collect(self, stream: Stream[Any, Any]) -> None:
            return

    async with connected(Forgetful()) as channel:
        with pytest.raises(GRPCError, match="no response") as caught:
            await collect(channel)
    assert caught.value.status is Status.INTERNAL
    assert "without a response" in caplog.text


async def test_metadata_goes_both_ways() -> None:
    seen: dict[str, Any] = {}

    async def talk(stream: Stream[Any, Any]) -> None:
        assert stream.metadata is not None
        seen.update(stream.metadata)
        first: dict[str, str | bytes] = {"x-first": "1", "x-bin": b"\0\1"}
        await stream.send_initial_metadata(metadata=first)
        await stream.recv_message()
        await stream.send_message(answer("x"))
        await stream.send_trailing_metadata(metadata={"x-last-bin": b"\xff" * 5})

    async with connected(Chat(talk)) as channel:
        metadata: dict[str, str | bytes] = {"x-key": "value", "x-key-bin": b"\xff\0"}
        async with chat(channel, metadata=metadata) as stream:
            await stream.send_message(request(), end=True)
            assert text_of(await stream.recv_message()) == "x"
            assert await stream.recv_message() is None
    assert seen == metadata
    assert dict(stream.initial_metadata) == {"x-first": "1", "x-bin": b"\0\1"}
    assert dict(stream.trailing_metadata) == {"x-last-bin": b"\xff" * 5}


class Collector(Chat):
    """Answers a stream of requests with one message, by hand."""

    def __init__(self, then: Callable[[Stream[Any, Any]], Awaitable[None]]) -> None:
        super().__init__()
        self._then = then

    async def collect(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await self._then(stream)


async def test_a_handler_that_fails_after_its_one_message_sends_the_status_alone() -> (
    None
):
    async def then(stream: Stream[Any, Any]) -> None:
        await stream.send_message(answer("x"))
        raise GRPCError(Status.ABORTED, "after all")

    async with serving(Collector(then)) as transport, raw_client(transport) as client:
        got = await client.ask(replaced(":path", COLLECT))
    assert (got.status, got.message, got.data) == ("10", "after all", b"")


async def test_one_message_may_have_metadata_before_and_after_it() -> None:
    async def after(stream: Stream[Any, Any]) -> None:
        await stream.send_message(answer("x"))
        await stream.send_trailing_metadata(metadata={"x-last": "2"})

    async def before(stream: Stream[Any, Any]) -> None:
        await stream.send_initial_metadata(metadata={"x-first": "1"})
        await stream.send_message(answer("x"))

    for then, first, last in (
        (after, {}, {"x-last": "2"}),
        (before, {"x-first": "1"}, {}),
    ):
        async with connected(Collector(then)) as channel:
            async with chat(channel, COLLECT) as stream:
                await stream.send_message(request(), end=True)
                assert text_of(await stream.recv_message()) == "x"
            assert dict(stream.initial_metadata) == first
            assert dict(stream.trailing_metadata) == last


async def test_two_messages_where_one_belongs_are_internal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def then(stream: Stream[Any, Any]) -> None:
        await stream.send_message(answer("x"))
        await stream.send_message(answer("y"))

    async with connected(Collector(then)) as channel:
        with pytest.raises(GRPCError) as caught:
            await collect(channel)
    assert caught.value.status is Status.INTERNAL
    assert "already sent" in caplog.text


async def test_a_handler_may_end_a_call_before_its_client_does() -> None:
    async def talk(stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        raise GRPCError(Status.ABORTED, "enough")

    async with serving(Chat(talk)) as transport, raw_client(transport) as client:
        call = client.open(replaced(":path", CHAT))
        client.h2.send_data(call, prefixed())
        await client.flush()
        got = await client.answer(call)
        await client.ask()  # whatever comes after the trailers has come by now
    assert (got.status, got.message) == ("10", "enough")
    assert got.reset == ErrorCode.NO_ERROR


async def test_a_handler_may_cancel_its_stream() -> None:
    async def talk(stream: Stream[Any, Any]) -> None:
        await stream.cancel()

    async with serving(Chat(talk)) as transport, raw_client(transport) as client:
        got = await client.ask(replaced(":path", CHAT))
    assert got.reset == ErrorCode.NO_ERROR
    assert got.status is None


# deadlines and cancellation


async def test_a_deadline_ends_the_handler_and_the_call(
    autojump_clock: trio.testing.MockClock,
) -> None:
    seen = []

    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        seen.append(trio.current_effective_deadline() - trio.current_time())
        try:
            await trio.sleep_forever()
        finally:
            seen.append(trio.current_time())

    async with serving(Ipam(allocate)) as transport, raw_client(transport) as client:
        start = trio.current_time()
        got = await client.ask([*HEADERS, ("grpc-timeout", "1500m")])
        assert trio.current_time() - start == pytest.approx(1.5)
    assert (got.status, got.message) == ("4", "the deadline of 1.5 s has passed")
    assert seen == [pytest.approx(1.5), pytest.approx(start + 1.5)]


async def test_a_handler_that_finishes_in_spite_of_the_deadline_has_finished(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        with trio.CancelScope(shield=True):
            await trio.sleep(2)
        return answer("late")

    async with serving(Ipam(allocate)) as transport, raw_client(transport) as client:
        got = await client.ask([*HEADERS, ("grpc-timeout", "1S")])
    assert got.status == "0"


async def test_a_deadline_of_nothing_has_passed() -> None:
    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        await trio.sleep_forever()

    async with serving(Ipam(allocate)) as transport, raw_client(transport) as client:
        got = await client.ask([*HEADERS, ("grpc-timeout", "0n")])
    assert got.status == "4"


async def test_a_deadline_in_the_middle_of_a_large_response_ends_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        return answer("x" * 200_000)

    async with serving(Ipam(allocate)) as transport, raw_client(transport) as client:
        client.h2.acknowledge_received_data = lambda *_: None  # type: ignore[method-assign]
        got = await client.ask([*HEADERS, ("grpc-timeout", "1S")])
    assert got.status == "4"
    assert 0 < len(got.data) < 200_000


async def test_a_reset_cancels_the_handler_at_once() -> None:
    cancelled = trio.Event()

    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with serving(Ipam(allocate)) as transport, raw_client(transport) as client:
        call = client.open(data=prefixed())
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        client.h2.reset_stream(call, ErrorCode.CANCEL)
        await client.flush()
        with trio.fail_after(5):
            await cancelled.wait()
        assert (await client.ask(replaced(":path", "/x"))).status == "12"


async def test_a_client_that_vanishes_cancels_its_handlers() -> None:
    cancelled = 0

    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        nonlocal cancelled
        try:
            await trio.sleep_forever()
        finally:
            cancelled += 1

    async with serving(Ipam(allocate)) as transport:
        async with raw_client(transport) as client:
            for _ in range(3):
                client.open(data=prefixed())
            await client.flush()
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        assert cancelled == 3


async def test_a_reset_before_the_handler_has_begun_stops_it() -> None:
    service = Ipam()
    async with serving(service) as transport, raw_client(transport) as client:
        call = client.open(data=prefixed())
        client.h2.reset_stream(call, ErrorCode.CANCEL)
        await client.flush()
        assert (await client.ask(replaced(":path", "/x"))).status == "12"


async def test_failures_of_a_cancelled_handler_are_nobodys_business(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def talk(stream: Stream[Any, Any]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            await stream.send_message(answer("too late"))

    async with serving(Chat(talk)) as transport, raw_client(transport) as client:
        call = client.open(replaced(":path", CHAT))
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        client.h2.reset_stream(call, ErrorCode.CANCEL)
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
    assert not caplog.records
