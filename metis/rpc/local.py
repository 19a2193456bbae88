"""A channel within the process: the generated stubs call the handlers themselves.

For whoever has the services at hand and asks them often. No connection, no frame, no
encoding: a call costs what its handler costs. What a caller can see is as over any
other channel: deadlines, statuses, cancellation.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from types import TracebackType
from typing import Any

import trio
from betterproto2.grpclib import ServiceBase
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import Deadline

from metis.rpc.channel import Channel, expiry
from metis.rpc.client_stream import MetadataLike

log = logging.getLogger("metis.rpc")


class LocalChannel(Channel):
    """Unary calls of services in this process; a `Channel` for the generated stubs.

    Args:
      services: instances of the generated `...Base` classes.
    """

    def __init__(self, services: Collection[ServiceBase]) -> None:
        self._methods: dict[str, Handler] = {}
        for service in services:
            # every generated class has it, though their base does not say so
            self._methods |= service.__mapping__()  # type: ignore[attr-defined]

    async def connect(self) -> None:
        """Nothing: whoever is asked is here."""

    def request(  # type: ignore[override]  # gives our stream
        self,
        name: str,
        cardinality: Cardinality,
        request_type: type[Any],
        reply_type: type[Any],
        *,
        timeout: float | None = None,
        deadline: Deadline | None = None,
        metadata: MetadataLike | None = None,
    ) -> _LocalCall:
        """A unary call, to be entered with `async with`; see `Channel.request`."""
        expires = expiry(timeout, deadline)
        return _LocalCall(name, self._methods.get(name), expires)


class _LocalCall:
    """Both ends of one unary call: the stub's stream, and the handler's."""

    def __init__(self, name: str, method: Handler | None, expires: float) -> None:
        self._name = name
        self._method = method
        self._expires = expires
        self._message: Any = None
        self._answer: _Answer | None = None

    async def __aenter__(self) -> _LocalCall:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is left open."""

    async def send_message(self, message: Any, *, end: bool = False) -> None:
        """Take the request."""
        self._message = message

    async def recv_message(self) -> Any:
        """Have the handler answer.

        Raises:
          GRPCError: as the handler raises it; UNIMPLEMENTED when there is none,
            DEADLINE_EXCEEDED, and INTERNAL for anything else that it raises.
        """
        if self._method is None:
            raise GRPCError(Status.UNIMPLEMENTED, f"there is no method {self._name}")
        answer = _Answer(self._message)
        with trio.CancelScope(deadline=self._expires) as scope:
            try:
                await self._method.func(answer)
            except GRPCError:
                raise
            except Exception as error:
                log.exception("%s failed", self._name)
                raise GRPCError(Status.INTERNAL, "internal error") from error
        if scope.cancelled_caught:
            raise GRPCError(Status.DEADLINE_EXCEEDED, "the deadline has passed")
        return answer.message


class _Answer:
    """The stream that a generated unary handler gets."""

    def __init__(self, request: Any) -> None:
        self.message: Any = None
        self._request = request

    async def recv_message(self) -> Any:
        return self._request

    async def send_message(self, message: Any) -> None:
        self.message = message
