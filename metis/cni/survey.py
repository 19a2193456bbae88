"""What this environment has that the plugin needs, found by importing all of it.

A fresh interpreter does the importing: it has the search path that whoever starts
Python here gets (virtual environments, .pth files, editable installations), and none
of what this very process loaded besides. It is also when the modules get their byte
code, if their directories can be written to.

Touches: one child process, and in it whatever an import touches.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metis.errors import InstallError

ROOT = str(Path(__file__).resolve().parents[2])
"""The directory in which this very package is."""

TIMEOUT = 120.0
"""Seconds for the imports, where nothing is byte-compiled and the disk is slow."""

LEFT_OUT = (
    "_crypt",
    "_ctypes_test",
    "_curses",
    "_dbm",
    "_gdbm",
    "_sqlite3",
    "_test",
    "_tkinter",
    "_xx",
    "nis",
    "ossaudiodev",
    "readline",
    "spwd",
    "xx",
)
"""First letters of extension modules that only tests and terminals want, or that bring
libraries for what the plugin never does."""

_CHILD = """\
import sys
from importlib.util import find_spec
root = {root!r}
spec = find_spec("metis")
if spec is None or spec.origin != root + "/metis/__init__.py":
    sys.path.insert(0, root)
from metis.cni import survey
survey.report()
"""

_UNWANTED = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONOPTIMIZE")
"""Variables that would keep byte code from where the plugin looks for it."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found.

    Attributes:
      interpreter: the program that runs, without links.
      search_path: directories that hold what is needed, in the order of search.
      packages: top-level modules and packages that are not the standard library's,
        as the paths of their files and directories.
      metadata: the files by which some of them look up their own versions.
      extensions: files of all extension modules.
      libraries: files of all shared libraries, the loader among them.
    """

    interpreter: str
    search_path: Sequence[str]
    packages: Sequence[str]
    metadata: Sequence[str]
    extensions: Sequence[str]
    libraries: Sequence[str]


def survey() -> Survey:
    """Find out what the plugin needs, and where it is.

    Raises:
      InstallError: it cannot be imported, or is no directory of files.
      OSError: no process can be started.
    """
    if not os.path.isdir(ROOT):
        raise InstallError(
            f"metis is in {ROOT}, which is no directory: a plugin runs from files, as "
            "pip puts them into an environment"
        )
    environ = {k: v for k, v in os.environ.items() if k not in _UNWANTED}
    try:
        done = subprocess.run(  # noqa: S603 - the running interpreter, and our text
            # -P: not what happens to be in the present directory.
            [sys.executable, "-P", "-c", _CHILD.format(root=ROOT)],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(
            f"{sys.executable} did not import metis within {TIMEOUT:g} s"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="backslashreplace").strip().splitlines()
        raise InstallError(
            f"{sys.executable} cannot import all of metis: "
            f"{said[-1] if said else f'it ended with status {done.returncode}'}"
        )
    return Survey(**json.loads(done.stdout))


def report() -> None:
    """Import everything and print what that was: the child's part."""
    for module in pkgutil.walk_packages([f"{ROOT}/metis"], "metis."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    _import_extensions()
    json.dump(
        {
            "interpreter": os.readlink("/proc/self/exe"),
            "search_path": _search_path(),
            "packages": _packages(),
            "metadata": _metadata(),
            "extensions": _extensions(),
            "libraries": _libraries(),
        },
        sys.stdout,
    )


def standard_library() -> str:
    """The directory of the standard library, as the running interpreter sees it."""
    return os.path.realpath(os.path.dirname(os.__file__))


def _extension_directories() -> list[str]:
    """Where the compiled modules of the standard library are."""
    return [path for path in sys.path if path.endswith("/lib-dynload")]


def _import_extensions() -> None:
    """Load what else of the standard library is compiled, with its libraries."""
    for directory in filter(os.path.isdir, _extension_directories()):
        for name in sorted(os.listdir(directory)):
            module = name.partition(".")[0]
            if not module.startswith(LEFT_OUT):
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
    # What the C library loads by itself once a thread ends, not before.
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL("libgcc_s.so.1")


def _places() -> dict[str, list[str]]:
    """Files or directories of every top-level module outside the standard library."""
    places: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name in sys.stdlib_module_names or name == "__main__":
            continue
        found = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
        paths = [os.path.abspath(path) for path in found if path]
        # Some parts of the standard library are named after the machine.
        if all(os.path.dirname(path) != standard_library() for path in paths):
            places[name] = paths
    return places


def _search_path() -> list[str]:
    """The standard library, then where the rest came from, in the order of sys.path."""
    needed = {os.path.dirname(path) for its in _places().values() for path in its}
    ordered = [path for path in map(os.path.abspath, sys.path) if path in needed]
    # Where no path led, but an editable installation's own finder.
    strays = sorted(needed - set(ordered))
    library = [standard_library(), *_extension_directories()]
    return list(dict.fromkeys([*library, *strays, *ordered]))


def _packages() -> list[str]:
    return sorted({path for its in _places().values() for path in its})


def _metadata() -> list[str]:
    names = importlib.metadata.packages_distributions()
    owners = {owner for name in _places() for owner in names.get(name, ())}
    return sorted(
        os.path.abspath(file.locate())
        for owner in owners
        for file in importlib.metadata.files(owner) or ()
        if file.name in ("METADATA", "PKG-INFO")
    )


def _extensions() -> list[str]:
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    files = (getattr(module, "__file__", None) for module in sys.modules.values())
    return sorted({os.path.realpath(f) for f in files if f and f.endswith(suffixes)})


def _libraries() -> list[str]:
    """Files whose code is mapped here, but for the program and extension modules."""
    others = {os.readlink("/proc/self/exe"), *_extensions()}
    mapped: set[str] = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/"):
                mapped.add(fields[5])
    return sorted(mapped - others)
