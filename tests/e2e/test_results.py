"""Results of every version, and requests, on their way through real plugins.

libcni runs ptp or bridge of the reference plugins, which run ours: what a result
is worth shows on the interface that they make from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import ledger
from tests.e2e.daemon import Daemon
from tests.e2e.ipam import Config, conflist, metis_ipam
from tests.e2e.network import addresses_in, output, ping
from tests.e2e.runtimes.libcni import Attachment, CNIError, Libcni, MakeLibcni

SUBNET, SUBNET6 = "10.107.0.0/24", "fd00:107::/64"
SECOND_SUBNET = "10.108.0.0/24"
NETWORK = "pods"

BY_FAMILY = ["0.1.0", "0.2.0"]
"""Versions whose results have a place for one address of each family."""

WITH_IP_VERSION = ["0.3.0", "0.3.1", "0.4.0"]
"""Versions in which every address says its family."""

LISTED = [*WITH_IP_VERSION, "1.0.0"]
"""Versions whose results have any number of addresses."""

VERSIONS = [*BY_FAMILY, *LISTED]
"""All that Debian's plugins speak."""

INTERFACE_PLUGINS: list[Config] = [
    {"type": "ptp", "mtu": 1400},
    {"type": "bridge", "bridge": "metis2", "isGateway": True},
]

Pods = tuple[Attachment, Attachment]
MakeNetwork = Callable[..., Libcni]


@pytest.fixture
def network(daemon: Daemon, libcni: MakeLibcni, tmp_path: Path) -> MakeNetwork:
    """Makes libcni with an interface plugin above ours."""

    def make(
        *subnets: str,
        version: str = "1.0.0",
        plugin: Config = INTERFACE_PLUGINS[0],
        ipam: Config | None = None,
        **more: object,
    ) -> Libcni:
        section = metis_ipam(daemon, tmp_path / "cni.log", *subnets, network=NETWORK)
        whole = {**plugin, "ipam": section | (ipam or {}), **more}
        return libcni(conflist("chain", version, whole))

    return make


def addresses(result: dict[str, Any]) -> list[str]:
    """The addresses of a result of any version, each as ADDRESS/PREFIX."""
    if result["cniVersion"] in BY_FAMILY:
        return [result[key]["ip"] for key in ("ip4", "ip6") if key in result]
    return [ip["address"] for ip in result["ips"]]


def held(daemon: Daemon, pod: Attachment) -> set[str]:
    return set(ledger.read(daemon).held_by.get(pod.container_id, ()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("plugin", INTERFACE_PLUGINS, ids=lambda plugin: plugin["type"])
@pytest.mark.parametrize("subnets", [(SUBNET,), (SUBNET, SUBNET6)], ids=["v4", "dual"])
def test_an_interface_plugin_makes_an_interface_of_a_result_of_any_version(
    daemon: Daemon,
    network: MakeNetwork,
    pods: Pods,
    subnets: tuple[str, ...],
    plugin: Config,
    version: str,
) -> None:
    cni = network(*subnets, version=version, plugin=plugin)
    one, two = pods
    expected = ["10.107.0.2/24", "fd00:107::2/64"][: len(subnets)]

    result = cni.add(one)

    assert result["cniVersion"] == version
    assert addresses(result) == expected
    assert addresses_in(one.netns, "eth0") == set(expected)
    gateways = ["10.107.0.1", "fd00:107::1"][: len(subnets)]
    assert default_gateways(one) == gateways
    for gateway in gateways:
        ping(one.netns, gateway)
    if version in WITH_IP_VERSION:
        assert [ip["version"] for ip in result["ips"]] == ["4", "6"][: len(subnets)]

    # ADD, DEL, ADD of one id: who comes after its DEL is served.
    cni.delete(one)
    assert not ledger.read(daemon).owned
    again = cni.add(one)
    assert addresses_in(one.netns, "eth0") == set(addresses(again))
    assert held(daemon, one) == {str(ip_interface(ip).ip) for ip in addresses(again)}

    other = cni.add(two)
    assert not set(addresses(other)) & set(addresses(again))
    for pod in pods:
        cni.delete(pod)
    assert not ledger.read(daemon).owned


def default_gateways(pod: Attachment) -> list[str]:
    """Where a pod sends what is for nobody near, by IPv4 and by IPv6."""
    return [
        route["gateway"]
        for family in ("-4", "-6")
        for route in json.loads(
            output(
                *("ip", "-n", pod.netns.name, family, "-j"),
                *("route", "show", "default"),
            )
        )
    ]


@pytest.mark.parametrize("version", LISTED)
def test_each_of_several_sets_gives_the_interface_an_address(
    daemon: Daemon, network: MakeNetwork, pods: Pods, version: str
) -> None:
    cni = network(SUBNET, SUBNET6, SECOND_SUBNET, version=version, ipam={"routes": []})
    one, _ = pods

    result = cni.add(one)

    assert addresses(result) == ["10.107.0.2/24", "fd00:107::2/64", "10.108.0.2/24"]
    assert addresses_in(one.netns, "eth0") == set(addresses(result))
    assert owners(daemon) == {one.container_id}
    cni.delete(one)
    assert not owners(daemon)


def owners(daemon: Daemon) -> set[str]:
    """Who holds anything; `ledger.read` allows one address of a family."""
    return {row["container_id"] for row in daemon.table("ip-addresses")} - {
        "",
        ledger.NULL,
    }


@pytest.mark.parametrize("version", BY_FAMILY)
def test_a_version_without_room_for_two_sets_of_a_family_is_refused_with_the_right_one(
    daemon: Daemon, network: MakeNetwork, pods: Pods, version: str
) -> None:
    cni = network(SUBNET, SECOND_SUBNET, version=version)

    with pytest.raises(CNIError, match=r"0\.3\.0") as caught:
        cni.add(pods[0])

    assert caught.value.code == 7
    assert not owners(daemon)


@pytest.mark.parametrize("way", ["IP=", "ips", "args"])
def test_a_requested_address_is_the_one_on_the_interface(
    daemon: Daemon, network: MakeNetwork, pods: Pods, way: str
) -> None:
    one, two = pods
    wanted = ["10.107.0.77/24", "fd00:107::77/64"]
    match way:
        case "IP=":
            cni = network(SUBNET)
            asked: dict[str, Any] = {"ip": "10.107.0.77"}
        case "ips":
            cni = network(SUBNET, SUBNET6, capabilities={"ips": True})
            asked = {"ips": tuple(wanted)}
        case _:
            cni = network(SUBNET, SUBNET6, args={"cni": {"ips": wanted}})
            asked = {}

    result = cni.add(one, **asked)

    assert addresses(result) == wanted[: len(addresses(result))]
    assert addresses_in(one.netns, "eth0") == set(addresses(result))

    # Another pod's, and after the DEL one that cools after another pod.
    for _ in range(2):
        with pytest.raises(CNIError, match=r"10\.107\.0\.77") as caught:
            cni.add(two, **asked)
        assert caught.value.code == 11
        assert not held(daemon, two)
        cni.delete(one)


def test_a_requested_address_that_no_pod_gets_is_refused(
    daemon: Daemon, network: MakeNetwork, pods: Pods
) -> None:
    cni = network(SUBNET)
    of_nobody = ("10.107.0.0", "10.107.0.1", "10.107.0.255")
    for address in (*of_nobody, "10.99.0.9"):
        with pytest.raises(CNIError) as caught:
            cni.add(pods[0], ip=address)

        assert caught.value.code == 7
        assert address in caught.value.message
    assert not owners(daemon)


def test_excluded_addresses_go_to_no_interface(
    network: MakeNetwork, pods: Pods
) -> None:
    spared = {"subnet": SUBNET, "exclude": ["10.107.0.2", "10.107.0.4/30"]}
    cni = network(SUBNET, ipam={"ranges": [[spared]]})

    given = [addresses(cni.add(pod)) for pod in pods]

    assert given == [["10.107.0.3/24"], ["10.107.0.8/24"]]
    for pod, its in zip(pods, given, strict=True):
        assert addresses_in(pod.netns, "eth0") == set(its)
    for pod in pods:
        cni.delete(pod)
    with pytest.raises(CNIError) as caught:
        cni.add(pods[0], ip="10.107.0.5")
    assert caught.value.code == 7


def test_new_pods_come_from_the_range_to_which_the_configuration_changed(
    daemon: Daemon, network: MakeNetwork, pods: Pods
) -> None:
    old, new = pods
    assert addresses(network(SUBNET).add(old)) == ["10.107.0.2/24"]
    cni = network(SECOND_SUBNET)

    assert addresses(cni.add(new)) == ["10.108.0.2/24"]

    assert held(daemon, old) == {"10.107.0.2"}
    for pod in pods:
        cni.delete(pod)
    assert not owners(daemon)


@pytest.mark.parametrize(
    ("ipam", "said"),
    [
        ({"ranges": [[{"subnet": "10.107.0.9/24"}]]}, ["10.107.0.9/24", SUBNET]),
        ({"routes": [{"dst": "nowhere"}]}, ["ipam.routes", "nowhere"]),
        ({"sticky": "yes"}, ["sticky", "yes"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_in_a_configuration_reaches_the_runtime(
    daemon: Daemon, network: MakeNetwork, pods: Pods, ipam: Config, said: list[str]
) -> None:
    cni = network(SUBNET, ipam=ipam)

    with pytest.raises(CNIError) as caught:
        cni.add(pods[0])

    assert caught.value.code == 7
    for text in said:
        assert text in caught.value.message
    assert 'plugin type="ptp"' in str(caught.value)
    # The runtime cleans up after any failure; that must work all the same.
    cni.delete(pods[0])
    assert not owners(daemon)


@pytest.mark.parametrize("version", ["0.4.0", "1.0.0"])
def test_check_through_an_interface_plugin_tells_of_a_loss(
    daemon: Daemon, network: MakeNetwork, pods: Pods, version: str, tmp_path: Path
) -> None:
    cni = network(SUBNET, SUBNET6, version=version)
    one, two = pods
    cni.add(one)
    cni.add(two)
    cni.check(one)
    # The interface stays: only the plugin below hears of this DEL.
    bare = metis_ipam(daemon, tmp_path / "cni.log", SUBNET, network=NETWORK)
    path = tmp_path / "bare.conflist"
    path.write_text(
        json.dumps(conflist("bare", version, {"type": "metis", "ipam": bare}))
    )
    Libcni(cni.driver, path, cni.plugin_directory, tmp_path / "other").delete(one)

    with pytest.raises(CNIError, match=one.container_id) as caught:
        cni.check(one)

    assert caught.value.code == 100
    cni.check(two)
    for pod in pods:
        cni.delete(pod)
    assert not owners(daemon)
