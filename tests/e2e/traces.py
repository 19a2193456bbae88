"""What a scenario could leave behind on a node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.network import interfaces, namespaces, output


def traces() -> set[str]:
    """Everything that lives or stands on the node now, each in a few words.

    Processes, mounts, interfaces and network namespaces; what is the session's
    own (and the machine's) is among them, so compare two of these.
    """
    return {
        *(f"process {process}" for process in _processes()),
        *(f"mount {target}" for target in _mounts()),
        *(f"interface {name}" for name in interfaces()),
        *(f"netns {name}" for name in namespaces()),
    }


def remove_bridges(*, keep: set[str]) -> None:
    """Remove bridges that the bridge plugin made; by design it never does."""
    for link in json.loads(output("ip", "-j", "link", "show", "type", "bridge")):
        if f"interface {link['ifname']}" not in keep:
            output("ip", "link", "del", link["ifname"])


def _processes() -> Iterator[str]:
    """Every process that runs; a zombie does not, and is process 1's to collect."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            name, rest = (directory / "stat").read_text().rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if rest.split()[0] != "Z":
            yield f"{name})"


def _mounts() -> Iterator[str]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        yield line.split()[1]
