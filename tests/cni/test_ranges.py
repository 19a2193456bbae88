"""Ranges as host-local has them: sets, alternatives, and what is wrong in one."""

from __future__ import annotations

from typing import Any

import pytest

from metis.cni.protocol import SUPPORTED_VERSIONS, CNIError
from metis.cni.ranges import RangeSet, range_sets
from metis.model import Family
from tests.cni.calls import Config, config, ipam, request

V4, V6 = "10.240.0.0/22", "fd00:10::/64"


def one(subnet: str, **changes: Any) -> Config:
    return {"subnet": subnet, **changes}


def read(
    fields: Config, runtime: Config | None = None, version: str = "1.0.0"
) -> tuple[RangeSet, ...]:
    return range_sets(fields, runtime or {}, version)


def subnets(sets: tuple[RangeSet, ...]) -> list[list[str]]:
    return [[each.subnet for each in one.ranges] for one in sets]


def refused(fields: Config, runtime: Config | None = None) -> str:
    with pytest.raises(CNIError) as caught:
        read(fields, runtime)
    assert caught.value.code == 7
    return caught.value.message


@pytest.mark.parametrize("fields", [{}, ipam(ranges=[]), ipam(ranges=None)])
def test_without_ranges_an_ipv4_address_of_whatever_there_is(fields: Config) -> None:
    assert read(fields) == (RangeSet(Family.IPV4),)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (ipam(ranges=[[one(V4)]]), [[V4]]),
        (ipam(subnet=V4), [[V4]]),
        (ipam(ranges=[[one(V6)], [one(V4)]]), [[V6], [V4]]),
        (ipam(ranges=[[one(V4), one("10.9.0.0/24")]]), [[V4, "10.9.0.0/24"]]),
        (ipam(ranges=[[one(V4)], [one("10.9.0.0/24")]]), [[V4], ["10.9.0.0/24"]]),
        # The older form stands in front, as a set of its own.
        (ipam(subnet="10.9.0.0/24", ranges=[[one(V4)]]), [["10.9.0.0/24"], [V4]]),
        # Spellings of the same subnets.
        (ipam(subnet="FD00:10:0:0::/64"), [[V6]]),
        (ipam(subnet="::ffff:10.240.0.0/118"), [[V4]]),
        # As small and as large as they come.
        (ipam(subnet="10.0.0.7/32"), [["10.0.0.7/32"]]),
        (ipam(subnet="10.0.0.6/31"), [["10.0.0.6/31"]]),
        (ipam(subnet="fd00::7/128"), [["fd00::7/128"]]),
        (ipam(subnet="fd00::6/127"), [["fd00::6/127"]]),
        (ipam(subnet="10.0.0.0/8"), [["10.0.0.0/8"]]),
        (ipam(subnet="fd00::/8"), [["fd00::/8"]]),
        # Bounds without a subnet mean nothing, as in host-local.
        (ipam(rangeStart="x", ranges=[[one(V4)]]), [[V4]]),
    ],
)
def test_every_set_is_one_address_and_its_members_are_alternatives(
    fields: Config, expected: list[list[str]]
) -> None:
    assert subnets(read(fields)) == expected


def test_the_runtime_s_ranges_stand_in_front_of_both_forms() -> None:
    fields = ipam(subnet="10.9.0.0/24", ranges=[[one(V4)]])
    runtime = {"ipRanges": [[one("10.7.0.0/24"), one("10.8.0.0/24")]]}
    assert subnets(read(fields, runtime)) == [
        ["10.7.0.0/24", "10.8.0.0/24"],
        ["10.9.0.0/24"],
        [V4],
    ]
    through = request("ADD", config(ipam=fields, runtimeConfig=runtime))
    assert subnets(through.wanted) == subnets(read(fields, runtime))


def test_a_range_has_bounds_a_gateway_and_exclusions() -> None:
    (found,) = read(
        ipam(
            ranges=[
                [
                    one(
                        V4,
                        rangeStart="10.240.0.10",
                        rangeEnd="10.240.0.20",
                        gateway="10.240.3.254",
                        exclude=["10.240.0.12", "10.240.0.16/30"],
                    )
                ]
            ]
        )
    )
    (only,) = found.ranges
    assert (only.start, only.end, only.gateway) == (
        "10.240.0.10",
        "10.240.0.20",
        "10.240.3.254",
    )
    assert only.exclude == ("10.240.0.12", "10.240.0.16/30")
    assert found.spans("10.240.0.10")
    assert found.spans("10.240.0.20")
    assert not found.spans("10.240.0.9")
    assert not found.spans("10.240.0.21")
    assert [n for n in range(10, 21) if found.sets_aside(f"10.240.0.{n}")] == [
        12,
        16,
        17,
        18,
        19,
    ]


def test_a_gateway_may_lie_outside_of_the_subnet() -> None:
    (found,) = read(ipam(subnet=V6, gateway="fe80::1"))
    assert found.ranges[0].gateway == "fe80::1"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        # What is no subnet: the place and the value.
        (ipam(ranges=[[one("10.0.0.0")]]), ["ipam.ranges[0][0].subnet", "'10.0.0.0'"]),
        (ipam(ranges=[[one("10.0.0.0/33")]]), ["'10.0.0.0/33'"]),
        (ipam(ranges=[[one("podnet/24")]]), ["'podnet/24'"]),
        (ipam(ranges=[[one("fe80::%eth0/64")]]), ["fe80::%eth0/64"]),
        (ipam(ranges=[[one(V4)], [one("10.1/24")]]), ["ipam.ranges[1][0].subnet"]),
        (ipam(ranges=[[one("")]]), ["ipam.ranges[0][0].subnet"]),
        (ipam(ranges=[[{"subnet": 10}]]), ["ipam.ranges[0][0].subnet is 10"]),
        (ipam(ranges=[[{}]]), ["ipam.ranges[0][0].subnet is None"]),
        (ipam(ranges=[["10.0.0.0/24"]]), ["ipam.ranges[0][0] is a text"]),
        (ipam(ranges=[one("10.0.0.0/24")]), ["ipam.ranges[0] is an object"]),
        (ipam(ranges=[[one(V4)], []]), ["ipam.ranges[1] is an empty set"]),
        (ipam(subnet=1), ["ipam.subnet is 1"]),
        # Host bits: the right network.
        (ipam(subnet="10.1.2.130/24"), ["ipam.subnet", "'10.1.2.0/24'"]),
        (ipam(ranges=[[one("fd00::1/64")]]), ["'fd00::1/64'", "'fd00::/64'"]),
        (ipam(subnet="::ffff:10.1.2.3/120"), ["host bits", "'10.1.2.0/24'"]),
        # Bounds: the nearest address.
        (
            ipam(subnet=V4, rangeStart="10.239.0.1"),
            ["ipam:", "range start '10.239.0.1'", "'10.240.0.1'"],
        ),
        (
            ipam(ranges=[[one(V4, rangeEnd="10.241.0.1")]]),
            ["ipam.ranges[0][0]:", "range end '10.241.0.1'", "'10.240.3.254'"],
        ),
        (ipam(subnet=V4, rangeStart="fd00::1"), ["'fd00::1'", V4]),
        (ipam(subnet=V4, rangeStart="first"), ["'first'"]),
        (ipam(subnet=V4, rangeEnd=9), ["ipam.rangeEnd is 9"]),
        (
            ipam(subnet=V4, rangeStart="10.240.0.9", rangeEnd="10.240.0.8"),
            ["'10.240.0.9'", "'10.240.0.8'"],
        ),
        # Gateways and exclusions.
        (ipam(subnet=V4, gateway="fd00::1"), ["'fd00::1'", "'10.240.0.1'"]),
        (ipam(subnet=V4, gateway="gate"), ["'gate'"]),
        (ipam(subnet=V4, gateway=1), ["ipam.gateway is 1"]),
        (ipam(subnet=V4, exclude="10.240.0.9"), ["ipam.exclude is a text"]),
        (ipam(subnet=V4, exclude=[9]), ["ipam.exclude[0] is 9"]),
        (ipam(subnet=V4, exclude=["10.9.0.1"]), ["'10.9.0.1'", V4]),
        (ipam(subnet=V4, exclude=["fd00::/64"]), ["'fd00::/64'", V4]),
        (
            ipam(subnet=V4, exclude=["10.240.0.8/30", "10.240.0.9/30"]),
            ["ipam.exclude[1]", "'10.240.0.8/30'"],
        ),
        (ipam(subnet=V4, exclude=[V4]), ["no address for pods"]),
        # One family a set, and every address in one range alone.
        (
            ipam(ranges=[[one(V4), one(V6)]]),
            ["ipam.ranges[0][1].subnet", f"'{V6}'", "a set of its own"],
        ),
        (
            ipam(ranges=[[one(V4), one("10.240.1.0/24")]]),
            ["ipam.ranges[0][1]", "overlaps ipam.ranges[0][0]"],
        ),
        (
            ipam(ranges=[[one(V4)], [one("10.9.0.0/24")], [one(V4)]]),
            ["ipam.ranges[2][0]", "overlaps ipam.ranges[0][0]"],
        ),
        (
            ipam(
                ranges=[
                    [one(V4, rangeEnd="10.240.0.50")],
                    [one(V4, rangeStart="10.240.0.40")],
                ]
            ),
            ["ipam.ranges[1][0]", "a rangeStart of '10.240.0.51'"],
        ),
        (ipam(subnet=V4, ranges=[[one(V4)]]), ["ipam.ranges[0][0]", "overlaps ipam ("]),
    ],
)
def test_what_is_wrong_in_a_range_is_named_with_its_place_and_the_right_one(
    fields: Config, named: list[str]
) -> None:
    message = refused(fields)
    for text in named:
        assert text in message


def test_ranges_of_the_runtime_are_held_to_the_same_rules() -> None:
    assert "runtimeConfig.ipRanges[0][0].subnet" in refused(
        ipam(), {"ipRanges": [[one("x")]]}
    )
    message = refused(ipam(ranges=[[one(V6)]]), {"ipRanges": [[one(V6)]]})
    assert "runtimeConfig.ipRanges[0][0]" in message
    assert "ipam.ranges[0][0]" in message


def test_two_parts_of_a_subnet_may_be_two_ranges() -> None:
    low, high = one(V4, rangeEnd="10.240.0.99"), one(V4, rangeStart="10.240.0.100")
    assert len(read(ipam(ranges=[[low, high]]))) == 1
    assert len(read(ipam(ranges=[[high], [low]]))) == 2


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
@pytest.mark.parametrize("second", ["10.9.0.0/24", "fd00:9::/64"])
def test_two_sets_of_a_family_need_a_version_that_has_room_for_them(
    version: str, second: str
) -> None:
    first = V4 if "." in second else V6
    fields = ipam(ranges=[[one(first)], [one(second)]])
    if version in ("0.1.0", "0.2.0"):
        with pytest.raises(CNIError) as caught:
            read(fields, version=version)
        assert caught.value.code == 7
        assert "ipam.ranges[1][0]" in caught.value.message
        assert f"cniVersion '{version}'" in caught.value.message
        assert "'0.3.0' or later" in caught.value.message
    else:
        assert len(read(fields, version=version)) == 2


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_one_set_of_each_family_is_possible_in_every_version(version: str) -> None:
    assert len(read(ipam(ranges=[[one(V4)], [one(V6)]]), version=version)) == 2
