"""Where connections come from: a Unix socket, TCP on loopback, or memory.

A `Transport` names one place. A server listens there, a client connects there,
and nothing above this module knows which kind it is. Every failure leaves as
`TransportError`, with the place and the reason in its message.

Touches: sockets, the socket file and the lock file beside it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import trio

from metis.errors import AddressInUse, TransportError
from metis.rpc.memory import MemoryStream, memory_stream_pair
from metis.rpc.peers import Doorkeeper
from metis.rpc.socket_file import SocketFile
from metis.rpc.socket_stream import SocketStream

BACKLOG = 4096
"""Connections that the kernel may queue for a listener.

A burst of plugins, one connection each, must not be refused while the daemon
is busy. The kernel cuts it to net.core.somaxconn, 4096 by default.
"""

MEMORY_BACKLOG = 64
"""Connections that wait in memory to be accepted before `connect` waits too."""

FULL_BACKLOG_PAUSE_SECONDS = 0.01
"""Pause before another try when the listener's queue is full.

Linux answers EAGAIN at once for Unix sockets; there is nothing to wait on.
"""

SOCKET_MODE = 0o600
"""The owner alone may connect, as with the original."""

SHARED_SOCKET_MODE = 0o666
"""Where other uids are allowed by number. No mode says whose they are, so this one
keeps nobody out: the credentials of each connection do (`metis.rpc.peers`)."""


class Listener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts connections at one address; closing it frees the address.

    Attributes:
      address: where it listens, as a person would write it.
    """

    address: str


class Transport(ABC):
    """A place where a server listens and clients connect."""

    @abstractmethod
    async def listen(self) -> Sequence[Listener]:
        """Start to listen; whoever calls closes the listeners.

        Raises:
          AddressInUse: somebody listens there already.
          TransportError: the place cannot be listened on.
        """

    @abstractmethod
    async def connect(self) -> trio.abc.Stream:
        """Connect to whoever listens there; whoever calls closes the stream.

        Raises:
          TransportError: nobody listens there, or it cannot be reached.
        """

    def claim(self) -> AbstractContextManager[None]:
        """Keep other servers away while this one gets ready, and until it is done.

        Nobody can connect yet: `listen` is for that, inside the claim. Where a
        place cannot be claimed beforehand this does nothing.

        Raises:
          AddressInUse: somebody listens there already, or is about to.
          TransportError: the place cannot be listened on.
        """
        return contextlib.nullcontext()


class _UnixListener(Listener):
    """A listening Unix socket, and something to undo.

    Whoever the doorkeeper does not admit is gone before anybody hears of it.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        undo: contextlib.ExitStack,
        doorkeeper: Doorkeeper,
    ) -> None:
        self.address = address
        self._socket = sock
        self._undo = undo
        self._doorkeeper = doorkeeper

    async def accept(self) -> SocketStream:
        while True:
            if self._socket.fileno() < 0:
                raise trio.ClosedResourceError("this listener is closed")
            await trio.lowlevel.wait_readable(self._socket)
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                continue  # the client has gone again
            if self._doorkeeper.admits(sock):
                return SocketStream(sock)
            sock.close()

    async def aclose(self) -> None:
        with self._undo:
            if self._socket.fileno() >= 0:
                trio.lowlevel.notify_closing(self._socket)
                self._socket.close()
        await trio.lowlevel.checkpoint()


class _TcpListener(Listener):
    """Trio's own listener, with an address."""

    def __init__(self, listener: trio.SocketListener, address: str) -> None:
        self.address = address
        self._listener = listener

    async def accept(self) -> trio.SocketStream:
        return await self._listener.accept()

    async def aclose(self) -> None:
        await self._listener.aclose()


class UnixTransport(Transport):
    """A Unix stream socket at a path.

    While it listens or is claimed, "<path>.lock" is locked (flock), so that of two
    servers that start in the same instant one alone takes the place of a dead
    socket (`metis.rpc.socket_file`).

    Served are root, the user of this process and `allowed_uids`. The connection of
    anybody else is closed before a byte is read.

    Args:
      path: the socket file. Its directory must exist when somebody listens.
      mode: permissions of the socket file, which it has from its first moment; by
        default SOCKET_MODE, or SHARED_SOCKET_MODE when there are `allowed_uids`.
      allowed_uids: who else may connect.
    """

    def __init__(
        self,
        path: str,
        mode: int | None = None,
        allowed_uids: Collection[int] = (),
    ) -> None:
        if mode is None:
            mode = SHARED_SOCKET_MODE if allowed_uids else SOCKET_MODE
        self.path = path
        self.allowed_uids = allowed_uids
        self._file = SocketFile(path, mode)

    def __repr__(self) -> str:
        return f"UnixTransport({self.path!r})"

    async def listen(self) -> Sequence[Listener]:
        """Take the path: a dead socket is replaced, all else is left alone.

        Raises:
          AddressInUse: a server answers there, or holds the lock.
          TransportError: the path is too long, something else than a socket
            stands there, or the directory is missing or not writable.
        """
        self._file.check_path("listen on")
        with contextlib.ExitStack() as undo:
            try:
                sock = self._file.bind(undo)
                sock.listen(BACKLOG)
            except OSError as exc:
                raise self._file.error("listen on", exc) from exc
            sock.setblocking(False)
            doorkeeper = Doorkeeper(self.path, self.allowed_uids)
            return [_UnixListener(sock, self.path, undo.pop_all(), doorkeeper)]

    def claim(self) -> AbstractContextManager[None]:
        """Hold the lock of the path; see `Transport.claim`."""
        return self._file.claim()

    async def connect(self) -> trio.abc.Stream:
        """Connect to the server at the path; see `Transport.connect`."""
        self._file.check_path("connect to")
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)

            # a Unix socket connects at once or not at all
            while (code := sock.connect_ex(self.path)) == errno.EAGAIN:  # noqa: ASYNC110
                await trio.sleep(FULL_BACKLOG_PAUSE_SECONDS)
            if code:
                raise self._file.error("connect to", OSError(code, os.strerror(code)))
            undo.pop_all()
            return SocketStream(sock)


class TcpTransport(Transport):
    """TCP on the loopback interface, for tests and tools on one machine.

    There is no authentication and no encryption, so no other interface is ever
    listened on.

    Args:
      host: a loopback address, "127.0.0.1" or "::1".
      port: TCP port; 0 lets the kernel choose when listening, and the
        listener's address tells what it chose.

    Raises:
      TransportError: `host` is not a loopback address.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise TransportError(
                f"{host!r} is not a loopback address: use '127.0.0.1' or '::1'"
            )
        self.host = host
        self.port = port

    def __repr__(self) -> str:
        return f"TcpTransport({self.host!r}, {self.port})"

    async def listen(self) -> Sequence[Listener]:
        """Listen on the port; see `Transport.listen`."""
        try:
            opened = await trio.open_tcp_listeners(
                self.port, host=self.host, backlog=BACKLOG
            )
        except OSError as exc:
            kind = AddressInUse if exc.errno == errno.EADDRINUSE else TransportError
            raise kind(f"cannot listen on {self._place()}: {exc.strerror}") from exc
        return [
            _TcpListener(listener, self._place(listener.socket.getsockname()[1]))
            for listener in opened
        ]

    async def connect(self) -> trio.abc.Stream:
        """Connect to the port; see `Transport.connect`."""
        with contextlib.ExitStack() as undo:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            sock = undo.enter_context(trio.socket.socket(family))
            try:
                await sock.connect((self.host, self.port))
            except OSError as exc:
                reason = os.strerror(exc.errno) if exc.errno else str(exc)
                raise TransportError(
                    f"cannot connect to {self._place()}: {reason}"
                ) from exc
            undo.pop_all()
            return trio.SocketStream(sock)

    def _place(self, port: int | None = None) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port if port is None else port}"


class MemoryTransport(Transport):
    """Server and clients in one process, without a file descriptor.

    One server at a time; after it has stopped another may listen.
    """

    def __init__(self) -> None:
        self._listener: _MemoryListener | None = None

    def __repr__(self) -> str:
        return f"<MemoryTransport at {id(self):#x}>"

    async def listen(self) -> Sequence[Listener]:
        """Start to listen; see `Transport.listen`."""
        if self._listener is not None:
            raise AddressInUse("cannot listen in memory: a server does so already")
        self._listener = _MemoryListener(self._forget)
        return [self._listener]

    async def connect(self) -> trio.abc.Stream:
        """Connect to the server; see `Transport.connect`."""
        if self._listener is None:
            raise TransportError("cannot connect in memory: no server listens")
        return await self._listener.connect()

    def _forget(self) -> None:
        self._listener = None


class _MemoryListener(Listener):
    """A queue of streams whose other ends clients hold already."""

    address = "memory"

    def __init__(self, on_close: Callable[[], None]) -> None:
        self._on_close: Callable[[], None] | None = on_close
        self._queue, self._incoming = trio.open_memory_channel[MemoryStream](
            MEMORY_BACKLOG
        )

    async def accept(self) -> MemoryStream:
        try:
            return await self._incoming.receive()
        except trio.EndOfChannel:
            raise trio.ClosedResourceError("this listener is closed") from None

    async def connect(self) -> MemoryStream:
        """Make a pair, queue one end and return the other."""
        ours, theirs = memory_stream_pair()
        try:
            await self._queue.send(theirs)
        except trio.ClosedResourceError as exc:
            raise TransportError(
                "cannot connect in memory: the server stopped listening"
            ) from exc
        return ours

    async def aclose(self) -> None:
        if self._on_close is not None:
            self._on_close()
            self._on_close = None
            self._queue.close()
            with contextlib.suppress(trio.EndOfChannel):
                while True:
                    self._incoming.receive_nowait().close()
            self._incoming.close()
        await trio.lowlevel.checkpoint()
