"""From which ranges a pod gets its addresses: `ranges` as host-local has them.

    ranges = [ set, set, ... ]    one address of each set
    set    = [ range, ... ]       alternatives, tried in order
    range  = { subnet, rangeStart, rangeEnd, gateway, exclude }

Pure. The older form, a single range in `ipam` itself, is a set in front of the
others, and what the runtime brings under the capability `ipRanges` stands in
front of both (CONVENTIONS.md of the specification, "Dynamic Plugin specific
Fields"). A range that a network could not be served from is refused here, with
the place, the value and the nearest right one, before anything is taken.

Unlike host-local, /31, /32, /127 and /128 are ranges too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from metis.cni import fields
from metis.cni.fields import Configuration, invalid, members, object_at
from metis.cni.protocol import parse_version, shown
from metis.errors import InvalidRequest
from metis.model import Family
from metis.ranges import AddressRange

SEVERAL_SINCE = (0, 3, 0)
"""The first version whose result has room for two addresses of a family."""


@dataclass(frozen=True, slots=True)
class Range:
    """A subnet, or the part of one from which pods are served.

    Attributes:
      where: its place in the configuration, for messages.
      parsed: what it means.
      start: the first address for pods as configured; "" means the subnet's.
      end: the last one, likewise.
      gateway: as configured; "" means the subnet's first address.
      exclude: addresses and blocks that no pod gets, as configured.
    """

    where: str = field(compare=False)
    parsed: AddressRange
    start: str = ""
    end: str = ""
    gateway: str = ""
    exclude: tuple[str, ...] = ()

    @property
    def family(self) -> Family:
        """The family of its addresses."""
        return self.parsed.family

    @property
    def subnet(self) -> str:
        """Its subnet in canonical form."""
        return self.parsed.block.cidr

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last address for pods, as integers."""
        at = self.parsed.block.first
        return at + self.parsed.first, at + self.parsed.last


@dataclass(frozen=True, slots=True)
class RangeSet:
    """One address that the pod gets.

    Attributes:
      family: of all its ranges.
      ranges: alternatives in the order in which they are tried; none means
        whatever the network has of the family.
      requested: the address that it must be, in canonical form; "" for any.
    """

    family: Family
    ranges: tuple[Range, ...] = ()
    requested: str = ""

    def spans(self, address: str) -> bool:
        """Whether a canonical address lies in one of the ranges."""
        if not self.ranges:
            return Family.of(address) is self.family
        return any(one.parsed.spans(address) for one in self.ranges)

    def sets_aside(self, address: str) -> bool:
        """Whether an address that lies in a range is none for pods."""
        return any(
            one.parsed.spans(address)
            and not one.parsed.contains(one.parsed.block.offset_of(address) or 0)
            for one in self.ranges
        )

    def __str__(self) -> str:
        return " or ".join(str(one.parsed) for one in self.ranges) or (
            f"an {self.family} subnet"
        )


def range_sets(
    ipam: Configuration, runtime: Configuration, version: str
) -> tuple[RangeSet, ...]:
    """The sets of a configuration, in order; without any, one IPv4 address.

    Args:
      ipam: the `ipam` object.
      runtime: the `runtimeConfig` object.
      version: the configuration's version, one of SUPPORTED_VERSIONS.

    Raises:
      CNIError: code 7.
    """
    found = [
        *_sets(runtime.get("ipRanges"), "runtimeConfig.ipRanges"),
        *_single(ipam),
        *_sets(ipam.get("ranges"), "ipam.ranges"),
    ]
    _check_overlaps(found)
    if parse_version(version) < SEVERAL_SINCE:
        _check_one_a_family(found, version)
    return tuple(found) or (RangeSet(Family.IPV4),)


def _sets(value: object, where: str) -> Iterator[RangeSet]:
    for place, alternatives in members(value, where):
        ranges = tuple(
            _range(object_at(member, at), at)
            for at, member in members(alternatives, place)
        )
        if not ranges:
            raise invalid(
                f"{place} is an empty set: write [{{'subnet': '10.240.0.0/20'}}]"
            )
        for one in ranges:
            if one.family is not ranges[0].family:
                raise invalid(
                    f"{one.where}.subnet: {shown(one.subnet)} is an {one.family} "
                    f"subnet in a set of {ranges[0].family} ones: write it as a set of "
                    "its own, which gives the pod an address of each family"
                )
        yield RangeSet(ranges[0].family, ranges)


def _single(ipam: Configuration) -> Iterator[RangeSet]:
    """The older form: the members of one range in `ipam` itself.

    Without `subnet` there is none, and the others mean nothing, as in host-local.
    """
    if ipam.get("subnet") is not None:
        one = _range(ipam, "ipam")
        yield RangeSet(one.family, (one,))


def _range(entry: Configuration, where: str) -> Range:
    subnet = entry.get("subnet")
    if not isinstance(subnet, str):
        raise invalid(f"{where}.subnet is {shown(subnet)}: write a text ADDRESS/PREFIX")
    # The daemon masks host bits; whoever wrote them meant another subnet, or part
    # of this one, and host-local would say so.
    block = fields.network_block(subnet, f"{where}.subnet")
    start, end, gateway = (
        fields.text(entry, key, f"{where}.{key}") or ""
        for key in ("rangeStart", "rangeEnd", "gateway")
    )
    exclude = fields.texts(entry.get("exclude"), f"{where}.exclude")
    for i, text in enumerate(exclude):
        if "/" in text:
            fields.network_block(text, f"{where}.exclude[{i}]")
    try:
        parsed = AddressRange.parse(block.cidr, start, end, gateway, exclude)
    except InvalidRequest as error:
        raise invalid(f"{where}: {error}") from None
    return Range(where, parsed, start, end, gateway, exclude)


def _check_overlaps(sets: Sequence[RangeSet]) -> None:
    """Refuse ranges that share an address, in one set or in two.

    A pod would get the same address twice, or the order of the alternatives
    would mean nothing.
    """
    ranges = sorted(
        (one for each in sets for one in each.ranges),
        key=lambda one: (one.family, one.bounds),
    )
    for one, other in itertools.pairwise(ranges):
        if not one.parsed.overlaps(other.parsed):
            continue
        message = (
            f"{other.where} ({other.parsed}) overlaps {one.where} ({one.parsed}): "
            "ranges share no address"
        )
        block = other.parsed.block
        offset = one.bounds[1] + 1 - block.first
        if offset <= other.parsed.last:
            message += (
                f", and a rangeStart of {shown(block.address_at(offset))} in the "
                "former would part them"
            )
        raise invalid(message)


def _check_one_a_family(sets: Sequence[RangeSet], version: str) -> None:
    seen: set[Family] = set()
    for one in sets:
        if one.family in seen:
            raise invalid(
                f"{one.ranges[0].where} is a second {one.family} set: "
                f"cniVersion {shown(version)} has room for one, "
                "write '0.3.0' or later"
            )
        seen.add(one.family)
