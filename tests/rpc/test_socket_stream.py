"""`metis.rpc.socket_stream`: Trio's contract of a stream, over a socket."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from metis.rpc.socket_stream import SocketStream


async def stream_pair() -> tuple[SocketStream, SocketStream]:
    """Two ends that hold little, so that senders have to wait."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return SocketStream(ours), SocketStream(theirs)


async def clogged_pair() -> tuple[SocketStream, SocketStream]:
    ours, theirs = await stream_pair()
    for one in (ours, theirs):
        while one.send_some(bytes(4096)):
            pass
    return ours, theirs


async def test_it_is_a_stream_as_trio_has_them() -> None:
    await trio.testing.check_two_way_stream(stream_pair, clogged_pair)


async def test_what_does_not_fit_is_not_sent() -> None:
    ours, theirs = await stream_pair()
    async with ours, theirs:
        sent = 0
        while number := ours.send_some(bytes(3000)):
            sent += number
        assert sent
        received = 0
        while received < sent:
            received += len(await theirs.receive_some(1000))
        assert ours.send_some(b"again") == 5


async def test_sending_to_nobody_is_told() -> None:
    ours, theirs = await stream_pair()
    theirs.close()
    with pytest.raises(trio.BrokenResourceError):
        ours.send_some(b"x")
    ours.close()
    ours.close()
    with pytest.raises(trio.ClosedResourceError):
        ours.send_some(b"x")
    with pytest.raises(trio.ClosedResourceError):
        await ours.receive_some()


async def test_nothing_is_lost_when_a_receiver_is_cancelled() -> None:
    ours, theirs = await stream_pair()
    received = b""

    async def receive() -> None:
        nonlocal received
        received += await theirs.receive_some(1)

    async with ours, theirs:
        for number in range(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive)
                await trio.testing.wait_all_tasks_blocked()
                # readable and cancelled in the same turn
                ours.send_some(bytes((number,)))
                nursery.cancel_scope.cancel()
        while len(received) < 10:
            await receive()
    assert received == bytes(range(10))


async def test_what_is_there_can_be_taken_without_waiting() -> None:
    ours, theirs = await stream_pair()
    assert ours.receive_now(10) is None
    theirs.send_some(b"twelve bytes")
    assert ours.receive_now(10) == b"twelve byt"
    theirs.close()
    assert ours.receive_now(10) == b"es"
    assert ours.receive_now(10) == b""
    ours.close()
    with pytest.raises(trio.ClosedResourceError):
        ours.receive_now(10)
