"""DELs that could not even reach the database: kept beside it, applied later.

A runtime that is told that its DEL failed keeps the container, and a node that
is full may need that very DEL to get its daemon back. So the DEL is written
down in "<database>.spool", one small file each, and succeeds:

  keep     the plugin, when neither daemon nor database can be reached
  apply    whoever opens the database: the daemon as it starts and every now and
           then while it serves, a plugin in direct mode before it asks
  pending  what a plugin looks for before it asks a daemon, which may not have
           applied it yet: with a DEL of its own it asks the database instead

Each file is written once, whole, and removed once, after its DEL was committed.
A file that comes to be applied twice does no harm: an owner that got its
addresses after the DEL keeps them.

May touch: that directory, in which a lock (flock) keeps appliers apart; the
kernel frees it with its holder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import trio

from metis.clock import Clock, SystemClock
from metis.errors import InvalidRequest, StoreBusy, StoreError
from metis.model import Owner

if TYPE_CHECKING:  # who only keeps a DEL, or looks for one, needs neither
    from metis.engine import Engine
    from metis.store.store import Store

log = logging.getLogger("metis.spool")

SUFFIX = ".spool"
"""What the directory's name has more than the database's."""

MAX_FILES = 4096
"""Most files in the directory, malformed ones included: far more pods than a
node has, and some 16 MiB at the very worst."""

MAX_ENTRY_BYTES = 4096
"""Largest file that is read. The three names have at most 253 bytes each, which
JSON can spell six times as long; the plugin's own have 1,000 in all."""

LOOK_SECONDS = 5.0
"""Pause between two looks of the daemon, in seconds. What waits there holds nobody up,
and waking is nearly all that an idle daemon does."""

LOCK_PAUSE = 0.02
"""Seconds between two tries to lock: the holder applies a few entries."""

LOCK_SECONDS = 4.0
"""How long the lock is waited for, in seconds. A holder that was stopped keeps it,
and must hold up neither a daemon that starts nor a call longer than it lasts."""

ABANDONED_SECONDS = 3600.0
"""Age at which a temporary file is nobody's any more; writing one takes
milliseconds, unless the process was killed meanwhile."""

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What this process lacks, and the entry that cannot be read for it has nothing to do
with: it has to be tried again."""

_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
"""A container id is what it takes to forge a DEL."""

_ENTRY = ".json"
_TEMPORARY = ".tmp"
_MALFORMED = ".malformed"


@dataclass(frozen=True, slots=True)
class Entry:
    """One DEL that was not carried out.

    Attributes:
      network: of the owner, as the two names that follow.
      container_id: "4f2a..."
      interface_name: "eth0"
      boot_id: the boot on whose clock it was written.
      boottime_ms: when, in milliseconds since that boot.
    """

    network: str
    container_id: str
    interface_name: str
    boot_id: str
    boottime_ms: int

    @property
    def owner(self) -> Owner:
        """Whose addresses were to come back."""
        return Owner(self.network, self.container_id, self.interface_name)

    def stored_ms(self, store: Store) -> int:
        """When it was written, in stored time.

        Before this boot when it is of a former one: what an owner got since then
        it got later.
        """
        clock = store.clock
        if self.boot_id != store.boot_id:
            return clock.offset_ms
        # Never after now, which would refuse the owner everything until then.
        return min(clock.offset_ms + self.boottime_ms, clock.now_ms())


def keep(db_path: str, owner: Owner, clock: Clock | None = None) -> None:
    """Write a DEL down, durably; it counts as of now.

    Raises:
      OSError: the directory or the file cannot be written, or there are
        MAX_FILES already.
    """
    clock = clock or SystemClock()
    directory = directory_of(db_path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, _DIRECTORY_MODE)
        _sync_directory(os.path.dirname(os.path.abspath(directory)))
    if len(os.listdir(directory)) >= MAX_FILES:
        raise OSError(f"{directory} holds {MAX_FILES} files already")
    now = clock.boottime_ms()
    entry = Entry(
        owner.network, owner.container_id, owner.interface_name, clock.boot_id(), now
    )
    path = os.path.join(directory, f"{_key(owner)}-{now:015d}-{os.getpid()}")
    descriptor = os.open(
        path + _TEMPORARY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE
    )
    try:
        with open(descriptor, "wb") as file:
            file.write(json.dumps(asdict(entry)).encode())
            file.flush()
            os.fsync(file.fileno())
        os.rename(path + _TEMPORARY, path + _ENTRY)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path + _TEMPORARY)
        raise
    _sync_directory(directory)


def pending(db_path: str, owner: Owner) -> Sequence[str]:
    """Paths of the DELs of an owner that are not applied yet; as a rule, none."""
    key = _key(owner)
    return [
        path
        for path in _entries(directory_of(db_path))
        if os.path.basename(path)[:32] == key
    ]


def may_hold(db_path: str) -> bool:
    """Whether there is a spool beside a database at all; as a rule, there is none.

    Beside a file that is no link it has its name, whatever leads there. In doubt there
    is one.
    """
    is_plain = not db_path.endswith(("/", ".")) and not os.path.islink(db_path)
    return not is_plain or os.path.lexists(f"{db_path}{SUFFIX}")


async def apply(db_path: str, engine: Engine, store: Store) -> int:
    """Carry out every DEL that was kept, and remove it.

    One that cannot be read is put aside and logged. What an owner got since its DEL
    was written down stays with it.

    Args:
      db_path: the database; its spool is beside it.
      engine: carries the DELs out.
      store: has the clock of stored times.

    Returns:
      How many were carried out.

    Raises:
      StoreBusy: another process kept the lock for LOCK_SECONDS, or the database.
      StoreError: the database failed; what was not applied stays.
      OSError: the spool cannot be read now; what was not applied stays.
    """
    return await _apply(directory_of(db_path), engine, store)


async def _apply(directory: str, engine: Engine, store: Store) -> int:
    applied = 0
    if not _entries(directory):
        return applied
    with _opened(directory) as descriptor:
        await _locked(descriptor, directory)
        _sweep(directory)
        for path in _entries(directory):
            try:
                entry = _read(path)
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno in _OURS:
                    raise
                _put_aside(path, error)
                continue
            await engine.deallocate(
                entry.owner,
                deadline=trio.current_time(),  # once: whoever asks tries again
                arrived_ms=entry.stored_ms(store),
            )
            applied += 1
            log.info("a DEL of the spool was applied", extra=_extra(entry))
            _remove(path)
    return applied


async def keep_applying(
    db_path: str,
    engine: Engine,
    store: Store,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Apply what is there, and for ever what comes; failures are logged.

    Plugins write DELs down while the database is full or locked, also when the
    daemon runs.

    Args:
      db_path: as for `apply`.
      engine: as for `apply`.
      store: as for `apply`.
      task_status: told after the first time, before which nobody is served.
    """
    directory = directory_of(db_path)  # of the file that is open, wherever links lead
    while True:
        try:
            await _apply(directory, engine, store)
        except (StoreError, OSError) as error:
            log.warning("DELs of the spool wait: %s", error)
        task_status.started()
        task_status = trio.TASK_STATUS_IGNORED
        await trio.sleep(LOOK_SECONDS)


def directory_of(db_path: str) -> str:
    """Where the DELs for a database are kept."""
    return f"{os.path.realpath(db_path)}{SUFFIX}"  # beside the file, as its locks are


def _key(owner: Owner) -> str:
    """The part of a file name that tells the owner; 32 hexadecimal digits."""
    text = "\0".join((owner.network, owner.container_id, owner.interface_name))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _entries(directory: str) -> list[str]:
    """Paths of what waits; nothing where nobody ever kept anything."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return [os.path.join(directory, name) for name in names if name.endswith(_ENTRY)]


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def _locked(descriptor: int, directory: str) -> None:
    """Wait for the lock of the directory.

    Raises:
      StoreBusy: somebody kept it for LOCK_SECONDS.
    """
    gives_up = trio.current_time() + LOCK_SECONDS
    while not _lock(descriptor):
        if trio.current_time() >= gives_up:
            raise StoreBusy(
                f"another process has kept the lock of {directory} "
                f"for {LOCK_SECONDS:g} s"
            )
        await trio.sleep(LOCK_PAUSE)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync_directory(directory: str) -> None:
    with _opened(directory) as descriptor:
        os.fsync(descriptor)


def _sweep(directory: str) -> None:
    """Remove temporary files whose writers were killed."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            if (
                name.endswith(_TEMPORARY)
                and os.stat(path).st_mtime < time.time() - ABANDONED_SECONDS
            ):
                os.unlink(path)


def _read(path: str) -> Entry:
    """Read and check an entry.

    Raises:
      ValueError: it is none.
      OSError: it cannot be read.
    """
    # Neither follow a link nor wait for a pipe that somebody put there.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        data = os.read(descriptor, MAX_ENTRY_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_ENTRY_BYTES:
        raise ValueError(f"it is longer than {MAX_ENTRY_BYTES} bytes")
    try:
        fields = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not an object")
    boottime_ms = fields.pop("boottime_ms", None)
    if type(boottime_ms) is not int or boottime_ms < 0:
        raise ValueError(f"boottime_ms is {boottime_ms!r:.40}")
    try:
        entry = Entry(**fields, boottime_ms=boottime_ms)
        if not all(isinstance(value, str) for value in fields.values()):
            raise ValueError("a name is not a text")
        _ = entry.owner  # its names are checked as it is made
    except (TypeError, InvalidRequest) as error:
        raise ValueError(str(error)) from None
    if "'" in entry.container_id:  # no plugin accepts it, and no filter spells it
        raise ValueError(f"container id {entry.container_id!r} holds a quote")
    return entry


def _put_aside(path: str, error: Exception) -> None:
    """Keep what cannot be read for people, out of everybody's way."""
    log.error(
        "an entry of the spool is malformed and was put aside: %s: %s", path, error
    )
    try:
        os.rename(path, path.removesuffix(_ENTRY) + _MALFORMED)
    except OSError as problem:
        log.error("%s cannot be put aside: %s", path, problem)


def _remove(path: str) -> None:
    """Remove an entry that is applied; one that stays will be found stale."""
    try:
        os.unlink(path)
    except OSError as error:
        log.error("%s cannot be removed: %s", path, error)


def _extra(entry: Entry) -> dict[str, str]:
    return {
        "network": entry.network,
        "container": entry.container_id,
        "interface": entry.interface_name,
    }
