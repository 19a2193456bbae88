"""Two networks of one node with the same addresses, told apart by runtime handler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.ipam import Config, conflist, metis_ipam
from tests.e2e.ledger import Holding
from tests.e2e.plugin import Plugin, delegate
from tests.e2e.requirements import require
from tests.e2e.runtimes.containerd import DEFAULT_HANDLER, Containerd, Pod

SUBNET = "10.109.0.0/24"
A, B = "a", "b"
HANDLERS = {A: DEFAULT_HANDLER, B: "other"}
"""The runtime handler of each network."""

FIRST, SECOND = "10.109.0.2", "10.109.0.3"


@dataclass(frozen=True)
class Node:
    """containerd, and the plugin as it calls it, on the two networks."""

    daemon: Daemon
    containerd: Containerd
    plugins: dict[str, Plugin]

    def run(self, name: str, network: str) -> Pod:
        return self.containerd.run(name, HANDLERS[network])

    def held(self) -> set[Holding]:
        return ledger.read(self.daemon).holdings


@pytest.fixture
def two_networks(
    daemon: Daemon, plugin_directory: Path, image: Path, tmp_path: Path
) -> Iterator[Node]:
    """A bridge for each network; what containerd logged is shown on failure."""
    require("containerd", "containerd", "ctr")
    require("runc", "runc")

    def ipam(network: str) -> Config:
        return metis_ipam(daemon, tmp_path / "cni.log", SUBNET, network=network)

    def bridge(network: str) -> Config:
        plugin = {"type": "bridge", "bridge": f"metis-{network}"}
        return conflist(network, "0.4.0", {**plugin, "ipam": ipam(network)})

    containerd = Containerd(
        tmp_path / "containerd",
        plugin_directory,
        {handler: bridge(network) for network, handler in HANDLERS.items()},
    )
    plugins = {
        # GC came with 1.1.0, which Debian's plugins do not speak yet.
        network: Plugin(plugin_directory / "metis", delegate(ipam(network), "1.1.0"))
        for network in HANDLERS
    }
    try:
        containerd.start(image)
        yield Node(daemon, containerd, plugins)
    finally:
        containerd.close()
        print(containerd.log_path.read_text())


def holding(network: str, pod: Pod, address: str) -> Holding:
    return Holding(network, pod.sandbox_id, "eth0", address)


def test_two_networks_have_the_same_addresses_and_nothing_else_in_common(
    two_networks: Node,
) -> None:
    containerd = two_networks.containerd
    pods = {
        (network, address): two_networks.run(f"{network}{number}", network)
        for network in HANDLERS
        for number, address in enumerate((FIRST, SECOND))
    }

    for (_, address), pod in pods.items():
        assert containerd.addresses(pod) == [address]
    assert two_networks.held() == {
        holding(network, pod, address) for (network, address), pod in pods.items()
    }
    # Whoever answers stands on the same bridge: each pod has one interface.
    for network in HANDLERS:
        container = containerd.start_container(pods[network, FIRST])
        containerd.execute(container, "ping", "-c1", "-w60", SECOND)

    containerd.stop(pods[A, FIRST].sandbox_id)

    del pods[A, FIRST]
    assert two_networks.held() == {
        holding(network, pod, address) for (network, address), pod in pods.items()
    }
    # On one network the address rests; nothing of that is seen on the other.
    assert containerd.addresses(two_networks.run("a-next", A)) == ["10.109.0.4"]
    assert containerd.addresses(two_networks.run("b-next", B)) == ["10.109.0.4"]


def test_gc_frees_what_is_not_listed_on_its_network_alone(two_networks: Node) -> None:
    containerd, plugins = two_networks.containerd, two_networks.plugins
    a1, a2 = two_networks.run("a1", A), two_networks.run("a2", A)
    b1, b2 = two_networks.run("b1", B), two_networks.run("b2", B)
    of_a = {holding(A, a1, FIRST), holding(A, a2, SECOND)}
    of_b = {holding(B, b1, FIRST), holding(B, b2, SECOND)}
    assert two_networks.held() == of_a | of_b

    def collect(network: str, *valid: Pod) -> None:
        listed = [{"containerID": pod.sandbox_id, "ifname": "eth0"} for pod in valid]
        keys = {"cni.dev/valid-attachments": listed}
        assert plugins[network].call("GC", "nobody", **keys) == {}

    # Without a list nothing is known, so nothing is freed.
    assert plugins[A].call("GC", "nobody") == {}
    assert two_networks.held() == of_a | of_b

    # Pods of the other network on the list are nothing to this one.
    collect(A, a2, b1)
    assert two_networks.held() == {holding(A, a2, SECOND)} | of_b
    assert ledger.read(two_networks.daemon).cooling_addresses == {FIRST}

    # An empty list is one.
    collect(B)
    assert two_networks.held() == {holding(A, a2, SECOND)}

    # The runtime's own DELs find nothing any more, and succeed.
    for pod in (a1, a2, b1, b2):
        containerd.stop(pod.sandbox_id)
        containerd.remove(pod.sandbox_id)
    assert not two_networks.held()
