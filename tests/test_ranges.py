"""Ranges and sets: what a configuration means, and what it cannot mean."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metis.errors import InvalidRequest
from metis.model import Family
from metis.ranges import AddressRange, AddressSet, check_disjoint

parse = AddressRange.parse


def given_by(found: AddressRange) -> list[str]:
    """Every address that a pod may get from a range of a small block."""
    return [
        found.block.address_at(offset)
        for offset in range(found.block.size)
        if found.contains(offset)
    ]


def ipv4(*numbers: int) -> list[str]:
    return [f"10.0.0.{number}" for number in numbers]


@pytest.mark.parametrize(
    ("arguments", "expected", "gateway"),
    [
        (("10.0.0.0/29",), ipv4(2, 3, 4, 5, 6), "10.0.0.1"),
        (("10.0.0.3/29",), ipv4(2, 3, 4, 5, 6), "10.0.0.1"),
        (("10.0.0.0/29", "10.0.0.4"), ipv4(4, 5, 6), "10.0.0.1"),
        (("10.0.0.0/29", "", "10.0.0.3"), ipv4(2, 3), "10.0.0.1"),
        (("10.0.0.0/29", "10.0.0.3", "10.0.0.3"), ipv4(3), "10.0.0.1"),
        (("10.0.0.0/29", "10.0.0.0", "10.0.0.7"), ipv4(2, 3, 4, 5, 6), "10.0.0.1"),
        (("10.0.0.0/29", "", "", "10.0.0.6"), ipv4(1, 2, 3, 4, 5), "10.0.0.6"),
        (("10.0.0.0/29", "", "", "10.9.9.9"), ipv4(1, 2, 3, 4, 5, 6), "10.9.9.9"),
        (("10.0.0.0/29", "::ffff:10.0.0.5"), ipv4(5, 6), "10.0.0.1"),
        (("10.0.0.0/30",), ipv4(2), "10.0.0.1"),
        (("10.0.0.0/31",), ipv4(0, 1), "169.254.4.6"),
        (("10.0.0.0/31", "", "", "10.0.0.1"), ipv4(0), "10.0.0.1"),
        (("10.0.0.7/32",), ipv4(7), "169.254.4.6"),
        (("fd00::/126",), ["fd00::2", "fd00::3"], "fd00::1"),
        (("fd00::/126", "", "", "FD00::0003"), ["fd00::1", "fd00::2"], "fd00::3"),
        (("fd00::/127",), ["fd00::", "fd00::1"], "fe80::8893:b6ff:fe2c:7a0d"),
        (("fd00::7/128",), ["fd00::7"], "fe80::8893:b6ff:fe2c:7a0d"),
        (("10.0.0.0/29", "", "", "", ("10.0.0.4",)), ipv4(2, 3, 5, 6), "10.0.0.1"),
        (("10.0.0.0/29", "", "", "", ("10.0.0.0/30",)), ipv4(4, 5, 6), "10.0.0.1"),
        (
            ("10.0.0.0/29", "", "", "", ("10.0.0.4", "10.0.0.3", "10.0.0.4/32")),
            ipv4(2, 5, 6),
            "10.0.0.1",
        ),
    ],
)
def test_a_range_gives_what_it_says(
    arguments: tuple[str], expected: list[str], gateway: str
) -> None:
    found = parse(*arguments)
    assert given_by(found) == expected
    assert found.gateway == gateway
    assert found.family is Family.of(expected[0])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("10.0.0.0",), "'10.0.0.0' is not a CIDR block"),
        (("10.0.0.0/24", "10.0.1.4"), "'10.0.1.4' .* nearest .* '10.0.0.254'"),
        (("10.0.1.0/24", "10.0.0.4"), "'10.0.0.4' .* nearest .* '10.0.1.1'"),
        (("10.0.0.0/24", "fd00::1"), "range start 'fd00::1' .* '10.0.0.1'"),
        (("10.0.0.0/24", "", "10.0.1.4"), "range end '10.0.1.4' .* '10.0.0.254'"),
        (("10.0.0.0/24", "10.0.0.9", "10.0.0.8"), "'10.0.0.9' .* '10.0.0.8'"),
        (("10.0.0.0/24", "10.0.0.x"), "range start '10.0.0.x' is not an IP address"),
        (("10.0.0.0/24", "10.0.0.9/24"), "'10.0.0.9/24' .* without a prefix"),
        (("fe80::/64", "fe80::1%eth0"), "'fe80::1%eth0' is not an IP address"),
        (("10.0.0.0/24", "", "", "fd00::1"), "gateway 'fd00::1' is an ipv6 address"),
        (("10.0.0.0/24", "", "", "no"), "gateway 'no' is not an IP address"),
        (("10.0.0.0/24", "", "", "", ("10.0.1.4",)), "excluded address '10.0.1.4'"),
        (("10.0.0.0/24", "", "", "", ("10.0.1.0/30",)), "excluded block '10.0.1.0/30'"),
        (("10.0.0.0/24", "", "", "", ("fd00::/8",)), "excluded block 'fd00::/8'"),
        (("10.0.0.0/24", "", "", "", ("10.0.0.0/8",)), "10.0.0.0/24 has no address"),
        (("10.0.0.0/24", "10.0.0.1", "10.0.0.1"), "10.0.0.1-10.0.0.1 of 10.0.0.0/24"),
        (("10.0.0.7/32", "", "", "10.0.0.7"), "10.0.0.7/32 has no address"),
    ],
)
def test_a_range_that_makes_no_sense_is_named(
    arguments: tuple[str], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        parse(*arguments)


@given(
    start=st.integers(0, 15),
    length=st.integers(0, 15),
    gateway=st.integers(0, 15) | st.none(),
    exclude=st.lists(st.tuples(st.integers(0, 15), st.integers(28, 32)), max_size=4),
)
def test_the_windows_are_what_a_range_contains(
    start: int,
    length: int,
    gateway: int | None,
    exclude: list[tuple[int, int]],
) -> None:
    end = min(start + length, 15)
    named = "" if gateway is None else f"10.0.0.{gateway}"
    gaps = [f"10.0.0.{number}/{prefix}" for number, prefix in exclude]
    expected = [
        offset
        for offset in range(max(start, 1), min(end, 14) + 1)
        if offset != (1 if gateway is None else gateway)
        and not any(
            offset >> (32 - prefix) == number >> (32 - prefix)
            for number, prefix in exclude
        )
    ]
    try:
        found = parse("10.0.0.0/28", f"10.0.0.{start}", f"10.0.0.{end}", named, gaps)
    except InvalidRequest:
        assert expected == []
        return
    listed = [range(first, last + 1) for first, last in found.windows]
    assert list(itertools.chain(*listed)) == expected
    assert [o for o in range(-1, 17) if found.contains(o)] == expected
    assert all(first <= last for first, last in found.windows)


def test_a_whole_range_is_told_from_a_part_of_a_block() -> None:
    assert parse("10.0.0.0/24").is_whole
    assert parse("10.0.0.0/24", "10.0.0.1", "10.0.0.254").is_whole
    assert parse("10.0.0.0/24", gateway="10.0.0.9").is_whole
    assert parse("fd00::/127").is_whole
    assert not parse("10.0.0.0/24", "10.0.0.2").is_whole
    assert not parse("10.0.0.0/24", exclude=["10.0.0.9"]).is_whole


def test_a_part_of_a_vast_block_costs_nothing() -> None:
    found = parse("fd00::/8", "fd12:3456::1000", "fd12:3456::1fff")
    assert found.spans("fd12:3456::1000")
    assert not found.spans("fd12:3456::2000")
    assert not found.spans("10.0.0.1")
    ((first, last),) = found.windows
    assert last - first == 0xFFF


def test_a_set_takes_alternatives_that_share_nothing() -> None:
    low = parse("10.0.0.0/24", "10.0.0.10", "10.0.0.19", "10.0.0.1")
    high = parse("10.0.0.0/24", "10.0.0.20", "10.0.0.29", "10.0.0.2")
    found = AddressSet((low, high, parse("10.0.9.0/24")))
    assert found.family is Family.IPV4
    assert found.spans("10.0.0.29")
    assert not found.spans("10.0.0.30")
    assert found.range_for("10.0.0.11") == low
    assert found.range_for("10.0.0.21") == high
    with pytest.raises(InvalidRequest, match=r"10\.0\.0\.20-10\.0\.0\.29 of 10"):
        found.range_for("10.0.8.1")


def test_an_address_that_no_pod_gets_is_named_with_the_reason() -> None:
    found = parse("10.0.0.0/24", exclude=["10.0.0.9"])
    found.check_for_pods("10.0.0.8")
    with pytest.raises(InvalidRequest, match=r"'10\.0\.0\.9' is excluded"):
        found.check_for_pods("10.0.0.9")
    with pytest.raises(InvalidRequest, match=r"'10\.0\.0\.1' is the gateway"):
        found.check_for_pods("10.0.0.1")


@pytest.mark.parametrize(
    ("alternatives", "named"),
    [
        ((), "empty"),
        ((parse("10.0.0.0/24"), parse("fd00::/64")), "ipv6 range a set of its own"),
        ((parse("10.0.0.0/24"), parse("10.0.0.0/25")), "10.0.0.0/25 overlaps .*/24"),
        (
            (parse("10.0.0.0/24"), parse("10.0.0.0/24", "10.0.0.254")),
            "10.0.0.254-10.0.0.254 of 10.0.0.0/24 overlaps range 10.0.0.0/24",
        ),
    ],
)
def test_a_set_that_makes_no_sense_is_named(
    alternatives: tuple[AddressRange, ...], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        AddressSet(alternatives)


def test_sets_of_one_request_share_nothing() -> None:
    def one(*arguments: str) -> AddressSet:
        return AddressSet((parse(*arguments),))

    low = one("10.0.0.0/24", "", "10.0.0.99")
    high = one("10.0.0.0/24", "10.0.0.100")
    check_disjoint([low, high, one("10.0.1.0/24"), one("fd00::/64")])
    with pytest.raises(InvalidRequest, match=r"10\.0\.0\.1-.* overlaps .*\.100-"):
        check_disjoint([high, one("fd00::/64"), one("10.0.0.0/24", "", "10.0.0.100")])
