"""Is the owner of an address gone? From what is known of it and what a node shows.

A runtime may lose the DEL of a container, and its address would be held for ever.
Taking it back from an owner that lives would be far worse: two pods with one
address. So an owner is gone only where something on the node proves it, and what
is merely not to be seen proves nothing.

  Rule 1: signs of life keep: the network namespace is there, or the runtime knows
          the container, whatever its state.
  Rule 2: whoever asked within the grace period is kept. A runtime asks for the
          address first and lists the container when all of it is up.
  Rule 3: gone is who got its address in another boot of the machine. No container
          survives a reboot; one that shows signs of life did not come from there,
          whatever its record says (of an older metis, of the original, or of a
          process that was shown another boot id).
  Rule 4: gone is whose network namespace is missing, where the directory in which
          it was can be looked at.
  Rule 5: gone is whom the runtime does not list and, asked by name, does not know,
          where the namespace tells nothing. A list may be short; the answer about
          one container is about that one. It counts for pods alone: containers of
          other runtimes have no namespace of Kubernetes, and no CRI knows them.
  Rule 6: all else is kept.

Evidence counts only against what was allocated before it was taken, which rule 2
includes. Whoever acts on a verdict waits for a second one (`metis.reclaim`).

Pure: no clock, no file, no socket, no `async def`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from metis.model import Holding

LONGEST_SHOWN = 200
"""Most characters of a path in a reason, which goes into logs and the history."""

LISTS_NOBODY = "the runtime lists no container at all"
"""Why a list without an entry tells nothing: it is that of a node without pods, too."""


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """What the container runtime says about its pod sandboxes.

    Attributes:
      named: container ids that it listed, or knew when it was asked by name.
      unknown: those of which it said, asked by name, that there is no such one.
      silence: why it told nothing; empty when it gave a list that has entries.
    """

    named: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()
    silence: str = ""


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Which paths of network namespaces there are.

    Attributes:
      present: something is there.
      missing: nothing is there, in a directory where namespaces of owners are seen.
      untold: nothing can be told, and why. So it is of all other paths as well.
    """

    present: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    untold: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a node shows.

    Attributes:
      taken_ms: the stored time before the first look.
      boot_id: of the present boot; empty where it is not known.
      namespaces: network namespaces that holdings name.
      sandboxes: what the runtime says.
    """

    taken_ms: int
    boot_id: str = ""
    namespaces: Namespaces = field(default_factory=Namespaces)
    sandboxes: Sandboxes = field(default_factory=Sandboxes)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an owner is gone, and the proof, or why there is none."""

    gone: bool
    reason: str


def judge(holding: Holding, evidence: Evidence, grace_ms: int) -> Verdict:
    """The verdict on the owner of one address, by the rules above.

    Args:
      holding: the address and its owner.
      evidence: what the node shows.
      grace_ms: how long an owner is left alone after it asked, in milliseconds.
    """
    namespaces, sandboxes = evidence.namespaces, evidence.sandboxes
    container_id, path = holding.owner.container_id, holding.netns_path
    if path in namespaces.present:
        return Verdict(False, f"its network namespace {shown(path)} is there")
    if container_id in sandboxes.named:
        return Verdict(False, "the runtime has the container")
    age_ms = evidence.taken_ms - holding.allocated_at
    if age_ms <= 0:
        return Verdict(False, "it asked for the address after this was looked at")
    if age_ms < grace_ms:
        return Verdict(
            False,
            f"it asked for the address {age_ms / 1000:.0f} s ago, "
            f"within the grace period of {grace_ms / 1000:g} s",
        )
    if holding.boot_id and evidence.boot_id and holding.boot_id != evidence.boot_id:
        return Verdict(True, "the node was rebooted since")
    if path in namespaces.missing:
        return Verdict(True, f"its network namespace {shown(path)} is gone")
    by_runtime = _of_runtime(holding, sandboxes)
    if not by_runtime:
        return Verdict(True, "the runtime has no such container")
    return Verdict(
        False, f"no evidence: {_of_namespace(path, namespaces)}; {by_runtime}"
    )


def shown(text: str) -> str:
    """A path for people, cut where it is too long for them."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _of_runtime(holding: Holding, sandboxes: Sandboxes) -> str:
    """Why the runtime does not prove that an owner is gone; empty when it does."""
    if sandboxes.silence:
        return sandboxes.silence
    if not holding.pod.namespace:
        return "it has no pod namespace, so the CRI would not know it"
    if holding.owner.container_id not in sandboxes.unknown:
        return "the runtime does not list it, and did not say that it is gone"
    return ""


def _of_namespace(path: str, namespaces: Namespaces) -> str:
    """Why its network namespace does not prove that an owner is gone."""
    if not path:
        return "its network namespace is not known"
    why = namespaces.untold.get(path, "nobody looked")
    return f"its network namespace {shown(path)} tells nothing ({why})"
