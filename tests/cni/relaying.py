"""The relay without a process of its own, and servers that say what they are told."""

from __future__ import annotations

import contextlib
import os
import posix
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from metis.cni import plugin, relay
from metis.cni.origin import Origin
from metis.cni.relay import Relay
from tests.cni.process import UNLOGGED
from tests.unhurried import UNHURRIED

ROOT = Path(__file__).resolve().parents[2]

PATIENT = (60.0, 120.0)
"""Seconds until the first word and until the answer, on a busy machine."""


def program(socket_path: str) -> list[str]:
    """The relay as a process, which keeps off the machine's own log.

    It is patient, but for a STATUS: the daemon may be a test on a busy machine.
    """
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import metis.config
from metis.cni import relay
{UNLOGGED}
{UNHURRIED}
relay.RUN_SECONDS = relay.UNDO_SECONDS = {PATIENT!r}
sys.exit(relay.main("metis", {socket_path!r}, sys.path))
"""
    return [sys.executable, "-c", code]


@dataclass
class Standing:
    """What a call in this process wrote, and what became of it."""

    stdout: list[bytes] = field(default_factory=list)
    stderr: list[bytes] = field(default_factory=list)
    taken_over: list[Relay] = field(default_factory=list)


@contextmanager
def standing_in(
    variables: Mapping[str, str], read: Callable[[], bytes]
) -> Iterator[Standing]:
    """Have this process's standard streams and variables be those of a call.

    When the call began is not told: this process began before all of them.
    """
    seen = Standing()
    take_over = Relay.take_over

    def note_take_over(call: Relay) -> int:
        seen.taken_over.append(call)
        return take_over(call)

    environ = {os.fsencode(k): os.fsencode(v) for k, v in variables.items()}
    with (
        mock.patch.dict(posix.environ, environ, clear=True),
        mock.patch.object(relay, "RUN_SECONDS", PATIENT),
        mock.patch.object(relay, "STATUS_SECONDS", PATIENT),
        mock.patch.object(relay, "UNDO_SECONDS", PATIENT),
        mock.patch.object(relay, "read_stdin", read),
        mock.patch.object(relay, "read_stat", bytes),
        mock.patch.object(plugin, "_read_origin", Origin),
        mock.patch.object(
            relay, "write_to_parent", lambda _parent, data: seen.stdout.append(data)
        ),
        mock.patch.object(relay, "complain", seen.stderr.append),
        mock.patch.object(Relay, "take_over", note_take_over),
    ):
        yield seen


class Script:
    """A server for one connection that reads, says its pieces, and hangs up.

    Attributes:
      path: where it listens.
      heard: what it was sent.
    """

    def __init__(self, path: Path, pieces: Iterable[bytes], *, hangs: bool) -> None:
        self.path = str(path)
        self.heard = b""
        self._pieces = pieces
        self._hangs = hangs
        self._over = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Script:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # nobody may have come
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._listener.accept()[0] as peer:
            self._listener.close()  # whoever comes again is refused
            self.heard = peer.recv(1 << 20)
            for piece in self._pieces:
                peer.sendall(piece)
            if self._hangs:
                self._over.wait()
