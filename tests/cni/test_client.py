"""Who is asked, and when: a daemon that is there, one that is away, the database."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio
from grpclib import GRPCError, Status
from trio.testing import MockClock

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    CheckPodIpRequest,
    IpConfig,
)
from metis.cni.client import DaemonClient, Unreachable, open_daemon
from metis.cni.protocol import CNIError
from metis.errors import StoreBusy, StoreError, StoreUnavailable
from metis.rpc.channel import Channel
from metis.rpc.server import serve
from tests.cni.fakes import FakeIpam, reach

SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""An empty SETTINGS frame (RFC 9113 section 6.5): a server's first word."""


@dataclass
class Direct:
    """Direct mode of a few lines, which fails as often as it is told to."""

    ipam: FakeIpam = field(default_factory=FakeIpam)
    failures: list[StoreError] = field(default_factory=list)
    for_ever: bool = False
    opened: list[float] = field(default_factory=list)

    def __call__(self) -> AbstractAsyncContextManager[Channel]:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Channel]:
        self.opened.append(trio.current_time())
        if self.failures:
            raise self.failures[0] if self.for_ever else self.failures.pop(0)
        async with reach(self.ipam)("", 1.0) as channel:
            yield channel


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
def direct() -> Direct:
    return Direct()


def client(path: str, direct: Direct | None) -> DaemonClient:
    return DaemonClient(path, open_daemon, "/db", direct)


async def add(channel: Channel, seconds: float) -> AllocatePodIpResponse:
    request = AllocatePodIpRequest(
        ipv4_config=IpConfig(interface_name="eth0", container_id="c1")
    )
    return await AdaptiveIpamStub(channel).allocate_pod_ip(request, timeout=seconds)


@contextlib.contextmanager
def dead_socket(path: str) -> Iterator[None]:
    """What a daemon leaves behind that was killed: nobody listens any more."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
    yield


@contextlib.contextmanager
def deaf_socket(path: str) -> Iterator[None]:
    """A daemon that is stopped: the kernel accepts, and nobody else does."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        yield


@contextlib.asynccontextmanager
async def rude_server(path: str, *words: bytes) -> AsyncIterator[None]:
    """Says the words, hears once, and closes the connection."""

    async def answer(stream: trio.abc.Stream) -> None:
        async with stream:
            for word in words:
                await stream.send_all(word)
            if words:
                await stream.receive_some()

    listeners = await metis.UnixTransport(path).listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, answer, list(listeners)))
        yield
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def daemon(path: str, ipam: FakeIpam) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve, [ipam], metis.UnixTransport(path), grace=0))
        yield
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("leave", [contextlib.nullcontext, dead_socket])
async def test_a_socket_that_is_absent_or_refuses_means_direct_mode_at_once(
    leave: object, path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    with leave(path):  # type: ignore[operator]  # both make a context manager
        answer = await client(path, direct).ask(add)
    assert answer.ipv4 is not None
    assert direct.opened == [0.0]


async def test_a_daemon_that_says_nothing_for_a_second_is_away(
    path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    with deaf_socket(path):
        await client(path, direct).ask(add)
    assert direct.opened == pytest.approx([1.0])


async def test_with_little_time_half_of_it_is_left_for_the_database(
    path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    with deaf_socket(path):
        await client(path, direct).ask(add, 0.4)
    assert direct.opened == pytest.approx([0.2])


@pytest.mark.parametrize("words", [[], [SETTINGS]])
async def test_a_daemon_that_dies_before_it_answers_is_away(
    words: list[bytes], path: str, direct: Direct
) -> None:
    async with rude_server(path, *words):
        await client(path, direct).ask(add)
    assert len(direct.ipam.asked) == 1


async def test_a_daemon_that_lets_a_call_wait_is_not_cut_off(
    path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    class Waiting(FakeIpam):
        async def allocate_pod_ip(
            self, message: AllocatePodIpRequest
        ) -> AllocatePodIpResponse:
            await trio.sleep(8)  # for a cooldown
            return await super().allocate_pod_ip(message)

    waiting = Waiting()
    async with daemon(path, waiting):
        await client(path, direct).ask(add)
    assert len(waiting.asked) == 1
    assert direct.opened == []


async def test_a_daemon_that_stops_sends_the_call_to_the_database(
    path: str, direct: Direct
) -> None:
    stopping = FakeIpam()
    stopping.failure = GRPCError(Status.UNAVAILABLE, "the server is stopping")
    async with daemon(path, stopping):
        await client(path, direct).ask(add)
    assert len(stopping.asked) == len(direct.ipam.asked) == 1


@pytest.mark.parametrize(
    "status",
    [
        Status.UNIMPLEMENTED,
        Status.RESOURCE_EXHAUSTED,
        Status.INVALID_ARGUMENT,
        Status.INTERNAL,
    ],
)
async def test_an_answer_that_is_an_error_is_an_answer(
    status: Status, path: str, direct: Direct
) -> None:
    refusing = FakeIpam()
    refusing.failure = GRPCError(status, "no")
    async with daemon(path, refusing):
        with pytest.raises(CNIError, match="no"):
            await client(path, direct).ask(add)
    assert direct.opened == []


async def test_an_error_of_direct_mode_names_the_database(
    path: str, direct: Direct
) -> None:
    direct.ipam.failure = GRPCError(Status.NOT_FOUND, "nothing held")
    with pytest.raises(CNIError) as caught:
        await client(path, direct).ask(add)
    assert (caught.value.code, caught.value.message) == (100, "nothing held")
    assert "/db" in caught.value.details


async def test_without_both_the_error_names_both(
    path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    direct.failures = [StoreUnavailable("the file is read-only")]
    direct.for_ever = True
    with pytest.raises(Unreachable) as caught:
        await client(path, direct).ask(add)
    assert caught.value.code == 11
    assert caught.value.message == (
        f"the daemon at {path} is away (cannot connect to {path}: No such file or "
        "directory), and the database /db cannot be used (the file is read-only)"
    )
    assert direct.opened == pytest.approx([0.0, 0.1, 0.2])


async def test_a_database_that_is_unavailable_to_the_engine_is_one_that_cannot_be_used(
    path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    direct.ipam.failure = GRPCError(Status.UNAVAILABLE, "the disk is full")
    with pytest.raises(Unreachable, match="the disk is full"):
        await client(path, direct).ask(add)


async def test_a_busy_database_is_tried_for_as_long_as_there_is_time(
    path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    direct.failures = [StoreBusy("locked") for _ in range(50)]
    assert (await client(path, direct).ask(add)).ipv4 is not None
    assert len(direct.opened) == 51


async def test_a_database_that_stays_busy_is_given_up_in_the_end(
    path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    direct.failures, direct.for_ever = [StoreBusy("locked")], True
    with pytest.raises(Unreachable, match="locked"):
        await client(path, direct).ask(add)
    assert 9 < trio.current_time() <= 10


async def test_a_daemon_that_appears_meanwhile_is_asked(
    path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    direct.failures, direct.for_ever = [StoreBusy("it is starting")], True
    ipam = FakeIpam()
    async with trio.open_nursery() as nursery:

        async def start() -> None:
            await trio.sleep(3.05)
            await nursery.start(
                partial(serve, [ipam], metis.UnixTransport(path), grace=0)
            )

        nursery.start_soon(start)
        await client(path, direct).ask(add)
        nursery.cancel_scope.cancel()
    assert len(ipam.asked) == 1


async def test_a_daemon_that_hangs_in_a_call_is_given_all_of_its_time(
    path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    hanging = FakeIpam()
    hanging.hangs = True
    async with daemon(path, hanging):
        await client(path, direct).ask(add)
    assert direct.opened == pytest.approx([10.0])


async def test_a_database_that_hangs_too_is_given_up(
    path: str, direct: Direct, autojump_clock: MockClock
) -> None:
    direct.ipam.hangs = True
    with pytest.raises(Unreachable) as caught:
        await client(path, direct).ask(add)
    assert caught.value.code == 11
    assert trio.current_time() == pytest.approx(10)


async def test_an_error_of_ours_in_a_question_is_itself(
    path: str, direct: Direct
) -> None:
    async def ask(channel: Channel, seconds: float) -> None:
        stub = AdaptiveIpamStub(channel)
        await stub.check_pod_ip(CheckPodIpRequest(), timeout=seconds)
        raise ZeroDivisionError

    async with daemon(path, FakeIpam()):
        with pytest.raises(ZeroDivisionError):
            await client(path, direct).ask(ask)
