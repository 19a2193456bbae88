"""`metis.serve` on a database that is damaged, before it serves or while it does."""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest
import trio
from grpclib import GRPCError, Status

import metis
from metis import daemon as daemon_module
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    CheckPodIpRequest,
    DeallocatePodIpRequest,
    IpConfig,
)
from metis.api.admin.v1 import AdminStub, ListIpAddressesRequest
from metis.model import Owner
from metis.store import healing, sql
from metis.store.writer import Damage


async def ask(
    transport: metis.UnixTransport, container_id: str, seconds: float = 10
) -> str:
    """One ADD; its address."""
    message = AllocatePodIpRequest(
        ipv4_config=IpConfig(
            interface_name="eth0",
            container_id=container_id,
            initial_pod_cidr="10.1.0.0/24",
        )
    )
    async with metis.open_channel(transport) as channel:
        answer = await AdaptiveIpamStub(channel).allocate_pod_ip(
            message, timeout=seconds
        )
    assert answer.ipv4 is not None
    return answer.ipv4.ip_address


class Serving(logging.Handler):
    """Counts how often a daemon has said that it serves."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0
        self.again = trio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "serving":
            self.times += 1
            if self.times > 1:
                self.again.set()


@pytest.fixture
def serving() -> Iterator[Serving]:
    handler = Serving()
    logger = logging.getLogger("metis.daemon")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


BREAK = """
import apsw, sys
connection = apsw.Connection(sys.argv[1])
connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
connection.close()
with open(sys.argv[1], "r+b") as file:
    for page in map(int, sys.argv[2:]):
        file.seek((page - 1) * 4096)
        file.write(bytes(4096))
"""


async def break_pages(path: str, *pages: int) -> None:
    """Blank pages of a database, from outside: it may be open here."""
    await trio.run_process(
        [sys.executable, "-c", BREAK, path, *map(str, pages)], capture_stdout=True
    )


def exists(path: str) -> bool:
    return os.path.exists(path)


def config_in(tmp_path: Path, **fields: Any) -> metis.DaemonConfig:
    return metis.DaemonConfig(
        db_path=str(tmp_path / "db.sqlite"),
        socket_path=str(tmp_path / "s"),
        cni_cache_dir="",
        shutdown_grace=0.1,
        **fields,
    )


@pytest.mark.damages_database("what was damaged is kept beside it")
async def test_a_database_that_is_damaged_while_it_is_served_is_healed_and_served(
    tmp_path: Path, serving: Serving
) -> None:
    config = config_in(tmp_path)
    transport = metis.UnixTransport(config.socket_path)
    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(metis.serve, config)
        first = daemon.engine
        given = {name: await ask(transport, name) for name in map(str, range(40))}
        assert daemon.store.statistics().healings == 0
        await break_pages(config.db_path, *range(8, 14))
        async with metis.open_channel(transport) as channel:
            with pytest.raises(GRPCError) as caught:
                await AdminStub(channel).list_ip_addresses(ListIpAddressesRequest())
        assert caught.value.status is Status.UNAVAILABLE
        await serving.again.wait()
        assert {name: await ask(transport, name) for name in given} == given
        with pytest.raises(GRPCError, match="the next is free in"):
            await ask(transport, "another", seconds=0.2)
        assert daemon.engine is not first
        assert daemon.store.statistics().healings == 1
        nursery.cancel_scope.cancel()
    assert len(healing.damaged_copies(config.db_path)) == 1


async def test_a_database_that_is_removed_while_it_is_served_is_put_back_and_served(
    tmp_path: Path, serving: Serving
) -> None:
    config = config_in(tmp_path)
    transport = metis.UnixTransport(config.socket_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(metis.serve, config)
        given = {name: await ask(transport, name) for name in map(str, range(5))}
        for suffix in ("", "-wal", "-shm"):
            os.unlink(config.db_path + suffix)  # as somebody else would
        with pytest.raises(GRPCError) as caught:
            await ask(transport, "another")
        assert caught.value.status is Status.UNAVAILABLE
        await serving.again.wait()
        assert {name: await ask(transport, name) for name in given} == given
        assert await ask(transport, "another") not in given.values()
        nursery.cancel_scope.cancel()


async def test_an_error_that_no_look_at_the_file_confirms_is_survived(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path)
    transport = metis.UnixTransport(config.socket_path)
    real = sql.allocate
    left = 1

    def allocate(*arguments: Any, **keywords: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise apsw.CorruptError("database disk image is malformed")
        return real(*arguments, **keywords)

    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(metis.serve, config)
        monkeypatch.setattr(sql, "allocate", allocate)
        with pytest.raises(GRPCError) as caught:
            await ask(transport, "c1")
        assert caught.value.status is Status.UNAVAILABLE
        await serving.again.wait()
        assert await ask(transport, "c1") == "10.1.0.2"
        assert daemon.store.statistics().healings == 0
        nursery.cancel_scope.cancel()
    assert healing.damaged_copies(config.db_path) == []


async def test_damage_that_comes_again_and_again_ends_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "FIRST_PAUSE", 0.001)
    config = config_in(tmp_path)
    served = 0

    async def fail(self: Damage) -> None:
        nonlocal served
        served += 1
        raise metis.StoreDamaged("broken again")

    monkeypatch.setattr(Damage, "wait", fail)
    with pytest.raises(metis.StoreDamaged, match="broken again"):
        await metis.serve(config)
    assert served == daemon_module.HEALINGS_IN_A_ROW + 1


@pytest.mark.damages_database("what was damaged is kept beside it")
async def test_nobody_is_served_before_the_database_is_whole(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DEL that found nothing yet would succeed, and its address come back."""
    config = config_in(tmp_path)
    transport = metis.UnixTransport(config.socket_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(metis.serve, config)
        given = await ask(transport, "c1")
        nursery.cancel_scope.cancel()
    await break_pages(config.db_path, 1)
    healing_now, go_on = threading.Event(), threading.Event()
    real = healing.heal

    def heal(*arguments: Any, **keywords: Any) -> Any:
        healing_now.set()
        assert go_on.wait(120)
        return real(*arguments, **keywords)

    monkeypatch.setattr(healing, "heal", heal)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(metis.serve, config)
        await trio.to_thread.run_sync(healing_now.wait, 120)
        assert not exists(config.socket_path)
        with pytest.raises((GRPCError, metis.TransportError)):
            await ask(transport, "c1")
        go_on.set()
        await serving.again.wait()
        async with metis.open_channel(transport) as channel:
            stub = AdaptiveIpamStub(channel)
            answer = await stub.check_pod_ip(
                CheckPodIpRequest(container_id="c1", interface_name="eth0")
            )
            assert [one.ip_address for one in answer.held] == [given]
            message = DeallocatePodIpRequest(container_id="c1", interface_name="eth0")
            await stub.deallocate_pod_ip(message)
            with pytest.raises(GRPCError) as caught:
                await stub.check_pod_ip(
                    CheckPodIpRequest(container_id="c1", interface_name="eth0")
                )
            assert caught.value.status is Status.NOT_FOUND
        nursery.cancel_scope.cancel()


@pytest.mark.damages_database("what was damaged is kept beside it")
async def test_the_runtime_s_cache_brings_back_whom_the_database_forgot(
    tmp_path: Path,
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    section = {"type": "metis", "daemonSocket": str(tmp_path / "s")}
    cached = {
        "kind": "cniCacheV1",
        "containerId": "c9",
        "ifName": "eth0",
        "config": base64.b64encode(json.dumps({"ipam": section}).encode()).decode(),
        "result": {"ips": [{"address": "10.1.0.7/24"}]},
    }
    (results / "podnet-c9-eth0").write_text(json.dumps(cached))
    (tmp_path / "db.sqlite").write_bytes(b"")
    config = replace(config_in(tmp_path), cni_cache_dir=str(results))
    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(metis.serve, config)
        [held] = await daemon.store.held(Owner("default", "c9", "eth0"))
        nursery.cancel_scope.cancel()
    assert held.address == "10.1.0.7"
    assert held.cidr == "10.1.0.0/24"
