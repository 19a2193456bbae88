"""`metis.rpc.session` and `.stream`: flow, pressure and time on one connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h2.settings
import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from metis.api.adaptiveipam.v1 import AllocatePodIpRequest, AllocatePodIpResponse
from metis.rpc.channel import Channel, open_channel
from metis.rpc.http2 import ErrorCode
from metis.rpc.limits import (
    LEAST_WINDOW_BYTES,
    READ_PAUSE_BYTES,
    STREAM_WINDOW_BYTES,
    WRITE_PAUSE_BYTES,
    Limits,
)
from metis.rpc.memory import MemoryStream
from metis.rpc.transport import MemoryTransport
from tests.rpc.raw import (
    EMPTY_SETTINGS,
    HEADERS,
    PREFACE,
    RawClient,
    frame,
    prefixed,
    raw_client,
    replaced,
)
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

INITIAL_WINDOW = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE


async def forever(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
    await trio.sleep_forever()
    raise AssertionError


# messages and windows


@pytest.mark.parametrize("size", [0, 1, 16_384, 100_000, 4_000_000])
async def test_messages_of_all_sizes_go_both_ways(size: int) -> None:
    async with ipam() as stub:
        assert len(text_of(await stub.allocate_pod_ip(request("x" * size)))) == size


async def test_messages_pass_through_windows_smaller_than_they_are() -> None:
    limits = Limits(
        stream_window_bytes=LEAST_WINDOW_BYTES,
        connection_window_bytes=LEAST_WINDOW_BYTES,
    )
    async with ipam(limits=limits, client=limits) as stub:
        text = "x" * 1_000_000
        assert text_of(await stub.allocate_pod_ip(request(text))) == text


@pytest.mark.parametrize("window", [1, 7, 1000])
async def test_a_client_may_have_a_tiny_window(window: int) -> None:
    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        return answer("x" * 3000)

    async with serving(Ipam(allocate)) as transport, raw_client(transport) as client:
        client.h2.update_settings({INITIAL_WINDOW: window})
        got = await client.ask()
    assert got.status == "0"
    assert got.data.endswith(b"x" * 3000)


async def test_many_large_calls_share_the_window_of_the_connection() -> None:
    limits = Limits(connection_window_bytes=LEAST_WINDOW_BYTES)
    async with ipam(limits=limits, client=limits) as stub:

        async def call(number: int) -> None:
            text = str(number % 10) * 200_000
            assert text_of(await stub.allocate_pod_ip(request(text))) == text

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, number)


async def say_on_and_on(channel: Channel) -> None:
    async with chat(channel) as stream:
        while True:
            await stream.send_message(request("x" * 10_000))


async def test_what_nobody_reads_does_not_take_the_window_from_others() -> None:
    async def talk(stream: Stream[Any, Any]) -> None:
        raise GRPCError(Status.ABORTED)

    limits = Limits(connection_window_bytes=LEAST_WINDOW_BYTES)
    async with connected(Chat(talk), Ipam(), limits=limits) as channel:
        for _ in range(30):
            with pytest.raises(GRPCError) as caught:
                await say_on_and_on(channel)
            assert caught.value.status is Status.ABORTED
        async with chat(channel, ALLOCATE) as call:
            await call.send_message(request("y" * 300_000), end=True)
            assert len(text_of(await call.recv_message())) == 300_000


async def test_what_a_handler_does_not_take_stays_with_the_client() -> None:
    may_read = trio.Event()
    taken: list[int] = []

    async def talk(stream: Stream[Any, Any]) -> None:
        await may_read.wait()
        taken.extend([len(message.pod_name) async for message in stream])
        await stream.send_message(answer("all"))

    sent = 0

    async def send(stream: Any) -> None:
        nonlocal sent
        for _ in range(300):
            await stream.send_message(request("x" * 10_000))
            sent += 10_000
        await stream.end()

    async with connected(Chat(talk)) as channel, chat(channel) as stream:
        await stream.send_request()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, stream)
            await trio.testing.wait_all_tasks_blocked()
            assert sent <= STREAM_WINDOW_BYTES
            may_read.set()
            assert text_of(await stream.recv_message()) == "all"
    assert taken == [10_000] * 300


async def test_a_window_that_the_client_shrinks_and_opens_by_settings_is_kept() -> None:
    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        return answer("x" * 5000)

    async with serving(Ipam(allocate)) as transport, raw_client(transport) as client:
        client.h2.update_settings({INITIAL_WINDOW: 100})
        call = client.open(data=prefixed())
        await client.flush()
        client.h2.acknowledge_received_data = lambda *_: None  # type: ignore[method-assign]
        while len(client.answers[call].data) < 100:
            await client.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert len(client.answers[call].data) == 100
        client.h2.update_settings({INITIAL_WINDOW: 10_000})
        await client.flush()
        got = await client.answer(call)
    assert got.status == "0"
    assert len(got.data) > 5000


@pytest.mark.parametrize("which", ["stream_window_bytes", "connection_window_bytes"])
def test_a_window_of_ours_that_peers_could_not_keep_to_is_refused(which: str) -> None:
    with pytest.raises(ValueError, match="65535 or more"):
        Limits(**{which: 1000})


# pressure


async def connect_by_hand(transport: MemoryTransport) -> MemoryStream:
    """A connection whose client has said hello and does not read."""
    stream = await transport.connect()
    assert isinstance(stream, MemoryStream)
    await stream.send_all(PREFACE + EMPTY_SETTINGS)
    return stream


class Pusher:
    """Sends one piece over and over; knows how much the server has taken."""

    def __init__(self, stream: MemoryStream, piece: bytes) -> None:
        self.stream = stream
        self.piece = piece
        self.sent = 0

    async def run(self) -> None:
        while True:
            await self.stream.send_all(self.piece)
            self.sent += len(self.piece)

    async def until_it_waits(self) -> int:
        while True:
            before = self.sent
            await trio.testing.wait_all_tasks_blocked()
            if self.sent == before:
                return self.sent


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(frame(6, 0, 0, b"12345678") * 100, id="ping"),
        pytest.param(EMPTY_SETTINGS * 100, id="settings"),
    ],
)
async def test_a_peer_that_floods_without_reading_is_not_read_until_it_reads(
    piece: bytes,
) -> None:
    async with serving(Ipam()) as transport:
        assert isinstance(transport, MemoryTransport)
        async with (
            await connect_by_hand(transport) as stream,
            trio.open_nursery() as nursery,
        ):
            pusher = Pusher(stream, piece)
            nursery.start_soon(pusher.run)
            held = await pusher.until_it_waits()
            assert held < 3 * READ_PAUSE_BYTES
            async with raw_client(transport) as other:
                assert (await other.ask()).status == "0"
            while pusher.sent < 3 * held:
                assert await stream.receive_some()
            nursery.cancel_scope.cancel()


async def test_a_stream_of_responses_waits_for_its_reader() -> None:
    sent = 0

    async def talk(stream: Stream[Any, Any]) -> None:
        nonlocal sent
        while True:
            await stream.send_message(answer("x" * 1000))
            sent += 1000

    async with serving(Chat(talk)) as transport:
        assert isinstance(transport, MemoryTransport)
        async with await connect_by_hand(transport) as stream:
            client = RawClient(stream)
            client.h2.initiate_connection()
            client.h2.data_to_send()
            client.h2.increment_flow_control_window(2**30)
            client.h2.update_settings({INITIAL_WINDOW: 2**30})
            client.open(replaced(":path", CHAT))
            await client.flush()
            await trio.testing.wait_all_tasks_blocked()
            first = sent
            assert WRITE_PAUSE_BYTES // 2 < first < 4 * WRITE_PAUSE_BYTES
            while sent < 20 * first:
                await client.receive()


async def test_opening_and_resetting_in_a_hurry_starts_a_bounded_number_of_calls() -> (
    None
):
    running = most = begun = 0

    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        nonlocal running, most, begun
        begun += 1
        running += 1
        most = max(most, running)
        try:
            with trio.CancelScope(shield=True):
                await release.wait()
        finally:
            running -= 1
        raise AssertionError

    release = trio.Event()
    limits = Limits(max_concurrent_calls=10)
    async with (
        serving(Ipam(allocate), limits=limits) as transport,
        raw_client(transport) as client,
    ):
        resets = 0
        for _ in range(20):
            calls = [client.open(data=prefixed()) for _ in range(5)]
            await client.flush()
            await trio.testing.wait_all_tasks_blocked()
            for call in calls:
                client.h2.reset_stream(call, ErrorCode.CANCEL)
            await client.flush()
            await trio.testing.wait_all_tasks_blocked()
            resets += 5
        assert (most, begun) == (10, 10)
        refused = await client.ask()
        assert refused.reset == ErrorCode.REFUSED_STREAM
        release.set()
        await trio.testing.wait_all_tasks_blocked()
        assert running == 0
        assert (await client.ask(replaced(":path", "/x"))).status == "12"


async def test_calls_above_the_limit_are_refused_and_the_others_served() -> None:
    limits = Limits(max_concurrent_calls=3)
    async with (
        serving(Ipam(forever), limits=limits) as transport,
        raw_client(transport) as client,
    ):
        calls = [client.open(data=prefixed()) for _ in range(5)]
        await client.flush()
        for call in calls[3:]:
            got = await client.answer(call)
            assert got.reset == ErrorCode.REFUSED_STREAM
        client.h2.reset_stream(calls[0], ErrorCode.CANCEL)
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        assert (await client.ask(replaced(":path", "/x"))).status == "12"


async def test_hundreds_of_calls_at_once_are_served_on_one_connection() -> None:
    together = trio.Event()
    waiting = 0

    async def allocate(message: AllocatePodIpRequest) -> AllocatePodIpResponse:
        nonlocal waiting
        waiting += 1
        if waiting == 400:
            together.set()
        await together.wait()
        return answer(message.pod_name)

    async with ipam(allocate) as stub:

        async def call(number: int) -> None:
            name = f"pod-{number}"
            assert text_of(await stub.allocate_pod_ip(request(name))) == name

        async with trio.open_nursery() as nursery:
            for number in range(400):
                nursery.start_soon(call, number)
    assert waiting == 400


# writing


class Counting(MemoryTransport):
    """Counts the writes of the server's side."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    async def listen(self) -> Any:
        [listener] = await super().listen()
        accept = listener.accept

        async def counting() -> Any:
            stream: Any = await accept()
            send_some = stream.send_some

            def send(data: bytes) -> int:
                self.writes.append(bytes(data))
                sent = send_some(data)
                assert sent == len(data)  # or `send_all` would send the rest
                return int(sent)

            stream.send_some = send
            return stream

        listener.accept = counting  # type: ignore[method-assign]
        return [listener]


async def test_all_frames_of_a_turn_leave_in_one_write() -> None:
    transport = Counting()
    async with serving(Ipam(), transport=transport), raw_client(transport) as client:
        await client.ask()
        await trio.testing.wait_all_tasks_blocked()
        transport.writes.clear()
        calls = [client.open(data=prefixed()) for _ in range(20)]
        await client.flush()
        for call in calls:
            assert (await client.answer(call)).status == "0"
    assert len(transport.writes) <= 2


async def test_a_connection_made_for_one_call_is_answered_in_one_write() -> None:
    transport = Counting()
    async with serving(Ipam(), transport=transport):
        client = RawClient(await transport.connect())
        client.h2.initiate_connection()
        assert (await client.ask()).status == "0"
        assert len(transport.writes) == 1


async def test_so_is_one_that_waits_for_a_turn_as_the_database_makes_it() -> None:
    async def allocate(_message: AllocatePodIpRequest) -> AllocatePodIpResponse:
        await trio.lowlevel.checkpoint()
        return answer("10.0.0.1")

    transport = Counting()
    async with serving(Ipam(allocate), transport=transport):
        for number in range(20):  # Trio draws lots for the order of tasks
            client = RawClient(await transport.connect())
            client.h2.initiate_connection()
            assert (await client.ask()).status == "0"
            assert len(transport.writes) == number + 1


async def test_calls_one_after_another_have_no_need_of_a_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("metis.rpc.server.ServerSession._send", None)
    async with serving(Ipam()) as transport, raw_client(transport) as client:
        for _ in range(3):
            assert (await client.ask()).status == "0"


async def test_a_server_answers_a_client_that_waits_for_its_settings() -> None:
    async with serving(Ipam()) as transport:
        assert isinstance(transport, MemoryTransport)
        async with await connect_by_hand(transport) as stream:
            assert (await stream.receive_some())[3] == 4  # a SETTINGS frame


# time


async def closed_at(
    transport: Any, said: bytes, then: Callable[[], bytes] | None = None
) -> tuple[float, bytes]:
    """How many seconds a connection lasts on which nothing but this is said."""
    start = trio.current_time()
    got = b""
    async with await transport.connect() as stream:
        await stream.send_all(said)
        while data := await stream.receive_some():
            got += data
    return trio.current_time() - start, got


LIMITS = Limits(handshake_seconds=10, idle_seconds=600)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (b"", 10),
        (PREFACE[:5], 10),
        (PREFACE, 10),
        (PREFACE + EMPTY_SETTINGS[:4], 10),
        (PREFACE + EMPTY_SETTINGS, 600),
        (PREFACE + EMPTY_SETTINGS + frame(1, 4, 1, b"\x82")[:9], 600),
    ],
)
async def test_a_silent_connection_ends_after_its_time(
    autojump_clock: trio.testing.MockClock, said: bytes, seconds: float
) -> None:
    async with serving(Ipam(), limits=LIMITS) as transport:
        lasted, got = await closed_at(transport, said)
    assert lasted == pytest.approx(seconds)
    assert got.endswith(b"no SETTINGS came" if seconds == 10 else b"idle")


async def test_a_connection_is_idle_from_its_last_call_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        await trio.sleep(1000)
        return answer("x")

    async with (
        serving(Ipam(allocate), limits=LIMITS) as transport,
        raw_client(transport) as client,
    ):
        start = trio.current_time()
        assert (await client.ask()).status == "0"
        await client.receive_until_closed()
        assert trio.current_time() - start == pytest.approx(1000 + 600)
        assert client.goaway is not None
        assert client.goaway.additional_data == b"idle"


async def test_a_client_connects_again_after_an_idle_connection_was_closed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with (
        serving(Ipam(), limits=Limits(idle_seconds=60)) as transport,
        open_channel(transport) as channel,
    ):
        for _ in range(3):
            async with chat(channel, ALLOCATE) as call:
                await call.send_message(request("again"), end=True)
                assert text_of(await call.recv_message()) == "again"
            await trio.sleep(100)


async def test_broken_http2_gets_a_goaway_and_ends_the_calls_of_its_connection() -> (
    None
):
    ended = trio.Event()

    async def allocate(_: AllocatePodIpRequest) -> AllocatePodIpResponse:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with serving(Ipam(allocate)) as transport:
        async with raw_client(transport) as client:
            client.open(data=prefixed())
            await client.flush()
            await trio.testing.wait_all_tasks_blocked()
            await client.stream.send_all(frame(0, 0, 0, b"data on no stream"))
            await client.receive_until_closed()
            assert client.goaway is not None
            assert client.goaway.error_code == ErrorCode.PROTOCOL_ERROR
            await ended.wait()
        async with raw_client(transport) as client:
            assert (await client.ask(replaced(":path", "/x"))).status == "12"


async def test_a_goaway_of_a_client_leaves_its_calls_running() -> None:
    async with serving(Ipam()) as transport, raw_client(transport) as client:
        call = client.open(HEADERS)
        client.h2.send_data(call, prefixed(bytes(request("p"))))
        await client.flush()
        await client.stream.send_all(frame(7, 0, 0, bytes(8)))
        client.h2.end_stream(call)
        await client.flush()
        assert (await client.answer(call)).status == "0"
