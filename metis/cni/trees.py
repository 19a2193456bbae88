"""The trees of self-contained plugins in a CNI directory: whose turn, and which go.

They are CNI_DIR/metis/VERSION-RANDOM. Every installation makes a new one, and none is
ever changed: a plugin that runs from one imports from it to its end. The launcher
names the one that is used.

A tree goes when the next installation begins, not when another takes its place: by
then nobody can be about to start from it, and the one before is still there to look
at. It goes only if no process runs from it, and that the kernel knows, whatever
container the process is in: a program that runs cannot be opened for writing.

One installation at a time (flock, which ends with its holder). So every other tree
that no launcher names was left by an installation that was cut off, and goes as well.

Touches: CNI_DIR/metis, and CNI_DIR/bin for launchers that were cut off.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from metis import __version__
from metis.cni.bundle import PYTHON
from metis.errors import InstallError

DIRECTORY = "metis"
"""Of the trees, in the CNI directory."""

LOCK = "lock"

LOCK_SECONDS = 120.0
"""How long another installation is waited for; each takes some seconds."""

LOCK_PAUSE = 0.1

SETTLING_SECONDS = 1.0
"""From when a launcher takes another's place until nobody can be about to start by the
other: what a kernel takes from a program's first line to its interpreter, at most."""

STALE_SECONDS = 600.0
"""Age from which a launcher under a temporary name belongs to nobody any more: longer
than an installation takes."""

_NAME = re.compile(r"\d[^/]*-[0-9a-f]{6}")
_FIRST_LINE = re.compile(rb"#!(?:/[^/ ]+)*/([^/ ]+)/" + PYTHON.encode() + rb" -IS")


def new_name() -> str:
    """A name that no tree has had."""
    return f"{__version__}-{secrets.token_hex(3)}"


@contextlib.contextmanager
def locked(trees: Path) -> Iterator[None]:
    """Be the only installation that touches the trees.

    Args:
      trees: their directory, which is made if it is missing.

    Raises:
      InstallError: another one is at it all the time.
      OSError: the directory cannot be written to.
    """
    if not trees.is_dir():
        trees.mkdir(exist_ok=True)
        trees.chmod(0o755)
    descriptor = os.open(trees / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise InstallError(
                        f"another installation has held {trees / LOCK} for "
                        f"{LOCK_SECONDS:g} s: end it, or wait for it"
                    ) from None
                time.sleep(LOCK_PAUSE)
        yield
    finally:
        os.close(descriptor)


def used_by(program: Path) -> str | None:
    """The name of the tree that a launcher runs from; None for another program."""
    try:
        with program.open("rb") as file:
            found = _FIRST_LINE.match(file.readline(4096))
    except OSError:
        return None
    return os.fsdecode(found[1]) if found else None


def remove_unused(trees: Path, program: Path) -> None:
    """Remove every tree that no process and no launcher uses.

    What cannot be removed stays for the next time.

    Args:
      trees: their directory, locked.
      program: the launcher, whose tree stays.

    Raises:
      OSError: they cannot be looked at.
    """
    used = used_by(program)
    others = [
        tree
        for tree in trees.iterdir()
        if _NAME.fullmatch(tree.name) and tree.name != used
    ]
    if others and used:
        age = time.time() - program.stat().st_ctime  # since it was renamed
        time.sleep(max(0.0, min(SETTLING_SECONDS, SETTLING_SECONDS - age)))
    for tree in others:
        if not _runs(tree):
            shutil.rmtree(tree, ignore_errors=True)


def remove_stale(directory: Path, prefix: str) -> None:
    """Remove launchers that were cut off before they got their name."""
    for path in directory.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()


def _runs(tree: Path) -> bool:
    """Whether a process runs from the tree, in any container of this machine."""
    try:
        os.close(os.open(tree / PYTHON, os.O_WRONLY))
    except OSError as error:
        return error.errno == errno.ETXTBSY
    return False
