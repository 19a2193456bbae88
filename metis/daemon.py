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

import importlib
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from metis.clock import Clock, SystemClock
from metis.cni import spool
from metis.config import DaemonConfig
from metis.engine import Engine
from metis.errors import MetisError, StoreDamaged, sole_error
from metis.rpc.transport import Transport, UnixTransport
from metis.store.store import Store, open_store

if TYPE_CHECKING:
    from betterproto2.grpclib import ServiceBase

    from metis.health import HealthService
    from metis.reclaim import Reclaimer
    from metis.store.rebuilding import Claim

log = logging.getLogger("metis.daemon")

SERVICES = (
    "adaptiveipam.v1.AdaptiveIpam",
    "admin.v1.Admin",
    "metis.v1.Node",
    "metis.v1.Plugin",
)
"""Full names of the services whose health can be asked for."""

BY_HAND_INTERVAL = 60.0
"""Least seconds between two strikes where the daemon makes no rounds of its own and
all come by `metis reclaim`."""


ANSWERING = (
    "metis.cni.node",
    "metis.evidence",
    "metis.health",
    "metis.node_service",
    "metis.plugin_service",
    "metis.reclaim",
    "metis.rpc.local",
    "metis.rpc.server",
    "metis.service",
)
"""What answers calls, and all that it takes of gRPC and HTTP/2: half of what a daemon
imports. Nobody needs it before the database is open."""

HEALINGS_IN_A_ROW = 5
"""How often a database that is damaged while it is served is opened anew before the
daemon gives up: what breaks it is still there."""

IN_A_ROW_SECONDS = 600.0
"""Seconds without damage after which the next one is the first again."""

FIRST_PAUSE = 0.1
"""Seconds before a database is opened anew, doubled each time in a row."""


@dataclass(slots=True)
class Daemon:
    """A daemon that serves; what `nursery.start(metis.serve, config)` returns.

    When the database was damaged and is made anew, so is everything over it: ask for
    these each time they are needed.

    Attributes:
      engine: the rules, for a program that calls them without gRPC.
      store: what is known, for one that only looks.
      addresses: where the transport listens, as it spells it; for TCP with
        port 0 this tells the port.
    """

    engine: Engine
    store: Store
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
      StoreDamaged: it was damaged again and again while it was served.
      TransportError: the address cannot be listened on.
      AddressInUse: another daemon serves there.
    """
    place = transport or UnixTransport(
        config.socket_path, allowed_uids=config.allow_uids
    )
    try:
        # First, so that a daemon that is not to be opens nobody's database.
        with place.claim():
            loaded = trio.Event()
            async with trio.open_nursery() as beside:
                beside.start_soon(_load, config, loaded)
                announcement = _Announcement(task_status)
                clock = clock or SystemClock()
                await _serve_on(config, place, clock, announcement, loaded)
    except BaseExceptionGroup as group:
        # The nurseries below wrap what this function promises to raise.
        sole = sole_error(group)
        if isinstance(sole, MetisError):
            raise sole from None
        raise


async def _load(config: DaemonConfig, loaded: trio.Event) -> None:
    """Import what answers calls, in a thread, while the database is looked through.

    Both take a tenth of a second, and SQLite leaves the interpreter to others.
    """
    names = ANSWERING + (("metis.cri",) if config.cri_socket else ())
    missing = [name for name in names if name not in sys.modules]
    if missing:
        await trio.to_thread.run_sync(
            lambda: [importlib.import_module(name) for name in missing]
        )
    loaded.set()


@dataclass(frozen=True, slots=True)
class Node:
    """The addresses of a node, and the services over them.

    Attributes:
      store: what is known.
      engine: the rules.
      reclaimer: who looks for owners that are gone; None in direct mode.
      health: what is told about both.
      services: all of it as gRPC serves it.
    """

    store: Store
    engine: Engine
    reclaimer: Reclaimer | None
    health: HealthService
    services: Sequence[ServiceBase]


@asynccontextmanager
async def open_node(
    config: DaemonConfig,
    clock: Clock,
    *,
    thorough: bool = False,
    socket_path: str = "",
    healings: int = 0,
    reclaims: bool = False,
    patience: float | None = None,
    loaded: trio.Event | None = None,
) -> AsyncIterator[Node]:
    """Open a node's database, with everything but a place to listen.

    The daemon serves it, and a plugin without a daemon asks it in its own process.

    Args:
      config: where the database is and the times that govern addresses.
      clock: where raw time comes from.
      thorough: whether the whole database is looked through for damage first.
      socket_path: where it is served; empty for nowhere.
      healings: how often the database was healed before.
      reclaims: whether owners that are gone are looked for, which is the daemon's.
      patience: how long to wait for others who open the database, in seconds.
      loaded: set when somebody else has imported what answers calls; None for nobody.

    Raises:
      StoreError: as `metis.store.store.open_store`.
    """
    async with open_store(
        config.db_path,
        clock=clock,
        release_cooldown=config.release_cooldown,
        synchronous=config.synchronous,
        thorough=thorough,
        evidence=partial(_evidence, config, socket_path),
        healings=healings,
        patience=patience,
    ) as store:
        if loaded is not None:
            await loaded.wait()
        # Here, because it takes as long to import as the database to look through.
        from metis.health import HealthService
        from metis.node_service import NodeService
        from metis.service import AdaptiveIpamService, AdminService

        engine = Engine(store)
        reclaimer = _reclaimer(config, engine, store) if reclaims else None
        health = HealthService(SERVICES)
        services = [
            AdaptiveIpamService(engine),
            AdminService(store),
            NodeService(engine, store, reclaimer),
            health,
        ]
        yield Node(store, engine, reclaimer, health, services)


def _evidence(config: DaemonConfig, socket_path: str) -> Sequence[Claim]:
    """Who must have an address, by what the runtime keeps; when records are lost."""
    # Here, because a plugin in direct mode comes by this module, and hardly ever here.
    from metis.cni import cache

    return cache.claims(config.cni_cache_dir, config.db_path, socket_path)


def _reclaimer(config: DaemonConfig, engine: Engine, store: Store) -> Reclaimer:
    """Who looks for owners that are gone; nothing runs yet."""
    # Here, because a plugin in direct mode comes by this module, too.
    from metis.evidence import Lookout
    from metis.reclaim import Reclaimer, Rules

    rules = Rules(
        interval=config.reclaim_interval or BY_HAND_INTERVAL,
        grace=config.reclaim_grace,
        limit=config.reclaim_limit,
    )
    runtime = UnixTransport(config.cri_socket) if config.cri_socket else None
    lookout = Lookout(store.clock.now_ms, store.boot_id, runtime)
    return Reclaimer(engine, store, rules, lookout.look)


def _plugin_service(config: DaemonConfig, clock: Clock, node: Node) -> ServiceBase:
    """The service that carries out calls of the plugin, over all the others."""
    # Here, because a plugin in direct mode comes by this module, too.
    from metis.plugin_service import PluginService
    from metis.rpc.local import LocalChannel

    channel = LocalChannel(node.services)
    return PluginService(channel, config.db_path, clock, node.store.boot_id)


class _Announcement:
    """Tells once that the daemon serves, and keeps what was told up to date."""

    def __init__(self, task_status: trio.TaskStatus[Daemon]) -> None:
        self.healings = 0  # of the database so far
        self._task_status = task_status
        self._daemon: Daemon | None = None

    def serving(self, node: Node, addresses: Sequence[str]) -> None:
        """Calls are accepted, for the first time or again."""
        log.info("serving", extra={"address": ", ".join(addresses)})
        if self._daemon is None:
            self._daemon = Daemon(node.engine, node.store, addresses)
            self._task_status.started(self._daemon)
        self._daemon.engine = node.engine
        self._daemon.store = node.store
        self._daemon.addresses = addresses


async def _serve_on(
    config: DaemonConfig,
    transport: Transport,
    clock: Clock,
    announcement: _Announcement,
    loaded: trio.Event,
) -> None:
    """Serve; open the database anew, which heals it, when it is found damaged."""
    in_a_row = 0
    while True:
        begun = trio.current_time()
        try:
            await _serve(config, transport, clock, announcement, loaded)
        except BaseExceptionGroup as group:
            # Of the nurseries: found while serving. What cannot be opened is alone.
            damage = sole_error(group)
            if not isinstance(damage, StoreDamaged):
                raise
        if trio.current_time() - begun > IN_A_ROW_SECONDS:
            in_a_row = 0
        in_a_row += 1
        if in_a_row > HEALINGS_IN_A_ROW:
            raise damage
        log.error("the database is damaged and is opened anew: %s", damage)
        await trio.sleep(FIRST_PAUSE * 2 ** (in_a_row - 1))


async def _serve(
    config: DaemonConfig,
    transport: Transport,
    clock: Clock,
    announcement: _Announcement,
    loaded: trio.Event,
) -> None:
    async with (
        open_node(
            config,
            clock,
            thorough=True,
            socket_path=config.socket_path,
            healings=announcement.healings,
            reclaims=True,
            loaded=loaded,
        ) as node,
        trio.open_nursery() as background,
    ):
        announcement.healings = node.store.statistics().healings
        background.start_soon(node.store.damage.wait)
        await background.start(
            spool.keep_applying, config.db_path, node.engine, node.store
        )
        background.start_soon(_end_watches, node.health)
        if node.reclaimer is not None and config.reclaim_interval:
            background.start_soon(node.reclaimer.run)
        from metis.rpc.server import serve as serve_rpc  # as in `open_node`

        services = [*node.services, _plugin_service(config, clock, node)]
        addresses = await background.start(
            partial(serve_rpc, services, transport, grace=config.shutdown_grace)
        )
        announcement.serving(node, addresses)


async def _end_watches(health: HealthService) -> None:
    """When the daemon is to stop, tell those who watch its health, and let them go."""
    try:
        await trio.sleep_forever()
    finally:
        health.stop()
