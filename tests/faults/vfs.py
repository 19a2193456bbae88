"""SQLite's way to the files, with faults in it.

`FaultyFiles` is a VFS of apsw over the real one. It counts the calls by name and
has the n-th of one name fail, once or from then on. What apsw's VFS does not reach
(the shared memory of the write-ahead log) fails one level below, in the system
calls of SQLite's own unix VFS.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import apsw

_numbers = itertools.count()

FAILURES: dict[str, Callable[[], apsw.Error]] = {
    "io": lambda: apsw.IOError("injected: input/output error"),
    "full": lambda: apsw.FullError("injected: disk full"),
    "torn": lambda: apsw.IOError("injected: half of it was written"),
    "busy": lambda: apsw.BusyError("injected: busy"),
}
"""What a call may answer; "torn" also writes a part of what it was given."""


@dataclass
class Faults:
    """Which call is to fail, and how; and how many of each there were.

    Attributes:
      call: name of the call, "xWrite"; None for none.
      number: the how manieth of them, from 1.
      failure: a key of FAILURES.
      lasting: whether all that come after it fail as well.
      injected: how many have failed.
      waits: called instead of failing, for a disk that is only slow.
    """

    call: str | None = None
    number: int = 0
    failure: str = "io"
    lasting: bool = False
    injected: int = 0
    waits: Callable[[str], None] | None = None
    calls: collections.Counter[str] = field(default_factory=collections.Counter)

    def strikes(self, call: str) -> bool:
        """Count a call; whether it is the one that is to fail."""
        self.calls[call] += 1
        if self.waits is not None:
            self.waits(call)
        if call != self.call:
            return False
        seen = self.calls[call]
        struck = seen >= self.number if self.lasting else seen == self.number
        self.injected += struck
        return struck

    def error(self) -> apsw.Error:
        """The failure, as an exception that apsw turns into SQLite's code."""
        return FAILURES[self.failure]()


class FaultyFile(apsw.VFSFile):
    """An open file whose calls may fail."""

    def __init__(
        self, faults: Faults, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        super().__init__("unix", name, flags)
        self._faults = faults

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802  # apsw's name
        if self._faults.strikes("xWrite"):
            if self._faults.failure == "torn":
                super().xWrite(bytes(data)[: len(data) // 2], offset)
            raise self._faults.error()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802  # apsw's name
        if self._faults.strikes("xSync"):
            raise self._faults.error()
        super().xSync(flags)

    def xTruncate(self, size: int) -> None:  # noqa: N802  # apsw's name
        if self._faults.strikes("xTruncate"):
            raise self._faults.error()
        super().xTruncate(size)

    def xLock(self, level: int) -> None:  # noqa: N802  # apsw's name
        if self._faults.strikes("xLock"):
            raise self._faults.error()
        super().xLock(level)

    def xFileSize(self) -> int:  # noqa: N802  # apsw's name
        if self._faults.strikes("xFileSize"):
            raise self._faults.error()
        return super().xFileSize()

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802  # apsw's name
        if self._faults.strikes("xRead"):
            raise self._faults.error()
        return super().xRead(amount, offset)


class FaultyFiles(apsw.VFS):
    """A VFS whose calls may fail, and which never sleeps."""

    def __init__(self, faults: Faults) -> None:
        self.name = f"metis-faults-{next(_numbers)}"
        super().__init__(self.name, "unix", makedefault=True)
        self._faults = faults

    def xOpen(  # noqa: N802  # apsw's name
        self, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> FaultyFile:
        if self._faults.strikes("xOpen"):
            raise apsw.CantOpenError("injected: cannot open")
        return FaultyFile(self._faults, name, flags)

    def xDelete(self, name: str, syncdir: bool) -> None:  # noqa: N802  # apsw's name
        if self._faults.strikes("xDelete"):
            raise self._faults.error()
        super().xDelete(name, syncdir)

    def xAccess(self, name: str, flags: int) -> bool:  # noqa: N802  # apsw's name
        if self._faults.strikes("xAccess"):
            raise self._faults.error()
        return super().xAccess(name, flags)

    def xSleep(self, microseconds: int) -> int:  # noqa: N802  # apsw's name
        return microseconds


@contextlib.contextmanager
def faulty_files(faults: Faults) -> Iterator[None]:
    """Have every connection that is opened meanwhile go through a FaultyFiles."""
    vfs = FaultyFiles(faults)
    try:
        yield
    finally:
        apsw.set_default_vfs("unix")
        vfs.unregister()


_SYSTEM_CALLS: dict[str, tuple[Any, list[Any]]] = {
    "mmap": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
                               ctypes.c_int, ctypes.c_int, ctypes.c_long]),
    "fcntl": (ctypes.c_int, [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]),
    "ftruncate": (ctypes.c_int, [ctypes.c_int, ctypes.c_long]),
    "pwrite64": (ctypes.c_ssize_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t,
                                    ctypes.c_long]),
}  # fmt: skip
"""System calls behind the shared memory of a log and behind every write, as
(result, arguments)."""


@contextlib.contextmanager
def faulty_system_call(call: str, faults: Faults, error: int) -> Iterator[None]:
    """Have a system call of SQLite's unix VFS fail as `faults` says.

    Args:
      call: a key of _SYSTEM_CALLS; the name in `faults`, too.
      faults: which one fails.
      error: the errno that it fails with.
    """
    result, arguments = _SYSTEM_CALLS[call]
    kind: Any = ctypes.CFUNCTYPE(result, *arguments, use_errno=True)
    unix = apsw.VFS("metis-calls", "unix")
    real = kind(unix.xGetSystemCall(call) or 0)

    def struck(*values: Any) -> int:
        if faults.strikes(call):
            ctypes.set_errno(error)
            return -1
        return int(real(*values) or 0)

    replaced = kind(struck)
    address = ctypes.cast(replaced, ctypes.c_void_p).value or 0
    unix.xSetSystemCall(call, address)
    try:
        yield
    finally:
        unix.xSetSystemCall(call, ctypes.cast(real, ctypes.c_void_p).value or 0)
        unix.unregister()
