"""The CNI contract, case by case, by the relay, the whole plugin and the program.

The cases follow the specification (1.1.0), and where it leaves something open,
what libcni's plugin skeleton and the reference plugins do: a runtime can see the
difference. Each has a network of its own. All go through the relay and through the
whole plugin, each with its daemon, and their answers are the same to the byte. In the
ordinary run the cases go through a process where that matters, with
`--conformance=program` all.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import pytest

import metis
from metis.cni.protocol import SUPPORTED_VERSIONS, about_text, version_text
from metis.cni.relay import Relay
from tests.cni.calls import Config, environ
from tests.cni.conformance import (
    Answer,
    InProcess,
    Node,
    Program,
    Recorded,
    Runtime,
    installed,
    node,
)
from tests.cni.relaying import standing_in

V4, V6 = {"subnet": "10.240.0.0/24"}, {"subnet": "fd00:10::/64"}
ONE = {"subnet": "10.9.0.8/32"}
"""A subnet that the first pod exhausts."""

HOST_NETNS = "/proc/self/ns/net"
VALID = "cni.dev/valid-attachments"
VERBS = ("ADD", "DEL", "CHECK", "GC", "STATUS")

Case = Callable[[Runtime], None]


@dataclass(frozen=True)
class Registered:
    """A case, and whether the ordinary run takes it through the program."""

    case: Case
    program: bool


CASES: list[Registered] = []


def conforms(case: Case) -> Case:
    """Register a case."""
    CASES.append(Registered(case, program=False))
    return case


def conforms_as_process(case: Case) -> Case:
    """Register a case that goes through the program in every run."""
    CASES.append(Registered(case, program=True))
    return case


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("n")) as place:
        yield place


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node like the first, for the whole plugin."""
    with node(tmp_path_factory.mktemp("n")) as place:
        yield place


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, served: Node) -> Program:
    return installed(tmp_path_factory.mktemp("cni"), served.socket_path)


_networks = (f"network-{number}" for number in itertools.count())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case in process; as a process those that want it, or all."""
    if "case" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--conformance") == "program"
        as_process = metafunc.function is test_the_installed_program
        chosen = [
            one.case for one in CASES if not as_process or everything or one.program
        ]
        metafunc.parametrize("case", chosen, ids=[one.__name__ for one in chosen])


def test_relay_and_whole_plugin_answer_alike(
    case: Case, served: Node, other: Node
) -> None:
    network = next(_networks)
    told = []
    for place, relayed in ((served, True), (other, False)):
        carry = InProcess(place.socket_path, relayed)
        recorded = Recorded(carry, place)
        before = recorded.logged()
        case(Runtime(place, recorded, network))
        after = recorded.logged()
        lines = {
            name: all_[len(before.get(name, ())) :] for name, all_ in after.items()
        }
        told.append((recorded.answers, {k: v for k, v in lines.items() if v}))
    assert told[0] == told[1]


def test_the_installed_program(case: Case, served: Node, program: Program) -> None:
    case(Runtime(served, program, next(_networks)))


def test_what_a_runtime_does_all_day_is_relayed(served: Node) -> None:
    runtime = Runtime(
        served, InProcess(served.socket_path, relayed=True), next(_networks)
    )
    fields = json.dumps(runtime.config()).encode()
    for command in ("STATUS", "ADD", "GC", "DEL", "DEL", "VERSION"):
        with standing_in(environ(command), lambda: fields) as seen:
            assert Relay("metis", served.socket_path, os.getppid()).carry_out() == 0
        assert seen.taken_over == [], command


def refused(answer: Answer, code: int, *said: str) -> None:
    assert answer.code == code, answer.stdout
    for text in said:
        assert text in answer.stdout


def silent(answer: Answer) -> None:
    assert (answer.status, answer.stdout, answer.stderr) == (0, "", "")


# Invocation, and the order of checks ----------------------------------------


def test_without_a_command_it_says_what_it_is_and_reads_nothing(
    program: Program,
) -> None:
    for variables in ({}, {"CNI_COMMAND": ""}):
        answer = program(variables, b"{")
        assert (answer.status, answer.stdout) == (0, "")
        assert answer.stderr == about_text(metis.__version__)
        assert "CNI protocol versions supported: 0.1.0, 0.2.0" in answer.stderr


@conforms_as_process
def version_is_one_line_and_needs_nothing(runtime: Runtime) -> None:
    answer = runtime.carry({"CNI_COMMAND": "VERSION"}, b"{")
    assert (answer.status, answer.stdout, answer.stderr) == (0, version_text(), "")
    assert answer.object["cniVersion"] == "1.1.0"
    assert answer.object["supportedVersions"] == list(SUPPORTED_VERSIONS)
    junk = {"CNI_COMMAND": "VERSION", "CNI_CONTAINERID": "/", "CNI_IFNAME": "/"}
    assert runtime.carry(junk, b"").stdout == version_text()


@conforms
def missing_variables_are_reported_together_in_order(runtime: Runtime) -> None:
    all_four = "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"
    for command, missing in (
        ("ADD", all_four),
        ("CHECK", all_four),
        ("DEL", "CNI_CONTAINERID,CNI_IFNAME,CNI_PATH"),
        ("GC", "CNI_PATH"),
        ("STATUS", "CNI_PATH"),
    ):
        answer = runtime.carry({"CNI_COMMAND": command}, b"{")
        refused(answer, 4, f"required env variables [{missing}] missing")


@conforms
def a_malformed_variable_fails_before_missing_ones_are_told(runtime: Runtime) -> None:
    answer = runtime.call("ADD", "", CNI_IFNAME="a/b")
    refused(answer, 4, "CNI_IFNAME")
    refused(runtime.call("ADD", "-x", CNI_IFNAME="a/b"), 4, "CNI_CONTAINERID")


@conforms
def container_ids_and_interface_names_are_held_to_their_rules(runtime: Runtime) -> None:
    for command in ("ADD", "DEL", "CHECK"):
        for bad in ("-c", ".c", "c d", "c\n", "c/d", "cé", "c\udcff"):
            refused(runtime.call(command, bad), 4, "CNI_CONTAINERID")
        for bad in ("sixteen-bytes-xx", "é" * 8, ".", "..", "a/b", "a:b", "a b", "a\n"):
            refused(runtime.call(command, CNI_IFNAME=bad), 4, "CNI_IFNAME")
    assert runtime.owned == []
    for good in ("e", "fifteen-bytes-x", "é" * 7, "eth0.100"):
        assert runtime.call("ADD", "A.b_c-9", CNI_IFNAME=good).status == 0
        silent(runtime.call("DEL", "A.b_c-9", CNI_IFNAME=good))


@conforms
def junk_in_variables_that_a_verb_does_not_need_is_ignored(runtime: Runtime) -> None:
    junk = {"CNI_IFNAME": "/", "CNI_NETNS": "\udcff", "CNI_ARGS": "?"}
    for command in ("GC", "STATUS"):
        silent(runtime.call(command, "/", variables=junk))


@conforms
def stdin_must_be_an_object_with_a_name(runtime: Runtime) -> None:
    for command in (*VERBS, "FROB"):
        for junk in (b"", b"{", b"[]", b"null", b'{"name": 1}', b"\xff", b"{} {}"):
            refused(runtime.call(command, fields=junk), 6)
        for fields in (b"{}", b'{"name": ""}', b'{"name": null}'):
            refused(runtime.call(command, fields=fields), 7, "missing network name")
        for name in ("-n", "n n", "n\n", "n/n", "né"):
            refused(runtime.call(command, fields={"name": name}), 7, "network name")


@conforms
def an_unknown_command_is_told_after_stdin_and_before_the_version(
    runtime: Runtime,
) -> None:
    refused(runtime.call("FROB", fields=b"{"), 6)
    refused(runtime.call("FROB", fields={"name": "n"}), 4, "unknown CNI_COMMAND: FROB")
    answer = runtime.call("add", fields=runtime.config("9.9.9"))
    refused(answer, 4, "unknown CNI_COMMAND: add")


@conforms
def younger_verbs_need_a_younger_configuration(runtime: Runtime) -> None:
    for command, versions in (
        ("CHECK", (None, "", "0.1.0", "0.2.0", "0.3.0", "0.3.1")),
        ("GC", (None, "0.4.0", "1.0.0")),
        ("STATUS", (None, "0.4.0", "1.0.0")),
    ):
        for version in versions:
            answer = runtime.call(command, fields=runtime.config(version))
            refused(answer, 1, f"config version does not allow {command}")
        refused(runtime.call(command, fields=runtime.config("x.y")), 6)
        refused(runtime.call(command, fields=runtime.config("1.2.0")), 1)


@conforms
def a_version_must_be_spelled_as_a_supported_one(runtime: Runtime) -> None:
    for version in ("1.0", "1.0.0 ", "v1.0.0", "0.3.2", "2.0.0", "x"):
        for command in ("ADD", "DEL"):
            answer = runtime.call(command, fields=runtime.config(version))
            refused(answer, 1, "incompatible CNI versions", repr(version), "0.1.0, 0.2")
    refused(runtime.call("ADD", fields=runtime.config() | {"cniVersion": 1}), 6)
    assert runtime.owned == []


@conforms_as_process
def the_host_s_own_namespace_is_refused_before_anything_is_taken(
    runtime: Runtime,
) -> None:
    answer = runtime.call("ADD", CNI_NETNS=HOST_NETNS)
    refused(answer, 8, "netns")
    assert runtime.owned == []
    for override in ("TRUE", "true", "1"):
        answer = runtime.call("ADD", CNI_NETNS=HOST_NETNS, CNI_NETNS_OVERRIDE=override)
        assert answer.status == 0
    silent(runtime.call("DEL", CNI_NETNS=HOST_NETNS))
    assert runtime.owned == []
    # A path that cannot be looked at is no error, as in the skeleton.
    assert runtime.call("ADD", CNI_NETNS="/proc/1/ns/absent").status == 0


# Output -----------------------------------------------------------------------


@conforms_as_process
def an_error_is_an_object_on_stdout_and_stderr_stays_empty(runtime: Runtime) -> None:
    answer = runtime.call("ADD", fields=runtime.config("0.4.0", ipam={"routes": 1}))
    assert answer.stdout.startswith('{\n    "cniVersion": "0.4.0",\n    "code": 7,\n')
    assert not answer.stdout.endswith("\n")
    assert (answer.status, answer.stderr) == (1, "")


@conforms_as_process
def tracing_variables_and_unknown_keys_are_tolerated(runtime: Runtime) -> None:
    answer = runtime.call(
        "ADD",
        fields=runtime.config(
            capabilities={"ips": True}, mtu=1400, ipam={"dataDir": "/x"}
        ),
        TRACEPARENT="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        TRACESTATE="a=b",
        BAGGAGE="c=d",
    )
    assert (answer.status, answer.stderr) == (0, "")


# Results ------------------------------------------------------------------------


def shape(version: str, families: str) -> Config:
    """The result that a delegate must give in a version."""
    old, middle = version in ("0.1.0", "0.2.0"), version.startswith("0.")
    result: Config = {"cniVersion": version}
    addresses = {
        "4": ("10.240.0.2/24", "10.240.0.1", "0.0.0.0/0"),
        "6": ("fd00:10::2/64", "fd00:10::1", "::/0"),
    }
    chosen = {key: addresses[key] for key in families}
    if old:
        for key, (address, gateway, route) in chosen.items():
            result[f"ip{key}"] = {
                "ip": address,
                "gateway": gateway,
                "routes": [{"dst": route}],
            }
        return result | {"dns": {}}
    result["ips"] = [
        {**({"version": key} if middle else {}), "address": address, "gateway": gateway}
        for key, (address, gateway, _) in chosen.items()
    ]
    result["routes"] = [{"dst": route} for _, _, route in chosen.values()]
    return result | ({"dns": {}} if middle else {})


@conforms
def every_version_has_its_shape_for_one_family_and_for_two(runtime: Runtime) -> None:
    base = runtime.network
    routes = [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
    for version in SUPPORTED_VERSIONS:
        for families, ranges in (("4", [[V4]]), ("6", [[V6]]), ("46", [[V4], [V6]])):
            runtime.network = f"{base}-{version}-{families}"
            result = runtime.add(
                version=version, ipam={"ranges": ranges, "routes": routes}
            )
            assert result == shape(version, families)


@conforms
def a_configuration_without_version_is_answered_as_0_1_0(runtime: Runtime) -> None:
    assert (
        runtime.add(version=None)
        == runtime.add(version="")
        == runtime.add(version="0.1.0")
    )
    assert runtime.add(version=None)["cniVersion"] == "0.1.0"


@conforms
def a_delegate_leaves_interfaces_out_and_a_main_plugin_names_its_own(
    runtime: Runtime,
) -> None:
    assert "interface" not in str(runtime.add())
    result = runtime.add("c2", type="metis")
    assert result["interfaces"] == [{"name": "eth0", "sandbox": "/run/netns/absent"}]
    assert result["ips"][0]["interface"] == 0


@conforms
def routes_are_handed_on_as_they_are_configured(runtime: Runtime) -> None:
    routes = [{"dst": "0.0.0.0/0"}, {"dst": "10.0.0.0/8", "gw": "10.240.0.9"}]
    assert runtime.add(ipam={"routes": routes})["routes"] == routes
    wrong: list[Any] = [
        [{"dst": "default"}],
        [{"dst": "0.0.0.0/0", "gw": "x"}],
        {},
        [{}],
    ]
    for bad in wrong:
        answer = runtime.call("ADD", "c2", runtime.config(ipam={"routes": bad}))
        refused(answer, 7, "ipam.routes")
    assert [container for container, _, _ in runtime.owned] == ["c1"]


@conforms
def an_ipv6_route_is_left_out_for_a_pod_without_ipv6(runtime: Runtime) -> None:
    routes = [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
    assert runtime.add(ipam={"routes": routes})["routes"] == [{"dst": "0.0.0.0/0"}]


@conforms
def resolv_conf_becomes_dns_and_a_missing_one_takes_nothing(runtime: Runtime) -> None:
    path = Path(runtime.node.directory) / "resolv.conf"
    path.write_text(
        "nameserver 10.0.0.53\nsearch a.example b.example\noptions rotate\n"
    )
    expected = {
        "nameservers": ["10.0.0.53"],
        "search": ["a.example", "b.example"],
        "options": ["rotate"],
    }
    for version in SUPPORTED_VERSIONS:
        result = runtime.add(version=version, ipam={"resolvConf": str(path)})
        assert result["dns"] == expected
    silent(runtime.call("DEL"))
    absent = {"resolvConf": str(path.with_name("absent"))}
    refused(runtime.call("ADD", fields=runtime.config(ipam=absent)), 5, "absent")
    assert runtime.owned == []


# Verbs -------------------------------------------------------------------------


@conforms_as_process
def a_repeated_add_gets_the_same_address(runtime: Runtime) -> None:
    assert runtime.add() == runtime.add() == runtime.add()
    assert runtime.owned == [("c1", "eth0", "10.240.0.2")]


@conforms
def one_container_may_have_several_interfaces(runtime: Runtime) -> None:
    for interface in ("eth0", "net1"):
        assert runtime.call("ADD", CNI_IFNAME=interface).status == 0
    silent(runtime.call("DEL", CNI_IFNAME="net1"))
    assert runtime.owned == [("c1", "eth0", "10.240.0.2")]


@conforms
def one_interface_may_be_on_several_networks(runtime: Runtime) -> None:
    runtime.add()
    other = runtime.network + "-other"
    nine = [[{"subnet": "10.9.0.0/24"}]]
    result = runtime.add(ipam={"network": other, "ranges": nine})
    assert result["ips"][0]["address"] == "10.9.0.2/24"
    silent(runtime.call("DEL"))
    assert runtime.owned == []
    assert runtime.node.owned(other) == [("c1", "eth0", "10.9.0.2")]


@conforms
def del_succeeds_with_any_or_no_namespace_and_as_often_as_it_comes(
    runtime: Runtime,
) -> None:
    silent(runtime.call("DEL", "never-added"))
    for netns in (None, "", "/absent", "/proc/999999999/ns/net", "\udcff"):
        runtime.add()
        silent(runtime.call("DEL", CNI_NETNS=netns))
        assert runtime.owned == []
        silent(runtime.call("DEL", CNI_NETNS=netns))


@conforms
def del_needs_no_ranges_that_are_still_right(runtime: Runtime) -> None:
    for broken in (
        {"ranges": "x"},
        {"ranges": None},
        {"ranges": [[{"subnet": "10.9.0.0/24"}]]},
        {"routes": 1},
        {"resolvConf": 1},
        {"releaseCooldown": "soon"},
        {"sticky": "yes"},
    ):
        runtime.add()
        silent(runtime.call("DEL", fields=runtime.config(ipam=broken)))
        assert runtime.owned == []
    runtime.add()
    changes: Config = {"prevResult": [], "runtimeConfig": 1, "args": 1, "dns": 1}
    silent(runtime.call("DEL", fields=runtime.config(**changes), CNI_ARGS="?;"))
    assert runtime.owned == []


@conforms_as_process
def check_compares_the_previous_result_with_what_is_held(runtime: Runtime) -> None:
    def checked(previous: Any, container: str = "c1") -> Answer:
        fields = runtime.config("0.4.0", prevResult=previous)
        return runtime.call("CHECK", container, fields)

    result = runtime.add(version="0.4.0")
    silent(checked(result))
    refused(checked(None), 7, "prevResult")
    refused(checked(result, "c2"), 100)
    other = {"ips": [{"version": "4", "address": "10.240.0.77/24"}]}
    refused(checked(other), 101, "10.240.0.2", "10.240.0.77")
    # What later plugins of a chain add is none of our business.
    more = result["ips"] + [{"version": "4", "address": "192.0.2.1/24"}]
    silent(checked({**result, "ips": more, "routes": [{"dst": "192.0.2.0/24"}]}))
    silent(runtime.call("DEL"))
    refused(checked(result), 100)


@conforms_as_process
def gc_frees_what_is_not_in_the_list_on_this_network_alone(runtime: Runtime) -> None:
    other = runtime.network + "-other"
    for container in ("c1", "c2", "c3"):
        runtime.add(container)
    runtime.call("ADD", "c1", CNI_IFNAME="net1")
    runtime.add("c9", ipam={"network": other})

    def collect(**keys: Any) -> Answer:
        return runtime.call("GC", fields={**runtime.config(), **keys})

    before = runtime.owned
    silent(collect())  # absent is not empty
    silent(collect(**{VALID: None}))
    assert runtime.owned == before
    entry = {"containerID": "c1", "ifname": "eth0"}
    for malformed in ("c2", {}, {"containerID": "c2"}, {"ifname": "eth0"}):
        refused(collect(**{VALID: [entry, malformed]}), 7, f"{VALID}[1]")
    assert runtime.owned == before
    silent(
        collect(
            **{
                VALID: [entry],
                "cni.dev/attachments": [{"containerID": "c3", "ifname": "eth0"}],
            }
        )
    )
    assert [held[:2] for held in runtime.owned] == [("c1", "eth0"), ("c3", "eth0")]
    silent(collect(**{"cni.dev/attachments": []}))
    assert runtime.owned == []
    assert [held[0] for held in runtime.node.owned(other)] == ["c9"]
    # What was freed rests as after any DEL.
    assert runtime.add("c4")["ips"][0]["address"] == "10.240.0.6/24"


@conforms_as_process
def status_is_silent_while_an_add_could_be_served(runtime: Runtime) -> None:
    silent(runtime.call("STATUS"))
    runtime.add(ipam={"ranges": [[ONE]]})
    full = {"ranges": [[ONE]]}
    silent(runtime.call("STATUS", fields=runtime.config(ipam=full)))
    strict = {**full, "statusOnExhaustion": True}
    answer = runtime.call("STATUS", fields=runtime.config(ipam=strict))
    refused(answer, 50, "no ipv4 address is free")


@conforms
def status_never_waits_for_the_write_lock(runtime: Runtime) -> None:
    writer = apsw.Connection(runtime.node.db_path)
    writer.set_busy_timeout(60_000)
    try:
        writer.execute("BEGIN IMMEDIATE")
        strict = runtime.config(ipam={"statusOnExhaustion": True})
        seconds = []
        for _ in range(5):  # a machine that is busy is not busy five times in a row
            start = time.monotonic()
            silent(runtime.call("STATUS", fields=strict))
            seconds.append(time.monotonic() - start)
        assert min(seconds) < 1
    finally:
        writer.close()


@conforms
def exhaustion_is_code_11_and_never_an_empty_result(runtime: Runtime) -> None:
    one = {"ranges": [[ONE]]}
    runtime.add("c1", ipam=one)
    for version in SUPPORTED_VERSIONS:
        answer = runtime.call("ADD", "c2", runtime.config(version, ipam=one))
        refused(answer, 11, "1 owned")
    assert [held[0] for held in runtime.owned] == ["c1"]


# Ranges --------------------------------------------------------------------------


@conforms
def every_set_gives_an_address_in_the_order_of_the_sets(runtime: Runtime) -> None:
    ranges = [[V6], [V4], [{"subnet": "10.9.0.0/24"}]]
    result = runtime.add(ipam={"ranges": ranges})
    assert [entry["address"] for entry in result["ips"]] == [
        "fd00:10::2/64",
        "10.240.0.2/24",
        "10.9.0.2/24",
    ]


@conforms
def alternatives_are_tried_in_order(runtime: Runtime) -> None:
    ranges = {"ranges": [[ONE, {"subnet": "10.9.1.0/24"}]]}
    given = [runtime.add(f"c{i}", ipam=ranges)["ips"][0]["address"] for i in range(3)]
    assert given == ["10.9.0.8/32", "10.9.1.2/24", "10.9.1.3/24"]


@conforms
def the_older_form_stands_in_front_and_the_runtime_s_ranges_before_it(
    runtime: Runtime,
) -> None:
    result = runtime.add(
        ipam={"subnet": "10.9.0.0/24", "ranges": [[V4]]},
        runtimeConfig={"ipRanges": [[{"subnet": "10.7.0.0/24"}]]},
    )
    assert [entry["address"] for entry in result["ips"]] == [
        "10.7.0.2/24",
        "10.9.0.2/24",
        "10.240.0.2/24",
    ]


@conforms
def bounds_gateway_and_exclusions_are_kept(runtime: Runtime) -> None:
    ranges = [
        [
            {
                **V4,
                "rangeStart": "10.240.0.10",
                "rangeEnd": "10.240.0.15",
                "gateway": "10.240.0.11",
                "exclude": ["10.240.0.12/31"],
            }
        ]
    ]
    section = {"ranges": ranges}
    given = [runtime.add(f"c{i}", ipam=section)["ips"][0] for i in range(3)]
    assert given == [
        {"address": f"10.240.0.{last}/24", "gateway": "10.240.0.11"}
        for last in (10, 14, 15)
    ]
    refused(runtime.call("ADD", "c3", runtime.config(ipam=section)), 11)


@conforms
def the_smallest_subnets_give_all_they_have(runtime: Runtime) -> None:
    base = runtime.network
    for subnet, count in (
        ("10.9.0.8/32", 1),
        ("10.9.0.8/31", 2),
        ("10.9.0.8/30", 1),
        ("fd00:9::8/128", 1),
        ("fd00:9::8/127", 2),
        ("fd00:9::8/126", 2),
    ):
        runtime.network = f"{base}-{subnet.partition('/')[2]}-{count}-{subnet[0]}"
        section = {"ranges": [[{"subnet": subnet}]]}
        given = {
            runtime.add(f"c{i}", ipam=section)["ips"][0]["address"]
            for i in range(count)
        }
        assert len(given) == count
        refused(runtime.call("ADD", "more", runtime.config(ipam=section)), 11)


@conforms
def wrong_ranges_are_code_7_with_the_value_and_the_nearest_right_one(
    runtime: Runtime,
) -> None:
    for ranges, value, right in (
        ([[{"subnet": "10.1.2.130/24"}]], "10.1.2.130/24", "10.1.2.0/24"),
        ([[{**V4, "rangeStart": "10.239.0.1"}]], "10.239.0.1", "10.240.0.1"),
        ([[{**V4, "rangeEnd": "10.241.0.1"}]], "10.241.0.1", "10.240.0.254"),
        ([[V4, V6]], "fd00:10::/64", "a set of its own"),
        ([[V4], [V4]], "ipam.ranges[1][0]", "ipam.ranges[0][0]"),
        ([[{"subnet": "10.0.0.0"}]], "10.0.0.0", "ADDRESS/PREFIX"),
        ([[]], "ipam.ranges[0]", "10.240.0.0/20"),
    ):
        for command in ("ADD", "STATUS"):
            answer = runtime.call(
                command, fields=runtime.config(ipam={"ranges": ranges})
            )
            refused(answer, 7, value, right)
    assert runtime.owned == []


@conforms
def two_sets_of_a_family_need_0_3_0(runtime: Runtime) -> None:
    two = {"ranges": [[V4], [{"subnet": "10.9.0.0/24"}]]}
    for version in ("0.1.0", "0.2.0"):
        answer = runtime.call("ADD", fields=runtime.config(version, ipam=two))
        refused(answer, 7, "0.3.0")
    for version in SUPPORTED_VERSIONS[2:]:
        assert len(runtime.add(version=version, ipam=two)["ips"]) == 2


@conforms
def a_set_that_is_exhausted_gives_back_what_the_others_gave(runtime: Runtime) -> None:
    runtime.add("c1", ipam={"ranges": [[ONE]]})
    both = runtime.config(ipam={"ranges": [[V4], [ONE]]})
    refused(runtime.call("ADD", "c2", both), 11)
    assert [held[0] for held in runtime.owned] == ["c1"]
    # Not even a cooldown: nobody ever had it.
    assert runtime.add("c3")["ips"][0]["address"] == "10.240.0.2/24"


# Requested addresses ---------------------------------------------------------------


@conforms_as_process
def an_address_can_be_asked_for_in_three_ways(runtime: Runtime) -> None:
    def address(answer: Answer) -> str:
        assert answer.status == 0, answer.stdout
        return str(answer.object["ips"][0]["address"])

    by_args = runtime.config(args={"cni": {"ips": ["10.240.0.21"]}})
    by_runtime = runtime.config(runtimeConfig={"ips": ["10.240.0.22/24"]})
    assert address(runtime.call("ADD", "c1", by_args)) == "10.240.0.21/24"
    assert address(runtime.call("ADD", "c2", by_runtime)) == "10.240.0.22/24"
    answer = runtime.call("ADD", "c3", CNI_ARGS="IP=10.240.0.23/24")
    assert address(answer) == "10.240.0.23/24"
    answer = runtime.call("ADD", "c4", CNI_ARGS="IgnoreUnknown=1;IP=10.240.0.24;MAC=x")
    assert address(answer) == "10.240.0.24/24"


@conforms
def an_address_that_cannot_be_had_is_refused_with_the_reason(runtime: Runtime) -> None:
    runtime.add()
    for wanted, code in (
        ("10.240.0.2", 11),  # another owner's
        ("10.240.0.0", 7),  # the network's
        ("10.240.0.1", 7),  # the gateway
        ("10.240.0.255", 7),  # broadcast
        ("10.9.0.9", 7),  # in no range
    ):
        answer = runtime.call("ADD", "c2", CNI_ARGS=f"IP={wanted}")
        refused(answer, code, wanted)
    refused(runtime.call("ADD", "c2", CNI_ARGS="IP=10.240.0"), 4, "IP=10.240.0")
    assert [held[0] for held in runtime.owned] == ["c1"]
    silent(runtime.call("DEL"))
    refused(runtime.call("ADD", "c2", CNI_ARGS="IP=10.240.0.2"), 11, "10.240.0.2")


@conforms
def requested_addresses_find_their_sets(runtime: Runtime) -> None:
    result = runtime.add(
        ipam={"ranges": [[V4], [V6], [{"subnet": "10.9.0.0/24"}]]},
        args={"cni": {"ips": ["10.9.0.77"]}},
        runtimeConfig={"ips": ["fd00:10::77/64"]},
    )
    assert [entry["address"] for entry in result["ips"]] == [
        "10.240.0.2/24",
        "fd00:10::77/64",
        "10.9.0.77/24",
    ]


@conforms
def a_sticky_pod_gets_its_address_back(runtime: Runtime) -> None:
    sticky = runtime.config(ipam={"sticky": True})
    web = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web"
    first = runtime.call("ADD", "c1", sticky, CNI_ARGS=web).object
    silent(runtime.call("DEL", "c1", sticky, CNI_ARGS=web))
    runtime.add("other")
    assert runtime.call("ADD", "c2", sticky, CNI_ARGS=web).object == first
    # A sandbox that still lives keeps its own.
    assert runtime.call("ADD", "c3", sticky, CNI_ARGS=web).object != first


# CNI_ARGS --------------------------------------------------------------------------


@conforms
def cni_args_are_held_to_their_syntax(runtime: Runtime) -> None:
    kubernetes = (
        "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=a;"
        "K8S_POD_UID=1-2"
    )
    for good in (
        "",
        kubernetes,
        f"IgnoreUnknown=1;{kubernetes}",
        f"FOO=1;IgnoreUnknown=true;{kubernetes}",
        f"FOO=1;{kubernetes};IgnoreUnknown=TRUE",
        "IgnoreUnknown=0",
        "K8S_POD_NAME=" + "名" * 253,
    ):
        assert runtime.call("ADD", CNI_ARGS=good).status == 0, good
    silent(runtime.call("DEL"))
    for bad in (
        f"{kubernetes};",
        f"{kubernetes};FOO=1",
        f"{kubernetes};FOO=1;IgnoreUnknown=false",
        "IgnoreUnknown=1;FOO",
        "IgnoreUnknown=1;FOO=a=b",
        "IgnoreUnknown=yes",
        "k8s_pod_name=web",
        "K8S_POD_NAME=\udcff",
    ):
        refused(runtime.call("ADD", CNI_ARGS=bad), 4, "CNI_ARGS")
    assert runtime.owned == []


# The log ---------------------------------------------------------------------------


@conforms_as_process
def a_log_that_cannot_be_written_fails_no_call(runtime: Runtime) -> None:
    for place in ("/proc/cni.log", "/dev/full", "/", "/absent/cni.log"):
        fields = runtime.config(logFile=place, logLevel="loud")
        answer = runtime.call("ADD", fields=fields)
        assert answer.status == 0
        assert "logLevel" in answer.stderr
        assert "cannot be written" in answer.stderr
        assert runtime.call("DEL", fields=fields).status == 0


@conforms
def every_call_is_a_line_in_the_log(runtime: Runtime) -> None:
    path = Path(runtime.node.directory) / f"{runtime.network}.log"
    fields = runtime.config(logFile=str(path), kubeconfig="hunter2")
    args = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web"
    runtime.call("ADD", fields=fields, CNI_ARGS=args)
    runtime.call("DEL", fields=fields, CNI_ARGS=args)
    runtime.call("GC", fields=fields)
    runtime.call("CHECK", fields=fields)
    lines = path.read_text().splitlines()
    owner = " container=c1 interface=eth0 pod=shop/web "
    assert f" verb=ADD{owner}address=10.240.0.2/24 ms=" in lines[0]
    assert lines[0].endswith(" outcome=ok")
    assert f" verb=DEL{owner}ms=" in lines[1]
    assert "verb=GC" in lines[2]
    assert "no list of valid attachments" in lines[2]
    assert 'outcome="7: CHECK needs prevResult' in lines[3]
    assert len(lines) == 4
    assert "hunter2" not in path.read_text()


@conforms
def a_log_of_level_debug_has_what_the_call_was_told(runtime: Runtime) -> None:
    path = Path(runtime.node.directory) / f"{runtime.network}.log"
    fields = runtime.config(logFile=str(path), logLevel="debug")
    runtime.call("ADD", fields=fields, CNI_ARGS="K8S_POD_NAME=web")
    refused(runtime.call("ADD", "c2", fields, CNI_ARGS="K8S_POD_NAME"), 4)
    given, wrong = path.read_text().splitlines()
    assert " netns=/run/netns/absent " in given
    assert ' args="K8S_POD_NAME=web" stdin="{' in given
    assert " details=" in wrong
