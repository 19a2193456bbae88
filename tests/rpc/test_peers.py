"""`metis.rpc.peers`: who may come in by a Unix socket, as the kernel tells it."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from metis.rpc import peers
from metis.rpc.peers import WARNING_SECONDS, Doorkeeper, Peer, peer_of
from metis.rpc.transport import Listener, UnixTransport

STRANGER = 65_534
"""The uid of nobody."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can be somebody else for a while"
)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that everybody may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="metis-test-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Be somebody else; a connection keeps the credentials of its first moment."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@asynccontextmanager
async def listening(transport: UnixTransport) -> AsyncIterator[Listener]:
    [listener] = await transport.listen()
    async with listener:
        yield listener


@asynccontextmanager
async def connected() -> AsyncIterator[socket.socket]:
    """The server's end of a connection from this process."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours


class Crowd:
    """Says who a peer is, in place of the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *peers_: Peer) -> None:
        self._peers = list(peers_)
        monkeypatch.setattr(peers, "peer_of", lambda _: self._peers.pop(0))


async def test_the_kernel_tells_the_uid_and_the_pid() -> None:
    async with connected() as sock:
        assert peer_of(sock) == Peer(os.geteuid(), os.getpid())


async def test_a_peer_whom_the_kernel_does_not_tell_is_nobody() -> None:
    with socket.socket() as closed:
        closed.close()
        assert peer_of(closed) == Peer(-1, 0)
        assert not Doorkeeper("here", [0, STRANGER]).admits(closed)


@pytest.mark.parametrize(
    ("uid", "admitted"), [(0, True), (7, True), (1001, True), (1002, True), (8, False)]
)
async def test_root_the_daemon_s_own_user_and_those_given_are_admitted(
    monkeypatch: pytest.MonkeyPatch, uid: int, admitted: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    doorkeeper = Doorkeeper("here", [1001, 1002])
    Crowd(monkeypatch, Peer(uid, 4321))
    async with connected() as sock:
        assert doorkeeper.admits(sock) is admitted


async def test_a_loop_of_connections_is_one_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mock_clock: trio.testing.MockClock,
) -> None:
    doorkeeper = Doorkeeper("/run/s")
    Crowd(monkeypatch, *(Peer(STRANGER, pid) for pid in range(1, 102)))
    async with connected() as sock:
        for _ in range(100):
            assert not doorkeeper.admits(sock)
        mock_clock.jump(WARNING_SECONDS)
        assert not doorkeeper.admits(sock)
    told = [
        {key: vars(record)[key] for key in ("address", "uid", "pid", "unmentioned")}
        for record in caplog.records
    ]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert told == [
        {"address": "/run/s", "uid": STRANGER, "pid": 1, "unmentioned": 0},
        {"address": "/run/s", "uid": STRANGER, "pid": 101, "unmentioned": 99},
    ]


async def refused_by(listener: Listener, path: Path) -> None:
    """See that a stranger gets not a byte, and whoever comes next is served."""
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.settimeout(120)
        with as_user(STRANGER):
            theirs.connect(str(path))
        with socket.socket(socket.AF_UNIX) as ours:
            ours.connect(str(path))
            async with await listener.accept() as served:
                ours.send(b"x")
                assert await served.receive_some(10) == b"x"
        assert await trio.to_thread.run_sync(what_came, theirs) == b""


def what_came(sock: socket.socket) -> bytes:
    """The first thing that a peer says; nothing when it has closed."""
    try:
        return sock.recv(10)
    except ConnectionResetError:
        return b""


@needs_root
async def test_the_connection_of_a_stranger_is_closed_and_the_next_is_served(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shared / "s"
    async with listening(UnixTransport(str(path), mode=0o666)) as listener:
        await refused_by(listener, path)
    [record] = caplog.records
    assert (vars(record)["uid"], vars(record)["pid"]) == (STRANGER, os.getpid())


@needs_root
async def test_a_stranger_is_not_even_let_to_a_socket_without_uids(
    shared: Path,
) -> None:
    path = shared / "s"
    async with listening(UnixTransport(str(path))):
        with (
            socket.socket(socket.AF_UNIX) as theirs,
            as_user(STRANGER),
            pytest.raises(PermissionError),
        ):
            theirs.connect(str(path))


@needs_root
async def test_a_user_who_is_given_is_served_and_another_is_not(shared: Path) -> None:
    path = shared / "s"
    transport = UnixTransport(str(path), allowed_uids=[1001])
    async with listening(transport) as listener:
        with socket.socket(socket.AF_UNIX) as theirs:
            with as_user(1001):
                theirs.connect(str(path))
            async with await listener.accept() as served:
                await served.send_all(b"hello")
                assert theirs.recv(10) == b"hello"
        await refused_by(listener, path)


@needs_root
async def test_a_crowd_of_strangers_neither_ends_nor_occupies_a_server(
    shared: Path,
) -> None:
    path = shared / "s"
    async with listening(UnixTransport(str(path), mode=0o666)) as listener:
        for _ in range(200):
            with socket.socket(socket.AF_UNIX) as theirs, as_user(STRANGER):
                theirs.connect(str(path))
        async with trio.open_nursery() as nursery:
            accepted = trio.Event()

            async def accept() -> None:
                async with await listener.accept():
                    accepted.set()

            nursery.start_soon(accept)
            await trio.testing.wait_all_tasks_blocked()
            assert not accepted.is_set()
            with socket.socket(socket.AF_UNIX) as ours:
                ours.connect(str(path))
                await accepted.wait()
