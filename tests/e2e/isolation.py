"""A machine of the tests' own: namespaces in which the whole session runs again.

pytest is started a second time below unshare(1), with mounts, network and
process ids of its own. In there:

- /run is an empty tmpfs, so no service of the machine is seen, and named
  network namespaces, runtime states and shim sockets are the session's own;
- /var/lib is a copy-on-write view of the machine's, so result caches and image
  caches that programs keep at fixed places never reach the machine;
- the host's ends of links detect no duplicate addresses (RFC 4862 section 5.4),
  which takes up to 2 s for every address;
- `sh` is process 1: it collects orphans, and when it ends the kernel ends
  every process that is left.

Interfaces and mounts go with their namespaces. What has none is removed by the
outer process: the session's directory, and the control groups that the
runtimes made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MARKER = "METIS_E2E_NAMESPACES"
"""Set in the environment of the inner session."""

CGROUPS = Path("/sys/fs/cgroup")

CGROUP_PARENTS = ("libpod_parent", "k8s.io")
"""Where podman and containerd's CRI plugin put the groups of their containers."""

SCRIPT = """
mount -t tmpfs tmpfs /run
mkdir -p /run/netns /run/cow/upper /run/cow/work
mount -t tmpfs tmpfs /run/netns
mount --make-shared /run/netns
mount -t overlay overlay \
  -o lowerdir=/var/lib,upperdir=/run/cow/upper,workdir=/run/cow/work /var/lib
mkdir -p /var/lib/cni
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
ip link set lo up
"$@"
exit $?
"""


def inside() -> bool:
    """Whether this process runs in namespaces of its own."""
    return MARKER in os.environ


def possible() -> bool:
    """Whether this process may make namespaces and mounts."""
    return os.geteuid() == 0 and shutil.which("unshare") is not None


def run_again(pytest_arguments: Sequence[str]) -> int:
    """Run this pytest session in new namespaces.

    Args:
      pytest_arguments: the arguments of this session.

    Returns:
      The exit status of the inner session.
    """
    groups = _container_cgroups()
    # A short path: those of Unix sockets end at 107 bytes (unix(7)).
    directory = Path(tempfile.mkdtemp(prefix="metis-e2e-"))
    try:
        return subprocess.run(
            [
                # Whatever happens to this process, the inner one does not outlive it.
                *("setpriv", "--pdeathsig", "KILL", "unshare"),
                *("--mount", "--propagation", "private", "--net"),
                *("--pid", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-euc", SCRIPT, "sh"),
                *(sys.executable, "-m", "pytest", *pytest_arguments),
                f"--basetemp={directory / 't'}",
            ],
            env={**os.environ, MARKER: "1"},
            check=False,
        ).returncode
    finally:
        shutil.rmtree(directory)
        for group in sorted(_container_cgroups() - groups, reverse=True):
            # The kernel removes empty groups alone, hence children first. After a
            # session that was cut off it may still be emptying one.
            with contextlib.suppress(OSError):
                group.rmdir()


def _container_cgroups() -> set[Path]:
    """The groups of containers; in hybrid mode every controller has its own."""
    return {
        Path(directory)
        for parent in CGROUP_PARENTS
        for top in (*CGROUPS.glob(parent), *CGROUPS.glob(f"*/{parent}"))
        for directory, _, _ in os.walk(top)
    }
