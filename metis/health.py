"""`grpc.health.v1.Health`, Check and Watch, as every health probe speaks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import trio
from grpclib import GRPCError, Status

from metis.api.grpc.health.v1 import (
    HealthBase,
    HealthCheckRequest,
    HealthCheckResponse,
    HealthCheckResponseServingStatus,
)

SERVING = HealthCheckResponseServingStatus.SERVING
NOT_SERVING = HealthCheckResponseServingStatus.NOT_SERVING
SERVICE_UNKNOWN = HealthCheckResponseServingStatus.SERVICE_UNKNOWN


class HealthService(HealthBase):
    """The health of a server and of each service that it has.

    All services share one fate here: they are served by one process over one
    database. So there is a single status, and the names only tell which
    services are known.
    """

    def __init__(self, services: Iterable[str]) -> None:
        """Start as SERVING.

        Args:
          services: full names, "adaptiveipam.v1.AdaptiveIpam"; the empty name,
            the server as a whole, is always known.
        """
        self._services = frozenset(services) | {""}
        self._status = SERVING
        self._changed = trio.Event()
        self._stopping = False

    def set_status(self, status: HealthCheckResponseServingStatus) -> None:
        """Change the status and wake every Watch."""
        self._status = status
        self._changed.set()
        self._changed = trio.Event()

    def stop(self) -> None:
        """Say NOT_SERVING to every Watch and end it, so that a stop need not wait."""
        self._stopping = True
        self.set_status(NOT_SERVING)

    async def check(self, message: HealthCheckRequest) -> HealthCheckResponse:
        """Answer with the status at this moment.

        Raises:
          GRPCError: NOT_FOUND for a service that this server does not have.
        """
        if message.service not in self._services:
            raise GRPCError(
                Status.NOT_FOUND,
                f"unknown service {message.service!r}: this server has "
                + ", ".join(sorted(filter(None, self._services))),
            )
        return HealthCheckResponse(status=self._status)

    async def watch(
        self, message: HealthCheckRequest
    ) -> AsyncIterator[HealthCheckResponse]:
        """Answer with the status now and after every change, until the server stops.

        An unknown service is SERVICE_UNKNOWN and stays so (health.proto).
        """
        known = message.service in self._services
        last = None
        while True:
            changed = self._changed
            status = self._status if known else SERVICE_UNKNOWN
            if status is not last:
                last = status
                yield HealthCheckResponse(status=status)
            if self._stopping:
                return
            await changed.wait()
