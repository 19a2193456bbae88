"""`metis.rpc.transport`: places to listen and to connect."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from metis.errors import AddressInUse, TransportError
from metis.rpc.socket_file import MAX_SOCKET_PATH_BYTES
from metis.rpc.transport import (
    MEMORY_BACKLOG,
    Listener,
    MemoryTransport,
    TcpTransport,
    Transport,
    UnixTransport,
)


@asynccontextmanager
async def listening(transport: Transport) -> AsyncIterator[Listener]:
    [listener] = await transport.listen()
    async with listener:
        yield listener


async def exchange(transport: Transport, listener: Listener) -> None:
    """Show that the two meet."""
    client = await transport.connect()
    server = await listener.accept()
    async with client, server:
        await client.send_all(b"ping")
        assert await server.receive_some(10) == b"ping"
        await server.send_all(b"pong")
        assert await client.receive_some(10) == b"pong"


def dead_socket(path: Path) -> None:
    """What a killed server leaves behind."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
    assert path.is_socket()


# all kinds


@pytest.fixture(params=["unix", "tcp", "memory"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    match request.param:
        case "unix":
            return UnixTransport(str(tmp_path / "s"))
        case "tcp":
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                return TcpTransport(port=sock.getsockname()[1])
        case _:
            return MemoryTransport()


async def test_client_and_server_meet_and_the_place_can_be_taken_again(
    transport: Transport,
) -> None:
    for _ in range(3):
        async with listening(transport) as listener:
            await exchange(transport, listener)


async def test_nobody_listens_on_the_port() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    reason = f"cannot connect to 127.0.0.1:{port}: Connection refused"
    with pytest.raises(TransportError, match=reason):
        await TcpTransport(port=port).connect()


async def test_a_lock_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.lock").mkdir()
    with pytest.raises(TransportError, match=rf"Is a directory \({tmp_path}/s.lock\)"):
        await UnixTransport(str(tmp_path / "s")).listen()


async def test_nobody_listens(transport: Transport) -> None:
    with pytest.raises(TransportError, match="cannot connect"):
        await transport.connect()
    async with listening(transport):
        pass
    with pytest.raises(TransportError, match="cannot connect"):
        await transport.connect()


async def test_a_second_server_is_told_that_the_place_is_taken(
    transport: Transport,
) -> None:
    async with listening(transport) as listener:
        with pytest.raises(AddressInUse, match="cannot listen"):
            await transport.listen()
        await exchange(transport, listener)


async def test_accepting_ends_with_the_listener(transport: Transport) -> None:
    [listener] = await transport.listen()
    async with trio.open_nursery() as nursery:

        async def accept() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await listener.accept()

        nursery.start_soon(accept)
        await trio.testing.wait_all_tasks_blocked()
        await listener.aclose()


async def test_a_listener_may_be_closed_twice(transport: Transport) -> None:
    [listener] = await transport.listen()
    await listener.aclose()
    await listener.aclose()


# Unix sockets


async def test_the_socket_belongs_to_its_owner_alone_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    modes = []

    class Watching(socket.socket):
        def bind(self, address: object) -> None:
            super().bind(address)  # type: ignore[arg-type]
            modes.append(stat.S_IMODE(path.stat().st_mode))

    monkeypatch.setattr("metis.rpc.transport.socket.socket", Watching)
    umask = os.umask(0)
    try:
        async with listening(UnixTransport(str(path))):
            modes.append(stat.S_IMODE(path.stat().st_mode))
    finally:
        os.umask(umask)
    assert modes == [0o600, 0o600]


async def test_another_mode_may_be_chosen(tmp_path: Path) -> None:
    async with listening(UnixTransport(str(tmp_path / "s"), mode=0o660)):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660


async def test_a_socket_for_several_users_is_open_to_all_by_its_mode(
    tmp_path: Path,
) -> None:
    for transport, mode in (
        (UnixTransport(str(tmp_path / "s"), allowed_uids=[1001]), 0o666),
        (UnixTransport(str(tmp_path / "s"), 0o660, allowed_uids=[1001]), 0o660),
    ):
        async with listening(transport):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode


async def test_the_socket_file_goes_with_the_listener(tmp_path: Path) -> None:
    async with listening(UnixTransport(str(tmp_path / "s"))) as listener:
        assert listener.address == str(tmp_path / "s")
        assert (tmp_path / "s").is_socket()
    assert not (tmp_path / "s").exists()


async def test_a_dead_socket_is_replaced(tmp_path: Path) -> None:
    dead_socket(tmp_path / "s")
    transport = UnixTransport(str(tmp_path / "s"))
    async with listening(transport) as listener:
        await exchange(transport, listener)


async def test_a_live_socket_of_a_server_without_our_lock_is_left_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(AddressInUse, match="a server answers there"):
            await UnixTransport(str(path)).listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


async def test_a_live_socket_with_a_full_queue_is_live(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            with pytest.raises(AddressInUse):
                await UnixTransport(str(path)).listen()


async def test_connecting_waits_for_room_in_the_queue(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            async with trio.open_nursery() as nursery:

                async def make_room() -> None:
                    await trio.sleep(1)
                    server.accept()[0].close()

                nursery.start_soon(make_room)
                async with await UnixTransport(path).connect() as second:
                    assert trio.current_time() >= 1
                    connection, _ = server.accept()
                    with connection:
                        connection.send(b"x")
                        assert await second.receive_some(1) == b"x"


@pytest.mark.parametrize("kind", ["file", "directory", "link", "pipe"])
async def test_what_is_no_socket_is_named_and_left_untouched(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "s"
    match kind:
        case "file":
            path.write_text("precious")
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case _:
            os.mkfifo(path)
    before = path.lstat()
    with pytest.raises(TransportError, match=f"{path}: a.*{kind}") as caught:
        await UnixTransport(str(path)).listen()
    assert not isinstance(caught.value, AddressInUse)
    assert os.path.samestat(path.lstat(), before)


@pytest.mark.parametrize("verb", ["listen", "connect"])
async def test_a_path_too_long_is_refused_with_its_length(
    tmp_path: Path, verb: str
) -> None:
    path = str(tmp_path / ("é" * 60))
    size = len(os.fsencode(path))
    assert size > MAX_SOCKET_PATH_BYTES
    transport = UnixTransport(path)
    with pytest.raises(TransportError, match=f"107 bytes, this one has {size}"):
        await getattr(transport, verb)()


async def test_the_longest_path_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    transport = UnixTransport("x" * MAX_SOCKET_PATH_BYTES)
    async with listening(transport) as listener:
        await exchange(transport, listener)


@pytest.mark.parametrize("path", ["", "a\0b"])
async def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(TransportError, match="no file path"):
        await UnixTransport(path).listen()
    with pytest.raises(TransportError, match="no file path"):
        await UnixTransport(path).connect()


async def test_a_missing_directory_is_a_clear_error(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "s")
    with pytest.raises(TransportError, match=f"{path}: No such file or directory"):
        await UnixTransport(path).listen()
    with pytest.raises(TransportError, match=f"{path}: No such file or directory"):
        await UnixTransport(path).connect()


async def test_a_failure_leaves_no_lock_behind(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("x")
    transport = UnixTransport(str(path))
    with pytest.raises(TransportError):
        await transport.listen()
    path.unlink()
    async with listening(transport) as listener:
        await exchange(transport, listener)


@pytest.mark.parametrize("content", ["", "1234\n", "garbage"])
async def test_a_lock_file_that_nobody_holds_is_no_obstacle(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "s.lock").write_text(content)
    transport = UnixTransport(str(tmp_path / "s"))
    async with listening(transport) as listener:
        await exchange(transport, listener)


async def test_a_lock_that_is_a_link_makes_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "s.lock").symlink_to("elsewhere")
    with pytest.raises(TransportError, match=r"levels of symbolic links \(.*s\.lock\)"):
        await UnixTransport(str(tmp_path / "s")).listen()
    assert not (tmp_path / "elsewhere").exists()


async def test_who_holds_the_lock_is_in_time_even_before_it_binds(
    tmp_path: Path,
) -> None:
    dead_socket(tmp_path / "s")
    with (tmp_path / "s.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(AddressInUse, match=r"another server holds .*s\.lock"):
            await UnixTransport(str(tmp_path / "s")).listen()
    assert (tmp_path / "s").is_socket()


async def test_a_claim_keeps_others_away_before_anybody_can_connect(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "s")
    transport, other = UnixTransport(path), UnixTransport(path)
    dead_socket(tmp_path / "s")
    with transport.claim():
        with pytest.raises(TransportError, match="cannot connect"):
            await other.connect()
        with pytest.raises(AddressInUse, match="another server holds"):
            await other.listen()
        with pytest.raises(AddressInUse, match="another server holds"), other.claim():
            pass
        async with listening(transport) as listener:
            await exchange(transport, listener)
        with pytest.raises(AddressInUse, match="another server holds"):
            await other.listen()
    async with listening(other) as listener:
        await exchange(other, listener)
        with pytest.raises(AddressInUse, match="another server"), transport.claim():
            pass


async def test_what_cannot_be_listened_on_cannot_be_claimed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(TransportError, match=f"{path}: a regular file"):
        UnixTransport(str(path)).claim().__enter__()
    with pytest.raises(TransportError, match="107 bytes"):
        UnixTransport(str(tmp_path / ("x" * 108))).claim().__enter__()
    path.unlink()
    async with listening(UnixTransport(str(path))):
        pass


async def test_an_error_within_a_claim_is_itself_and_ends_it(tmp_path: Path) -> None:
    transport = UnixTransport(str(tmp_path / "s"))
    error = OSError("of somebody else")
    with pytest.raises(OSError, match="of somebody else") as caught, transport.claim():
        raise error
    assert caught.value is error
    async with listening(UnixTransport(transport.path)):
        pass


async def test_a_place_in_a_directory_that_is_missing_is_nobody_s(
    tmp_path: Path,
) -> None:
    transport = UnixTransport(str(tmp_path / "later" / "s"))
    with transport.claim():
        (tmp_path / "later").mkdir()
        async with listening(transport) as listener:
            await exchange(transport, listener)


@pytest.mark.parametrize("transport", ["tcp", "memory"], indirect=True)
async def test_other_places_are_taken_by_listening_alone(transport: Transport) -> None:
    with transport.claim():
        async with listening(transport) as listener:
            await exchange(transport, listener)


def take(path: str, ready: object, go: object, results: object) -> None:
    """Try to become the server, in a process of its own."""

    async def main() -> None:
        try:
            [listener] = await UnixTransport(path).listen()
        except AddressInUse:
            results.put("lost")  # type: ignore[attr-defined]
        else:
            async with listener:
                results.put("won")  # type: ignore[attr-defined]
                await trio.to_thread.run_sync(go.wait)  # type: ignore[attr-defined]

    ready.wait()  # type: ignore[attr-defined]
    trio.run(main)


def test_of_servers_that_start_at_once_over_a_dead_socket_one_wins(
    tmp_path: Path,
) -> None:
    dead_socket(tmp_path / "s")
    context = multiprocessing.get_context("spawn")
    ready, go, results = context.Barrier(4), context.Event(), context.Queue()
    processes = [
        context.Process(target=take, args=(str(tmp_path / "s"), ready, go, results))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    outcomes = sorted(results.get(timeout=120) for _ in processes)
    go.set()
    for process in processes:
        process.join(timeout=120)
    results.close()
    assert outcomes == ["lost", "lost", "lost", "won"]


async def test_a_socket_file_that_is_not_ours_any_more_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with listening(UnixTransport(str(path))):
        path.unlink()
        dead_socket(path)
        other = path.stat()
    assert os.path.samestat(path.stat(), other)


async def test_a_socket_file_that_somebody_removed_is_no_error(tmp_path: Path) -> None:
    async with listening(UnixTransport(str(tmp_path / "s"))):
        (tmp_path / "s").unlink()


async def test_a_datagram_socket_in_the_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(TransportError, match="wrong type"):
            await UnixTransport(str(path)).listen()
        assert path.is_socket()


# TCP


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org", ""])  # noqa: S104  # refused, which is the test
def test_no_address_but_loopback_is_taken(host: str) -> None:
    with pytest.raises(TransportError, match="is not a loopback address"):
        TcpTransport(host)


async def test_the_kernel_chooses_a_port_and_the_listener_tells_it() -> None:
    async with listening(TcpTransport()) as listener:
        host, _, port = listener.address.rpartition(":")
        assert host == "127.0.0.1"
        await exchange(TcpTransport(port=int(port)), listener)


async def test_ipv6_loopback_is_loopback() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    [listener] = await TcpTransport("::1").listen()
    async with listener:
        assert listener.address.startswith("[::1]:")
        port = int(listener.address.rpartition(":")[2])
        await exchange(TcpTransport("::1", port), listener)


# memory


async def test_connecting_waits_while_too_many_wait_to_be_accepted() -> None:
    transport = MemoryTransport()
    async with listening(transport) as listener:
        for _ in range(MEMORY_BACKLOG):
            await transport.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transport.connect)
            await trio.testing.wait_all_tasks_blocked()
            assert nursery.child_tasks
            await listener.accept()


async def test_whoever_waits_to_be_accepted_learns_that_the_server_is_gone() -> None:
    transport = MemoryTransport()
    [listener] = await transport.listen()
    streams = [await transport.connect() for _ in range(MEMORY_BACKLOG)]
    async with trio.open_nursery() as nursery:

        async def connect() -> None:
            with pytest.raises(TransportError, match="stopped listening"):
                await transport.connect()

        nursery.start_soon(connect)
        await trio.testing.wait_all_tasks_blocked()
        await listener.aclose()
    for stream in streams:
        assert await stream.receive_some(1) == b""


def test_transports_say_what_they_are() -> None:
    assert repr(UnixTransport("/run/s")) == "UnixTransport('/run/s')"
    assert repr(TcpTransport(port=5)) == "TcpTransport('127.0.0.1', 5)"
    assert "MemoryTransport" in repr(MemoryTransport())
