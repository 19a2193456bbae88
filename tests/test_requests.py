"""What a request message wants, and what it may not ask for."""

from __future__ import annotations

import pytest

from metis.api.adaptiveipam.v1 import (
    AddressRange,
    AddressSet,
    AllocatePodIpRequest,
    IpConfig,
)
from metis.errors import InvalidRequest
from metis.model import Allocation, CIDRBlock, Family, Owner, Wanted
from metis.requests import (
    LONGEST_PATH_BYTES,
    MOST_ALTERNATIVES,
    MOST_SETS,
    allocation_response,
    netns_path_of,
    owner_of,
    wanted_of,
)


def one_set(
    *subnets: str, requested: str = "", range_start: str = "", gateway: str = ""
) -> AddressSet:
    return AddressSet(
        alternatives=[
            AddressRange(subnet=subnet, range_start=range_start, gateway=gateway)
            for subnet in subnets
        ],
        requested_ip=requested,
    )


def request(*sets: AddressSet, requested: tuple[str, ...] = ()) -> AllocatePodIpRequest:
    config = IpConfig(
        interface_name="eth0", container_id="c1", initial_pod_cidr="10.9.0.0/24"
    )
    return AllocatePodIpRequest(
        ipv4_config=config, sets=list(sets), requested_ips=list(requested)
    )


def test_sets_stand_in_place_of_the_blocks() -> None:
    message = request(one_set("fd00::/64"), one_set("10.0.0.0/24", "10.0.1.0/24"))
    six, four = wanted_of(message)
    assert (six.family, four.family) == (Family.IPV6, Family.IPV4)
    assert six.block is four.block is None
    assert str(four.ranges) == "10.0.0.0/24, 10.0.1.0/24"
    assert owner_of(message) == Owner("default", "c1", "eth0")
    assert wanted_of(request()) == [Wanted(Family.IPV4, CIDRBlock.parse("10.9.0.0/24"))]


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/run/netns/a", True),
        ("/run/netns/a b", True),
        ("/" + "n" * (LONGEST_PATH_BYTES - 1), True),
        ("/" + "n" * LONGEST_PATH_BYTES, False),
        ("/" + "ö" * (LONGEST_PATH_BYTES // 2 + 1), False),
        ("", False),
        ("netns/a", False),
        ("/run/netns/\n", False),
        ("/run/netns/\0", False),
    ],
)
def test_a_namespace_is_known_by_a_path_that_there_can_be(
    path: str, kept: bool
) -> None:
    message = request()
    message.netns_path = path
    assert netns_path_of(message) == (path if kept else "")


def test_every_field_of_a_range_counts() -> None:
    message = AddressRange(
        subnet="10.0.0.0/24",
        range_start="10.0.0.10",
        range_end="10.0.0.20",
        gateway="10.0.0.15",
        exclude=["10.0.0.12/31"],
    )
    (want,) = wanted_of(request(AddressSet(alternatives=[message])))
    assert want.ranges is not None
    (found,) = want.ranges.alternatives
    assert found.windows == ((10, 11), (14, 14), (16, 20))
    assert found.gateway == "10.0.0.15"


@pytest.mark.parametrize(
    ("sets", "requested", "expected"),
    [
        (("10.0.0.0/24", "10.0.1.0/24"), ("10.0.1.9",), [None, "10.0.1.9"]),
        (
            ("10.0.0.0/24", "fd00::/64"),
            ("FD00::0009", "::ffff:10.0.0.9"),
            ["10.0.0.9", "fd00::9"],
        ),
    ],
)
def test_a_requested_address_is_that_of_the_first_set_that_has_it(
    sets: tuple[str, ...], requested: tuple[str, ...], expected: list[str | None]
) -> None:
    message = request(*map(one_set, sets), requested=requested)
    assert [want.address for want in wanted_of(message)] == expected


def test_a_set_may_bring_its_address_itself() -> None:
    message = request(
        one_set("10.0.0.0/24", requested="10.0.0.9"),
        one_set("fd00::/64"),
        requested=("10.0.0.9", "fd00::7"),
    )
    assert [want.address for want in wanted_of(message)] == ["10.0.0.9", "fd00::7"]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (request(AddressSet()), "empty: name one subnet"),
        (request(one_set("")), "'' is not a CIDR block"),
        (request(one_set("10.0.0.0/24", "fd00::/64")), "a set of its own"),
        (request(one_set("10.0.0.0/24", range_start="10.0.1.1")), "'10.0.1.1'"),
        (request(one_set("10.0.0.0/24", requested="x")), "requested address 'x'"),
        (
            request(one_set("10.0.0.0/24"), requested=("10.0.1.9",)),
            r"'10\.0\.1\.9' is in no set .* of 10\.0\.0\.0/24",
        ),
        (
            request(one_set("10.0.0.0/24"), requested=("10.0.0.9", "10.0.0.8")),
            r"'10\.0\.0\.8' is in no set that has none yet",
        ),
        (request(*[one_set("10.0.0.0/24")] * (MOST_SETS + 1)), "33 sets: at most 32"),
        (
            request(one_set(*["10.0.0.0/24"] * (MOST_ALTERNATIVES + 1))),
            "set 0 has 257 alternatives",
        ),
    ],
)
def test_what_makes_no_sense_is_named(
    message: AllocatePodIpRequest, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        wanted_of(message)


def test_an_answer_has_the_first_of_each_family_and_all_of_the_sets() -> None:
    wanted = wanted_of(
        request(
            one_set("fd00::/64"),
            one_set("10.0.0.0/24", gateway="10.0.0.254"),
            one_set("10.0.1.0/24"),
        )
    )
    given = [
        Allocation(Family.IPV6, "fd00::2", "fd00::/64", "id"),
        Allocation(Family.IPV4, "10.0.0.1", "10.0.0.0/24", "id"),
        Allocation(Family.IPV4, "10.0.1.2", "10.0.1.0/24", "id"),
    ]
    answer = allocation_response(wanted, given)
    assert answer.ipv4 == answer.ips[1]
    assert answer.ipv6 == answer.ips[0]
    assert [(one.ip_address, one.gateway) for one in answer.ips] == [
        ("fd00::2", "fd00::1"),
        ("10.0.0.1", "10.0.0.254"),
        ("10.0.1.2", "10.0.1.1"),
    ]
    assert answer.allocation_id == "id"
