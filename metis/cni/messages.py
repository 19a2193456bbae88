"""What an ADD asks of the daemon, and what it got, as messages and values.

Pure. A request says the same thing twice where it can: in `sets`, which is all
of it, and in `ipv4_config` and `ipv6_config`, for a daemon that does not know
`sets`. An answer without `ips` is such a daemon's; whoever asked for more than
it understands must not take it for the answer to that.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from metis.api.adaptiveipam.v1 import (
    AddressRange,
    AddressSet,
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    IpConfig,
    PodIp,
)
from metis.cni.protocol import INTERNAL, UNSUPPORTED_FIELD, CNIError, shown
from metis.cni.ranges import Range, RangeSet
from metis.cni.spec import Request
from metis.errors import InvalidRequest
from metis.model import CIDRBlock, Family


@dataclass(frozen=True, slots=True)
class PodAddress:
    """One address that a pod was given.

    Attributes:
      family: its address family.
      address: in canonical form.
      prefix_length: that of its subnet, as interfaces need it.
      gateway: of the subnet.
    """

    family: Family
    address: str
    prefix_length: int
    gateway: str

    def __str__(self) -> str:
        return f"{self.address}/{self.prefix_length}"


def allocate_request(request: Request) -> AllocatePodIpRequest:
    """The message of an ADD.

    A network without configured ranges has no sets: the daemon takes what it
    has, and a requested address stands in `requested_ips`.
    """
    message = AllocatePodIpRequest(
        network=request.network,
        pod_name=request.pod.name,
        pod_namespace=request.pod.namespace,
        sticky=request.sticky,
        netns_path=request.env.netns,
        sets=[_set(one) for one in request.wanted if one.ranges],
        requested_ips=[
            one.requested for one in request.wanted if one.requested and not one.ranges
        ],
    )
    for one in reversed(request.wanted):  # the first of a family comes last
        config = IpConfig(
            interface_name=request.env.interface,
            container_id=request.env.container_id,
            initial_pod_cidr=one.ranges[0].subnet if one.ranges else "",
        )
        if one.family is Family.IPV4:
            message.ipv4_config = config
        else:
            message.ipv6_config = config
    return message


def given_addresses(
    request: Request, response: AllocatePodIpResponse
) -> list[PodAddress]:
    """What the daemon gave, which must be one address for each that is wanted.

    Success without an address would start a pod that nobody can reach.

    Raises:
      CNIError: code 2 when the daemon cannot do what the configuration says,
        999 when its answer makes no sense.
    """
    entries: list[PodIp | None]
    if response.ips:
        if len(response.ips) != len(request.wanted):
            raise CNIError(
                INTERNAL,
                f"the daemon gave {len(response.ips)} addresses, "
                f"{len(request.wanted)} were wanted",
            )
        entries = list(response.ips)
    else:
        # Its own answer to a request without sets has an id, an original's none.
        if not response.allocation_id or any(one.ranges for one in request.wanted):
            for key, value in _beyond_the_original(request):
                raise CNIError(
                    UNSUPPORTED_FIELD,
                    f"the daemon does not know {key}, which is {value}",
                    "it is the original or an older one: replace it, or take the "
                    "key out of the configuration",
                )
        by_family = {Family.IPV4: response.ipv4, Family.IPV6: response.ipv6}
        entries = [by_family[one.family] for one in request.wanted]
    return [
        _given(one.family, entry)
        for one, entry in zip(request.wanted, entries, strict=True)
    ]


def canonical(entry: PodIp) -> str:
    """An address in the spelling in which addresses are compared."""
    try:
        return str(ipaddress.ip_address(entry.ip_address))
    except ValueError:
        return entry.ip_address


def _set(one: RangeSet) -> AddressSet:
    return AddressSet(
        alternatives=[_range(each) for each in one.ranges], requested_ip=one.requested
    )


def _range(one: Range) -> AddressRange:
    return AddressRange(
        subnet=one.subnet,
        range_start=one.start,
        range_end=one.end,
        gateway=one.gateway,
        exclude=list(one.exclude),
    )


def _beyond_the_original(request: Request) -> Iterator[tuple[str, str]]:
    """Keys that an original daemon would silently do without, and their values."""
    if request.sticky:
        yield "ipam.sticky", "true"
    seen: set[Family] = set()
    for one in request.wanted:
        if one.requested:
            yield "a requested address", shown(one.requested)
        if one.family in seen:
            yield one.ranges[0].where, f"a second {one.family} set"
        seen.add(one.family)
        for each in one.ranges:
            usual = each.parsed.block.gateway
            for key, value in (
                ("rangeStart", each.start),
                ("rangeEnd", each.end),
                ("gateway", each.gateway),
                ("exclude", ", ".join(each.exclude)),
            ):
                if value and (key, value) != ("gateway", usual):
                    yield f"{each.where}.{key}", shown(value)


def _given(family: Family, entry: PodIp | None) -> PodAddress:
    if entry is None:
        raise CNIError(INTERNAL, f"the daemon gave no {family} address")
    try:
        block = CIDRBlock.parse(entry.cidr, family)
    except InvalidRequest as error:
        raise CNIError(INTERNAL, f"the daemon's answer: {error}") from None
    if block.offset_of(entry.ip_address) is None:
        raise CNIError(
            INTERNAL,
            f"the daemon gave {shown(entry.ip_address)}, "
            f"which is no address of its block {block.cidr}",
        )
    return PodAddress(
        family, canonical(entry), block.prefix_length, _gateway(entry, block)
    )


def _gateway(entry: PodIp, block: CIDRBlock) -> str:
    """The gateway that the daemon tells, else the one of every such block."""
    if not entry.gateway:
        return block.gateway
    try:
        gateway = ipaddress.ip_address(entry.gateway)
    except ValueError:
        raise CNIError(
            INTERNAL,
            f"the daemon gave {shown(entry.gateway)} as a gateway, which is no address",
        ) from None
    return str(gateway)
