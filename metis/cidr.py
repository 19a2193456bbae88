"""CIDR blocks and addresses: canonical form, and what no pod ever gets.

The rules for a whole block live here and nowhere else: how it is spelled, which
addresses exist, which of them are set aside, and which one is the gateway. Pure:
no clock, no file, no socket, no `async def`.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
import socket
from dataclasses import dataclass, field

from metis.errors import InvalidRequest

MAX_TOTAL_IPS = 2**63 - 1
"""What `total_ips` says of a block too large for SQLite's 64-bit integers."""

RESERVE_FROM_SIZE = 4
"""Smallest block with reserved addresses; /31, /32, /127 and /128 give all."""

LINK_LOCAL_GATEWAY_IPV4 = "169.254.4.6"
"""Gateway reported for IPv4 blocks longer than /30, which have none inside."""

LINK_LOCAL_GATEWAY_IPV6 = "fe80::8893:b6ff:fe2c:7a0d"
"""Gateway reported for IPv6 blocks longer than /126, which have none inside."""


class Family(enum.StrEnum):
    """An address family, spelled as the database spells it."""

    IPV4 = "ipv4"
    IPV6 = "ipv6"

    @property
    def bits(self) -> int:
        """Width of an address in bits."""
        return 32 if self is Family.IPV4 else 128

    @classmethod
    def of(cls, address: str) -> Family:
        """The family of an address, told by its spelling."""
        return cls.IPV6 if ":" in address else cls.IPV4


EXAMPLE = {Family.IPV4: "10.240.0.0/20", Family.IPV6: "fd00:10::/64"}
"""A block of each family, for messages."""


@dataclass(frozen=True, slots=True)
class CIDRBlock:
    """A block of addresses in canonical form.

    Attributes:
      cidr: canonical text, "10.240.0.0/20": host bits masked, IPv6 in the
        compressed lower-case form.
      family: its address family.
      first: the network address as an integer.
      prefix_length: bits of the network part.
      size: how many addresses it has, reserved ones included. This and what follows
        is worked out once, because most calls need it.
      gateway: the one reported to a pod of this block (the original's contract): the
        first address after the network address, or a link-local one for blocks too
        small to set one aside.
      reserved_offsets: where the addresses stand that no pod may ever get. In blocks
        of RESERVE_FROM_SIZE addresses or more: the network address (in IPv6 the
        subnet-router anycast, RFC 4291 section 2.6.1), the gateway, and in IPv4 the
        broadcast address.
    """

    cidr: str
    family: Family
    first: int
    prefix_length: int
    size: int = field(init=False, compare=False, repr=False)
    gateway: str = field(init=False, compare=False, repr=False)
    reserved_offsets: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        is_ipv4 = self.family is Family.IPV4
        size = 1 << (self.family.bits - self.prefix_length)
        reserved: tuple[int, ...] = ()
        if size >= RESERVE_FROM_SIZE:
            gateway = self.address_at(1)
            reserved = (0, 1, size - 1) if is_ipv4 else (0, 1)
        else:
            gateway = LINK_LOCAL_GATEWAY_IPV4 if is_ipv4 else LINK_LOCAL_GATEWAY_IPV6
        for name, value in (
            ("size", size),
            ("gateway", gateway),
            ("reserved_offsets", reserved),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, text: str, family: Family | None = None) -> CIDRBlock:
        """Read a block from text, in whatever spelling it comes.

        Host bits are masked and an IPv4-mapped IPv6 prefix of /96 or longer is
        the IPv4 block that it maps.

        Args:
          text: "ADDRESS/PREFIX".
          family: the family that the caller needs, or None for either.

        Raises:
          InvalidRequest: not a CIDR block, or one of the other family.
        """
        block = _parse_block(text)
        if family is not None:
            block.check_family(family, text)
        return block

    def check_family(self, family: Family, text: str = "") -> None:
        """Refuse a block of the other family.

        Args:
          family: the one that is needed.
          text: how the block was spelled, for the message.

        Raises:
          InvalidRequest: it is of the other one.
        """
        if self.family is not family:
            raise InvalidRequest(
                f"{(text or self.cidr)!r} is an {self.family} block where an {family} "
                f"block is needed: for example {EXAMPLE[family]!r}"
            )

    @property
    def total_ips(self) -> int:
        """`size`, bounded to what the database can hold."""
        return min(self.size, MAX_TOTAL_IPS)

    def address_at(self, offset: int) -> str:
        """The address `offset` places after the network address, as text."""
        return format_address(self.family, self.first + offset)

    def offset_of(self, address: str) -> int | None:
        """Where an address stands in the block; None when it does not."""
        try:
            offset = parse_address(self.family, address) - self.first
        except ValueError:
            return None
        return offset if 0 <= offset < self.size else None

    def is_reserved(self, offset: int) -> bool:
        """Whether no pod may ever get the address at `offset`."""
        return offset in self.reserved_offsets

    def overlaps(self, other: CIDRBlock) -> bool:
        """Whether the two blocks share an address."""
        return (
            self.family is other.family
            and self.first < other.first + other.size
            and other.first < self.first + self.size
        )


def format_address(family: Family, value: int) -> str:
    """An address as text in the canonical form of its family (RFC 5952)."""
    if family is Family.IPV4:
        return socket.inet_ntop(socket.AF_INET, value.to_bytes(4, "big"))
    text = socket.inet_ntop(socket.AF_INET6, value.to_bytes(16, "big"))
    # The C library, ten times as fast, writes ::/96 and ::ffff:0:0/96 with dots.
    return text if "." not in text else str(ipaddress.IPv6Address(value))


def parse_address(family: Family, text: str) -> int:
    """The integer of an address given as text.

    Raises:
      ValueError: not an address of the family.
    """
    kind = socket.AF_INET if family is Family.IPV4 else socket.AF_INET6
    try:
        return int.from_bytes(socket.inet_pton(kind, text), "big")
    except OSError:
        raise ValueError(f"{text!r} is not an {family} address") from None


_MAPPED_PREFIX_LENGTH = 96
"""IPv4 addresses stand in the last 32 bits of ::ffff:0:0/96 (RFC 4291 2.5.5.2)."""


@functools.lru_cache(maxsize=1024)
def _parse_block(text: str) -> CIDRBlock:
    if "/" not in text or text != text.strip():
        raise InvalidRequest(
            f"{text[:64]!r} is not a CIDR block: write ADDRESS/PREFIX, "
            f"for example {EXAMPLE[Family.IPV4]!r}"
        )
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise InvalidRequest(
            f"{text[:64]!r} is not a CIDR block: write ADDRESS/PREFIX, "
            f"for example {EXAMPLE[Family.IPV4]!r} ({error})"
        ) from None
    if isinstance(network, ipaddress.IPv6Network):
        mapped = network.network_address.ipv4_mapped
        if mapped is None or network.prefixlen < _MAPPED_PREFIX_LENGTH:
            if network.network_address.scope_id is not None:
                raise InvalidRequest(
                    f"{text[:64]!r} has a zone: a CIDR block is written without one"
                )
            return CIDRBlock(
                str(network),
                Family.IPV6,
                int(network.network_address),
                network.prefixlen,
            )
        network = ipaddress.IPv4Network(
            (int(mapped), network.prefixlen - _MAPPED_PREFIX_LENGTH)
        )
    return CIDRBlock(
        str(network), Family.IPV4, int(network.network_address), network.prefixlen
    )
