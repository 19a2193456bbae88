"""What the node shows right now of the owners of its addresses.

Looked at are the network namespaces that holdings name, and the runtime's own list
where one is configured. The rules for what follows from it are those of
`metis.verdicts`; here is only what can be told and what cannot:

  A path of a namespace is there or it is missing, but only in a directory that can
  be listed and has something in it. A daemon in a mount namespace of its own sees
  an empty directory, or none, where the runtime has all its namespaces.

  Nor is anything missing in a directory in which, since this process began, no
  namespace was ever seen that a holding names: it may be another one of that name,
  a host's beside a runtime in a container of it. A directory is the same by its
  device and inode, not by its path.

  What stands below /proc tells nothing either way: a process id means something
  else in another pid namespace, and some other process tomorrow.

A directory is opened once and looked at through its descriptor, so that
/var/run/netns and /run/netns are one and the same, and what is mounted meanwhile
makes no difference. Files are looked at in worker threads that are not waited for
longer than LOOK_SECONDS: a mount that hangs holds up nobody, and keeps one thread.

May touch: the directories that holdings name, /proc/self/fd, the runtime's socket.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import trio

from metis.model import Holding
from metis.rpc.transport import Transport
from metis.verdicts import LISTS_NOBODY, Evidence, Namespaces, Sandboxes

log = logging.getLogger("metis.reclaim")

LOOK_SECONDS = 5.0
"""Until a directory must have been looked at, in seconds. A local one takes some
microseconds; one that does not answer is on a mount that hangs."""

LOOKERS = 4
"""Threads that look at directories. Each that hangs is lost until it ends; there is
one directory for each runtime, as a rule."""

MOST_DIRECTORIES = 64
"""Most directories that are looked at. A runtime uses one, and each may cost
LOOK_SECONDS."""

_PROC = re.compile(r"/proc(/.*)?|.*/(\d+|self|thread-self)/ns", re.DOTALL)
"""A directory of the kernel's process records, wherever they are mounted."""

Identity: TypeAlias = tuple[int, int]
"""Device and inode of a directory."""


@dataclass(frozen=True, slots=True)
class Lookout:
    """Where evidence comes from.

    Attributes:
      now_ms: the stored time.
      boot_id: of this boot.
      runtime: where the runtime's CRI serves; None where none is configured.
      lookers: the threads that look at files.
      proven: directories in which a namespace of an owner has been seen.
      silences: why the runtime told nothing when it was asked last, if so.
    """

    now_ms: Callable[[], int]
    boot_id: str
    runtime: Transport | None = None
    lookers: trio.CapacityLimiter = field(
        default_factory=lambda: trio.CapacityLimiter(LOOKERS)
    )
    proven: set[Identity] = field(default_factory=set)
    silences: set[str] = field(default_factory=set)

    async def look(self, holdings: Collection[Holding]) -> Evidence:
        """Look at everything that tells something about the owners of addresses.

        Never fails: what cannot be seen is told as such.

        Args:
          holdings: read from the database before this call, so that each of them
            is older than the evidence.
        """
        taken_ms = self.now_ms()
        namespaces = await look_at_namespaces(
            {holding.netns_path for holding in holdings}, self.lookers, self.proven
        )
        sandboxes = Sandboxes(silence="no CRI socket is configured")
        if self.runtime is not None:
            # Here, because without a socket of a runtime nobody needs its messages.
            from metis.cri import ask_runtime

            suspects = {
                holding.owner.container_id
                for holding in holdings
                if holding.pod.namespace
                and holding.netns_path not in namespaces.present
            }
            sandboxes = await ask_runtime(self.runtime, suspects)
            self._tell_of_silence(sandboxes.silence)
        return Evidence(taken_ms, self.boot_id, namespaces, sandboxes)

    def _tell_of_silence(self, silence: str) -> None:
        """Warn of a runtime that fails, or a wrong path, once until it answers.

        Nothing is lost by it but evidence, so that nobody would notice otherwise.
        """
        if not silence or silence == LISTS_NOBODY:
            self.silences.clear()
        elif not self.silences:
            self.silences.add(silence)
            log.warning(
                "the container runtime cannot be asked who is gone",
                extra={"runtime": self.runtime, "reason": silence},
            )


async def look_at_namespaces(
    paths: Collection[str], lookers: trio.CapacityLimiter, proven: set[Identity]
) -> Namespaces:
    """Which of the paths there are.

    Args:
      paths: of network namespaces; empty ones are passed over.
      lookers: bounds the threads, those of earlier calls that hang included.
      proven: directories in which one of the paths was seen in earlier calls; gets
        those of this one.
    """
    present: set[str] = set()
    missing: set[str] = set()
    untold: dict[str, str] = {}
    by_directory: dict[str, list[str]] = {}
    for path in paths:
        directory, name = os.path.split(path)
        if not path:
            continue
        if not path.startswith("/") or name in ("", ".", "..") or "\0" in path:
            untold[path] = "it is no absolute path of a file"
        elif _PROC.fullmatch(directory):
            untold[path] = "it is named by a process id"
        else:
            by_directory.setdefault(directory, []).append(path)

    async def look(directory: str, its: Sequence[str]) -> None:
        names = {os.path.basename(path): path for path in its}
        reason = f"no answer within {LOOK_SECONDS:g} s"
        seen = _nothing(names, reason)
        with trio.move_on_after(LOOK_SECONDS):
            try:
                seen = await trio.to_thread.run_sync(
                    partial(_look_at_directory, directory, tuple(names)),
                    abandon_on_cancel=True,
                    limiter=lookers,
                )
            except RuntimeError as error:  # the system has no more threads
                seen = _nothing(names, str(error))
        if seen.identity is not None and True in seen.told.values():
            proven.add(seen.identity)
        for name, path in names.items():
            there = seen.told[name]
            if isinstance(there, str):
                untold[path] = there
            elif there:
                present.add(path)
            elif seen.identity in proven:
                missing.add(path)
            else:
                untold[path] = "no owner's namespace was ever seen in its directory"

    async with trio.open_nursery() as nursery:
        for number, (directory, its) in enumerate(sorted(by_directory.items())):
            if number < MOST_DIRECTORIES:
                nursery.start_soon(look, directory, its)
            else:
                reason = f"there are more than {MOST_DIRECTORIES} directories"
                untold.update(dict.fromkeys(its, reason))
    return Namespaces(frozenset(present), frozenset(missing), untold)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a directory shows.

    Attributes:
      identity: which one it is; None where it could not be opened.
      told: by name, whether it is there, or why that cannot be told.
    """

    identity: Identity | None
    told: dict[str, bool | str]


def _look_at_directory(directory: str, names: Collection[str]) -> _Seen:
    """Look which names are there. Blocks."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return _nothing(names, f"its directory: {error.strerror}")
    try:
        # Where it really is, however many links led there.
        if _PROC.fullmatch(os.readlink(f"/proc/self/fd/{descriptor}")):
            return _nothing(names, "it is named by a process id")
        if not os.listdir(descriptor):
            return _nothing(names, "its directory is empty")
        status = os.fstat(descriptor)
        told = {name: _is_there(descriptor, name) for name in names}
        return _Seen((status.st_dev, status.st_ino), told)
    except OSError as error:
        return _nothing(names, f"its directory: {error.strerror}")
    finally:
        os.close(descriptor)


def _nothing(names: Collection[str], reason: str) -> _Seen:
    return _Seen(None, dict.fromkeys(names, reason))


def _is_there(directory: int, name: str) -> bool | str:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        return str(error.strerror)
    return True
