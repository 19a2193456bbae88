"""From stdin to a request: order of checks, versions, contents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from metis.cni.configuration import Route
from metis.cni.dns import DNS
from metis.cni.environment import REQUIRED, read_environment
from metis.cni.protocol import SUPPORTED_VERSIONS, CNIError
from metis.cni.spec import (
    answer_version,
    decode_configuration,
    log_path,
    read_request,
)
from metis.config import DEFAULT_CNI_LOG_PATH, DEFAULT_DB_PATH, DEFAULT_SOCKET_PATH
from metis.model import CIDRBlock, Pod
from tests.cni.calls import Config, config, environ, ipam, request


def refused(
    command: str = "ADD",
    fields: Config | None = None,
    variables: dict[str, str] | None = None,
) -> CNIError:
    with pytest.raises(CNIError) as caught:
        request(command, fields, variables)
    return caught.value


@pytest.mark.parametrize(
    "stdin",
    [
        b"",
        b"{",
        b'{"name": "n"} {}',
        b"null",
        b"[]",
        b'"name"',
        b"1",
        b'{"name": NaN}',
        b'{"name": Infinity}',
        b'{"name": "\xff"}',
        b'\xef\xbb\xbf{"name": "n"}',
        '{"name": "n"}'.encode("utf-16"),
        b'{"name": 1}',
        b'{"name": ["n"]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"name": "n", "mtu": ' + b"1" * 5000 + b"}",
    ],
)
def test_stdin_that_is_no_json_object_with_a_name_cannot_be_decoded(
    stdin: bytes,
) -> None:
    with pytest.raises(CNIError) as caught:
        decode_configuration(stdin)
    assert caught.value.code == 6


@pytest.mark.parametrize("stdin", [b"{}", b'{"name": ""}', b'{"name": null}'])
def test_a_network_needs_a_name(stdin: bytes) -> None:
    with pytest.raises(CNIError, match=r"^missing network name$") as caught:
        decode_configuration(stdin)
    assert caught.value.code == 7


@pytest.mark.parametrize("name", ["-n", "n n", "n\n", "n/n", "né", "\ud800"])
def test_a_network_name_is_like_a_container_id(name: str) -> None:
    with pytest.raises(CNIError, match="network name") as caught:
        decode_configuration(json.dumps({"name": name}).encode())
    assert caught.value.code == 7


@pytest.mark.parametrize("command", ["FROB", "add", "VERSIONS"])
def test_an_unknown_command_is_named(command: str) -> None:
    error = refused(command)
    assert (error.code, error.message) == (4, f"unknown CNI_COMMAND: {command}")


def test_a_configuration_that_cannot_be_read_wins_over_an_unknown_command() -> None:
    assert refused("FROB", {}).message == "missing network name"


def test_an_unknown_command_wins_over_an_unknown_version() -> None:
    assert refused("FROB", config("9.9.9")).code == 4


@pytest.mark.parametrize("command", ["ADD", "DEL"])
@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_every_released_version_is_answered_in_kind(command: str, version: str) -> None:
    assert request(command, config(version)).version == version


@pytest.mark.parametrize("version", [None, ""])
def test_a_configuration_without_version_is_of_the_first(version: str | None) -> None:
    assert request("ADD", config(version)).version == "0.1.0"


@pytest.mark.parametrize("version", ["1.0", "1.0.0 ", "v1.0.0", "0.3.2", "2.0.0", "x"])
@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_a_version_must_be_spelled_as_a_supported_one(
    command: str, version: str
) -> None:
    error = refused(command, config(version))
    assert (error.code, error.message) == (1, "incompatible CNI versions")
    assert repr(version) in error.details
    assert "0.1.0, 0.2.0" in error.details


@pytest.mark.parametrize("version", [1, 1.0, True, ["1.0.0"], {}])
def test_a_version_must_be_a_text(version: Any) -> None:
    for command in ("ADD", "DEL"):
        assert refused(command, config(cniVersion=version)).code == 6


@pytest.mark.parametrize(
    ("command", "version"),
    [
        ("CHECK", None),
        ("CHECK", "0.1.0"),
        ("CHECK", "0.3.1"),
        ("CHECK", "0.3"),
        ("GC", "1.0.0"),
        ("GC", "1"),
        ("STATUS", "1.0.0"),
        ("STATUS", "0.4.0"),
    ],
)
def test_a_command_younger_than_the_configuration_is_refused(
    command: str, version: str | None
) -> None:
    error = refused(command, config(version))
    assert (error.code, error.message) == (
        1,
        f"config version does not allow {command}",
    )


@pytest.mark.parametrize("version", ["x", "1.x", "1.0.0.0", "1.-1", "1.²", "9" * 5000])
@pytest.mark.parametrize("command", ["CHECK", "GC", "STATUS"])
def test_a_version_that_must_be_compared_must_be_one(
    command: str, version: str
) -> None:
    assert refused(command, config(version)).code == 6


@pytest.mark.parametrize("version", ["1.1", "1.2.0", "2"])
@pytest.mark.parametrize("command", ["CHECK", "GC", "STATUS"])
def test_a_version_that_is_young_enough_must_still_be_supported(
    command: str, version: str
) -> None:
    error = refused(command, config(version))
    assert (error.code, error.message) == (1, "incompatible CNI versions")


def test_gc_needs_no_ranges_that_could_be_given_from() -> None:
    broken = config("1.1.0", ipam=ipam(subnet="x", routes=1, releaseCooldown=1))
    assert request("GC", broken).wanted == ()
    assert refused("STATUS", broken).code == 7


def test_gc_and_status_are_requests_from_1_1_0_on() -> None:
    for command in ("GC", "STATUS"):
        variables = {"CNI_COMMAND": command, "CNI_PATH": "/x"}
        assert request(command, config("1.1.0"), variables).env.command == command


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (ipam(subnet="10.0.0.0/x"), "ipam.subnet"),
        (ipam(ranges="10.0.0.0/24"), "ipam.ranges is a text"),
        (ipam(sticky="yes"), "sticky is 'yes'"),
        (ipam(statusOnExhaustion=1), "statusOnExhaustion is 1"),
        (ipam(resolvConf=["x"]), "resolvConf is ['x']"),
        (ipam(routes={}), "ipam.routes is an object"),
        (ipam(routes=["0.0.0.0/0"]), "ipam.routes[0] is a text"),
        (ipam(routes=[{}]), "ipam.routes[0] has no dst"),
        (ipam(routes=[{"dst": "default"}]), "ipam.routes[0].dst: 'default'"),
        (ipam(routes=[{"dst": 1}]), "ipam.routes[0].dst is 1"),
        (
            ipam(routes=[{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "gate"}]),
            "ipam.routes[1].gw: 'gate'",
        ),
        (ipam(routes=[{"dst": "::/0", "gw": "fe80::1%eth0"}]), "has a zone"),
        (ipam(routes=[{"dst": "::/0", "gw": 1}]), "ipam.routes[0].gw is 1"),
        (ipam(routes=[{"dst": "::/0", "mtu": "big"}]), "ipam.routes[0].mtu is 'big'"),
        (ipam(routes=[{"dst": "::/0", "table": True}]), "ipam.routes[0].table"),
        (ipam(routes=[{"dst": "::/0", "scope": -1}]), "ipam.routes[0].scope is -1"),
        (ipam(releaseCooldown="1 minute"), "releaseCooldown"),
        (ipam(releaseCooldown="-1m"), "releaseCooldown"),
        (ipam(releaseCooldown=60), "releaseCooldown is 60"),
        (ipam(releaseCooldown="9" * 400 + "h"), "releaseCooldown"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_named_but_never_stops_del(
    fields: Config, named: str
) -> None:
    for command in ("ADD", "CHECK"):
        error = refused(command, config(ipam=fields, prevResult={}))
        assert error.code == 7
        assert named in error.message
    assert request("DEL", config(ipam=fields)).wanted == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ipam": []}, "ipam is a list"),
        ({"ipam": "metis"}, "ipam is a text"),
        ({"ipam": ipam(network=1)}, "ipam.network is 1"),
        ({"ipam": ipam(network="a\nb")}, "ipam.network: "),
        ({"ipam": ipam(network="\ud800")}, "ipam.network is '\\ud800'"),
        ({"ipam": ipam(network="n" * 1025)}, "ipam.network: "),
        ({"daemonSocket": 1}, "daemonSocket is 1"),
        ({"daemonSocket": "/a\0b"}, "daemonSocket"),
        ({"daemonSocket": "/\udfff"}, "daemonSocket"),
        ({"daemonSocket": "/" + "s" * 107}, "at most 107"),
        ({"dbPath": ["x"]}, "dbPath"),
    ],
)
@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK"])
def test_what_every_call_needs_must_be_right(
    command: str, changes: Config, named: str
) -> None:
    error = refused(command, config(prevResult={}, **changes))
    assert error.code == 7
    assert named in error.message


def test_defaults() -> None:
    read = request("ADD", config(ipam=None))
    assert read.network == "default"
    assert read.socket_path == DEFAULT_SOCKET_PATH
    assert read.db_path == DEFAULT_DB_PATH
    assert read.release_cooldown == 60.0
    assert read.pod == Pod()
    assert read.routes == ()


def test_settings_stand_beside_ipam_or_in_it_and_ipam_wins() -> None:
    outside = {
        "daemonSocket": "/out.sock",
        "dbPath": "/out.db",
        "logFile": "/out.log",
        "releaseCooldown": "1m30s",
    }
    inside = {key: value.replace("out", "in") for key, value in outside.items()}
    inside["releaseCooldown"] = "500ms"
    read = request("ADD", config(**outside))
    assert (read.socket_path, read.db_path) == ("/out.sock", "/out.db")
    assert read.release_cooldown == 90.0
    assert log_path(config(**outside)) == "/out.log"
    both = config(ipam=ipam(**inside), **outside)
    read = request("ADD", both)
    assert (read.socket_path, read.db_path) == ("/in.sock", "/in.db")
    assert read.release_cooldown == 0.5
    assert log_path(both) == "/in.log"


def test_empty_settings_mean_their_defaults() -> None:
    read = request("ADD", config(daemonSocket="", dbPath="", releaseCooldown=""))
    assert read.socket_path == DEFAULT_SOCKET_PATH
    assert read.db_path == DEFAULT_DB_PATH
    assert read.release_cooldown == 60.0


@pytest.mark.parametrize("value", [1, "", None, [], {}])
def test_a_log_file_that_is_no_path_is_the_default_one(value: Any) -> None:
    assert log_path(config(logFile=value)) == DEFAULT_CNI_LOG_PATH
    assert log_path(config(ipam=value)) == DEFAULT_CNI_LOG_PATH


def test_the_network_of_the_addresses_is_not_the_configuration_s_name() -> None:
    read = request("ADD", config(ipam=ipam(network="blue net")))
    assert read.network == "blue net"


def test_routes_are_read_with_their_gateways_and_numbers() -> None:
    routes = [
        {"dst": "0.0.0.0/0"},
        {"dst": "10.1.2.3/8", "gw": "10.240.0.9", "unknown": {}},
        {"dst": "::/0", "gw": "FE80::1", "mtu": 1400, "scope": 0, "priority": None},
        {"dst": "fd00::/8", "gw": ""},
    ]
    assert request("ADD", config(ipam=ipam(routes=routes))).routes == (
        Route(CIDRBlock.parse("0.0.0.0/0")),
        Route(CIDRBlock.parse("10.0.0.0/8"), "10.240.0.9"),
        Route(CIDRBlock.parse("::/0"), "fe80::1", (("mtu", 1400), ("scope", 0))),
        Route(CIDRBlock.parse("fd00::/8")),
    )


def test_metis_is_the_main_plugin_when_the_type_is_the_program_s_name() -> None:
    env = read_environment(environ())
    for kind, program, main in [
        ("metis", "metis", True),
        ("ptp", "metis", False),
        ("metis", "metis2", False),
        ("metis2", "metis2", True),
        (None, "metis", False),
        (["metis"], "metis", False),
    ]:
        read = read_request(env, config(type=kind), program=program)
        assert read.main is main


def test_check_needs_the_previous_result() -> None:
    for fields in (config(), config(prevResult={}) | {"prevResult": None}):
        error = refused("CHECK", fields)
        assert error.code == 7
        assert "prevResult" in error.message


@pytest.mark.parametrize(
    ("result", "addresses"),
    [
        ({}, ()),
        ({"ips": []}, ()),
        ({"ips": [{"address": "10.0.0.2/24"}]}, ("10.0.0.2",)),
        (
            {
                "ips": [
                    {"version": "4", "address": "10.0.0.2/24", "interface": 1},
                    {"version": "6", "address": "FD00:0::2/64"},
                ]
            },
            ("10.0.0.2", "fd00::2"),
        ),
        (
            {"ip4": {"ip": "10.0.0.2/24"}, "ip6": {"ip": "fd00::2/64"}, "dns": {}},
            ("10.0.0.2", "fd00::2"),
        ),
        ({"ip4": None, "ip6": {"ip": "fd00::2"}}, ("fd00::2",)),
    ],
)
def test_the_previous_result_is_read_in_every_version_s_shape(
    result: Config, addresses: tuple[str, ...]
) -> None:
    read = request("CHECK", config("0.4.0", prevResult=result))
    assert read.previous == addresses


@pytest.mark.parametrize(
    ("result", "named"),
    [
        ([], "prevResult is a list"),
        ({"ips": {}}, "prevResult.ips is an object"),
        ({"ips": ["10.0.0.2/24"]}, "prevResult.ips[0] is a text"),
        ({"ips": [{}]}, "prevResult.ips[0].address: ''"),
        ({"ips": [{"address": 1}]}, "prevResult.ips[0].address is 1"),
        ({"ips": [{"address": "10.0.0/24"}]}, "'10.0.0' is not an IP address"),
        ({"ip4": "10.0.0.2/24"}, "prevResult.ip4 is a text"),
        ({"ip6": {}}, "prevResult.ip6.ip: ''"),
    ],
)
def test_a_previous_result_that_check_cannot_read_is_named(
    result: Any, named: str
) -> None:
    error = refused("CHECK", config(prevResult=result))
    assert error.code == 7
    assert named in error.message
    for command in ("ADD", "DEL"):  # which have no use for it
        assert request(command, config(prevResult=result)).previous == ()


def test_unknown_keys_are_tolerated_everywhere() -> None:
    fields = config(
        mtu=1400,
        capabilities={"ips": True},
        runtimeConfig={"portMappings": []},
        args={"labels": []},
        ipam=ipam(ranges=[[{"subnet": "10.240.0.0/22", "mtu": 1}]], dataDir="/x"),
    )
    assert len(request("ADD", fields).wanted) == 1


def test_args_name_the_pod_and_are_checked_where_they_decide_something() -> None:
    variables = environ("ADD", CNI_ARGS="K8S_POD_NAME=web;K8S_POD_NAMESPACE=shop")
    assert request("ADD", None, variables).pod == Pod("web", "shop")
    for command in ("ADD", "CHECK"):
        variables = environ(command, CNI_ARGS="FOO=1")
        assert refused(command, config(prevResult={}), variables).code == 4
    variables = environ("DEL", CNI_ARGS="FOO=1")
    assert request("DEL", None, variables).pod == Pod()
    variables = environ("STATUS", CNI_ARGS="FOO=1")
    assert request("STATUS", config("1.1.0"), variables).pod == Pod()


def test_a_requested_address_is_checked_on_add_alone() -> None:
    asked = environ("ADD", CNI_ARGS="IP=10.240.0.9/22")
    assert request("ADD", None, asked).wanted[0].requested == "10.240.0.9"
    outside = environ("ADD", CNI_ARGS="IP=10.9.0.9")
    error = refused("ADD", None, outside)
    assert error.code == 7
    assert "'10.9.0.9'" in error.message
    assert "10.240.0.0/22" in error.details
    for command in ("DEL", "CHECK"):
        variables = environ(command, CNI_ARGS="IP=10.9.0.9")
        read = request(command, config(prevResult={}), variables)
        assert not any(one.requested for one in read.wanted)


def test_without_ranges_any_ipv4_address_may_be_requested() -> None:
    asked = environ("ADD", CNI_ARGS="IP=10.9.0.9")
    read = request("ADD", config(ipam={"type": "metis"}), asked)
    assert [one.requested for one in read.wanted] == ["10.9.0.9"]
    asked = environ("ADD", CNI_ARGS="IP=fd00::9")
    assert refused("ADD", config(ipam={"type": "metis"}), asked).code == 7


def test_a_pod_is_sticky_when_the_configuration_says_so() -> None:
    assert not request("ADD", config()).sticky
    assert not request("ADD", config(ipam=ipam(sticky=False))).sticky
    assert request("ADD", config(ipam=ipam(sticky=True))).sticky


def test_dns_of_the_configuration_is_the_main_plugin_s_and_wins() -> None:
    fields = config(
        type="metis",
        dns={"nameservers": ["10.0.0.53"], "domain": "a.example"},
        ipam=ipam(resolvConf="/etc/resolv.conf"),
    )
    main = request("ADD", fields)
    assert main.dns == DNS(("10.0.0.53",), "a.example")
    assert main.resolv_conf == ""
    delegate = request("ADD", {**fields, "type": "ptp"})
    assert delegate.dns == DNS()
    assert delegate.resolv_conf == "/etc/resolv.conf"
    assert request("ADD", {**fields, "dns": {}}).resolv_conf == "/etc/resolv.conf"


@pytest.mark.parametrize(
    ("dns", "named"),
    [
        ([], "dns is a list"),
        ({"nameservers": "10.0.0.53"}, "dns.nameservers is a text"),
        ({"nameservers": [1]}, "dns.nameservers[0] is 1"),
        ({"domain": 1}, "dns.domain is 1"),
        ({"search": {}}, "dns.search is an object"),
        ({"options": [None]}, "dns.options[0] is None"),
    ],
)
def test_dns_that_cannot_be_read_is_named(dns: Any, named: str) -> None:
    error = refused("ADD", config(dns=dns))
    assert error.code == 7
    assert named in error.message
    assert request("DEL", config(dns=dns)).dns == DNS()


def test_a_release_in_direct_mode_rests_as_long_as_the_configuration_says() -> None:
    for command, version in (("DEL", "1.0.0"), ("GC", "1.1.0")):
        read = request(command, config(version, ipam=ipam(releaseCooldown="5m")))
        assert read.release_cooldown == 300.0
        broken = config(version, ipam=ipam(releaseCooldown="soon"))
        assert request(command, broken).release_cooldown == 60.0


def test_a_wrong_configuration_is_named_before_wrong_args() -> None:
    variables = environ("ADD", CNI_ARGS="FOO=1")
    assert refused("ADD", config(ipam=ipam(subnet="x")), variables).code == 7


@pytest.mark.parametrize(
    ("version", "answer"),
    [("0.4.0", "0.4.0"), (None, "0.1.0"), ("", "0.1.0"), ("9.9.9", None), (1, None)],
)
def test_errors_are_answered_in_the_version_asked_for_if_it_is_ours(
    version: Any, answer: str | None
) -> None:
    assert answer_version(config(cniVersion=version)) == answer


def test_every_command_that_reads_stdin_is_known() -> None:
    assert set(REQUIRED) == {"ADD", "DEL", "CHECK", "GC", "STATUS"}
