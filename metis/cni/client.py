"""One question to whoever knows: the daemon, or without one the database itself.

A daemon is away when its socket is absent or refuses, when nothing comes from it
for a second, and when it goes, says that it is about to, or lets the time pass
before it answers.
Then the question is put to the same services in this process (`metis.cni.direct`).
Asking twice does no harm: an owner's ADD is answered with what it holds, and its
DEL with success when it holds nothing.

gRPC statuses and broken connections become CNI codes here and nowhere else.
May touch the daemon's socket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
from metis.errors import MetisError, StoreBusy, StoreError, TransportError
from metis.rpc.channel import Channel, open_channel
from metis.rpc.transport import Listener, Transport, UnixTransport

RPC_TIMEOUT = 10.0
"""Seconds for a call, as the original's client waits; runtimes wait longer."""

TIMEOUT_MARGIN = 0.5
"""Seconds between the daemon's deadline and giving up on its answer, so that an
answer that says why comes first. The tries to connect fit into it."""

LIVENESS_SECONDS = 1.0
"""How long a daemon may take to say the first word (its SETTINGS, RFC 9113 section
3.4), which it does as soon as it has accepted a connection. One that hangs, or is
stopped, does not; one that lets an ADD wait for a cooldown has done it long since."""

CONNECT_TRIES = 3
CONNECT_PAUSE = 0.1
"""Tries and seconds between them, as the original's client does: a daemon that is
being replaced is back in that time. A database that is busy is tried as long as
there is time."""

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

OpenChannel = Callable[[str, float], AbstractAsyncContextManager[Channel]]
"""From the path of a socket, and the seconds in which there must be a sign of life
there, to a channel; raises TransportError."""

OpenDirect = Callable[[], AbstractAsyncContextManager[Channel]]
"""Opens a channel to the database itself; raises StoreError."""

T = TypeVar("T")


class Unreachable(CNIError):
    """Neither the daemon nor the database answered; what was asked may be undone."""


class PassedOver(MetisError):
    """The daemon has no answer that would count; whoever can do without it shall.

    No answer to a runtime: the message is what `DaemonClient.passed_over` gets there.
    """


@asynccontextmanager
async def open_daemon(socket_path: str, patience: float) -> AsyncIterator[Channel]:
    """A channel to the daemon that serves on a Unix socket, and lives.

    Args:
      socket_path: where it serves.
      patience: seconds until its first word.

    Raises:
      TransportError: nobody is there, or nothing was heard in time.
    """
    transport = _Overheard(UnixTransport(socket_path))
    async with open_channel(transport) as channel:
        with trio.move_on_after(patience):
            await channel.connect()
            await transport.heard.wait()
        if not transport.alive:
            raise TransportError(
                f"{socket_path}: the connection was closed without a word"
                if transport.heard.is_set()
                else f"{socket_path}: no answer within {patience:g} s"
            )
        yield channel


class _Overheard(Transport):
    """A place whose first sign of life is noticed.

    Attributes:
      heard: something came, if only the end of the connection.
      alive: bytes came.
    """

    def __init__(self, place: Transport) -> None:
        self.heard = trio.Event()
        self.alive = False
        self._place = place

    async def listen(self) -> list[Listener]:
        """As the place; nobody here does."""
        return list(await self._place.listen())

    async def connect(self) -> trio.abc.Stream:
        """Connect; the stream tells when something comes."""
        return _OverheardStream(await self._place.connect(), self.note)

    def note(self, data: bytes | bytearray) -> None:
        """Take note of what came; nothing is the end of the connection."""
        self.alive |= bool(data)
        self.heard.set()


class _OverheardStream(trio.abc.Stream):
    """A stream that tells of everything that it receives."""

    def __init__(
        self, stream: trio.abc.Stream, note: Callable[[bytes | bytearray], None]
    ) -> None:
        self._stream = stream
        self._note = note

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data: bytes | bytearray = b""
        try:
            data = await self._stream.receive_some(max_bytes)
        finally:
            self._note(data)
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


@dataclass(frozen=True, slots=True)
class _Absent:
    """Why the daemon or the database gave no answer that would count.

    Attributes:
      error: what the runtime is told when there is nobody else to ask.
      reason: in few words.
      passing: whether it ends by itself, so that trying again makes sense.
    """

    error: CNIError
    reason: str
    passing: bool = False


@dataclass(frozen=True, slots=True)
class DaemonClient:
    """The daemon as a verb sees it.

    Attributes:
      socket_path: where it serves.
      open_channel: how it is reached.
      db_path: its database.
      open_direct: how that is used while the daemon is away; None for not at all.
      passed_over: why the daemon is not asked though it may be there; empty to ask.
      hands_over: whether somebody else does without the daemon.
    """

    socket_path: str
    open_channel: OpenChannel = open_daemon
    db_path: str = ""
    open_direct: OpenDirect | None = None
    passed_over: str = ""
    hands_over: bool = False

    def __str__(self) -> str:
        return f"the daemon at {self.socket_path}"

    async def ask(
        self,
        question: Callable[[Channel, float], Awaitable[T]],
        seconds: float = RPC_TIMEOUT,
    ) -> T:
        """Ask one question, on a connection of its own.

        Args:
          question: makes the call, with the channel and the seconds it has. It
            may be made again, of somebody else, when no answer comes.
          seconds: how long there is for the answer.

        Raises:
          Unreachable: there is neither a daemon nor a database that can be used.
          PassedOver: no answer, and somebody else does without it.
          CNIError: no answer, or one that is an error.
        """
        outcome = await self._outcome(question, seconds)
        # Raised only here: the channel's nursery would make it a group.
        if isinstance(outcome, CNIError):
            raise outcome
        return outcome

    async def _outcome(
        self, question: Callable[[Channel, float], Awaitable[T]], seconds: float
    ) -> T | CNIError:
        """The answer or its failure, of the first who is there."""
        deadline = trio.current_time() + seconds
        tries = 1
        while True:
            away = await self._of_daemon(question, deadline)
            if not isinstance(away, _Absent):
                return away
            if self.hands_over:
                raise PassedOver(away.reason)
            failure, last = away.error, tries >= CONNECT_TRIES
            if self.open_direct is not None:
                unusable = await self._of_database(self.open_direct, question, seconds)
                if not isinstance(unusable, _Absent):
                    return unusable
                failure = Unreachable(
                    TRY_AGAIN_LATER,
                    f"{self} is away ({away.reason}), and the database "
                    f"{self.db_path} cannot be used ({unusable.reason})",
                )
                last = last and not unusable.passing
            if last or trio.current_time() + CONNECT_PAUSE >= deadline:
                return failure
            tries += 1
            await trio.sleep(CONNECT_PAUSE)

    async def _of_daemon(
        self, question: Callable[[Channel, float], Awaitable[T]], deadline: float
    ) -> T | CNIError | _Absent:
        """Ask the daemon, if it says anything and until there is no more time."""
        if self.passed_over:
            reason = self.passed_over
            return _Absent(CNIError(TRY_AGAIN_LATER, reason), reason)
        left = deadline - trio.current_time()
        # At most half of what is left, so that the other half is the database's.
        patience = min(LIVENESS_SECONDS, left / 2)
        with trio.move_on_at(deadline + TIMEOUT_MARGIN):
            try:
                async with self.open_channel(self.socket_path, patience) as channel:
                    await channel.connect()
                    return await self._answer(question, channel, deadline, str(self))
            except TransportError as error:
                return _Absent(
                    CNIError(TRY_AGAIN_LATER, f"no daemon is there: {error}"),
                    str(error),
                )
        reason = "it did not answer in time"
        return _Absent(CNIError(TRY_AGAIN_LATER, f"{self}: {reason}"), reason)

    async def _of_database(
        self,
        open_direct: OpenDirect,
        question: Callable[[Channel, float], Awaitable[T]],
        seconds: float,
    ) -> T | CNIError | _Absent:
        """Ask the database.

        It has its time from when it is open: where hundreds of plugins share a
        few processors, getting there may take longer than the answer itself.
        """
        who = f"the database {self.db_path}"
        try:
            async with open_direct() as channel:
                deadline = trio.current_time() + seconds
                with trio.move_on_at(deadline + min(TIMEOUT_MARGIN, seconds / 2)):
                    return await self._answer(question, channel, deadline, who)
                reason = f"it did not answer within {seconds:g} s"
        except StoreError as error:
            reason = str(error)
            return _Absent(
                CNIError(TRY_AGAIN_LATER, reason), reason, isinstance(error, StoreBusy)
            )
        return _Absent(CNIError(TRY_AGAIN_LATER, reason), reason)

    async def _answer(
        self,
        question: Callable[[Channel, float], Awaitable[T]],
        channel: Channel,
        deadline: float,
        who: str,
    ) -> T | CNIError | _Absent:
        try:
            return await question(channel, deadline - trio.current_time())
        except GRPCError as error:
            name = error.status.name
            failure = CNIError(
                STATUS_CODES.get(error.status, INTERNAL),
                error.message or f"{who} answered {name}",
                f"{name} from {who}",
            )
            # It stops, has just died, or hangs since it said its first word.
            if error.status in (Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED):
                return _Absent(failure, error.message or name)
            return failure
        except (StreamTerminatedError, OSError) as error:
            reason = f"{who} broke off: {error}"
            return _Absent(CNIError(TRY_AGAIN_LATER, reason), reason)
