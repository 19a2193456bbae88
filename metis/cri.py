"""Which pod sandboxes a container runtime has: its CRI, over our own channel.

One connection and a few calls a round, bounded in time. The runtime is a foreign
program, so whatever goes wrong with it leaves here as a silence with a reason: it
proves nothing about anybody. Nor does a list without a single entry, which is what
a runtime that has not found its own state yet would send.

Whoever is missing in the list is asked for by name, because a list may be short
while an answer about one container is about that one.

May touch: the runtime's socket, through a transport.
"""

from __future__ import annotations

from collections.abc import Collection

import trio
from grpclib import GRPCError, Status

from metis.api.runtime.v1 import (
    ListPodSandboxRequest,
    PodSandboxStatusRequest,
    RuntimeServiceStub,
)
from metis.errors import sole_error
from metis.rpc.channel import open_channel
from metis.rpc.limits import MIB, Limits
from metis.rpc.transport import Transport
from metis.verdicts import LISTS_NOBODY, Sandboxes

CRI_SECONDS = 10.0
"""Until the runtime must have answered everything, in seconds. It needs a
millisecond a question; a loaded node may take a thousand times that."""

MOST_ASKED = 1000
"""Most containers that are asked for by name at once, one after the other: about
a second. A node has a hundred pods, and the rest has its turn in the next rounds."""

LIMITS = Limits(max_message_bytes=16 * MIB)
"""Bounds of the connection. Runtimes answer with up to 16 MiB: labels and
annotations come with each sandbox."""


async def ask_runtime(transport: Transport, suspects: Collection[str]) -> Sandboxes:
    """What the runtime says about its sandboxes, or why it says nothing.

    Args:
      transport: where its CRI serves.
      suspects: container ids to ask for by name where the list has them not.
    """
    named: set[str] = set()
    unknown: set[str] = set()
    silence = f"the runtime did not answer within {CRI_SECONDS:g} s"
    with trio.move_on_after(CRI_SECONDS):
        try:
            async with open_channel(transport, limits=LIMITS) as channel:
                stub = RuntimeServiceStub(channel)
                answer = await stub.list_pod_sandbox(ListPodSandboxRequest())
                named |= {one.id for one in answer.items if one.id}
                silence = "" if named else LISTS_NOBODY
                asked = sorted(set(suspects) - named) if named else []
                for container_id in asked[:MOST_ASKED]:
                    match await _has(stub, container_id):
                        case True:
                            named.add(container_id)
                        case False:
                            unknown.add(container_id)
        except Exception as error:
            # Anything at all: the runtime and what it sends are not ours.
            silence = f"the runtime does not tell its containers: {_said(error)}"
    return Sandboxes(frozenset(named), frozenset(unknown), silence)


async def _has(stub: RuntimeServiceStub, container_id: str) -> bool | None:
    """Whether the runtime has one container; None when it does not say."""
    try:
        await stub.pod_sandbox_status(
            PodSandboxStatusRequest(pod_sandbox_id=container_id)
        )
    except GRPCError as error:
        return False if error.status is Status.NOT_FOUND else None
    return True


def _said(error: Exception) -> str:
    """A failure in words, with the status where it was the runtime's."""
    sole = sole_error(error)
    if isinstance(sole, GRPCError):
        return f"{sole.message or 'the call failed'} ({sole.status.name})"
    return str(sole) or type(sole).__name__
