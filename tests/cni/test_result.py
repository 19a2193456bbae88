"""The shape of a result in every version, as delegate and as main plugin."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from metis.cni.dns import DNS
from metis.cni.messages import PodAddress
from metis.cni.result import result_text
from metis.cni.spec import Request
from metis.model import CIDRBlock, Family
from tests.cni.calls import NETNS, Config, config, ipam, request

V4 = PodAddress(Family.IPV4, "10.240.0.2", 22, "10.240.0.1")
V6 = PodAddress(Family.IPV6, "fd00:10::2", 64, "fd00:10::1")
SECOND_V4 = PodAddress(Family.IPV4, "10.9.0.7", 24, "10.9.0.254")
NO_DNS = DNS()
RESOLVER = DNS(("10.0.0.53",), "example.org", ("a.example", "b.example"), ("ndots:5",))

OLD = ["0.1.0", "0.2.0"]
MIDDLE = ["0.3.0", "0.3.1", "0.4.0"]
NEW = ["1.0.0", "1.1.0"]


def made(
    version: str,
    *addresses: PodAddress,
    routes: list[Config] | None = None,
    main: bool = False,
    dns: DNS = NO_DNS,
) -> Any:
    return json.loads(result_text(asked(version, routes, main), addresses, dns))


def asked(version: str, routes: list[Config] | None, main: bool) -> Request:
    chosen = [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}] if routes is None else routes
    read = request("ADD", config(version, ipam=ipam(routes=chosen)))
    return dataclasses.replace(read, main=main)


@pytest.mark.parametrize("version", OLD)
def test_up_to_0_2_0_every_family_has_its_own_key_and_routes(version: str) -> None:
    assert made(version, V4, V6) == {
        "cniVersion": version,
        "ip4": {
            "ip": "10.240.0.2/22",
            "gateway": "10.240.0.1",
            "routes": [{"dst": "0.0.0.0/0"}],
        },
        "ip6": {
            "ip": "fd00:10::2/64",
            "gateway": "fd00:10::1",
            "routes": [{"dst": "::/0"}],
        },
        "dns": {},
    }


@pytest.mark.parametrize("version", OLD)
def test_up_to_0_2_0_there_is_no_place_for_interfaces(version: str) -> None:
    assert made(version, V4, routes=[{"dst": "0.0.0.0/0"}], main=True) == {
        "cniVersion": version,
        "ip4": {
            "ip": "10.240.0.2/22",
            "gateway": "10.240.0.1",
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.240.0.1"}],
        },
        "dns": {},
    }


@pytest.mark.parametrize("version", MIDDLE)
def test_from_0_3_0_on_addresses_are_a_list_and_say_their_version(version: str) -> None:
    assert made(version, V4, V6) == {
        "cniVersion": version,
        "ips": [
            {"version": "4", "address": "10.240.0.2/22", "gateway": "10.240.0.1"},
            {"version": "6", "address": "fd00:10::2/64", "gateway": "fd00:10::1"},
        ],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        "dns": {},
    }


@pytest.mark.parametrize("version", NEW)
def test_from_1_0_0_on_addresses_do_not_say_their_version(version: str) -> None:
    assert made(version, V4, V6) == {
        "cniVersion": version,
        "ips": [
            {"address": "10.240.0.2/22", "gateway": "10.240.0.1"},
            {"address": "fd00:10::2/64", "gateway": "fd00:10::1"},
        ],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
    }


def test_the_main_plugin_says_which_interface_and_where_routes_lead() -> None:
    text = result_text(asked("1.0.0", None, True), [V4], NO_DNS)
    assert text == (
        "{\n"
        '    "cniVersion": "1.0.0",\n'
        '    "interfaces": [\n'
        "        {\n"
        '            "name": "eth0",\n'
        f'            "sandbox": "{NETNS}"\n'
        "        }\n"
        "    ],\n"
        '    "ips": [\n'
        "        {\n"
        '            "interface": 0,\n'
        '            "address": "10.240.0.2/22",\n'
        '            "gateway": "10.240.0.1"\n'
        "        }\n"
        "    ],\n"
        '    "routes": [\n'
        "        {\n"
        '            "dst": "0.0.0.0/0",\n'
        '            "gw": "10.240.0.1"\n'
        "        }\n"
        "    ]\n"
        "}"
    )


@pytest.mark.parametrize("version", MIDDLE + NEW)
def test_the_main_plugin_lists_its_interface_in_every_later_version(
    version: str,
) -> None:
    result = made(version, V4, V6, main=True)
    assert result["interfaces"] == [{"name": "eth0", "sandbox": NETNS}]
    assert [entry["interface"] for entry in result["ips"]] == [0, 0]
    assert [route["gw"] for route in result["routes"]] == ["10.240.0.1", "fd00:10::1"]


@pytest.mark.parametrize("version", OLD + MIDDLE + NEW)
def test_a_delegate_never_speaks_of_interfaces(version: str) -> None:
    assert "interface" not in json.dumps(made(version, V4, V6))


@pytest.mark.parametrize("version", OLD + MIDDLE + NEW)
def test_routes_of_a_family_without_an_address_are_left_out(version: str) -> None:
    assert "::/0" not in json.dumps(made(version, V4))
    assert "0.0.0.0/0" not in json.dumps(made(version, V6))


@pytest.mark.parametrize("version", OLD + MIDDLE + NEW)
def test_an_empty_list_of_routes_is_left_out(version: str) -> None:
    assert "routes" not in json.dumps(made(version, V4, routes=[]))
    assert "routes" not in json.dumps(made(version, V4, routes=[{"dst": "::/0"}]))


@pytest.mark.parametrize("main", [True, False])
def test_a_configured_gateway_of_a_route_stays(main: bool) -> None:
    route = {"dst": "10.0.0.0/8", "gw": "10.240.0.9"}
    assert made("1.0.0", V4, routes=[route], main=main)["routes"] == [route]


def test_numbers_on_routes_came_with_1_1_0() -> None:
    numbers = {"mtu": 1400, "advmss": 1360, "priority": 5, "table": 7, "scope": 0}
    route = {"dst": "0.0.0.0/0", **numbers}
    assert made("1.1.0", V4, routes=[route])["routes"] == [route]
    for version in [*MIDDLE, "1.0.0"]:
        assert made(version, V4, routes=[route])["routes"] == [{"dst": "0.0.0.0/0"}]
    assert made("0.2.0", V4, routes=[route])["ip4"]["routes"] == [{"dst": "0.0.0.0/0"}]


@pytest.mark.parametrize("version", OLD + MIDDLE + NEW)
def test_dns_is_the_same_in_every_version_and_its_empty_members_are_left_out(
    version: str,
) -> None:
    assert made(version, V4, dns=RESOLVER)["dns"] == {
        "nameservers": ["10.0.0.53"],
        "domain": "example.org",
        "search": ["a.example", "b.example"],
        "options": ["ndots:5"],
    }
    assert made(version, V4, dns=DNS(("::1",)))["dns"] == {"nameservers": ["::1"]}


@pytest.mark.parametrize("version", MIDDLE + NEW)
def test_every_address_is_listed_in_the_order_of_its_set(version: str) -> None:
    entries = made(version, SECOND_V4, V6, V4)["ips"]
    assert [(entry["address"], entry["gateway"]) for entry in entries] == [
        ("10.9.0.7/24", "10.9.0.254"),
        ("fd00:10::2/64", "fd00:10::1"),
        ("10.240.0.2/22", "10.240.0.1"),
    ]


@pytest.mark.parametrize("version", OLD)
def test_up_to_0_2_0_there_is_room_for_one_address_of_a_family(version: str) -> None:
    result = made(version, SECOND_V4, V6, V4, main=True)
    assert result["ip4"] == {
        "ip": "10.9.0.7/24",
        "gateway": "10.9.0.254",
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.9.0.254"}],
    }
    assert result["ip6"]["ip"] == "fd00:10::2/64"


def test_routes_of_the_main_plugin_lead_to_the_gateway_of_the_family_s_first() -> None:
    result = made("1.0.0", SECOND_V4, V4, main=True)
    assert result["routes"] == [{"dst": "0.0.0.0/0", "gw": "10.9.0.254"}]


def test_small_blocks_have_their_gateway_elsewhere() -> None:
    gateway = CIDRBlock.parse("10.0.0.0/31").gateway
    address = PodAddress(Family.IPV4, "10.0.0.0", 31, gateway)
    (ip,) = made("1.0.0", address)["ips"]
    assert ip == {"address": "10.0.0.0/31", "gateway": "169.254.4.6"}
