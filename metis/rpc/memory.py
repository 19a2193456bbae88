"""A pair of connected Trio streams inside one process, with bounded buffers.

A `trio.abc.Stream` like any other: what one end sends the other receives, a
sender waits while the buffer is full, and closing one end is seen at the other.
No file descriptor, no socket, no thread.
"""

from __future__ import annotations

import operator

import trio

from metis.rpc.prompt import PromptStream

PIPE_BYTES = 64 * 1024
"""What one direction holds before its sender waits, as a Unix socket would."""


class _Pipe:
    """One direction: a bounded buffer and who waits at which end of it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.data = bytearray()
        self.sender_closed = False
        self.receiver_closed = False
        self._changed = trio.lowlevel.ParkingLot()

    def notify(self) -> None:
        """Let everybody who waits at either end look again."""
        self._changed.unpark_all()

    async def wait(self) -> None:
        await self._changed.park()


class MemoryStream(PromptStream):
    """One end of a pair that `memory_stream_pair` made."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._out = outgoing
        self._in = incoming
        self._closed = False
        self._sending = False
        self._receiving = False

    def send_some(self, data: bytes | memoryview) -> int:
        """Hand over what there is room for now; see `PromptStream`."""
        self._check_sendable()
        room = max(0, self._out.limit - len(self._out.data))
        self._out.data += data[:room]
        self._out.notify()
        return min(room, len(data))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Hand over all of `data`; waits while the other end does not read.

        Raises:
          BusyResourceError: another task is sending.
          ClosedResourceError: this end is closed.
          BrokenResourceError: the other end is closed.
        """
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            view = memoryview(data)
            self._check_sendable()
            while view:
                room = self._out.limit - len(self._out.data)
                if room > 0:
                    self._out.data += view[:room]
                    view = view[room:]
                    self._out.notify()
                else:
                    await self._out.wait()
                    self._check_sendable()
        finally:
            self._sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room; errors as those of `send_all`."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            self._check_sendable()
            while len(self._out.data) >= self._out.limit:
                await self._out.wait()
                self._check_sendable()
        finally:
            self._sending = False

    def _check_sendable(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this stream is closed")
        if self._out.receiver_closed:
            raise trio.BrokenResourceError("the other end is closed")

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Take what is there, at least one byte; b"" after the other end closed.

        Raises:
          BusyResourceError: another task is receiving.
          ClosedResourceError: this end is closed.
          ValueError: `max_bytes` is not positive.
        """
        max_bytes = self._in.limit if max_bytes is None else operator.index(max_bytes)
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}: it must be 1 or more")
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while True:
                if self._closed:
                    raise trio.ClosedResourceError("this stream is closed")
                if self._in.data or self._in.sender_closed:
                    break
                await self._in.wait()
            data = bytes(self._in.data[:max_bytes])
            del self._in.data[:max_bytes]
            self._in.notify()
            return data
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        """Close this end; what it sent before can still be read."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close this end without giving other tasks a turn."""
        if not self._closed:
            self._closed = True
            self._out.sender_closed = True
            self._in.receiver_closed = True
            self._in.data.clear()
            self._out.notify()
            self._in.notify()


def memory_stream_pair(limit: int = PIPE_BYTES) -> tuple[MemoryStream, MemoryStream]:
    """Two ends of one stream.

    Args:
      limit: bytes that each direction holds before its sender waits.
    """
    there, back = _Pipe(limit), _Pipe(limit)
    return MemoryStream(there, back), MemoryStream(back, there)
