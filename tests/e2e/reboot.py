"""A reboot of the node: everything that a kernel forgets, without the machine.

Namespaces of the session's own (`isolation`) make it possible: no process but
process 1 and pytest is of another matter, and mounts are private.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from pathlib import Path

from tests.e2e.network import output
from tests.e2e.waiting import until

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

PROCESSES = Path("/proc")


def end_every_process() -> None:
    """Kill all processes but process 1 and this one, and see that they are gone."""
    until("every other process has ended", _none_is_left)


def remove_namespaces_below(directory: Path) -> None:
    """Unmount and remove the network namespaces that runtimes keep as files."""
    mounts = Path("/proc/self/mountinfo").read_text()
    points = [line.split()[4] for line in mounts.splitlines()]
    for point in reversed(points):  # the last mount first
        if Path(point).is_relative_to(directory):
            output("umount", "--lazy", point)
    for path in directory.glob("**/netns/*"):
        path.unlink()


def change_boot_id(directory: Path) -> str:
    """Let the kernel's id of this boot be another one from now on.

    Args:
      directory: for the file that stands in its place.
    """
    boot_id = str(uuid.uuid4())
    path = directory / f"boot-id-{boot_id}"
    path.write_text(f"{boot_id}\n")
    output("mount", "--bind", str(path), str(BOOT_ID))
    return boot_id


def restore_boot_id() -> None:
    """Let the kernel tell its own id again."""
    while any(
        line.split()[4] == str(BOOT_ID)
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
    ):
        output("umount", str(BOOT_ID))


def _none_is_left() -> bool:
    """Kill what there is; True when there was nothing."""
    left = False
    for entry in PROCESSES.iterdir():
        if not entry.name.isdecimal() or int(entry.name) in (1, os.getpid()):
            continue
        with contextlib.suppress(OSError):
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                left = True
                os.kill(int(entry.name), signal.SIGKILL)
    return not left
