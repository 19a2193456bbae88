"""Which layer of the daemon a sampled stack was in. Pure.

A sample belongs to the innermost frame whose file tells a layer: what C code or
the standard library does is done for whoever called it; a system call on a socket,
which Trio makes, is a layer of its own. Only what is below no such
frame is "the rest": the interpreter's own start, logging, signal handling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

LAYERS = (
    ("h2 and hpack", ("h2/", "hpack/", "hyperframe/")),
    ("metis.rpc and grpclib", ("metis/rpc/", "grpclib/", "multidict/")),
    ("sockets", ("trio/_socket.py", "trio/_core/_io_epoll.py")),
    ("SQL", ("metis/store/", "apsw/")),
    ("messages and rules", ("metis/", "betterproto2/")),
    ("Trio", ("trio/", "outcome/", "anyio/", "sniffio/")),
)
"""Layers and where their files are in site-packages; the first that fits decides."""

WAITING = ("WorkerThread._work", "trio/_core/_thread_cache.py")
"""Function and file of a thread that waits for work: no CPU, though a profiler that
stops the process sees it on its way to sleep and counts it."""

INSTALLED = "site-packages/"
"""What stands before it in a path may be named like anything, and tells nothing."""

REST = "the rest"

NAMES = (*(name for name, _ in LAYERS), REST)


def layer_of(stack: str) -> str:
    """The layer of one stack, its frames from the outermost on, parted by ";".

    A frame is "function (file:line)", as py-spy writes it with full file names.
    Empty for a thread that waits.
    """
    innermost = True
    for frame in reversed(stack.split(";")):
        function, _, path = frame.rpartition(" (")
        _, installed, file = path.rpartition(INSTALLED)
        if innermost and function == WAITING[0] and file.startswith(WAITING[1]):
            return ""
        innermost = False
        for name, packages in LAYERS:
            if installed and file.startswith(packages):
                return name
    return REST


def shares(raw: Iterable[str]) -> dict[str, float]:
    """The part of each layer in all samples, by name, 0.25 for a quarter.

    Args:
      raw: lines of py-spy's raw format, "frame;frame;frame count".

    Raises:
      ValueError: there are no samples.
    """
    counts: Counter[str] = Counter()
    for line in raw:
        stack, _, count = line.strip().rpartition(" ")
        layer = layer_of(stack) if stack else ""
        if layer:
            counts[layer] += int(count)
    total = counts.total()
    if not total:
        raise ValueError("no samples: the process did nothing, or could not be read")
    return {name: counts[name] / total for name in NAMES}
