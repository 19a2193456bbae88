"""Peers that mean harm, or are broken: the others are served on."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import h2.config
import h2.connection
import pytest
import trio
import trio.testing
from grpclib.exceptions import GRPCError
from hypothesis import given, settings
from hypothesis import strategies as st

from metis.api.adaptiveipam.v1 import AdaptiveIpamStub
from metis.rpc.channel import open_channel
from metis.rpc.http2 import ErrorCode
from metis.rpc.limits import MAX_HEADER_LIST_BYTES, Limits
from metis.rpc.transport import MemoryTransport, Transport, UnixTransport
from tests.rpc.raw import EMPTY_SETTINGS, HEADERS, PREFACE, frame, prefixed, raw_client
from tests.rpc.services import Ipam, answer, request, serving

HELLO = PREFACE + EMPTY_SETTINGS


def recorded_request(name: str = "pod") -> bytes:
    """All that an honest client says in one call."""
    client = h2.connection.H2Connection(
        h2.config.H2Configuration(validate_outbound_headers=False)
    )
    client.initiate_connection()
    client.send_headers(1, HEADERS)
    client.send_data(1, prefixed(bytes(request(name))), end_stream=True)
    return client.data_to_send()


def recorded_response() -> bytes:
    """All that an honest server says in one call."""
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    server.receive_data(recorded_request())
    server.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
    server.send_data(1, prefixed(bytes(answer("x"))))
    server.send_headers(1, [("grpc-status", "0")], end_stream=True)
    return server.data_to_send()


async def is_served(transport: Transport) -> None:
    """Show that the server is well."""
    async with raw_client(transport) as client:
        assert (await client.ask()).status == "0"


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 1000,
        b"\xff" * 100_000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        PREFACE[:-1] + b"X" + EMPTY_SETTINGS,
        HELLO + frame(0, 0, 1, b"x"),
        HELLO + frame(5, 4, 1, b"\0\0\0\2\x82"),
        HELLO + frame(1, 4, 2, b"\x82"),
        HELLO + frame(9, 4, 1, b"\x82"),
        HELLO + b"\xff\xff\xff\0\0\0\0\0\1",
        HELLO + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 2,
        HELLO + frame(4, 0, 0, b"\0\4\xff\xff\xff\xff"),
        HELLO + frame(1, 4, 1, b"\xff" * 20),
        HELLO + frame(1, 4, 1, b"\x40\x01a\xff\xff\xff\xff\xff\xff"),
        HELLO + frame(1, 0, 1, b"\x82") + frame(9, 0, 1, b"\x82") * 200,
        HELLO + frame(1, 0x24, 1, b"\0\0\0\1\0\x82"),
        HELLO + frame(2, 0, 1, b"\0\0\0\1\0"),
    ],
)
async def test_garbage_ends_its_own_connection_alone(data: bytes) -> None:
    async with serving(Ipam()) as transport:
        async with await transport.connect() as stream:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(data)
            with trio.fail_after(5), contextlib.suppress(trio.BrokenResourceError):
                while await stream.receive_some():
                    pass
        await is_served(transport)


@pytest.mark.parametrize("length", [1, 10, 24, 30, 33, 40, 60])
async def test_a_client_that_stalls_in_the_middle_of_a_frame_holds_up_nobody(
    length: int,
) -> None:
    async with serving(Ipam()) as transport, await transport.connect() as stream:
        await stream.send_all(recorded_request()[:length])
        await is_served(transport)
        await stream.send_all(recorded_request()[length:])
        assert await stream.receive_some()
        await is_served(transport)


async def test_a_client_that_stalls_in_the_middle_of_a_message_holds_up_nobody() -> (
    None
):
    async with serving(Ipam()) as transport, raw_client(transport) as client:
        calls = [client.open() for _ in range(3)]
        for call in calls:
            client.h2.send_data(call, prefixed(b"x" * 100)[:50])
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        assert (await client.ask()).status == "0"
        await is_served(transport)


@pytest.mark.parametrize(
    "headers",
    [
        [("x-pad", "y" * MAX_HEADER_LIST_BYTES)],
        [("x-pad", "y")] * 600,
        [(f"x-{number}", "") for number in range(600)],
    ],
)
async def test_a_header_bomb_ends_its_own_connection_alone(
    headers: list[tuple[str, str]],
) -> None:
    async with serving(Ipam()) as transport:
        async with raw_client(transport) as client:
            client.open([*HEADERS, *headers], prefixed())
            await client.flush()
            await client.receive_until_closed()
            assert client.goaway is not None
            assert client.goaway.error_code == ErrorCode.ENHANCE_YOUR_CALM
        await is_served(transport)


async def test_headers_just_below_the_limit_are_served() -> None:
    async with serving(Ipam()) as transport, raw_client(transport) as client:
        padding = ("x-pad", "y" * (MAX_HEADER_LIST_BYTES - 1000))
        assert (await client.ask([*HEADERS, padding])).status == "0"


async def test_a_bomb_of_references_into_the_table_is_not_unpacked() -> None:
    async with serving(Ipam()) as transport:
        async with await transport.connect() as stream:
            # one large field enters the table, and is then meant 4,000 times
            field = b"\x40\x01a\x7f\x81\x1e" + b"b" * 4000
            assert len(field) < 16_384
            await stream.send_all(HELLO + frame(1, 4, 1, field + b"\xbe" * 4000))
            while await stream.receive_some():
                pass
        await is_served(transport)


async def test_thousands_of_resets_on_one_connection_leave_nothing_behind() -> None:
    service = Ipam()
    async with serving(service) as transport, raw_client(transport) as client:
        for _ in range(50):
            for _ in range(100):
                call = client.open()
                client.h2.reset_stream(call, ErrorCode.CANCEL)
            await client.flush()
        await is_served(transport)
        assert (await client.ask()).status == "0"
    assert service.calls == 2


@contextlib.contextmanager
def descriptors(wanted: int) -> Iterator[None]:
    """Allow this many open files, or skip the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may have {hard} descriptors, {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("said", [b"", PREFACE[:10], HELLO])
async def test_a_thousand_idle_connections_leave_it_serving(
    tmp_path: Path, said: bytes
) -> None:
    path = str(tmp_path / "s")
    with descriptors(4096), contextlib.ExitStack() as open_sockets:
        async with serving(Ipam(), transport=UnixTransport(path)) as transport:
            for _ in range(1000):
                idle = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
                idle.connect(path)
                idle.send(said)
                if not said:
                    await trio.lowlevel.checkpoint()
            with trio.fail_after(20):
                await is_served(transport)
                async with open_channel(transport) as channel:
                    stub = AdaptiveIpamStub(channel)
                    async with trio.open_nursery() as nursery:
                        for _ in range(300):
                            nursery.start_soon(stub.allocate_pod_ip, request())


async def test_a_thousand_idle_connections_in_memory_end_in_their_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(handshake_seconds=10, idle_seconds=600)
    async with serving(Ipam(), limits=limits) as transport:
        silent = [await transport.connect() for _ in range(500)]
        polite = [await transport.connect() for _ in range(500)]
        for stream in polite:
            await stream.send_all(HELLO)
        await is_served(transport)
        await trio.sleep(11)
        for stream in silent:
            assert await stream.receive_some()
            assert await stream.receive_some() == b""
        for stream in polite:
            await stream.send_all(frame(6, 0, 0, b"12345678"))
        await trio.sleep(600)
        with pytest.raises(trio.BrokenResourceError):
            await polite[0].send_all(b"x")
        await is_served(transport)


# fuzz: bytes at random, and honest bytes that were tampered with

edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "insert", "delete", "repeat", "cut"]),
        st.integers(0, 400),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=6,
)


def tampered(
    data: bytes, changes: list[tuple[str, int, bytes]], spare: int = 0
) -> bytes:
    """The bytes after some changes, none of them in the first `spare`."""
    edited = bytearray(data)
    for kind, where, by in changes:
        at = spare + where % max(1, len(edited) - spare)
        match kind:
            case "flip":
                for offset, byte in enumerate(by[: len(edited) - at]):
                    edited[at + offset] ^= byte
            case "insert":
                edited[at:at] = by
            case "delete":
                del edited[at : at + len(by)]
            case "repeat":
                edited[at:at] = edited[at : at + 20 * len(by)]
            case _:
                del edited[at:]
    return bytes(edited)


class Complaints(logging.Handler):
    """Collects what the server takes for a bug of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def __enter__(self) -> Complaints:
        logging.getLogger("metis.rpc").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("metis.rpc").removeHandler(self)


async def survive(data: bytes, pieces: int) -> None:
    """Say this to a server that has another client, which must not suffer."""
    with Complaints() as complaints:
        await say_to_a_server_with_another_client(data, pieces)
    assert not complaints.records


async def say_to_a_server_with_another_client(data: bytes, pieces: int) -> None:
    async with serving(Ipam()) as transport, raw_client(transport) as other:
        before = other.open()
        other.h2.send_data(before, prefixed())
        await other.flush()
        async with await transport.connect() as stream:
            size = max(1, len(data) // pieces)
            with contextlib.suppress(trio.BrokenResourceError):
                for start in range(0, len(data), size):
                    await stream.send_all(data[start : start + size])
                    await trio.testing.wait_all_tasks_blocked()
        other.h2.end_stream(before)
        await other.flush()
        assert (await other.answer(before)).status == "0"
        assert (await other.ask()).status == "0"


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=300), hello=st.booleans(), pieces=st.integers(1, 3))
async def test_random_bytes_harm_nobody(data: bytes, hello: bool, pieces: int) -> None:
    await survive(HELLO + data if hello else data, pieces)


@settings(max_examples=250, deadline=None)
@given(changes=edits, spare=st.sampled_from([0, 24, 70]), pieces=st.integers(1, 3))
async def test_tampered_requests_harm_nobody(
    changes: list[tuple[str, int, bytes]], spare: int, pieces: int
) -> None:
    await survive(tampered(recorded_request() * 2, changes, spare), pieces)


@settings(max_examples=250, deadline=None)
@given(data=st.binary(max_size=100), changes=edits, spare=st.sampled_from([0, 50, 90]))
async def test_no_server_makes_a_call_hang_or_fail_in_another_way_than_a_status(
    data: bytes, changes: list[tuple[str, int, bytes]], spare: int
) -> None:
    transport = MemoryTransport()
    [listener] = await transport.listen()
    said = tampered(recorded_response(), changes, spare) + data

    async def play() -> None:
        while True:
            async with await listener.accept() as stream:
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.send_all(said)
                    await stream.receive_some()
                    await trio.testing.wait_all_tasks_blocked()

    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(play)
        async with open_channel(transport) as channel:
            with trio.fail_after(20):
                try:
                    response = await AdaptiveIpamStub(channel).allocate_pod_ip(
                        request()
                    )
                    assert response is not None
                except GRPCError as exc:
                    assert exc.status.value != 0  # noqa: PT017  # either is right
        nursery.cancel_scope.cancel()


async def test_the_recordings_are_honest() -> None:
    """What is tampered with above would be answered if it were left alone."""
    async with serving(Ipam()) as transport, await transport.connect() as stream:
        await stream.send_all(recorded_request("a-pod"))
        got = b""
        while b"a-pod" not in got:
            got += await stream.receive_some()
