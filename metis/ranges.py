"""Ranges of addresses, as the network configurations of CNI name them.

A range is a subnet, or the part of one from which pods are served. A set is a
list of ranges of one family, tried in order, that gives a pod one address. The
rules are those of the reference IPAM plugin, host-local: what is left out means
the whole subnet but its first and, in IPv4, its last address, and the gateway
is the address after the network address, which no pod gets.

Whatever a range says, no pod gets the network address of a subnet or an IPv4
broadcast address; subnets of one or two addresses give all they have.

Pure: no clock, no file, no socket, no `async def`.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from metis.cidr import (
    RESERVE_FROM_SIZE,
    CIDRBlock,
    Family,
    format_address,
    parse_address,
)
from metis.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class AddressRange:
    """The part of a subnet that gives addresses to pods.

    Attributes:
      block: the subnet.
      first: offset in the block of the first address for pods.
      last: offset of the last one.
      gateway: reported to pods, in canonical form, and given to none of them. It
        may lie outside of the subnet.
      excluded: pairs of offsets, both inclusive, that no pod gets; in order, and
        no two of them touch.
      windows: the pairs of offsets, both inclusive, that pods may get; in order.
        What the other fields say, for whoever looks for a free address, worked out
        once, as what follows is.
      gateway_offset: where the gateway stands in the block; None when it does not.
      reserved_offsets: where the addresses of the block stand that are set aside for
        this range: those of the block, with the gateway in place of network + 1.
      is_whole: whether pods may get all of the block but what is set aside in it.

    Raises:
      InvalidRequest: nothing is left for pods.
    """

    block: CIDRBlock
    first: int
    last: int
    gateway: str
    excluded: tuple[tuple[int, int], ...] = ()
    windows: tuple[tuple[int, int], ...] = field(init=False, compare=False, repr=False)
    gateway_offset: int | None = field(init=False, compare=False, repr=False)
    reserved_offsets: tuple[int, ...] = field(init=False, compare=False, repr=False)
    is_whole: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        at = self.block.offset_of(self.gateway)
        own = set() if at is None else {at}
        gaps = sorted([*self.excluded, *((offset, offset) for offset in own)])
        edges = {offset for offset in self.block.reserved_offsets if offset != 1}
        for name, value in (
            ("windows", tuple(_between(self.first, self.last, gaps))),
            ("gateway_offset", at),
            ("reserved_offsets", tuple(sorted(edges | own))),
            (
                "is_whole",
                (self.first, self.last, self.excluded) == (*_bounds(self.block), ()),
            ),
        ):
            object.__setattr__(self, name, value)
        if not self.windows:
            raise InvalidRequest(
                f"range {self} has no address for pods once the network, gateway and "
                "broadcast addresses and those excluded are set aside: make it larger"
            )

    @classmethod
    def parse(
        cls,
        subnet: str,
        range_start: str = "",
        range_end: str = "",
        gateway: str = "",
        exclude: Sequence[str] = (),
    ) -> AddressRange:
        """Read a range as a configuration spells it.

        Args:
          subnet: "10.240.0.0/20"; host bits are masked.
          range_start: first address for pods, in the subnet; empty for the one
            after the network address.
          range_end: last address for pods; empty for the last that there is.
          gateway: an address of the family; empty for network + 1, or for a
            link-local one where the subnet is too small to set one aside.
          exclude: addresses and CIDR blocks in the subnet that no pod gets.

        Raises:
          InvalidRequest: one of them cannot be read, is of the other family or
            lies outside of the subnet, or nothing is left for pods.
        """
        return _parse_range(subnet, range_start, range_end, gateway, tuple(exclude))

    @property
    def family(self) -> Family:
        """The address family."""
        return self.block.family

    def contains(self, offset: int) -> bool:
        """Whether a pod may get the address at an offset of the block."""
        return any(first <= offset <= last for first, last in self.windows)

    def spans(self, address: str) -> bool:
        """Whether an address lies between the first and the last one."""
        offset = self.block.offset_of(address)
        return offset is not None and self.first <= offset <= self.last

    def check_for_pods(self, address: str) -> None:
        """Refuse an address of the range that no pod gets.

        Args:
          address: one that the range spans.

        Raises:
          InvalidRequest: it is the gateway, or excluded.
        """
        offset = self.block.offset_of(address)
        if offset is None or not self.contains(offset):
            what = "the gateway" if address == self.gateway else "excluded from pods"
            raise InvalidRequest(
                f"address {address!r} is {what} in {self}: "
                "ask for one that pods may have"
            )

    def overlaps(self, other: AddressRange) -> bool:
        """Whether the two share an address, be it one that no pod gets."""
        return (
            self.family is other.family
            and self.block.first + self.first <= other.block.first + other.last
            and other.block.first + other.first <= self.block.first + self.last
        )

    def __str__(self) -> str:
        """The range as messages name it: "10.0.0.10-10.0.0.20 of 10.0.0.0/24"."""
        if (self.first, self.last) == _bounds(self.block):
            return self.block.cidr
        start, end = self.block.address_at(self.first), self.block.address_at(self.last)
        return f"{start}-{end} of {self.block.cidr}"


@dataclass(frozen=True, slots=True)
class AddressSet:
    """Alternatives that give one address, tried in order.

    Raises:
      InvalidRequest: there are none, they are of two families, or two of them
        share an address.
    """

    alternatives: tuple[AddressRange, ...]

    def __post_init__(self) -> None:
        if not self.alternatives:
            raise InvalidRequest("a set of ranges is empty: name one subnet or more")
        for one, other in itertools.combinations(self.alternatives, 2):
            if one.family is not other.family:
                raise InvalidRequest(
                    f"{one.block.cidr} and {other.block.cidr} stand in one set: "
                    f"give the {other.family} range a set of its own"
                )
            if one.overlaps(other):
                raise InvalidRequest(_overlap(one, other))

    @property
    def family(self) -> Family:
        """The address family."""
        return self.alternatives[0].family

    def spans(self, address: str) -> bool:
        """Whether an address lies in one of the alternatives."""
        return any(one.spans(address) for one in self.alternatives)

    def range_for(self, address: str) -> AddressRange:
        """The alternative that an address lies in.

        Raises:
          InvalidRequest: it lies in none of them.
        """
        for one in self.alternatives:
            if one.spans(address):
                return one
        raise InvalidRequest(
            f"address {address!r} is in no range of its set: "
            f"it must be in one of {self}"
        )

    def __str__(self) -> str:
        """The set as messages name it."""
        return ", ".join(str(one) for one in self.alternatives)


def check_disjoint(sets: Sequence[AddressSet]) -> None:
    """Refuse sets of one request that share an address.

    Raises:
      InvalidRequest: naming the two ranges.
    """
    for one, other in itertools.combinations(sets, 2):
        for ours, theirs in itertools.product(one.alternatives, other.alternatives):
            if ours.overlaps(theirs):
                raise InvalidRequest(_overlap(ours, theirs))


def parse_any_address(what: str, text: str) -> tuple[Family, str]:
    """The family and the canonical form of an address in whatever spelling.

    An IPv4-mapped IPv6 address is the IPv4 address that it maps.

    Args:
      what: how a message calls it, "range start".
      text: the address, without a prefix.

    Raises:
      InvalidRequest: it is none.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        address = None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return Family.IPV4, str(address.ipv4_mapped)
        if address.scope_id is None:
            return Family.IPV6, format_address(Family.IPV6, int(address))
    elif address is not None:
        return Family.IPV4, str(address)
    raise InvalidRequest(
        f"{what} {text[:64]!r} is not an IP address: write it without a prefix, "
        "for example '10.240.0.9'"
    )


@functools.lru_cache(maxsize=1024)  # as many ranges as a node will ever serve
def _parse_range(
    subnet: str, start: str, end: str, gateway: str, exclude: tuple[str, ...]
) -> AddressRange:
    block = CIDRBlock.parse(subnet)
    lowest, highest = _bounds(block)
    first = _offset(block, "range start", start, lowest) if start else lowest
    last = _offset(block, "range end", end, highest) if end else highest
    if first > last:
        raise InvalidRequest(
            f"range start {start!r} comes after range end "
            f"{end or block.address_at(last)!r}: name the lower one first"
        )
    if gateway:
        family, gateway = parse_any_address("gateway", gateway)
        if family is not block.family:
            raise InvalidRequest(
                f"gateway {gateway!r} is an {family} address, {block.cidr} an "
                f"{block.family} block: for example {block.gateway!r}"
            )
    return AddressRange(
        block,
        max(first, lowest),
        min(last, highest),
        gateway or block.gateway,
        _merged(_excluded(block, text) for text in exclude),
    )


def _bounds(block: CIDRBlock) -> tuple[int, int]:
    """The offsets between which pods are served when nothing else is said."""
    if block.size < RESERVE_FROM_SIZE:
        return 0, block.size - 1
    return 1, block.size - (2 if block.family is Family.IPV4 else 1)


def _offset(block: CIDRBlock, what: str, text: str, nearest: int) -> int:
    """Where an address stands that must be in a block."""
    family, address = parse_any_address(what, text)
    offset = block.offset_of(address)
    if offset is None:
        if family is block.family:
            below = parse_address(family, address) < block.first
            lowest, highest = _bounds(block)
            nearest = lowest if below else highest
        raise InvalidRequest(
            f"{what} {text!r} is not in subnet {block.cidr}: "
            f"the nearest address of it is {block.address_at(nearest)!r}"
        )
    return offset


def _excluded(block: CIDRBlock, text: str) -> tuple[int, int]:
    """The offsets that an entry of `exclude` takes from a block."""
    if "/" not in text:
        offset = _offset(block, "excluded address", text, 0)
        return offset, offset
    gap = CIDRBlock.parse(text)
    if not gap.overlaps(block):
        raise InvalidRequest(
            f"excluded block {text!r} is not in subnet {block.cidr}: "
            "exclude addresses and blocks of the subnet"
        )
    first = gap.first - block.first
    return max(first, 0), min(first + gap.size, block.size) - 1


def _merged(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Pairs of offsets in order, those that touch or overlap made one."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _between(
    first: int, last: int, gaps: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """What is left of first..last without the gaps, which come in order."""
    for start, end in (*gaps, (last + 1, last + 1)):
        if first <= min(start - 1, last):
            yield first, min(start - 1, last)
        first = max(first, end + 1)


def _overlap(one: AddressRange, other: AddressRange) -> str:
    return f"range {other} overlaps range {one}: ranges share no address"
