"""Put the plugin into a CNI directory: whole, verified, or not at all.

What is installed is a launcher: a small script that starts this very
interpreter, isolated (`-I`), so that it finds the packages that this process
found and nothing of the runtime's environment can lead it elsewhere. The plugin
is configured through its network configuration alone; runtimes start it with
whatever environment they happen to have.

May touch: the `bin` directory of the CNI directory, and one child process that
runs the new launcher before it takes its place.
"""

from __future__ import annotations

import json
import os
import shlex
import site
import subprocess
import sys
import tempfile
from pathlib import Path

from metis.cni.protocol import SUPPORTED_VERSIONS
from metis.errors import MetisError

NAME = "metis"
"""The plugin's file name, which is its `type` in a network configuration."""

MODE = 0o755

MAX_SHEBANG_BYTES = 127
"""Longest first line that every supported kernel reads whole, execve(2)."""

VERIFY_TIMEOUT = 30.0
"""Seconds for the new launcher to answer VERSION on a machine that is busy."""


class InstallError(MetisError):
    """The plugin was not installed; whatever was there before is untouched."""


def install(cni_dir: Path) -> Path:
    """Install the plugin as CNI_DIR/bin/metis.

    The file appears by a rename within the directory, after it answered VERSION
    under its temporary name: a runtime that looks meanwhile sees the old plugin
    or the new one.

    Args:
      cni_dir: an existing directory, "/opt/cni". `bin` is made in it where it
        does not exist yet: runtimes start without.

    Returns:
      The path of the plugin.

    Raises:
      InstallError: the directory is missing or cannot be written to, something
        else has the plugin's name, or the launcher does not work there.
    """
    directory = cni_dir / "bin"
    target = directory / NAME
    if not cni_dir.is_dir():
        raise InstallError(
            f"{cni_dir} is not a directory: name the one that holds the runtime's "
            "bin directory, for example /opt/cni"
        )
    if target.is_dir():
        raise InstallError(f"{target} is a directory: the plugin is a file there")
    try:
        directory.mkdir(exist_ok=True)
        _replace(target, launcher(sys.executable))
    except OSError as error:
        raise InstallError(f"{target} cannot be installed: {error}") from error
    return target


def launcher(python: str) -> str:
    """The script that starts the plugin.

    Args:
      python: absolute path of an interpreter. Not resolved: that of a virtual
        environment is a symbolic link whose own place says where packages are.

    Raises:
      InstallError: not an absolute path.
    """
    if not os.path.isabs(python):
        raise InstallError(
            f"the running interpreter is {python!r}: it must be an absolute path"
        )
    program = "\n".join(
        [
            "import sys",
            *_path_lines(),
            "from metis.__main__ import main",
            "sys.exit(main())",
        ]
    )
    shebang = f"#!{python} -I"
    if len(os.fsencode(shebang)) <= MAX_SHEBANG_BYTES and not set(python) & set(
        " \t\n"
    ):
        return f"{shebang}\n{program}\n"
    # The kernel would cut the line, or split it at the blank: the shell does not.
    # `-c` takes the place of the script's name, which the plugin wants to know.
    program = program.replace("import sys\n", "import sys\nsys.argv = sys.argv[1:]\n")
    return (
        "#!/bin/sh\n"
        f'exec {shlex.quote(python)} -I -c {shlex.quote(program)} "$0" "$@"\n'
    )


def _path_lines() -> list[str]:
    """How the launcher finds this package where it is not in site-packages.

    That is so in a checkout and in an editable installation.
    """
    root = str(Path(__file__).resolve().parents[2])
    if root in map(os.path.realpath, site.getsitepackages()):
        return []
    return [f"sys.path.insert(0, {root!r})"]


def _replace(target: Path, script: str) -> None:
    """Write, verify and rename; the temporary file never stays.

    Raises:
      OSError: the file system refuses.
      InstallError: the script does not work.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{NAME}-", dir=target.parent)
    temporary = Path(name)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(script)
            file.flush()
            os.fchmod(descriptor, MODE)
            os.fsync(descriptor)
        # Closed first: the kernel does not run a file that is open for writing.
        _verify(temporary)
        temporary.rename(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _verify(program: Path) -> None:
    """Have the program answer VERSION with nothing else in its environment.

    Raises:
      OSError: it cannot be started, on a file system without execution.
      InstallError: it answers something else, or not in time.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the file was just written here
            [program],
            env={"CNI_COMMAND": "VERSION"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=VERIFY_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(
            f"{program} did not answer VERSION within {VERIFY_TIMEOUT:g} s"
        ) from None
    try:
        answer = json.loads(done.stdout)["supportedVersions"]
    except (ValueError, LookupError, TypeError):
        answer = None
    if done.returncode or answer != list(SUPPORTED_VERSIONS):
        said = (done.stderr or done.stdout).decode(errors="backslashreplace").strip()
        raise InstallError(
            f"{program} does not work: VERSION ended with status {done.returncode}"
            + (f" and {said.splitlines()[-1]}" if said else "")
        )
