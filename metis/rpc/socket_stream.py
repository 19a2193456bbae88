"""A connected socket as a Trio stream, with as few system calls as it takes.

Trio's own asks the socket before it waits, which a server whose clients wait for
their answers does in vain at every call, and gives a turn away after every success.
This one waits first and then takes what is there; and `send_some` lets a task send
on the spot.

Touches: the socket it is given.
"""

from __future__ import annotations

import errno
import operator
import socket

import trio

from metis.rpc.prompt import PromptStream

RECEIVE_BYTES = 64 * 1024
"""Most bytes of one `receive_some` that names no number."""


class SocketStream(PromptStream):
    """A connected stream socket, which belongs to this object from now on.

    Args:
      sock: it is made non-blocking.

    Attributes:
      socket: it.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._sending = False

    def send_some(self, data: bytes | memoryview) -> int:
        """Send what the kernel takes now; see `PromptStream`."""
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise _translated(exc) from exc

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; see `trio.abc.SendStream`."""
        await self._begin_sending()
        try:
            view = memoryview(data)
            self._check_open()
            while view:
                sent = self.send_some(view)
                view = view[sent:]
                if view:
                    await trio.lowlevel.wait_writable(self.socket)
        finally:
            self._sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the kernel takes something; see `trio.abc.SendStream`."""
        await self._begin_sending()
        try:
            self._check_open()
            await trio.lowlevel.wait_writable(self.socket)
        finally:
            self._sending = False

    async def _begin_sending(self) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
        except BaseException:
            self._sending = False
            raise

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes and take them; see `trio.abc.ReceiveStream`."""
        max_bytes = RECEIVE_BYTES if max_bytes is None else operator.index(max_bytes)
        if max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}: it must be 1 or more")
        while True:
            self._check_open()
            await trio.lowlevel.wait_readable(self.socket)
            try:
                return self.socket.recv(max_bytes)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise _translated(exc) from exc

    def receive_now(self, max_bytes: int) -> bytes | None:
        """Take what the kernel has now; see `PromptStream`."""
        try:
            return self.socket.recv(max_bytes)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise _translated(exc) from exc

    def _check_open(self) -> None:
        if self.socket.fileno() < 0:
            raise trio.ClosedResourceError("this stream is closed")

    async def aclose(self) -> None:
        """Close the socket; whoever waits on it gets ClosedResourceError."""
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close it without giving other tasks a turn."""
        if self.socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()


def _translated(exc: OSError) -> Exception:
    if exc.errno == errno.EBADF:
        return trio.ClosedResourceError("this stream is closed")
    return trio.BrokenResourceError(f"the connection is broken: {exc.strerror}")
