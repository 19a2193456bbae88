"""The file of a Unix socket: which path will do, and whose turn it is to bind it.

A socket file outlives the server that bound it. So whoever wants its place first
locks "<path>.lock" (flock), finds out whether somebody answers there, and removes
what is dead. The kernel frees the lock with its holder; that file means nothing and
stays.

Touches: the two files, and a socket to knock at the first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator

from metis.errors import AddressInUse, TransportError

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux: sun_path less its final zero byte."""

_LOCK_MODE = 0o600


class SocketFile:
    """The place of a Unix socket.

    Attributes:
      path: where it is.
      mode: permissions of the socket file, which it has from its first moment.
    """

    def __init__(self, path: str, mode: int) -> None:
        self.path = path
        self.mode = mode
        self._claimed = False

    def check_path(self, verb: str) -> None:
        """See that the path can be one of a socket.

        Args:
          verb: what is to be done there, for the message.

        Raises:
          TransportError: it is too long, or no path.
        """
        size = len(os.fsencode(self.path))
        if size > MAX_SOCKET_PATH_BYTES:
            raise TransportError(
                f"cannot {verb} {self.path}: the path of a socket may have "
                f"{MAX_SOCKET_PATH_BYTES} bytes, this one has {size}"
            )
        if not self.path or "\0" in self.path:
            raise TransportError(f"cannot {verb} {self.path!r}: it is no file path")

    def error(self, verb: str, exc: OSError) -> TransportError:
        """What the operating system says, with the path."""
        if isinstance(exc, TransportError):
            return exc
        about = "" if exc.filename in (None, self.path) else f" ({exc.filename})"
        return TransportError(f"cannot {verb} {self.path}: {exc.strerror}{about}")

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Hold the lock, after a look at the place; `bind` may follow.

        In a directory that does not exist yet nobody serves, and there is nothing
        to hold.

        Raises:
          AddressInUse: a server answers there, or holds the lock.
          TransportError: something else stands there, or it cannot be locked.
        """
        self.check_path("listen on")
        with contextlib.ExitStack() as undo:
            try:
                if os.path.isdir(os.path.dirname(os.path.abspath(self.path))):
                    undo.enter_context(self._lock())
                    self._clear_the_place()
                    undo.callback(setattr, self, "_claimed", False)
                    self._claimed = True
            except OSError as exc:
                raise self.error("listen on", exc) from exc
            yield

    def bind(self, undo: contextlib.ExitStack) -> socket.socket:
        """Lock, clear and bind; `undo` learns how to take it back.

        Raises:
          AddressInUse: a server answers there, or holds the lock.
          OSError: something else stands there, or it cannot be bound.
        """
        if not self._claimed:
            undo.enter_context(self._lock())
        self._clear_the_place()
        sock = undo.enter_context(socket.socket(socket.AF_UNIX))
        # Linux gives the file the mode of the unbound socket less the umask, so
        # there is no moment at which others could connect
        os.fchmod(sock.fileno(), self.mode)
        sock.bind(self.path)
        undo.callback(self._unlink, os.lstat(self.path))
        os.chmod(self.path, self.mode)
        return sock

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        path = f"{self.path}.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, _LOCK_MODE)
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
