"""`metis history` against a daemon in another process."""

from __future__ import annotations

import json

import trio

import metis
from metis.api.adaptiveipam.v1 import (
    AdaptiveIpamStub,
    AllocatePodIpRequest,
    DeallocatePodIpRequest,
    IpConfig,
)
from tests.cli.conftest import DaemonProcess, StartDaemon, run_metis


def add(daemon: DaemonProcess, container: str, pod: str) -> str:
    async def run() -> str:
        transport = metis.UnixTransport(str(daemon.socket_path))
        async with metis.open_channel(transport) as channel:
            config = IpConfig(
                interface_name="eth0",
                container_id=container,
                initial_pod_cidr="10.9.0.0/29",
            )
            answer = await AdaptiveIpamStub(channel).allocate_pod_ip(
                AllocatePodIpRequest(
                    ipv4_config=config, pod_name=pod, pod_namespace="shop"
                )
            )
        assert answer.ipv4 is not None
        return answer.ipv4.ip_address

    return trio.run(run)


def delete(daemon: DaemonProcess, container: str) -> None:
    async def run() -> None:
        transport = metis.UnixTransport(str(daemon.socket_path))
        async with metis.open_channel(transport) as channel:
            await AdaptiveIpamStub(channel).deallocate_pod_ip(
                DeallocatePodIpRequest(container_id=container, interface_name="eth0")
            )

    trio.run(run)


def history(daemon: DaemonProcess, *arguments: str) -> list[dict[str, str]]:
    done = run_metis(
        "history", "-o", "json", "--socket-path", str(daemon.socket_path), *arguments
    )
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


def test_who_had_an_address_is_told_by_address_time_pod_and_container(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon("--release-cooldown", "0")
    address = add(daemon, "c1", "web")
    (first,) = history(daemon, "--container", "c1")
    during = first["given_at"].replace("Z", "+00:00")  # by the clock of stored times
    delete(daemon, "c1")
    for number in range(2, 7):  # the last gets the address that was released
        held = add(daemon, f"c{number}", "api")
    assert held == address

    now, before = history(daemon, "--ip", address)
    assert (now["container_id"], now["ended_at"], now["reason"]) == (
        *("c6", "NULL", "NULL"),
    )
    assert (before["container_id"], before["reason"]) == ("c1", "deleted")
    assert first["given_at"] == before["given_at"] < before["ended_at"]
    assert history(daemon, "--ip", address, "--at", during) == [before]
    assert history(daemon, "--pod", "shop/web") == [before]
    assert history(daemon, "--container", "c6") == [now]
    assert history(daemon, "--network", "other") == []

    people = run_metis("history", "--socket-path", str(daemon.socket_path)).stdout
    header, *rows = people.splitlines()
    assert header.split()[:3] == ["NETWORK", "ADDRESS", "CONTAINER_ID"]
    assert len(rows) == 6


def test_what_cannot_be_read_is_named_with_what_would_be_right(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon()
    path = ("--socket-path", str(daemon.socket_path))
    for arguments, word in (
        (("--at", "yesterday"), "2026-01-31T12:00:00Z"),
        (("--pod", "web"), "NAMESPACE/NAME"),
        (("--pod", "shop/web/0"), "NAMESPACE/NAME"),
        (("--pod", ""), "'--pod': it is empty"),
        (("--container", ""), "'--container': it is empty"),
        (("--ip", "10.0.0"), "10.0.0"),
        (("--at", "1960-01-01"), "before 1970"),
    ):
        done = run_metis("history", *arguments, *path)
        assert done.returncode != 0
        assert word in done.stderr
        assert "Traceback" not in done.stderr
