"""containerd: pods through the CRI, on ptp links with metis."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.ipam import Config, conflist, metis_ipam
from tests.e2e.ledger import Holding
from tests.e2e.requirements import require
from tests.e2e.runtimes.containerd import DEFAULT_HANDLER, Containerd, Pod

SUBNET, SUBNET6 = "10.103.0.0/24", "fd00:103::/64"
DUAL_HANDLER = "dual"

MANY = 30
"""Pods that are started at once."""


@pytest.fixture
def containerd(
    daemon: Daemon, plugin_directory: Path, image: Path, tmp_path: Path
) -> Iterator[Containerd]:
    """containerd whose pods get IPv4, and IPv6 too by the handler "dual".

    What it logged is shown when the test fails.
    """
    require("containerd", "containerd", "ctr")
    require("runc", "runc")

    def network(name: str, *subnets: str) -> Config:
        ipam = metis_ipam(daemon, tmp_path / "cni.log", *subnets, network="pods")
        return conflist(name, "0.4.0", {"type": "ptp", "mtu": 1400, "ipam": ipam})

    containerd = Containerd(
        tmp_path / "containerd",
        plugin_directory,
        {
            DEFAULT_HANDLER: network("single", SUBNET),
            DUAL_HANDLER: network("dual", SUBNET, SUBNET6),
        },
    )
    try:
        containerd.start(image)
        yield containerd
    finally:
        containerd.close()
        print(containerd.log_path.read_text())


def holdings(addresses: dict[Pod, list[str]]) -> set[Holding]:
    return {
        Holding("pods", pod.sandbox_id, "eth0", address)
        for pod, its in addresses.items()
        for address in its
    }


def test_three_pods_get_addresses_reach_each_other_and_give_them_back(
    daemon: Daemon, containerd: Containerd
) -> None:
    pods = [
        containerd.run("one"),
        containerd.run("two"),
        containerd.run("three", DUAL_HANDLER),
    ]

    addresses = {pod: containerd.addresses(pod) for pod in pods}
    assert [addresses[pod] for pod in pods] == [
        ["10.103.0.2"],
        ["10.103.0.3"],
        ["10.103.0.4", "fd00:103::2"],
    ]
    held = ledger.read(daemon)
    assert held.holdings == holdings(addresses)
    assert {(row["pod_name"], row["pod_namespace"]) for row in held.owned} == {
        ("one", "e2e"),
        ("two", "e2e"),
        ("three", "e2e"),
    }
    for pod in pods:
        container = containerd.start_container(pod)
        for peer in pods:
            containerd.execute(container, "ping", "-c1", "-w60", addresses[peer][0])

    # The gateway of a pod is the host's end of its link.
    shown = containerd.execute(container, "ip", "-6", "route")
    assert "default via fd00:103::1" in shown
    containerd.execute(container, "ping", "-c1", "-w60", "fd00:103::1")

    for pod in pods:
        containerd.stop(pod.sandbox_id)
    stopped = ledger.read(daemon)
    assert not stopped.owned
    assert stopped.cooling_addresses == {
        address for its in addresses.values() for address in its
    }

    # Removing sends a DEL for what is gone already, without its namespace.
    for pod in pods:
        containerd.remove(pod.sandbox_id)
    assert ledger.read(daemon) == stopped


def test_many_pods_at_once_get_an_address_each(
    daemon: Daemon, containerd: Containerd
) -> None:
    with ThreadPoolExecutor(MANY) as threads:
        pods = list(threads.map(containerd.run, (f"pod{n}" for n in range(MANY))))
        addresses = {pod: containerd.addresses(pod) for pod in pods}
        held = ledger.read(daemon)
        for end in (containerd.stop, containerd.remove):
            list(threads.map(end, (pod.sandbox_id for pod in pods)))

    assert all(len(its) == 1 for its in addresses.values())
    given = {its[0] for its in addresses.values()}
    assert len(given) == MANY
    assert all(ip_address(address) in ip_network(SUBNET) for address in given)
    assert held.holdings == holdings(addresses)
    after = ledger.read(daemon)
    assert not after.owned
    assert after.cooling_addresses == given
