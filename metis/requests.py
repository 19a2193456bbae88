"""What a caller asks for: allocation messages as values of `metis.model`.

A request names its owner in the configuration of a family, and what it wants
either there, in the original's form, or as sets of ranges. Addresses that it
must have stand with their set or in a list beside; each is one set's.

Pure: no clock, no file, no socket, no `async def`.
"""

from __future__ import annotations

from collections.abc import Sequence

from metis.api.adaptiveipam.v1 import (
    AddressRange as RangeMessage,
)
from metis.api.adaptiveipam.v1 import (
    AllocatePodIpRequest,
    AllocatePodIpResponse,
    IpConfig,
    PodIp,
)
from metis.errors import InvalidRequest
from metis.model import DEFAULT_NETWORK, Allocation, CIDRBlock, Family, Owner, Wanted
from metis.ranges import AddressRange, AddressSet, parse_any_address

MOST_SETS = 32
"""Most sets of a request: a set is an address of one interface, and every set is
compared with every other."""

MOST_ALTERNATIVES = 256
"""Most alternatives of a set, each of which may cost a look into its block."""


LONGEST_PATH_BYTES = 4095
"""Longest path that the kernel takes (PATH_MAX without its final zero byte)."""


def netns_path_of(message: AllocatePodIpRequest) -> str:
    """The path of the owner's network namespace; empty for one that cannot be.

    It is evidence for later and no part of what is asked for, so that a path which
    could never be looked at is no reason to refuse anything.
    """
    path = message.netns_path
    is_usable = (
        path.startswith("/")
        and path.isprintable()
        and len(path.encode()) <= LONGEST_PATH_BYTES
    )
    return path if is_usable else ""


def owner_of(message: AllocatePodIpRequest) -> Owner:
    """The owner that the configurations of the families name.

    Raises:
      InvalidRequest: there is no configuration, or they name two owners.
    """
    configs = _configs(message)
    if not configs:
        raise InvalidRequest(
            "the request has neither ipv4_config nor ipv6_config: set one or both"
        )
    network = message.network or DEFAULT_NETWORK
    owner, *others = [
        Owner(network, config.container_id, config.interface_name)
        for _, config in configs
    ]
    if any(other != owner for other in others):
        raise InvalidRequest(
            "ipv4_config and ipv6_config name different interfaces or containers: "
            + " and ".join(
                repr(f"{config.container_id}/{config.interface_name}")
                for _, config in configs
            )
        )
    return owner


def wanted_of(message: AllocatePodIpRequest) -> list[Wanted]:
    """What a request wants: an entry a set, or without sets one a family.

    Raises:
      InvalidRequest: a block, range or requested address makes no sense.
    """
    if message.sets:
        return _wanted_of_sets(message)
    configs = _configs(message)
    requested = _by_family(message.requested_ips, [family for family, _ in configs])
    return [
        Wanted(
            family,
            CIDRBlock.parse(config.initial_pod_cidr, family)
            if config.initial_pod_cidr
            else None,
            requested.get(family),
        )
        for family, config in configs
    ]


def allocation_response(
    wanted: Sequence[Wanted], allocations: Sequence[Allocation]
) -> AllocatePodIpResponse:
    """The answer: the first address of each family, and one for each set."""
    ips = [_pod_ip(*pair) for pair in zip(wanted, allocations, strict=True)]
    first = {want.family: ip for want, ip in reversed([*zip(wanted, ips, strict=True)])}
    return AllocatePodIpResponse(
        ipv4=first.get(Family.IPV4),
        ipv6=first.get(Family.IPV6),
        ips=ips if wanted[0].ranges is not None else [],
        allocation_id=allocations[0].allocation_id,
    )


def _pod_ip(want: Wanted, allocation: Allocation) -> PodIp:
    if want.ranges is not None:
        gateway = want.ranges.range_for(allocation.address).gateway
    else:
        gateway = CIDRBlock.parse(allocation.cidr).gateway
    return PodIp(ip_address=allocation.address, cidr=allocation.cidr, gateway=gateway)


def _configs(message: AllocatePodIpRequest) -> list[tuple[Family, IpConfig]]:
    return [
        (family, config)
        for family, config in (
            (Family.IPV4, message.ipv4_config),
            (Family.IPV6, message.ipv6_config),
        )
        if config is not None
    ]


def _by_family(addresses: Sequence[str], families: list[Family]) -> dict[Family, str]:
    """The requested addresses by family, in canonical form."""
    requested: dict[Family, str] = {}
    for text in addresses:
        family, address = parse_any_address("requested address", text)
        if family not in families or family in requested:
            raise InvalidRequest(
                f"requested address {address!r} is one too many: at most one of each "
                f"family asked for ({', '.join(families)}) can be requested"
            )
        requested[family] = address
    return requested


def _wanted_of_sets(message: AllocatePodIpRequest) -> list[Wanted]:
    if len(message.sets) > MOST_SETS:
        raise InvalidRequest(
            f"the request has {len(message.sets)} sets: at most {MOST_SETS} are allowed"
        )
    sets: list[AddressSet] = []
    requested: list[str | None] = []
    for number, entry in enumerate(message.sets):
        if len(entry.alternatives) > MOST_ALTERNATIVES:
            raise InvalidRequest(
                f"set {number} has {len(entry.alternatives)} alternatives: "
                f"at most {MOST_ALTERNATIVES} are allowed"
            )
        sets.append(AddressSet(tuple(_range(one) for one in entry.alternatives)))
        requested.append(_canonical(entry.requested_ip) if entry.requested_ip else None)
    for text in message.requested_ips:
        address = _canonical(text)
        if address in requested:
            continue
        for number, one in enumerate(sets):
            if requested[number] is None and one.spans(address):
                requested[number] = address
                break
        else:
            raise InvalidRequest(
                f"requested address {address!r} is in no set that has none yet: each "
                f"must be in a set of its own, of {'; '.join(map(str, sets))}"
            )
    return [Wanted.out_of(*pair) for pair in zip(sets, requested, strict=True)]


def _range(message: RangeMessage) -> AddressRange:
    return AddressRange.parse(
        message.subnet,
        message.range_start,
        message.range_end,
        message.gateway,
        message.exclude,
    )


def _canonical(text: str) -> str:
    _, address = parse_any_address("requested address", text)
    return address
