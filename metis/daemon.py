"""The daemon as one coroutine: the store outside, the server inside.

    store        writer and readers; drains last
      background   whatever looks at the store beside the calls
        server       connections, and the calls on them (`metis.rpc.server`)

Shutdown runs from the inside out and starts with a cancellation from outside:
the server stops accepting, tells its clients, gives calls in flight their
grace, and only then does the store drain and close. There are no signal
handlers, no global state and no logging set-up here; `metis daemon` adds them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio
from betterproto2.grpclib import ServiceBase

from metis.clock import Clock, SystemClock
from metis.cni import spool
from metis.config import DaemonConfig
from metis.engine import Engine
from metis.errors import MetisError, sole_error
from metis.health import HealthService
from metis.node_service import NodeService
from metis.rpc.server import serve as serve_rpc
from metis.rpc.transport import Transport, UnixTransport
from metis.service import AdaptiveIpamService, AdminService
from metis.store.store import Store, open_store

log = logging.getLogger("metis.daemon")

SERVICES = ("adaptiveipam.v1.AdaptiveIpam", "admin.v1.Admin", "metis.v1.Node")
"""Full names of the services whose health can be asked for."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon that serves; what `nursery.start(metis.serve, config)` returns.

    Attributes:
      engine: the rules, for a program that calls them without gRPC.
      addresses: where the transport listens, as it spells it; for TCP with
        port 0 this tells the port.
    """

    engine: Engine
    addresses: Sequence[str]


async def serve(
    config: DaemonConfig,
    *,
    transport: Transport | None = None,
    clock: Clock | None = None,
    task_status: trio.TaskStatus[Daemon] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve addresses until cancelled; `await nursery.start(serve, config)`.

    Args:
      config: where the database is and the times that govern addresses.
      transport: where to listen; by default the Unix socket of the config.
      clock: where raw time comes from; by default the kernel.
      task_status: gets the `Daemon` once calls are accepted, which is after
        the database is open and whole.

    Raises:
      StoreIncompatible: the file is not a database that this version may use.
      StoreUnavailable: the database cannot be opened for writing.
      TransportError: the address cannot be listened on.
      AddressInUse: another daemon serves there.
    """
    try:
        await _serve(
            config,
            transport or UnixTransport(config.socket_path),
            clock or SystemClock(),
            task_status,
        )
    except BaseExceptionGroup as group:
        # The nurseries below wrap what this function promises to raise.
        sole = sole_error(group)
        if isinstance(sole, MetisError):
            raise sole from None
        raise


@dataclass(frozen=True, slots=True)
class Node:
    """The addresses of a node, and the services over them.

    Attributes:
      store: what is known.
      engine: the rules.
      health: what is told about both.
      services: all of it as gRPC serves it.
    """

    store: Store
    engine: Engine
    health: HealthService
    services: Sequence[ServiceBase]


@asynccontextmanager
async def open_node(config: DaemonConfig, clock: Clock) -> AsyncIterator[Node]:
    """Open a node's database, with everything but a place to listen.

    The daemon serves it, and a plugin without a daemon asks it in its own process.

    Args:
      config: where the database is and the times that govern addresses.
      clock: where raw time comes from.

    Raises:
      StoreError: as `metis.store.store.open_store`.
    """
    async with open_store(
        config.db_path,
        clock=clock,
        release_cooldown=config.release_cooldown,
        synchronous=config.synchronous,
    ) as store:
        engine = Engine(store)
        health = HealthService(SERVICES)
        services = [
            AdaptiveIpamService(engine),
            AdminService(store),
            NodeService(engine),
            health,
        ]
        yield Node(store, engine, health, services)


async def _serve(
    config: DaemonConfig,
    transport: Transport,
    clock: Clock,
    task_status: trio.TaskStatus[Daemon],
) -> None:
    async with open_node(config, clock) as node, trio.open_nursery() as background:
        await background.start(
            spool.keep_applying, config.db_path, node.engine, node.store
        )
        background.start_soon(_end_watches, node.health)
        addresses = await background.start(
            partial(serve_rpc, node.services, transport, grace=config.shutdown_grace)
        )
        log.info("serving", extra={"address": ", ".join(addresses)})
        task_status.started(Daemon(node.engine, addresses))


async def _end_watches(health: HealthService) -> None:
    """When the daemon is to stop, tell those who watch its health, and let them go."""
    try:
        await trio.sleep_forever()
    finally:
        health.stop()
