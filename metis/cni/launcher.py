"""The text of the program that a runtime starts: the interpreter, and the relay.

Everything is fixed when it is written: the interpreter, where its modules are, where
the daemon serves. The interpreter is isolated (`-I -S`), so nothing in a runtime's
environment leads it elsewhere and no directory of packages is looked through at the
start. The relay (`metis.cni.relay`) is loaded as one file, without the packages above
it: each of them would be a directory to list.

Pure: text from text.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from metis.cni.protocol import INTERNAL, CNIError, error_text

RELAY_MODULE = "metis.cni.relay"

START_MODULE = "metis_start"
"""The module of a self-contained plugin that `bundled_launcher` has imported."""

MAX_SHEBANG_BYTES = 127
"""Longest first line that every supported kernel reads whole, execve(2)."""

_SHELL = """\
#!/bin/sh
# Written by `metis install`, which replaces it; nothing in here is meant to be edited.
python={python}
relay={relay}
if [ -x "$python" ] && [ -r "$relay" ]; then
  exec "$python" -IS -c {program} "$0" "$@"
fi
printf '%s\\n' {error}
exit 1
"""

# `_frozen_importlib_external` is where importlib.machinery has it from. What follows a
# failure is compiled only then: that would take a fifth of a millisecond.
_PROGRAM = """\
import sys
try:
    from _frozen_importlib_external import {loader} as Loader
    relay = sys.modules[{name!r}] = type(sys)({name!r})
    relay.__file__ = {path}
    exec(Loader({name!r}, relay.__file__).get_code({name!r}), relay.__dict__)
    main = relay.main
except BaseException as error:
    exec({report!r})
sys.argv = sys.argv[1:]
sys.exit(main(sys.argv[0], {socket_path!r}, {search_path}))
"""

_REPORT = """\
import posix
text = f"{{type(error).__name__}}: {{error}}".translate({{34: 39, 92: 47}})
text = text.encode("ascii", "replace").decode()
text = "".join(letter if letter.isprintable() else " " for letter in text)
posix.write(1, ({before!r} + text + {after!r}).encode())
posix._exit(1)
"""

_REASON = "REASON"


def launcher(
    python: str, relay: str, socket_path: str, search_path: Sequence[str]
) -> str:
    """The program for this environment: a shell script that becomes the interpreter.

    The shell costs half a millisecond. For that it can say what a kernel cannot, if
    the interpreter or the package has been moved.

    Args:
      python: absolute path of the interpreter.
      relay: absolute path of the relay's source, which has its byte code beside it.
      socket_path: where the daemon serves.
      search_path: directories of all modules, the standard library's first.
    """
    gone = _error(
        "metis is not where it was when it was installed",
        f"{python} or {relay} is gone; `metis install` repairs that",
    )
    return _SHELL.format(
        python=shlex.quote(python),
        relay=shlex.quote(relay),
        program=shlex.quote(
            _program("SourceFileLoader", repr(relay), socket_path, repr([*search_path]))
        ),
        error=shlex.quote(gone),
    )


def bundled_launcher(python: str) -> str:
    """The program of a self-contained plugin: one line, for the kernel to read.

    What the interpreter shall do stands behind `-c` in the line itself, so that there
    is no script to be opened and compiled.

    Args:
      python: absolute path of the interpreter, as the runtime will see it.

    Raises:
      ValueError: no kernel could read that line, or would split it elsewhere.
    """
    line = f"#!{python} -IScimport {START_MODULE}"
    excess = _size(line) - MAX_SHEBANG_BYTES
    if excess > 0:
        raise ValueError(
            f"{python} has {_size(python)} bytes, and no more than "
            f"{_size(python) - excess} fit into the first line of a program"
        )
    if set(python) & set(" \t\n"):
        raise ValueError(f"{python!r} has a blank, at which the kernel would cut it")
    return (
        f"{line}\n"
        "# Written by `metis install --self-contained`, which replaces it. The line\n"
        "# above is all of it.\n"
    )


def start_module(socket_path: str, relay: str, search_path: Sequence[str]) -> str:
    """The source of START_MODULE.

    Args:
      socket_path: where the daemon serves.
      relay: the relay's byte code, relative to the interpreter's directory.
      search_path: directories of all modules, relative likewise.
    """
    path = ", ".join(f"sys.prefix + {'/' + entry!r}" for entry in search_path)
    return _program(
        "SourcelessFileLoader",
        f"sys.prefix + {'/' + relay!r}",
        socket_path,
        f"[{path}]",
    )


def _program(loader: str, path: str, socket_path: str, search_path: str) -> str:
    """Load the relay and have it do the call, or say in CNI's way why it cannot."""
    before, after = _error(
        "metis cannot be loaded from where it was when it was installed",
        f"{_REASON}; `metis install` repairs that",
    ).split(_REASON)
    return _PROGRAM.format(
        loader=loader,
        name=RELAY_MODULE,
        path=path,
        socket_path=socket_path,
        search_path=search_path,
        report=_REPORT.format(before=before, after=after),
    )


def _size(text: str) -> int:
    return len(text.encode(errors="surrogateescape"))


def _error(message: str, details: str) -> str:
    """An error object, which says nothing of the call's version."""
    return error_text(CNIError(INTERNAL, message, details), None)
