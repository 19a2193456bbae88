"""`metis.serve` inside a foreign Trio program."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import apsw
import pytest
import trio
from grpclib import GRPCError, Status

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    CheckPodIpRequest,
    IpConfig,
)
from metis.model import CIDRBlock, Family, Owner, Pod, Wanted


def request(container_id: str, cidr: str = "10.1.0.0/24") -> AllocatePodIpRequest:
    return AllocatePodIpRequest(
        ipv4_config=IpConfig(
            interface_name="eth0", container_id=container_id, initial_pod_cidr=cidr
        )
    )


async def ask(transport: metis.UnixTransport, container_id: str) -> str:
    async with metis.open_channel(transport) as channel:
        answer = await AdaptiveIpamStub(channel).allocate_pod_ip(request(container_id))
    assert answer.ipv4 is not None
    return answer.ipv4.ip_address


async def test_it_runs_beside_other_tasks_twice_in_one_process(tmp_path: Path) -> None:
    ticks = 0

    async def other_work() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await trio.lowlevel.checkpoint()

    answers = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other_work)
        for name in ("a", "b"):
            directory = tmp_path / name
            config = metis.DaemonConfig(
                db_path=str(directory / "db.sqlite"), socket_path=str(directory / "s")
            )
            await nursery.start(metis.serve, config)
            transport = metis.UnixTransport(config.socket_path)
            answers.append(await ask(transport, "c1"))
            answers.append(await ask(transport, "c2"))
        nursery.cancel_scope.cancel()
    assert answers == ["10.1.0.2", "10.1.0.3"] * 2
    assert ticks


@pytest.mark.parametrize("kind", ["unix", "tcp", "memory"])
async def test_it_serves_over_each_transport(tmp_path: Path, kind: str) -> None:
    transport: metis.UnixTransport | metis.TcpTransport | metis.MemoryTransport
    match kind:
        case "unix":
            transport = metis.UnixTransport(str(tmp_path / "s"))
        case "tcp":
            transport = metis.TcpTransport(port=0)
        case _:
            transport = metis.MemoryTransport()
    config = metis.DaemonConfig(db_path=str(tmp_path / "db.sqlite"))
    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(partial(metis.serve, config, transport=transport))
        client = transport
        if kind == "tcp":
            port = int(daemon.addresses[0].rpartition(":")[2])
            client = metis.TcpTransport(port=port)
        async with metis.open_channel(client) as channel:
            answer = await AdaptiveIpamStub(channel).allocate_pod_ip(request("c1"))
        nursery.cancel_scope.cancel()
    assert answer.ipv4 is not None
    assert answer.ipv4.ip_address == "10.1.0.2"


async def test_the_engine_is_there_for_a_program_that_needs_no_grpc(
    tmp_path: Path,
) -> None:
    config = metis.DaemonConfig(db_path=str(tmp_path / "db.sqlite"))
    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(
            partial(metis.serve, config, transport=metis.MemoryTransport())
        )
        [allocation] = await daemon.engine.allocate(
            Owner("default", "c1", "eth0"),
            [Wanted(Family.IPV4, CIDRBlock.parse("10.1.0.0/24"))],
            Pod("pod", "ns"),
        )
        nursery.cancel_scope.cancel()
    assert allocation.address == "10.1.0.2"


async def test_cancelled_from_outside_it_leaves_no_socket_task_or_lock(
    tmp_path: Path,
) -> None:
    socket = tmp_path / "s"
    config = metis.DaemonConfig(
        db_path=str(tmp_path / "db.sqlite"), socket_path=str(socket)
    )
    for container_id in ("c1", "c2"):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(metis.serve, config)
                await ask(metis.UnixTransport(config.socket_path), container_id)
                scope.cancel()
        assert scope.cancelled_caught
        assert not socket.exists()
    assert not [t for t in threading.enumerate() if "metis" in t.name]


async def test_what_was_answered_is_there_after_a_restart(tmp_path: Path) -> None:
    config = metis.DaemonConfig(db_path=str(tmp_path / "db.sqlite"))
    transport = metis.MemoryTransport()
    for expected in ("10.1.0.2", "10.1.0.3"):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(metis.serve, config, transport=transport))
            async with metis.open_channel(transport) as channel:
                stub = AdaptiveIpamStub(channel)
                answer = await stub.allocate_pod_ip(request(expected))
                assert answer.ipv4 is not None
                assert answer.ipv4.ip_address == expected
                await stub.check_pod_ip(
                    CheckPodIpRequest(container_id="10.1.0.2", interface_name="eth0")
                )
            nursery.cancel_scope.cancel()


@pytest.mark.damages_database("a database of a version to come")
async def test_a_failure_to_start_is_itself_and_not_a_group(tmp_path: Path) -> None:
    newer = tmp_path / "file"
    connection = apsw.Connection(str(newer))
    connection.pragma("user_version", 7)
    connection.close()
    config = metis.DaemonConfig(
        db_path=str(newer), socket_path=str(tmp_path / "socket")
    )
    with pytest.raises(metis.StoreIncompatible, match=str(newer)):
        await metis.serve(config)

    occupied = tmp_path / "occupied"
    occupied.write_text("a plain file")
    config = metis.DaemonConfig(
        db_path=str(tmp_path / "db.sqlite"), socket_path=str(occupied)
    )
    with pytest.raises(metis.TransportError, match=str(occupied)):
        await metis.serve(config)
    assert occupied.read_text() == "a plain file"


async def test_a_second_daemon_refuses_a_live_socket(tmp_path: Path) -> None:
    config = metis.DaemonConfig(
        db_path=str(tmp_path / "db.sqlite"), socket_path=str(tmp_path / "s")
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(metis.serve, config)
        with pytest.raises(metis.AddressInUse, match=config.socket_path):
            await metis.serve(config)
        assert await ask(metis.UnixTransport(config.socket_path), "c1") == "10.1.0.2"
        nursery.cancel_scope.cancel()


async def test_a_call_after_the_end_is_unavailable(tmp_path: Path) -> None:
    transport = metis.UnixTransport(str(tmp_path / "gone"))
    with pytest.raises((GRPCError, metis.TransportError)) as caught:
        await ask(transport, "c1")
    if isinstance(caught.value, GRPCError):
        assert caught.value.status is Status.UNAVAILABLE
    assert str(tmp_path / "gone") in str(caught.value)
