"""`metis.rpc.memory`: streams inside one process that keep Trio's contract."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from metis.rpc.memory import MemoryStream, memory_stream_pair


async def make_pair() -> tuple[MemoryStream, MemoryStream]:
    return memory_stream_pair()


async def make_clogged_pair() -> tuple[MemoryStream, MemoryStream]:
    one, other = memory_stream_pair(limit=10)
    for end in (one, other):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.send_all, b"x" * 11)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    return one, other


async def test_they_keep_the_contract_of_a_trio_stream() -> None:
    await trio.testing.check_two_way_stream(make_pair, make_clogged_pair)


async def test_a_sender_waits_for_its_reader() -> None:
    one, other = memory_stream_pair(limit=10)
    sent = False

    async def send() -> None:
        nonlocal sent
        await one.send_all(b"x" * 25)
        sent = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        assert await other.receive_some(100) == b"x" * 10
        await trio.testing.wait_all_tasks_blocked()
        assert not sent
        assert await other.receive_some(100) == b"x" * 10
        await trio.testing.wait_all_tasks_blocked()
        assert sent
        assert await other.receive_some(100) == b"x" * 5


async def test_what_was_sent_before_the_end_can_still_be_read() -> None:
    one, other = memory_stream_pair()
    await one.send_all(b"last words")
    await one.aclose()
    assert await other.receive_some() == b"last words"
    assert await other.receive_some() == b""
    assert await other.receive_some() == b""
    with pytest.raises(trio.BrokenResourceError):
        await other.send_all(b"anybody there?")
