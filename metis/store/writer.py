"""The writer: one task that turns queued requests into transactions.

A request that is cancelled while it is queued never runs. One that runs is
waited for, shielded: whoever asked learns what happened to it. Knows no request
by name; those are `metis.store.store`'s.

  many at once   queue -> task -> one transaction -> an answer each
  one alone      one turn of the event loop, in which others may come and make it
                 many; then the transaction, in place, if it waits for nothing

Either way there is one transaction at a time: one that is written in place neither
waits nor lets another task run, and is written only while the task has nothing to do.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

import trio

from metis.clock import StoredClock
from metis.errors import MetisError, StoreDamaged, StoreError, StoreUnavailable
from metis.store.transactions import Work

log = logging.getLogger("metis.store")

T = TypeVar("T")

GROUP_SIZE = 64
"""Most requests in one transaction: beyond it a commit costs little per request,
while the first of the group waits for the work of all the others (about 5 ms)."""

QUEUE_SIZE = 1024
"""Most requests that wait for the writer; whoever comes later waits to queue.

Ten times what the writer does while a client is patient would be pointless, and
16 full groups are done in a tenth of a second.
"""

COMPLAINT_SECONDS = 60.0
"""Least time between two lines in the log that say that nothing can be written: every
call is told, and the log is not to fill the rest of the disk."""

DRAIN_SECONDS = 5.0
"""How long a closing store works on what is queued before it refuses the rest."""


class DatabaseLike(Protocol):
    """What the store needs of `metis.store.database.Database`."""

    clock: StoredClock

    def write_at_once(self, group: Sequence[Work[object]]) -> list[object] | None:
        """Run requests as one transaction; None where that has to wait."""

    async def write(self, group: Sequence[Work[object]]) -> list[object]:
        """Run requests as one transaction."""

    async def read(self, work: Work[T]) -> T:
        """Run a request that writes nothing."""

    async def keep_log_short(self) -> None:
        """Do what has to be done beside the requests, until cancelled."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What the writer has done so far, and what waits for it now.

    `healings` tells how often the database was made anew since its owner started.
    """

    groups: int
    requests: int
    queue_depth: int
    healings: int = 0


class Damage:
    """What was found to be wrong with a database while it was used; nothing at first.

    Attributes:
      error: how it was found out, or None.
      is_possible: whether something went wrong that nobody foresaw: a bug, or rows
        that make no sense. A look at the whole database tells.
    """

    def __init__(self) -> None:
        self.error: StoreDamaged | None = None
        self.is_possible = False
        self._found = trio.Event()

    def note(self, answer: object) -> None:
        """Take note of an answer that tells of damage, or may; of no other."""
        if isinstance(answer, StoreDamaged):
            self.is_possible = True
            if self.error is None:
                self.error = answer
                self._found.set()
        elif type(answer) is StoreError or (
            isinstance(answer, Exception) and not isinstance(answer, MetisError)
        ):
            self.is_possible = True

    async def wait(self) -> None:
        """Wait until there is some, and raise it.

        Raises:
          StoreDamaged: always, in the end.
        """
        await self._found.wait()
        raise StoreDamaged(str(self.error))


@dataclass(slots=True, eq=False)
class Request(Generic[T]):
    """A change that somebody waits for, from the queue to its answer."""

    work: Work[T]
    waiting: trio.lowlevel.Task | None = None
    cancelled: bool = False
    running: bool = False
    answered: bool = False
    answer: object = None

    async def wait(self) -> T:
        """Wait for the answer; cancellation withdraws the request while it can."""

        def abort(_: object) -> trio.lowlevel.Abort:
            if self.running:
                return trio.lowlevel.Abort.FAILED
            self.cancelled = True
            return trio.lowlevel.Abort.SUCCEEDED

        if not self.answered:
            self.waiting = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)
        if isinstance(self.answer, Exception):
            raise self.answer
        return cast("T", self.answer)

    def finish(self, answer: object) -> None:
        """Set the answer, an exception included, and wake whoever waits."""
        self.answered, self.answer = True, answer
        if self.waiting is not None:
            trio.lowlevel.reschedule(self.waiting)


class Writer:
    """A queue of requests, and the task that works it off."""

    def __init__(self, database: DatabaseLike) -> None:
        self._database = database
        self._queue, self._requests = trio.open_memory_channel[Request[object]](
            QUEUE_SIZE
        )
        self._alone: Request[object] | None = None
        self._drain_until = math.inf
        self._groups_done = 0
        self._requests_done = 0
        self._silent_until = 0.0
        self._damage = Damage()

    def statistics(self) -> StoreStatistics:
        """A snapshot of the work."""
        return StoreStatistics(
            self._groups_done,
            self._requests_done,
            self._requests.statistics().current_buffer_used,
        )

    @property
    def damage(self) -> Damage:
        """Whether the database was found to be damaged."""
        return self._damage

    @property
    def is_closing(self) -> bool:
        """Whether no more requests are taken."""
        return self._drain_until < math.inf

    async def write(self, work: Work[T]) -> T:
        """Queue a request and wait until it is committed.

        Raises:
          StoreError: nothing was written; or whatever `work` raises.
        """
        request = cast("Request[object]", Request(work))
        if self._is_idle():
            await trio.lowlevel.checkpoint_if_cancelled()
            self._alone = request
            await trio.lowlevel.cancel_shielded_checkpoint()  # for others to come
            if self._alone is request:
                self._alone = None
                await self._write_alone(request)
        else:
            self._join_alone()
            await self._put(request)
        return cast("T", await request.wait())

    async def _put(self, request: Request[object]) -> None:
        """Queue a request; that waits only where there is no room."""
        try:
            try:
                self._queue.send_nowait(request)
            except trio.WouldBlock:
                await self._queue.send(request)
        except trio.ClosedResourceError:
            raise closing() from None

    def close(self) -> None:
        """Take no more requests; `run` works off those that are queued."""
        self._join_alone()
        self._drain_until = trio.current_time() + DRAIN_SECONDS
        self._queue.close()

    def _is_idle(self) -> bool:
        """Whether the task waits for a request, and none is under way."""
        waiting = self._requests.statistics().tasks_waiting_receive
        return waiting == 1 and self._alone is None and not self.is_closing

    def _join_alone(self) -> None:
        """Queue the request that has been alone, before one that makes it two."""
        if self._alone is not None:
            self._queue.send_nowait(self._alone)  # the queue is empty
            self._alone = None

    async def _write_alone(self, request: Request[object]) -> None:
        """Write the only request there is, if that waits for nothing.

        The task would do the same after two more turns of the event loop, which take
        as long as the transaction.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            answers = self._database.write_at_once([request.work])
        except Exception as error:
            answers = self._failures(error, 1)
        else:
            if answers is None:
                self._queue.send_nowait(request)
                return
            self._note(answers)
        request.finish(answers[0])

    async def run(self) -> None:
        """Write what is queued, group by group, until closed.

        Shielded, because requests that wait for it may be: only closing ends it.
        """
        with trio.CancelScope(shield=True):
            async for first in self._requests:
                # One more turn for others to come: then all of them wait for their
                # answers, wake at once, and are one group again if they come back.
                await trio.lowlevel.checkpoint()
                group = self._collect(first)
                if not group:
                    continue
                for request in group:
                    request.running = True
                answers = await self._run(group)
                for request, answer in zip(group, answers, strict=True):
                    request.finish(answer)

    def _collect(self, first: Request[object]) -> list[Request[object]]:
        """The queued requests of one group, without the cancelled ones."""
        group = [first]
        with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
            while len(group) < GROUP_SIZE:
                group.append(self._requests.receive_nowait())
        return [request for request in group if not request.cancelled]

    async def _run(self, group: list[Request[object]]) -> list[object]:
        """The answers of a group, whatever happens to it."""
        if trio.current_time() >= self._drain_until:
            return [closing() for _ in group]
        try:
            answers = await self._database.write([request.work for request in group])
        except Exception as error:
            return self._failures(error, len(group))
        self._note(answers)
        return answers

    def _note(self, answers: list[object]) -> None:
        """Take note of a group that was written."""
        if self._silent_until:
            log.info("the database is written to again")
            self._silent_until = 0.0
        self._groups_done += 1
        self._requests_done += len(answers)
        for answer in answers:
            if isinstance(answer, Exception):
                self._damage.note(answer)

    def _failures(self, error: Exception, count: int) -> list[object]:
        """What to answer to the requests of a group of which nothing was written."""
        self._damage.note(error)
        if not isinstance(error, StoreError):
            # A bug, but who waits must not wait for ever.
            error = StoreError(f"nothing was written: {error!r}")
        self._complain(error)
        # One exception each: several tasks will raise and extend it.
        return [type(error)(str(error)) for _ in range(count)]

    def _complain(self, error: StoreError) -> None:
        """Say in the log that the disk is full, or whatever it is, now and then."""
        now = trio.current_time()
        if isinstance(error, StoreUnavailable) and now >= self._silent_until:
            log.error("the database cannot be written to: %s", error)
            self._silent_until = now + COMPLAINT_SECONDS


def closing() -> StoreUnavailable:
    """The error of a store that takes no more requests."""
    return StoreUnavailable("the store is closing")
