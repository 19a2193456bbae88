"""Trying a plugin before it takes its place: does it start, and does it do its job.

Two calls, with nothing in the environment but what they need: VERSION of the launcher,
which must find the interpreter, the relay and the plugin; and an ADD of the plugin on
a database of its own, without a daemon, which imports all that any call may need.

Touches: one child process at a time, and a directory for the database.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from metis.cni.protocol import SUPPORTED_VERSIONS
from metis.errors import InstallError

TIMEOUT = 30.0
"""Seconds for an answer on a machine that is busy."""

_ADD = {
    "CNI_COMMAND": "ADD",
    "CNI_CONTAINERID": "metis-install",
    "CNI_NETNS": "/nonexistent",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/nonexistent",
}

_NOWHERE = "/dev/null/metis.sock"
"""No daemon can serve there."""


def ask_version(program: Sequence[str], root: str = "") -> None:
    """Have a launcher answer VERSION.

    Args:
      program: the command that runs it.
      root: the root directory that it is to have; "" for the present one.

    Raises:
      InstallError: the answer is missing or wrong.
      OSError: it cannot be started.
    """
    name = program[-1]
    answer, said = _call(program, {"CNI_COMMAND": "VERSION"}, "", name, root)
    versions = answer.get("supportedVersions")
    # Those of the daemon if one serves, whose release may be another.
    if not isinstance(versions, list) or not {*SUPPORTED_VERSIONS} & {*versions}:
        raise InstallError(f"{name} does not work: VERSION {said}")


def ask_for_an_address(
    python: Sequence[str], search_path: Sequence[str], scratch: str, root: str = ""
) -> None:
    """Have the whole plugin do an ADD without a daemon.

    Args:
      python: the command that runs the interpreter.
      search_path: where it finds its modules.
      scratch: an empty directory, as the interpreter sees it.
      root: as for `ask_version`.

    Raises:
      InstallError: there is no address in the answer.
      OSError: it cannot be started.
    """
    program = (
        f"import sys; sys.path[:] = {[*search_path]!r}; "
        "from metis.cni.plugin import main; sys.exit(main())"
    )
    config = {
        "cniVersion": "1.0.0",
        "name": "metis-install",
        "type": "metis",
        "ipam": {"type": "metis", "ranges": [[{"subnet": "192.0.2.0/29"}]]},
        "daemonSocket": _NOWHERE,
        "dbPath": f"{scratch}/metis.sqlite",
        "logFile": f"{scratch}/metis.log",
    }
    name = f"{python[-1]} with {':'.join(search_path)}"
    command = [*python, "-ISc", program]
    answer, said = _call(command, _ADD, json.dumps(config), name, root)
    if not answer.get("ips"):
        raise InstallError(f"{name} does not work: an ADD without daemon {said}")


def can_enter(root: str) -> bool:
    """Whether this process may make a directory the root of another."""
    done = subprocess.run(  # noqa: S603 - the running interpreter
        [sys.executable, "-ISc", "import posix, sys; posix.chroot(sys.argv[1])", root],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode == 0


def _call(
    command: Sequence[str],
    environ: Mapping[str, str],
    stdin: str,
    name: str,
    root: str,
) -> tuple[dict[str, Any], str]:
    """The object that is answered, empty if there is none; and how it ended."""
    try:
        done = subprocess.run(  # noqa: S603 - what was just written here
            command,
            env=environ,
            input=stdin.encode(),
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
            cwd="/",
            preexec_fn=partial(_change_root, root) if root else None,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(
            f"{name} did not answer {environ['CNI_COMMAND']} within {TIMEOUT:g} s"
        ) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    told = (done.stderr or done.stdout).decode(errors="backslashreplace").strip()
    told = told.splitlines()[-1] if told else ""
    if isinstance(answer, dict) and "msg" in answer:
        told = " ".join(str(answer[k]) for k in ("msg", "details") if k in answer)
    said = f"ended with status {done.returncode}" + (f" and {told}" if told else "")
    is_success = isinstance(answer, dict) and not done.returncode
    return (answer if is_success else {}), said


def _change_root(root: str) -> None:
    os.chroot(root)
    os.chdir("/")
