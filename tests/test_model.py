"""The values check themselves, and the rules of CIDR blocks hold for every block."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metis.errors import InvalidRequest, PoolExhausted
from metis.model import (
    LINK_LOCAL_GATEWAY_IPV4,
    LINK_LOCAL_GATEWAY_IPV6,
    MAX_NAME_BYTES,
    MAX_TOTAL_IPS,
    Allocation,
    CIDRBlock,
    Family,
    IPUsage,
    Owner,
    Pod,
    TablePage,
    Wanted,
    checked_name,
    format_address,
    parse_address,
)

networks = st.one_of(
    st.builds(
        lambda value, length: ipaddress.ip_network((value, length), strict=False),
        st.integers(0, 2**32 - 1),
        st.integers(0, 32),
    ),
    st.builds(
        lambda value, length: ipaddress.ip_network((value, length), strict=False),
        # Small integers would be IPv4 to the ipaddress module.
        st.integers(2**32, 2**128 - 1).map(lambda v: v.to_bytes(16, "big")),
        st.integers(0, 128),
    ),
)


@given(networks, st.data())
def test_a_block_is_the_same_whatever_host_it_is_written_with(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, network.num_addresses - 1))
    host = network.network_address + offset
    block = CIDRBlock.parse(f"{host}/{network.prefixlen}")
    if block.family is Family.IPV4 and network.version == 6:
        return  # IPv4-mapped; see below
    assert block.cidr == str(network)
    assert block.size == network.num_addresses
    assert block.total_ips == min(network.num_addresses, MAX_TOTAL_IPS)
    assert block.first == int(network.network_address)
    assert block.prefix_length == network.prefixlen
    assert block == CIDRBlock.parse(str(network))
    assert CIDRBlock.parse(block.cidr, block.family) == block
    address = block.address_at(offset)
    assert ipaddress.ip_address(address) == host
    assert block.offset_of(address) == offset
    assert str(block.family) == f"ipv{network.version}"


@pytest.mark.parametrize(
    ("text", "cidr"),
    [
        ("10.0.0.5/24", "10.0.0.0/24"),
        ("10.0.0.0/255.255.255.0", "10.0.0.0/24"),
        ("FD00:0010::1/64", "fd00:10::/64"),
        ("::ffff:10.0.0.5/120", "10.0.0.0/24"),
        ("::ffff:0:0/96", "0.0.0.0/0"),
        ("::ffff:10.0.0.0/95", "::fffe:0:0/95"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("::/0", "::/0"),
    ],
)
def test_every_spelling_has_one_canonical_form(text: str, cidr: str) -> None:
    assert CIDRBlock.parse(text).cidr == cidr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.0",
        "10.0.0.0/",
        "10.0.0.0/33",
        "10.0.0/24",
        "10.0.0.256/24",
        " 10.0.0.0/24",
        "10.0.0.0/24 ",
        "10.0.0.0/24/24",
        "fd00::/129",
        "fd00::g/64",
        "1; DROP TABLE/24",
        "x" * 10_000 + "/24",
    ],
)
def test_what_is_no_block_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"write ADDRESS/PREFIX.*'10\.240\.0\.0/20'"
    ):
        CIDRBlock.parse(text)


def test_a_zone_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="has a zone"):
        CIDRBlock.parse("fe80::%eth0/64")


@pytest.mark.parametrize(
    ("text", "family", "example"),
    [
        ("10.0.0.0/24", Family.IPV6, "fd00:10::/64"),
        ("fd00::/64", Family.IPV4, "10.240.0.0/20"),
        ("::ffff:10.0.0.0/120", Family.IPV6, "fd00:10::/64"),
    ],
)
def test_a_block_of_the_wrong_family_is_refused(
    text: str, family: Family, example: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"an {family} block is needed.*{example}"):
        CIDRBlock.parse(text, family)
    with pytest.raises(InvalidRequest, match=f"an {family} block is needed.*{example}"):
        Wanted(family, CIDRBlock.parse(text))


def test_what_is_wanted_may_come_without_a_block() -> None:
    assert Wanted(Family.IPV4).block is None
    block = CIDRBlock.parse("10.0.0.0/24")
    assert Wanted(Family.IPV4, block).block is block


@pytest.mark.parametrize(
    ("cidr", "gateway", "reserved"),
    [
        ("10.0.0.0/24", "10.0.0.1", (0, 1, 255)),
        ("10.0.0.4/30", "10.0.0.5", (0, 1, 3)),
        ("10.0.0.4/31", LINK_LOCAL_GATEWAY_IPV4, ()),
        ("10.0.0.4/32", LINK_LOCAL_GATEWAY_IPV4, ()),
        ("fd00::/64", "fd00::1", (0, 1)),
        ("fd00::4/126", "fd00::5", (0, 1)),
        ("fd00::4/127", LINK_LOCAL_GATEWAY_IPV6, ()),
        ("fd00::4/128", LINK_LOCAL_GATEWAY_IPV6, ()),
    ],
)
def test_gateway_and_reserved_addresses_follow_the_size(
    cidr: str, gateway: str, reserved: tuple[int, ...]
) -> None:
    block = CIDRBlock.parse(cidr)
    assert block.gateway == gateway
    assert block.reserved_offsets == reserved
    some = [*range(min(block.size, 300)), block.size - 1]
    assert {offset for offset in some if block.is_reserved(offset)} == set(reserved)


@pytest.mark.parametrize(
    "address", ["10.0.1.0", "9.255.255.255", "fd00::1", "10.0.0", "", "10.0.0.1/32"]
)
def test_an_address_that_is_not_in_a_block_has_no_offset(address: str) -> None:
    assert CIDRBlock.parse("10.0.0.0/24").offset_of(address) is None


@given(networks, networks)
def test_blocks_overlap_when_they_share_an_address(
    one: ipaddress.IPv4Network | ipaddress.IPv6Network,
    other: ipaddress.IPv4Network | ipaddress.IPv6Network,
) -> None:
    first, second = CIDRBlock.parse(str(one)), CIDRBlock.parse(str(other))
    expected = first.family is second.family and ipaddress.ip_network(
        first.cidr
    ).overlaps(ipaddress.ip_network(second.cidr))
    assert first.overlaps(second) == expected
    assert second.overlaps(first) == expected
    assert first.overlaps(first)


@given(st.integers(0, 2**32 - 1))
def test_ipv4_text_is_that_of_the_standard_library(value: int) -> None:
    text = format_address(Family.IPV4, value)
    assert text == str(ipaddress.IPv4Address(value))
    assert parse_address(Family.IPV4, text) == value


@given(
    st.integers(0, 2**128 - 1)
    # Runs of zeros, where the canonical forms of RFC 5952 differ from others.
    | st.lists(st.sampled_from([0, 0, 1, 0xFFFF]), min_size=8, max_size=8).map(
        lambda groups: sum(group << 16 * n for n, group in enumerate(groups))
    )
)
def test_ipv6_text_is_that_of_the_standard_library(value: int) -> None:
    text = format_address(Family.IPV6, value)
    assert text == str(ipaddress.IPv6Address(value))
    assert parse_address(Family.IPV6, text) == value


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (Family.IPV4, "fd00::1"),
        (Family.IPV4, "10.0.0"),
        (Family.IPV4, "010.0.0.1"),
        (Family.IPV6, "10.0.0.1"),
        (Family.IPV6, "fe80::1%eth0"),
    ],
)
def test_what_is_no_address_of_the_family_is_refused(family: Family, text: str) -> None:
    with pytest.raises(ValueError, match=f"is not an {family} address"):
        parse_address(family, text)


def test_the_bits_of_the_families() -> None:
    assert (Family.IPV4.bits, Family.IPV6.bits) == (32, 128)


@given(networks)
def test_the_family_of_an_address_shows_in_its_spelling(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network,
) -> None:
    address = str(network.network_address)
    assert Family.of(address) == f"ipv{network.version}"


@pytest.mark.parametrize(
    "name", ["c1", "a" * MAX_NAME_BYTES, "é" * (MAX_NAME_BYTES // 2), "a b", "'; --"]
)
def test_a_name_may_hold_anything_that_prints(name: str) -> None:
    assert checked_name("network", name) == name
    assert Owner(name, name, name).network == name
    assert Pod(name, name).namespace == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "network is empty"),
        ("a" * (MAX_NAME_BYTES + 1), f"{MAX_NAME_BYTES + 1} bytes long: at most"),
        ("é" * MAX_NAME_BYTES, f"{2 * MAX_NAME_BYTES} bytes long: at most"),
        ("a\nb", "cannot be printed"),
        ("a\0b", "cannot be printed"),
    ],
)
def test_a_name_that_nothing_can_have_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        checked_name("network", name)


@pytest.mark.parametrize("bad", ["", "x" * (MAX_NAME_BYTES + 1), "\n"])
def test_every_part_of_an_owner_is_checked(bad: str) -> None:
    for parts in (
        (bad, "c1", "eth0"),
        ("default", bad, "eth0"),
        ("default", "c1", bad),
    ):
        with pytest.raises(InvalidRequest):
            Owner(*parts)


def test_the_names_of_a_pod_may_be_missing() -> None:
    assert Pod() == Pod("", "")
    for parts in (("\n", ""), ("", "\n")):
        with pytest.raises(InvalidRequest, match="pod name"):
            Pod(*parts)


def test_values_are_equal_by_what_they_hold() -> None:
    assert Owner("n", "c", "i") == Owner("n", "c", "i")
    assert hash(Owner("n", "c", "i")) == hash(Owner("n", "c", "i"))
    assert Allocation(Family.IPV4, "10.0.0.2", "10.0.0.0/24") != Allocation(
        Family.IPV4, "10.0.0.3", "10.0.0.0/24"
    )
    assert IPUsage(1, 2, 3, None).next_free_ms is None
    assert TablePage(("id",), ()).next_token == ""


@pytest.mark.parametrize(
    ("counts", "wait_ms", "message"),
    [
        ((0, 0, 0), None, "the network has no CIDR block of this family; no address"),
        ((1, 2, 3), 1500, "1 owned, 2 cooling, 3 reserved; the next is free in 1.5 s"),
        ((1, 2, 3), -5, "the next is free in 0.0 s"),
        ((1, 0, 3), None, "1 owned, 0 cooling, 3 reserved; no address is cooling"),
    ],
)
def test_exhaustion_tells_counts_and_the_next_free_time(
    counts: tuple[int, int, int], wait_ms: int | None, message: str
) -> None:
    owned, cooling, reserved = counts
    error = PoolExhausted(
        "blue",
        "ipv4",
        owned=owned,
        cooling=cooling,
        reserved=reserved,
        next_free_ms=None if wait_ms is None else 1_000 + wait_ms,
        wait_ms=wait_ms,
    )
    assert str(error).startswith("no ipv4 address is free on network 'blue': ")
    assert message in str(error)
    assert (error.owned, error.cooling, error.reserved) == counts
