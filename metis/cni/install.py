"""Put the plugin into a CNI directory: whole, tried, or not at all.

What runtimes start is CNI_DIR/bin/metis, a launcher (`metis.cni.launcher`). It starts
the interpreter of this very environment, or of a tree beside it that needs nothing of
the host (`metis.cni.bundle`). In both, everything that the plugin imports is where
this environment has it: nothing in the runtime's environment leads it elsewhere. The
plugin is configured by its network configuration; only where the daemon serves, by
which alone it is as fast as it is, is fixed here.

Touches: CNI_DIR/bin, CNI_DIR/metis, and child processes that try the new plugin before
it takes its place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metis.cni import bundle, launcher, trees, trial
from metis.cni.survey import ROOT, survey
from metis.config import DEFAULT_SOCKET_PATH
from metis.errors import InstallError, InvalidRequest
from metis.paths import refuse_exposed_links
from metis.rpc.socket_file import MAX_SOCKET_PATH_BYTES

NAME = "metis"
"""The plugin's file name, which is its `type` in a network configuration."""

MODE = 0o755

HOST = "/host"
"""Where a container of an installer has the host's root directory, as a rule."""

_TEMPORARY = f".{NAME}-"


@dataclass(frozen=True, slots=True)
class Installed:
    """A self-contained plugin.

    Attributes:
      program: the launcher, here.
      tree: what it runs from, as the runtime sees it.
    """

    program: Path
    tree: str


def install(cni_dir: Path, *, socket_path: str = DEFAULT_SOCKET_PATH) -> Path:
    """Install the plugin as CNI_DIR/bin/metis, to run from this environment.

    The file appears by a rename within the directory, after it was tried under a
    temporary name: a runtime that looks meanwhile sees the old plugin or the new one.

    Args:
      cni_dir: an existing directory, "/opt/cni". `bin` is made in it where it
        does not exist yet: runtimes start without.
      socket_path: where the daemon serves, absolute.

    Returns:
      The path of the plugin.

    Raises:
      InstallError: the directory is missing or cannot be written to, something
        else has the plugin's name, the socket's path will not do, or the plugin does
        not work there.
    """
    target = _target(cni_dir, socket_path)
    try:
        found = survey()
        directory = cni_dir / trees.DIRECTORY
        if directory.is_dir():
            with trees.locked(directory):
                trees.remove_unused(directory, target)
        relay = Path(ROOT, *launcher.RELAY_MODULE.split(".")).with_suffix(".py")
        script = launcher.launcher(
            found.interpreter, str(relay), socket_path, found.search_path
        )

        def attempt(program: Path) -> None:
            trial.ask_version([str(program)])
            with tempfile.TemporaryDirectory(prefix="metis-") as scratch:
                trial.ask_for_an_address(
                    [found.interpreter], found.search_path, os.path.realpath(scratch)
                )

        _replace(target, script, attempt)
    except OSError as error:
        raise InstallError(f"{target} cannot be installed: {error}") from error
    return target


def install_self_contained(
    cni_dir: Path,
    *,
    socket_path: str = DEFAULT_SOCKET_PATH,
    runtime_dir: str | None = None,
) -> Installed:
    """Install the plugin with everything that it needs, for a host without Python.

    Args:
      cni_dir: as for `install`.
      socket_path: likewise.
      runtime_dir: what the runtime calls that directory, since the plugin's paths are
        fixed; by default see `runtime_directory`.

    Returns:
      What was installed.

    Raises:
      InstallError: as `install`; and patchelf is missing, a path is too long.
    """
    target = _target(cni_dir, socket_path)
    if runtime_dir is None:
        runtime_dir = runtime_directory(cni_dir)
    if not runtime_dir.startswith("/"):
        raise InstallError(
            f"the runtime's directory is {runtime_dir!r}: it must be an absolute path"
        )
    directory = Path(os.path.abspath(cni_dir), trees.DIRECTORY)
    try:
        with trees.locked(directory):
            trees.remove_unused(directory, target)
            name = trees.new_name()
            place = bundle.Place(
                directory / name,
                os.path.join(os.path.normpath(runtime_dir), trees.DIRECTORY, name),
            )
            script = launcher.bundled_launcher(f"{place.there}/{bundle.PYTHON}")
            try:
                bundle.build(place, survey(), socket_path)
                bundle.flush(place.here)
                _replace(target, script, lambda program: _attempt(place, program))
            except BaseException:
                shutil.rmtree(place.here, ignore_errors=True)
                raise
    except (OSError, ValueError) as error:
        raise InstallError(f"{target} cannot be installed: {error}") from error
    return Installed(target, place.there)


def runtime_directory(cni_dir: Path) -> str:
    """What a runtime on the host most likely calls the directory.

    That is its own path, less the /host under which containers have the host's files.
    """
    path = os.path.abspath(cni_dir)
    return path.removeprefix(HOST) if path.startswith(f"{HOST}/") else path


def _target(cni_dir: Path, socket_path: str) -> Path:
    """Where the launcher goes, if it can.

    Raises:
      InstallError: it cannot.
    """
    if not cni_dir.is_dir():
        raise InstallError(
            f"{cni_dir} is not a directory: name the one that holds the runtime's "
            "bin directory, for example /opt/cni"
        )
    target = Path(os.path.abspath(cni_dir)) / "bin" / NAME
    if target.is_dir():
        raise InstallError(f"{target} is a directory: the plugin is a file there")
    if not socket_path.startswith("/") or not socket_path.isprintable():
        raise InstallError(
            f"the socket's path is {socket_path!r}: it must be an absolute path "
            "without control characters"
        )
    size = len(os.fsencode(socket_path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise InstallError(
            f"the socket's path {socket_path} has {size} bytes: that of a Unix socket "
            f"may have {MAX_SOCKET_PATH_BYTES}"
        )
    try:
        refuse_exposed_links("the socket's path", socket_path)
        with contextlib.suppress(FileExistsError):  # another installation's, as well
            target.parent.mkdir()
            target.parent.chmod(0o755)  # whatever the umask says
    except InvalidRequest as error:
        raise InstallError(str(error)) from error
    except OSError as error:
        raise InstallError(f"{target} cannot be installed: {error}") from error
    trees.remove_stale(target.parent, _TEMPORARY)
    return target


def _attempt(place: bundle.Place, program: Path) -> None:
    """Try a self-contained plugin, as near to where it will run as can be.

    That is at its own path, or below a root directory in which it has that path. If
    there is none, or it cannot be entered, the loader is told by hand what the
    interpreter has fixed; so it is for direct mode where that root has no /proc, from
    which the plugin learns which boot this is.

    Raises:
      InstallError: it does not work.
      OSError: it cannot be started.
    """
    here, there = str(place.here), place.there
    root = here.removesuffix(there)
    is_seen = not root or (root != here and trial.can_enter(root))
    by_hand = [
        f"{here}/{bundle.LOADER}",
        *("--library-path", f"{here}/{bundle.LIBRARIES}", f"{here}/{bundle.PYTHON}"),
    ]
    if is_seen:
        trial.ask_version([str(program).removeprefix(root)], root)
    else:
        start = f"-IScimport {launcher.START_MODULE}"
        trial.ask_version([*by_hand, start, str(program)])
    scratch = place.here / "trial"
    scratch.mkdir(0o700)
    try:
        is_whole = is_seen and os.path.exists(f"{root}/proc/self")
        seen, root = (there, root) if is_whole else (here, "")
        trial.ask_for_an_address(
            [f"{there}/{bundle.PYTHON}"] if is_whole else by_hand,
            [f"{seen}/{path}" for path in bundle.search_path()],
            f"{seen}/{scratch.name}",
            root,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replace(target: Path, script: str, attempt: Callable[[Path], None]) -> None:
    """Write, try and rename; the temporary file never stays.

    Raises:
      OSError: the file system refuses.
      InstallError: the script does not work.
    """
    descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=target.parent)
    temporary = Path(name)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(script)
            file.flush()
            os.fchmod(descriptor, MODE)
            os.fsync(descriptor)
        # Closed first: the kernel does not run a file that is open for writing.
        attempt(temporary)
        temporary.rename(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
