"""The attachments that a GC is to leave alone.

Section 2, "GC": everything of the network that is not in
`cni.dev/valid-attachments` is stale. libcni sends the same list under the key
`cni.dev/attachments` as well, which older plugins read. Pure.

Two rules keep pods alive. A list that is absent is not an empty one: it says
that the runtime does not know, and then nothing is stale. And an entry that
cannot be read could mean any attachment, so with one in the list nobody can be
told to be stale, and the call fails without freeing anything.
"""

from __future__ import annotations

from metis.cni.environment import MAX_INTERFACE_BYTES, NAME
from metis.cni.fields import Configuration, invalid, is_encodable, json_type
from metis.cni.protocol import CNIError, shown

KEYS = ("cni.dev/valid-attachments", "cni.dev/attachments")

MAX_REPORTED = 8
"""Most malformed entries that one message names; people read it."""

Attachment = tuple[str, str]
"""Container id and interface name."""


def valid_attachments(config: Configuration) -> frozenset[Attachment] | None:
    """The attachments that stay; None when the runtime sent no list.

    With both keys, what stands in either stays.

    Raises:
      CNIError: code 7, naming every entry that cannot be read.
    """
    lists = [(key, config[key]) for key in KEYS if config.get(key) is not None]
    if not lists:
        return None
    found: set[Attachment] = set()
    problems: list[str] = []
    for key, entries in lists:
        if not isinstance(entries, list):
            problems.append(f"{key} is {json_type(entries)}: write a list")
            continue
        for i, entry in enumerate(entries):
            problem = _problem(entry)
            if problem:
                problems.append(f"{key}[{i}]{problem}")
            else:
                found.add((entry["containerID"], entry["ifname"]))
    if problems:
        raise _unreadable(problems)
    return frozenset(found)


def _problem(entry: object) -> str:
    """What is wrong with an entry; empty for nothing."""
    if not isinstance(entry, dict):
        return f" is {json_type(entry)}: write an object"
    container, interface = entry.get("containerID"), entry.get("ifname")
    if not isinstance(container, str) or not NAME.fullmatch(container):
        return f".containerID is {shown(container)}: write a container id"
    if (
        not isinstance(interface, str)
        or not is_encodable(interface)
        or not 0 < len(interface.encode()) <= MAX_INTERFACE_BYTES
    ):
        return f".ifname is {shown(interface)}: write an interface name"
    return ""


def _unreadable(problems: list[str]) -> CNIError:
    more = len(problems) - MAX_REPORTED
    named = "; ".join(problems[:MAX_REPORTED])
    return invalid(
        named + (f"; and {more} more" if more > 0 else ""),
        "nothing was freed: an entry that cannot be read could mean any attachment",
    )
