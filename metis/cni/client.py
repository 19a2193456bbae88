"""One question to the daemon: connect, ask, and tell what went wrong.

gRPC statuses and broken connections become CNI codes here and nowhere else.
May touch the daemon's socket.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

import trio
from grpclib import GRPCError, Status
from grpclib.exceptions import StreamTerminatedError

from metis.cni.protocol import (
    INTERNAL,
    INVALID_CONFIGURATION,
    NOT_ALLOCATED,
    OTHER_ADDRESS,
    TRY_AGAIN_LATER,
    CNIError,
)
from metis.errors import TransportError
from metis.rpc.channel import Channel, open_channel
from metis.rpc.transport import UnixTransport

RPC_TIMEOUT = 10.0
"""Seconds for a call, as the original's client waits; runtimes wait longer."""

TIMEOUT_MARGIN = 0.5
"""Seconds between the daemon's deadline and giving up on its answer, so that an
answer that says why comes first. The tries to connect fit into it."""

CONNECT_TRIES = 3
CONNECT_PAUSE = 0.1
"""Tries to connect and seconds between them, as the original's client does: a
daemon that is being replaced is back in that time."""

STATUS_CODES: Mapping[Status, int] = {
    Status.INVALID_ARGUMENT: INVALID_CONFIGURATION,
    Status.RESOURCE_EXHAUSTED: TRY_AGAIN_LATER,
    Status.UNAVAILABLE: TRY_AGAIN_LATER,
    Status.DEADLINE_EXCEEDED: TRY_AGAIN_LATER,
    Status.CANCELLED: TRY_AGAIN_LATER,
    Status.ABORTED: TRY_AGAIN_LATER,
    Status.NOT_FOUND: NOT_ALLOCATED,
    Status.FAILED_PRECONDITION: OTHER_ADDRESS,
}
"""What a status means to a runtime; every other one is a fault of ours."""

OpenChannel = Callable[[str], AbstractAsyncContextManager[Channel]]
"""From the path of a socket to a channel."""

T = TypeVar("T")


def open_daemon(socket_path: str) -> AbstractAsyncContextManager[Channel]:
    """A channel to the daemon that serves on a Unix socket."""
    return open_channel(UnixTransport(socket_path))


@dataclass(frozen=True, slots=True)
class DaemonClient:
    """The daemon as a verb sees it.

    Attributes:
      socket_path: where it serves.
      open_channel: how it is reached.
    """

    socket_path: str
    open_channel: OpenChannel = open_daemon

    def __str__(self) -> str:
        return f"the daemon at {self.socket_path}"

    async def ask(
        self,
        question: Callable[[Channel, float], Awaitable[T]],
        seconds: float = RPC_TIMEOUT,
    ) -> T:
        """Ask one question, on a connection of its own.

        Args:
          question: makes the call, with the channel and the seconds it has.
          seconds: how long the daemon has for the answer.

        Raises:
          CNIError: no daemon, no answer, or an answer that is an error.
        """
        with trio.move_on_after(seconds + TIMEOUT_MARGIN):
            outcome = await self._outcome(question, seconds)
            # Raised only here: the channel's nursery would make it a group.
            if isinstance(outcome, CNIError):
                raise outcome
            return outcome
        raise CNIError(TRY_AGAIN_LATER, f"{self} did not answer within {seconds:g} s")

    async def _outcome(
        self, question: Callable[[Channel, float], Awaitable[T]], seconds: float
    ) -> T | CNIError:
        """The answer or its failure, on the first connection that comes about."""
        tries = 1
        while True:
            try:
                async with self.open_channel(self.socket_path) as channel:
                    await channel.connect()
                    return await self._answer(question(channel, seconds))
            except TransportError as error:
                if tries == CONNECT_TRIES:
                    return CNIError(TRY_AGAIN_LATER, f"no daemon is there: {error}")
            tries += 1
            await trio.sleep(CONNECT_PAUSE)

    async def _answer(self, answer: Awaitable[T]) -> T | CNIError:
        try:
            return await answer
        except GRPCError as error:
            name = error.status.name
            return CNIError(
                STATUS_CODES.get(error.status, INTERNAL),
                error.message or f"{self} answered {name}",
                f"{name} from {self}",
            )
        except (StreamTerminatedError, OSError) as error:
            return CNIError(TRY_AGAIN_LATER, f"{self} broke off: {error}")
