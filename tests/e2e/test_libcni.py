"""The plugin below libcni: the verbs in every role and result version."""

from __future__ import annotations

import sys
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path

import pytest

from metis.cni import relay
from metis.cni.launcher import launcher
from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.ipam import Config, conflist, metis_ipam
from tests.e2e.ledger import Holding
from tests.e2e.network import addresses_in, ping
from tests.e2e.runtimes.libcni import Attachment, CNIError, Libcni, MakeLibcni

SUBNET, SUBNET6 = "10.101.0.0/24", "fd00:101::/64"
NETWORK = "pods"

VERSIONS = ["0.4.0", "1.0.0"]

# A plugin after the interface plugin, as conflists have it: DEL and CHECK then
# come with the result of the whole chain, not with metis' own.
CHAINED = {"type": "tuning", "sysctl": {"net.ipv4.conf.eth0.log_martians": "1"}}


@pytest.mark.parametrize("version", VERSIONS)
def test_as_main_plugin_every_verb_works_and_the_address_comes_back(
    daemon: Daemon,
    libcni: MakeLibcni,
    pods: tuple[Attachment, Attachment],
    tmp_path: Path,
    version: str,
) -> None:
    ipam = metis_ipam(daemon, tmp_path / "cni.log", SUBNET, SUBNET6, network=NETWORK)
    cni = libcni(conflist("main", version, {"type": "metis", "ipam": ipam}))
    one, _ = pods

    result = cni.add(one)

    assert result["cniVersion"] == version
    assert result["interfaces"] == [{"name": "eth0", "sandbox": str(one.netns)}]
    assert [ip["address"] for ip in result["ips"]] == [
        "10.101.0.2/24",
        "fd00:101::2/64",
    ]
    assert [ip["gateway"] for ip in result["ips"]] == ["10.101.0.1", "fd00:101::1"]
    # Up to 0.4.0 every address says its version; since 1.0.0 none does.
    assert [ip.get("version") for ip in result["ips"]] == (
        ["4", "6"] if version == "0.4.0" else [None, None]
    )
    cni.check(one)
    delete_twice_and_add_again(daemon, cni, one)
    cni.delete(one)
    assert not ledger.read(daemon).owned


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "plugin",
    [
        {"type": "ptp", "mtu": 1400},
        {"type": "bridge", "bridge": "metis0", "isGateway": True},
    ],
    ids=lambda plugin: plugin["type"],
)
def test_as_ipam_of_an_interface_plugin_two_pods_reach_each_other(
    daemon: Daemon,
    libcni: MakeLibcni,
    pods: tuple[Attachment, Attachment],
    tmp_path: Path,
    version: str,
    plugin: Config,
) -> None:
    ipam = metis_ipam(daemon, tmp_path / "cni.log", SUBNET, SUBNET6, network=NETWORK)
    cni = libcni(conflist("chain", version, {**plugin, "ipam": ipam}, CHAINED))
    one, two = pods

    results = [cni.add(pod) for pod in pods]

    assert [[ip["address"] for ip in result["ips"]] for result in results] == [
        ["10.101.0.2/24", "fd00:101::2/64"],
        ["10.101.0.3/24", "fd00:101::3/64"],
    ]
    for pod, result in zip(pods, results, strict=True):
        addresses = {ip["address"] for ip in result["ips"]}
        assert addresses_in(pod.netns, "eth0") == addresses
        cni.check(pod)
    for pod, peer in ((one, results[1]), (two, results[0])):
        for ip in peer["ips"]:
            ping(pod.netns, str(ip_interface(ip["address"]).ip))
    assert ledger.read(daemon).holdings == {
        Holding(NETWORK, pod.container_id, "eth0", address)
        for pod, addresses in (
            (one, ("10.101.0.2", "fd00:101::2")),
            (two, ("10.101.0.3", "fd00:101::3")),
        )
        for address in addresses
    }

    delete_twice_and_add_again(daemon, cni, one)
    # From the new interface: its requests also tell the peer that an address it
    # has just spoken to has another hardware address now.
    for address in ledger.read(daemon).held_by[two.container_id]:
        ping(one.netns, address)

    for pod in pods:
        cni.delete(pod)
    assert not ledger.read(daemon).owned


def test_the_whole_life_of_a_pod_needs_the_relay_alone(
    daemon: Daemon,
    libcni: MakeLibcni,
    pods: tuple[Attachment, Attachment],
    plugin_directory: Path,
    tmp_path: Path,
) -> None:
    # Nothing is found by a search path that is empty, the whole plugin included.
    text = launcher(sys.executable, relay.__file__, str(daemon.socket_path), [])
    (plugin_directory / "metis").write_text(text)
    ipam = metis_ipam(daemon, tmp_path / "cni.log", SUBNET, SUBNET6)
    cni = libcni(conflist("chain", "1.0.0", {"type": "ptp", "ipam": ipam}))
    one, two = pods

    given = cni.add(one)["ips"]

    cni.check(one)
    cni.delete(one)
    assert {ip["address"] for ip in given} == {"10.101.0.2/24", "fd00:101::2/64"}
    assert not ledger.read(daemon).owned
    # And it is told when it does not suffice.
    daemon.stop()
    with pytest.raises(CNIError, match="`metis install`"):
        cni.add(two)


def delete_twice_and_add_again(daemon: Daemon, cni: Libcni, pod: Attachment) -> None:
    """DEL, DEL, ADD under the same id; the ledger is right at each step."""
    before = ledger.read(daemon)
    held = before.held_by[pod.container_id]
    for _ in range(2):
        cni.delete(pod)
        after = ledger.read(daemon)
        assert after.holdings == {
            holding
            for holding in before.holdings
            if holding.container_id != pod.container_id
        }
        assert held <= after.cooling_addresses

    result = cni.add(pod)

    again = ledger.read(daemon)
    addresses = {str(ip_interface(ip["address"]).ip) for ip in result["ips"]}
    assert again.held_by[pod.container_id] == addresses
    for address in addresses:
        subnet = SUBNET6 if ":" in address else SUBNET
        assert ip_address(address) in ip_network(subnet)
    cni.check(pod)


def test_check_fails_once_the_address_is_gone(
    daemon: Daemon,
    libcni: MakeLibcni,
    pods: tuple[Attachment, Attachment],
    tmp_path: Path,
) -> None:
    ipam = metis_ipam(daemon, tmp_path / "cni.log", SUBNET, network=NETWORK)
    cni = libcni(conflist("main", "1.0.0", {"type": "metis", "ipam": ipam}))
    one, _ = pods
    cni.add(one)
    # Another cache: the runtime's view of the container survives the DEL.
    forgetful = Libcni(
        cni.driver, cni.config_path, cni.plugin_directory, tmp_path / "other"
    )
    forgetful.delete(one)

    with pytest.raises(CNIError, match=one.container_id):
        cni.check(one)

    assert not ledger.read(daemon).owned


def test_an_exhausted_pool_fails_the_pod_and_leaves_no_interface(
    daemon: Daemon,
    libcni: MakeLibcni,
    pods: tuple[Attachment, Attachment],
    tmp_path: Path,
) -> None:
    # Four addresses, of which network, gateway and broadcast go to no pod.
    ipam = metis_ipam(daemon, tmp_path / "cni.log", "10.101.0.0/30", network=NETWORK)
    cni = libcni(conflist("small", "1.0.0", {"type": "ptp", "ipam": ipam}))
    one, two = pods
    cni.add(one)

    with pytest.raises(CNIError, match=r"no ipv4 address is free on network 'pods'"):
        cni.add(two)

    assert set(ledger.read(daemon).held_by) == {one.container_id}
    cni.delete(two)
    cni.delete(one)
    assert not ledger.read(daemon).owned
