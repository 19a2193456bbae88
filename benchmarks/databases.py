"""Databases of a given fill, made once a run by the engine itself and then copied."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import trio

import metis
from benchmarks.grpc_load import INTERFACE
from metis.engine import Engine
from metis.model import CIDRBlock, Family, Owner, Pod, Wanted

COOLDOWN_SECONDS = 24 * 3600
"""Cooldown of a prepared database: none ends while a benchmark runs."""

POOL = "10.0.0.0/15"
"""131,072 addresses: room for all that is filled in, and for what is measured."""

NETWORK = "default"

NAME = "metis.sqlite"

TASKS = 64
"""Calls under way while a database is filled: what one commit takes."""


async def allocate_many(
    engine: Engine, tag: str, count: int, cidr: str, *, tasks: int = TASKS
) -> None:
    """Allocate for owners "TAG-0" to "TAG-count", `tasks` of them at a time."""
    wanted = [Wanted(Family.IPV4, CIDRBlock.parse(cidr))]
    numbers = iter(range(count))

    async def work() -> None:
        for i in numbers:
            owner = Owner(NETWORK, f"{tag}-{i}", INTERFACE)
            await engine.allocate(owner, wanted, Pod(f"p-{tag}-{i}", "ns"))

    async with trio.open_nursery() as nursery:
        for _ in range(tasks):
            nursery.start_soon(work)


async def _release_many(engine: Engine, tag: str, count: int) -> None:
    numbers = iter(range(count))

    async def work() -> None:
        for i in numbers:
            await engine.deallocate(Owner(NETWORK, f"{tag}-{i}", INTERFACE))

    async with trio.open_nursery() as nursery:
        for _ in range(TASKS):
            nursery.start_soon(work)


async def _fill(path: Path, cooling: int, held: int) -> None:
    """Serve from a file just long enough to fill it."""
    config = metis.DaemonConfig(
        db_path=str(path), release_cooldown=COOLDOWN_SECONDS, cni_cache_dir=""
    )
    transport = metis.MemoryTransport()
    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(partial(metis.serve, config, transport=transport))
        # In turns: the rows of those that cool are then all there are below.
        tag = f"fill-{cooling}-{held}"
        await allocate_many(daemon.engine, f"{tag}-cooling", cooling, POOL)
        await _release_many(daemon.engine, f"{tag}-cooling", cooling)
        await allocate_many(daemon.engine, f"{tag}-held", max(held, 1), POOL)
        nursery.cancel_scope.cancel()


def prepare(directory: Path, cooling: int, held: int = 0) -> Path:
    """Make a directory with a database of a network that has been in use.

    Args:
      directory: made; holds the file as a daemon expects it.
      cooling: addresses in cooldown.
      held: addresses that pods have; one at least, so that the block is there.
    """
    directory.mkdir(mode=0o700)
    trio.run(_fill, directory / NAME, cooling, held)
    return directory


def copy(prepared: Path, directory: Path) -> None:
    """Copy the files of a prepared database, which nobody has open, to a directory."""
    for file in prepared.glob(f"{NAME}*"):
        shutil.copy(file, directory / file.name)
