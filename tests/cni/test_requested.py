"""Addresses that the runtime asks for: three ways, one address a set."""

from __future__ import annotations

from typing import Any

import pytest

from metis.cni.protocol import CNIError
from metis.cni.spec import Request
from tests.cni.calls import Config, config, environ, ipam, request

RANGES = [
    [{"subnet": "10.240.0.0/22"}],
    [{"subnet": "fd00:10::/64"}],
    [{"subnet": "10.9.0.0/24", "exclude": ["10.9.0.64/26"], "gateway": "10.9.0.5"}],
]


def asked(
    args: Any = None, runtime: Any = None, variable: str = "", **fields: Any
) -> Request:
    fields = config(
        args=None if args is None else {"cni": {"ips": args}},
        runtimeConfig=None if runtime is None else {"ips": runtime},
        ipam=ipam(ranges=fields.get("ranges", RANGES)),
    )
    variables = environ("ADD", CNI_ARGS=f"IP={variable}" if variable else "")
    return request("ADD", fields, variables)


def requested(*arguments: Any, **options: Any) -> list[str]:
    return [one.requested for one in asked(*arguments, **options).wanted]


def refused(*arguments: Any, **options: Any) -> CNIError:
    with pytest.raises(CNIError) as caught:
        asked(*arguments, **options)
    assert caught.value.code == 7
    return caught.value


@pytest.mark.parametrize(
    ("args", "runtime", "variable", "expected"),
    [
        (None, None, "", ["", "", ""]),
        ([], [], "", ["", "", ""]),
        (["10.240.0.9"], None, "", ["10.240.0.9", "", ""]),
        (None, ["10.240.0.9/22"], "", ["10.240.0.9", "", ""]),
        (None, None, "10.240.0.9", ["10.240.0.9", "", ""]),
        # Each goes to the first set that holds it, wherever it stands.
        (
            ["10.9.0.9"],
            ["FD00:10::9"],
            "10.240.0.9",
            ["10.240.0.9", "fd00:10::9", "10.9.0.9"],
        ),
        (["10.9.0.9", "fd00:10::9/64"], None, "", ["", "fd00:10::9", "10.9.0.9"]),
        # The same address by two ways is asked for once.
        (["10.240.0.9"], ["10.240.0.9/22"], "10.240.0.9", ["10.240.0.9", "", ""]),
        (None, ["::ffff:10.240.0.9"], "", ["10.240.0.9", "", ""]),
        # `args` decides where CNI_ARGS has another address for the same set.
        (["10.240.0.9"], None, "10.240.0.8", ["10.240.0.9", "", ""]),
    ],
)
def test_all_three_ways_are_merged_and_mapped_to_sets(
    args: Any, runtime: Any, variable: str, expected: list[str]
) -> None:
    assert requested(args, runtime, variable) == expected


@pytest.mark.parametrize(
    ("args", "runtime", "variable", "named"),
    [
        (["10.8.0.9"], None, "", ["'10.8.0.9'", "args.cni.ips[0]", "in no range"]),
        (None, ["10.8.0.9"], "", ["'10.8.0.9'", "runtimeConfig.ips[0]"]),
        (None, None, "10.8.0.9", ["'10.8.0.9'", "IP= in CNI_ARGS"]),
        # Outside every range it is wrong, whatever `args` says.
        (["10.240.0.9"], None, "10.8.0.9", ["'10.8.0.9'"]),
        # One set, two addresses.
        (["10.240.0.9", "10.240.0.8"], None, "", ["'10.240.0.8'", "one too many"]),
        (["10.240.0.9"], ["10.240.0.8"], "", ["'10.240.0.8'", "runtimeConfig.ips[0]"]),
        (None, ["10.240.0.9"], "10.240.0.8", ["'10.240.0.8'", "one too many"]),
        # What no pod gets.
        (["10.240.0.1"], None, "", ["'10.240.0.1'", "the gateway or excluded"]),
        (["10.9.0.5"], None, "", ["'10.9.0.5'", "the gateway or excluded"]),
        (["10.9.0.70"], None, "", ["'10.9.0.70'", "the gateway or excluded"]),
        (["10.240.0.0"], None, "", ["'10.240.0.0'", "in no range"]),
        (["10.240.3.255"], None, "", ["'10.240.3.255'", "in no range"]),
        # What is no address.
        (["10.240.0"], None, "", ["args.cni.ips[0]: '10.240.0'"]),
        ([""], None, "", ["args.cni.ips[0]: ''"]),
        ([9], None, "", ["args.cni.ips[0] is 9"]),
        ("10.240.0.9", None, "", ["args.cni.ips is a text"]),
        (None, ["10.240.0.9/33"], "", ["'10.240.0.9/33'", "write '10.240.0.9'"]),
        (None, ["10.240.0.9/"], "", ["'10.240.0.9/'"]),
        (None, ["fe80::1%eth0"], "", ["has a zone"]),
        (None, {}, "", ["runtimeConfig.ips is an object"]),
    ],
)
def test_an_address_that_cannot_be_had_is_named_with_its_place(
    args: Any, runtime: Any, variable: str, named: list[str]
) -> None:
    message = refused(args, runtime, variable).message
    for text in named:
        assert text in message


@pytest.mark.parametrize(
    "fields", [{"args": []}, {"args": {"cni": 1}}, {"runtimeConfig": "ips"}]
)
def test_a_section_that_is_no_object_is_named(fields: Config) -> None:
    with pytest.raises(CNIError, match=f"{next(iter(fields))}.* write an object"):
        request("ADD", config(**fields))


def test_two_addresses_of_one_set_can_be_had_of_two_sets() -> None:
    low = {"subnet": "10.240.0.0/22", "rangeEnd": "10.240.0.99"}
    high = {"subnet": "10.240.0.0/22", "rangeStart": "10.240.0.100"}
    ips = ["10.240.0.200", "10.240.0.20"]
    assert requested(ips, ranges=[[low], [high]]) == ["10.240.0.20", "10.240.0.200"]


def test_nothing_is_asked_for_where_nothing_is_given() -> None:
    outside = {"cni": {"ips": ["192.0.2.1"]}}
    for command in ("DEL", "CHECK"):
        read = request(command, config(args=outside, prevResult={}))
        assert not any(one.requested for one in read.wanted)
