"""Where connections come from: a Unix socket, TCP on loopback, or memory.

A `Transport` names one place. A server listens there, a client connects there,
and nothing above this module knows which kind it is. Every failure leaves as
`TransportError`, with the place and the reason in its message.

Touches: sockets, the socket file and the lock file beside it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import trio

from metis.errors import AddressInUse, TransportError
from metis.rpc.memory import MemoryStream, memory_stream_pair

BACKLOG = 4096
"""Connections that the kernel may queue for a listener.

A burst of plugins, one connection each, must not be refused while the daemon
is busy. The kernel cuts it to net.core.somaxconn, 4096 by default.
"""

MEMORY_BACKLOG = 64
"""Connections that wait in memory to be accepted before `connect` waits too."""

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux: sun_path less its final zero byte."""

FULL_BACKLOG_PAUSE_SECONDS = 0.01
"""Pause before another try when the listener's queue is full.

Linux answers EAGAIN at once for Unix sockets; there is nothing to wait on.
"""

SOCKET_MODE = 0o600
"""The owner alone may connect, as with the original."""


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


class _SocketListener(Listener):
    """Trio's own listener on a socket, with an address and something to undo."""

    def __init__(
        self, listener: trio.SocketListener, address: str, undo: contextlib.ExitStack
    ) -> None:
        self.address = address
        self._listener = listener
        self._undo = undo

    async def accept(self) -> trio.SocketStream:
        return await self._listener.accept()

    async def aclose(self) -> None:
        with self._undo:
            await self._listener.aclose()


class UnixTransport(Transport):
    """A Unix stream socket at a path.

    While it listens, "<path>.lock" is locked (flock), so that of two servers
    that start in the same instant one alone takes the place of a dead socket.
    The kernel frees the lock with its holder; the file itself means nothing
    and stays.

    Args:
      path: the socket file, at most MAX_SOCKET_PATH_BYTES long. Its directory
        must exist.
      mode: permissions of the socket file, which it has from its first moment.
    """

    def __init__(self, path: str, mode: int = SOCKET_MODE) -> None:
        self.path = path
        self.mode = mode

    def __repr__(self) -> str:
        return f"UnixTransport({self.path!r})"

    async def listen(self) -> Sequence[Listener]:
        """Take the path: a dead socket is replaced, all else is left alone.

        Raises:
          AddressInUse: a server answers there, or holds the lock.
          TransportError: the path is too long, something else than a socket
            stands there, or the directory is missing or not writable.
        """
        self._check_path("listen on")
        with contextlib.ExitStack() as undo:
            try:
                listener = self._bind(undo)
            except OSError as exc:
                raise self._error("listen on", exc) from exc
            return [_SocketListener(listener, self.path, undo.pop_all())]

    async def connect(self) -> trio.abc.Stream:
        """Connect to the server at the path; see `Transport.connect`."""
        self._check_path("connect to")
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)

            # a Unix socket connects at once or not at all
            while (code := sock.connect_ex(self.path)) == errno.EAGAIN:  # noqa: ASYNC110
                await trio.sleep(FULL_BACKLOG_PAUSE_SECONDS)
            if code:
                raise self._error("connect to", OSError(code, os.strerror(code)))
            undo.pop_all()
            return trio.SocketStream(trio.socket.from_stdlib_socket(sock))

    def _check_path(self, verb: str) -> None:
        size = len(os.fsencode(self.path))
        if size > MAX_SOCKET_PATH_BYTES:
            raise TransportError(
                f"cannot {verb} {self.path}: the path of a socket may have "
                f"{MAX_SOCKET_PATH_BYTES} bytes, this one has {size}"
            )
        if not self.path or "\0" in self.path:
            raise TransportError(f"cannot {verb} {self.path!r}: it is no file path")

    def _error(self, verb: str, exc: OSError) -> TransportError:
        if isinstance(exc, TransportError):
            return exc
        about = "" if exc.filename in (None, self.path) else f" ({exc.filename})"
        return TransportError(f"cannot {verb} {self.path}: {exc.strerror}{about}")

    def _bind(self, undo: contextlib.ExitStack) -> trio.SocketListener:
        """Lock, clear, bind and listen; `undo` learns how to take it back."""
        undo.enter_context(self._lock())
        self._clear_the_place()
        sock = undo.enter_context(socket.socket(socket.AF_UNIX))
        # Linux gives the file the mode of the unbound socket less the umask, so
        # there is no moment at which others could connect
        os.fchmod(sock.fileno(), self.mode)
        sock.bind(self.path)
        undo.callback(self._unlink, os.lstat(self.path))
        os.chmod(self.path, self.mode)
        sock.listen(BACKLOG)
        return trio.SocketListener(trio.socket.from_stdlib_socket(sock))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        path = f"{self.path}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise AddressInUse(
                    f"cannot listen on {self.path}: another server holds {path}"
                ) from exc
            yield
        finally:
            os.close(fd)

    def _clear_the_place(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise TransportError(
                f"cannot listen on {self.path}: {_KINDS.get(stat.S_IFMT(mode))} "
                "stands there, which is not ours to remove"
            )
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            code = probe.connect_ex(self.path)
        if code in (0, errno.EAGAIN):
            raise AddressInUse(f"cannot listen on {self.path}: a server answers there")
        if code == errno.ECONNREFUSED:
            os.unlink(self.path)
        elif code != errno.ENOENT:
            raise OSError(code, os.strerror(code))

    def _unlink(self, ours: os.stat_result) -> None:
        """Remove the socket file, unless another has taken its place."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(self.path), ours):
                os.unlink(self.path)


_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
            _SocketListener(
                listener,
                self._place(listener.socket.getsockname()[1]),
                contextlib.ExitStack(),
            )
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
