"""metis that dies at a named step of what it does: `python -m tests.faults.stepped`.

  stepped STEP NUMBER MARKER metis-arguments...     kills itself at that step
  stepped --slow SECONDS metis-arguments...         every commit takes so much longer
  stepped --wall SECONDS metis-arguments...         the wall clock is so far off

The product has no hooks. Steps are found from outside: SQLite tells every statement
before it runs and every commit as it begins (apsw), a VFS sees what reaches the
files, and single functions are replaced by ones that call them. When a step comes for
the NUMBERth time, the process sends itself SIGKILL. A daemon counts from when it gets
SIGUSR1 on, which it confirms by making the file MARKER; with "-" for MARKER, from its
start.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any

import apsw

import metis.clock
from metis.__main__ import main
from metis.clock import StoredClock
from metis.cni import spool
from metis.cni.client import DaemonClient
from metis.rpc.socket_stream import SocketStream
from metis.store import connecting, database, healing, seeding, writer
from metis.store.transactions import Work, run_group
from tests.faults.vfs import Faults, faulty_system_call

STEPS: dict[str, str] = {
    "before BEGIN": "a group of requests was taken from the queue",
    "after BEGIN": "the write lock is held, nothing has changed",
    "in a request": "a statement of a request is about to change a row",
    "after a request": "one request of several is done",
    "before COMMIT": "all requests of the group are done",
    "in COMMIT": "SQLite has begun to commit",
    "before a write to the log": "a frame is about to reach the log",
    "in a write to the log": "half of a frame has reached it",
    "before a sync of the log": "the frames are written, not flushed",
    "after a sync of the log": "they are flushed",
    "after COMMIT": "the transaction is whole, nobody knows",
    "before a request is told": "its task has not been woken",
    "before the answer is sent": "its bytes are about to go to the socket",
    "after the answer is sent": "they are with the kernel",
    "before a checkpoint": "the log is long",
    "before a write to the database": "a page is about to be folded back",
    "in a write to the database": "half of a page has been",
    "before a sync of the database": "pages are folded back, not flushed",
    "after a sync of the database": "they are flushed",
    "after a checkpoint": "the log may begin anew",
    "before the log is deleted": "the last connection closes",
    "before a seeding step": "a block has no rows left",
    "after a seeding step": "it has new ones",
    "before a file is opened": "SQLite opens the database, its log or its index",
    "before the log's index grows": "as its first reader or writer comes",
    "before the log's index is mapped": "it is long enough",
    "before a look at the file": "nobody knows yet whether it is damaged",
    "after a look at the file": "it is not, or it has been moved",
    "before it is made ours": "the journal mode, the schema and the clock lack",
    "in the schema": "a statement that makes a table, a column or an index",
    "after it is made ours": "it is complete",
    "before it is healed": "it is damaged",
    "before a file is linked": "a second name for a damaged one, or the new one's",
    "after a file is linked": "it has both names",
    "before a file is moved": "as the one that is healed takes its place",
    "after a file is moved": "it has",
    "after it is healed": "it is rebuilt",
    "before the daemon is asked": "the plugin knows what it will ask",
    "after the daemon has answered": "the plugin knows, its caller does not",
    "before a DEL is kept": "the plugin reached nobody",
    "after a DEL is kept": "it is written down",
}
"""What is so when the process dies there."""

_SCHEMA = re.compile("^ *(CREATE|ALTER) ", re.MULTILINE)  # comments come before it
_CHANGES = ("INSERT ", "UPDATE ", "DELETE ")


class Death:
    """The end of this process at a step.

    Attributes:
      counts: whether steps count by now.
      has_committed: whether something was since.
      files: the VFS that tells of steps.
      calls: the system calls that do.
    """

    files: apsw.VFS
    calls: ExitStack

    def __init__(self, step: str, number: int, marker: str) -> None:
        self._step = step
        self._left = number
        self._marker = marker
        self.counts = marker == "-"
        self.has_committed = False

    def begin(self, *_: object) -> None:
        """Count from now on; a signal handler."""
        self.counts = True
        Path(self._marker).touch()

    def at(self, step: str) -> None:
        """Die here, if this is the place."""
        if self.counts and step == self._step:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()  # never returns

    def around(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Replace a function by one with steps before and after it."""
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def replaced(*arguments: Any, **more: Any) -> Any:
            self.at(before)
            answer = function(*arguments, **more)
            self.at(after)
            return answer

        setattr(owner, name, replaced)


class File(apsw.VFSFile):
    """A file of SQLite that a process may die over."""

    def __init__(
        self, death: Death, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        super().__init__("unix", name, flags)
        self._death = death
        is_log = bool(flags[0] & apsw.SQLITE_OPEN_WAL)
        self._what = "the log" if is_log else "the database"

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802  # apsw's name
        self._death.at(f"before a write to {self._what}")
        half = len(data) // 2
        super().xWrite(bytes(data[:half]), offset)
        self._death.at(f"in a write to {self._what}")
        super().xWrite(bytes(data[half:]), offset + half)

    def xSync(self, flags: int) -> None:  # noqa: N802  # apsw's name
        self._death.at(f"before a sync of {self._what}")
        super().xSync(flags)
        self._death.at(f"after a sync of {self._what}")


class Files(apsw.VFS):
    """The files of SQLite; what they share by memory is the system's."""

    def __init__(self, death: Death) -> None:
        super().__init__("metis-steps", "unix", makedefault=True)
        self._death = death

    def xOpen(  # noqa: N802  # apsw's name
        self, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> File:
        self._death.at("before a file is opened")
        return File(self._death, name, flags)

    def xDelete(self, name: str, syncdir: bool) -> None:  # noqa: N802  # apsw's name
        if name.endswith("-wal"):
            self._death.at("before the log is deleted")
        super().xDelete(name, syncdir)


class Mapping(Faults):
    """The memory that processes share about the log, which no VFS of apsw sees."""

    def __init__(self, death: Death) -> None:
        super().__init__()
        self._death = death

    def strikes(self, call: str) -> bool:
        """Nothing fails; somebody may die."""
        grows = call == "ftruncate"
        self._death.at(f"before the log's index {'grows' if grows else 'is mapped'}")
        return False


def watch_statements(death: Death, connection: apsw.Connection) -> None:
    """Know the steps of a transaction by its statements."""
    begun = False

    def statement(_: object, text: str, __: object) -> bool:
        nonlocal begun
        if begun:
            begun = False
            death.at("after BEGIN")
        if text == "BEGIN IMMEDIATE":
            begun = True
            death.at("before BEGIN")
        elif text == "COMMIT":
            death.at("before COMMIT")
        elif _SCHEMA.search(text):
            death.at("in the schema")
        elif text.lstrip().startswith(_CHANGES):
            death.at("in a request")
        return True

    def commit() -> bool:
        death.at("in COMMIT")
        return False

    connection.exec_trace = statement
    connection.set_commit_hook(commit)


def install(death: Death) -> None:
    """Put every step into this process."""
    apsw.connection_hooks.append(partial(watch_statements, death))
    death.calls = ExitStack()
    for call in ("mmap", "ftruncate"):
        death.calls.enter_context(faulty_system_call(call, Mapping(death), 0))
    death.files = Files(death)  # it is SQLite's for as long as somebody keeps it
    death.around(
        database, "_look", "before a look at the file", "after a look at the file"
    )
    death.around(
        connecting, "prepare", "before it is made ours", "after it is made ours"
    )
    death.around(healing, "heal", "before it is healed", "after it is healed")
    death.around(os, "link", "before a file is linked", "after a file is linked")
    death.around(os, "rename", "before a file is moved", "after a file is moved")
    for name in ("_fold", "_checkpoint"):
        death.around(
            database.Database, name, "before a checkpoint", "after a checkpoint"
        )
    death.around(seeding, "extend", "before a seeding step", "after a seeding step")
    death.around(writer.Request, "finish", "before a request is told")
    death.around(spool, "keep", "before a DEL is kept", "after a DEL is kept")

    def stepped(work: Work[object]) -> Work[object]:
        def run(connection: apsw.Connection, now_ms: int) -> object:
            answer = work(connection, now_ms)
            death.at("after a request")
            return answer

        return run

    def committed(
        connection: apsw.Connection, clock: StoredClock, group: Sequence[Work[object]]
    ) -> list[object]:
        answers = run_group(connection, clock, [stepped(work) for work in group])
        death.at("after COMMIT")
        death.has_committed = death.counts
        return answers

    setattr(database, "run_group", committed)  # noqa: B010  # its own type differs
    send_some = SocketStream.send_some

    def sent(self: SocketStream, data: bytes) -> int:
        if death.has_committed:
            death.at("before the answer is sent")
        number = send_some(self, data)
        if death.has_committed:
            death.at("after the answer is sent")
        return number

    setattr(SocketStream, "send_some", sent)  # noqa: B010  # as above
    ask = DaemonClient.ask

    async def asked(self: DaemonClient, *arguments: Any) -> Any:
        death.at("before the daemon is asked")
        answer = await ask(self, *arguments)
        death.at("after the daemon has answered")
        return answer

    setattr(DaemonClient, "ask", asked)  # noqa: B010  # as above


def slow(seconds: float) -> None:
    """Make every commit take longer, as on a disk that is slow."""

    def hook(connection: apsw.Connection) -> None:
        def commit() -> bool:
            time.sleep(seconds)
            return False

        connection.set_commit_hook(commit)

    apsw.connection_hooks.append(hook)


def shift_wall_clock(seconds: float) -> None:
    """Let the wall clock of this process be wrong."""
    real = metis.clock.SystemClock.walltime_ms

    def shifted(self: metis.clock.SystemClock) -> int:
        return real(self) + round(seconds * 1000)

    metis.clock.SystemClock.walltime_ms = shifted  # type: ignore[method-assign]  # so


def run(arguments: list[str]) -> int:
    """What the module says."""
    what, value, *rest = arguments
    if what == "--slow":
        slow(float(value))
    elif what == "--wall":
        shift_wall_clock(float(value))
    else:
        if what not in STEPS:
            raise SystemExit(f"{what!r} is no step: it must be one of {list(STEPS)}")
        marker, *rest = rest
        death = Death(what, int(value), marker)
        signal.signal(signal.SIGUSR1, death.begin)
        install(death)
    sys.argv = ["metis", *rest]
    return main()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
