"""The frozen values that travel between modules, and the rules they carry.

A value checks itself when it is made, so whoever holds one may trust it. Pure:
no clock, no file, no socket, no `async def`. CIDR blocks and addresses have a
module of their own, `metis.cidr`, whose names are these as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from metis.cidr import (
    LINK_LOCAL_GATEWAY_IPV4,
    LINK_LOCAL_GATEWAY_IPV6,
    MAX_TOTAL_IPS,
    RESERVE_FROM_SIZE,
    CIDRBlock,
    Family,
    format_address,
    parse_address,
)
from metis.errors import InvalidRequest
from metis.ranges import AddressSet

__all__ = [
    "DEFAULT_NETWORK",
    "LINK_LOCAL_GATEWAY_IPV4",
    "LINK_LOCAL_GATEWAY_IPV6",
    "MAX_NAME_BYTES",
    "MAX_TOTAL_IPS",
    "RESERVE_FROM_SIZE",
    "Allocation",
    "CIDRBlock",
    "Family",
    "Holding",
    "IPUsage",
    "Owner",
    "Pod",
    "TablePage",
    "Wanted",
    "checked_name",
    "format_address",
    "parse_address",
]

DEFAULT_NETWORK = "default"

MAX_NAME_BYTES = 1024
"""Longest container id, network, interface or pod name on the wire, in bytes.

The CNI specification sets no bound; runtimes use 64 characters, Kubernetes
names have 253. A bound keeps rows, log lines and error messages small.
"""


def checked_name(what: str, value: str, *, required: bool = True) -> str:
    """Return `value` unchanged if it can serve as a name.

    Args:
      what: how an error message calls the value, "container id".
      value: the name.
      required: whether the empty string is refused.

    Raises:
      InvalidRequest: empty though required, longer than MAX_NAME_BYTES, or
        holding a control character.
    """
    if not value:
        if required:
            raise InvalidRequest(f"{what} is empty: it must name one")
        return value
    if len(value) > MAX_NAME_BYTES or len(value.encode()) > MAX_NAME_BYTES:
        raise InvalidRequest(
            f"{what} {value[:32]!r}... is {len(value.encode())} bytes long: "
            f"at most {MAX_NAME_BYTES} are allowed"
        )
    if not value.isprintable():
        raise InvalidRequest(
            f"{what} {value[:64]!r} holds a character that cannot be printed: "
            "use letters, digits and punctuation"
        )
    return value


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds an address: one interface of one container on one network.

    Together with the family this is the key of every allocation, so a repeated
    request finds what the first one took.
    """

    network: str
    container_id: str
    interface_name: str

    def __post_init__(self) -> None:
        checked_name("network", self.network)
        checked_name("container id", self.container_id)
        checked_name("interface name", self.interface_name)


@dataclass(frozen=True, slots=True)
class Pod:
    """The Kubernetes names of a pod; kept for people, never part of a key."""

    name: str = ""
    namespace: str = ""

    def __post_init__(self) -> None:
        checked_name("pod name", self.name, required=False)
        checked_name("pod namespace", self.namespace, required=False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One address that an owner asks for.

    Attributes:
      family: the family of the address.
      block: the block to serve the network from when it does not have it yet,
        or None to use only what the network has.
      address: the address that it must be, in canonical form, or None for any.
      ranges: where it must come from, in place of the network's blocks; None
        for a request in the original's form.

    Raises:
      InvalidRequest: the block or the ranges are of the other family.
    """

    family: Family
    block: CIDRBlock | None = None
    address: str | None = None
    ranges: AddressSet | None = None

    def __post_init__(self) -> None:
        if self.block is not None:
            self.block.check_family(self.family)
        if self.ranges is not None:
            self.ranges.alternatives[0].block.check_family(self.family)

    @classmethod
    def out_of(cls, ranges: AddressSet, address: str | None = None) -> Wanted:
        """An address out of a set, or this one of it."""
        return cls(ranges.family, None, address, ranges)


@dataclass(frozen=True, slots=True)
class Allocation:
    """An address that an owner holds: "10.240.0.2" of "10.240.0.0/20".

    Attributes:
      family: its family.
      address: in canonical form.
      cidr: the block that it belongs to, in canonical form.
      allocation_id: names the call that gave it or, since, found it held; no two
        calls have the same. Empty where the original gave it.
    """

    family: Family
    address: str
    cidr: str
    allocation_id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Holding:
    """One address and all that is known of whoever holds it.

    Attributes:
      owner: who holds it.
      pod: the pod's names; empty where the runtime told none.
      family: of the address.
      address: in canonical form.
      allocation_id: as in `Allocation`.
      allocated_at: when the owner asked for it last, in stored time; 0 where that
        is not known.
      boot_id: in which boot that was; empty where that is not known.
      netns_path: of the owner's network namespace, as the runtime told it; empty
        where it told none.
    """

    owner: Owner
    pod: Pod
    family: Family
    address: str
    allocation_id: str = ""
    allocated_at: int = 0
    boot_id: str = ""
    netns_path: str = ""


@dataclass(frozen=True, slots=True)
class IPUsage:
    """How the addresses of one family are spent on one network.

    `next_free_ms` is the stored time at which a cooling address becomes free
    (which one, the caller of `Store.usage` says); None when there is none.
    """

    owned: int
    cooling: int
    reserved: int
    next_free_ms: int | None


@dataclass(frozen=True, slots=True)
class TablePage:
    """One page of a table for people: text all through, NULL as "NULL".

    `next_token` is where the next page begins, empty on the last one.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    next_token: str = ""
