"""Readers for single fields of a decoded configuration.

Pure. Every reader refuses what it cannot use with code 7, naming the place, the
value and what would be right. What is read there, `metis.cni.configuration` and
its neighbours know.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any

from metis.cni.protocol import INVALID_CONFIGURATION, CNIError, shown
from metis.errors import InvalidRequest
from metis.model import CIDRBlock

Configuration = Mapping[str, Any]
"""A decoded JSON object; Any because nothing in it is known to be right."""


def members(value: object, where: str) -> Iterator[tuple[str, object]]:
    """The members of a list, each with its place; an absent list has none."""
    if value is None:
        return
    if not isinstance(value, list):
        raise invalid(f"{where} is {json_type(value)}: write a list")
    for i, member in enumerate(value):
        yield f"{where}[{i}]", member


def object_at(value: object, where: str) -> Configuration:
    """A value that must be an object."""
    if not isinstance(value, dict):
        raise invalid(f"{where} is {json_type(value)}: write an object")
    return value


def section(fields: Configuration, key: str, where: str) -> Configuration:
    """The object under a key; empty when there is none."""
    value = fields.get(key)
    return {} if value is None else object_at(value, where)


def text(fields: Configuration, key: str, where: str) -> str | None:
    """The text under a key; None when there is none."""
    value = fields.get(key)
    return None if value is None else text_at(value, where)


def text_at(value: object, where: str) -> str:
    """A value that must be a text."""
    if not isinstance(value, str) or not is_encodable(value):
        raise invalid(f"{where} is {shown(value)}: write a text")
    return value


def texts(value: object, where: str) -> tuple[str, ...]:
    """A list of texts; an absent list is empty."""
    return tuple(text_at(member, place) for place, member in members(value, where))


def block(value: str, where: str) -> CIDRBlock:
    """A CIDR block, in whatever spelling."""
    try:
        return CIDRBlock.parse(value)
    except InvalidRequest as error:
        raise invalid(f"{where}: {error}") from None


def network_block(value: str, where: str) -> CIDRBlock:
    """A CIDR block that is written without host bits, as host-local wants it."""
    found = block(value, where)
    if _has_host_bits(value):
        raise invalid(
            f"{where}: {shown(value)} has host bits set: "
            f"the network is {shown(found.cidr)}"
        )
    return found


def address(value: str, where: str) -> str:
    """An address in canonical form; one with a zone is refused.

    An IPv4-mapped one is the IPv4 address that it maps (RFC 4291, 2.5.5.2).
    """
    try:
        found = ipaddress.ip_address(value)
    except ValueError:
        raise invalid(f"{where}: {shown(value)} is not an IP address") from None
    if "%" in value:
        raise invalid(f"{where}: {shown(value)} has a zone, which no result can hold")
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def address_of_prefixed(value: str, where: str) -> str:
    """The address of "ADDRESS" or "ADDRESS/PREFIX"."""
    host, slash, length = value.partition("/")
    found = address(host, where)
    bits = 128 if ":" in host else 32
    if slash and not (length.isascii() and length.isdigit() and _within(length, bits)):
        raise invalid(
            f"{where}: {shown(value)} has no prefix length from 0 to {bits} "
            f"after the slash: write {shown(found)}"
        )
    return found


def boolean(value: object, where: str) -> bool:
    """A boolean; absent means false."""
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{where} is {shown(value)}: write true or false")
    return bool(value)


def is_encodable(value: str) -> bool:
    """JSON can spell half of a surrogate pair, which no path and no name has."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_type(value: object) -> str:
    """How a message calls the type of a decoded JSON value."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def invalid(message: str, details: str = "") -> CNIError:
    """The error for a configuration that cannot be used."""
    return CNIError(INVALID_CONFIGURATION, message, details)


@functools.lru_cache(maxsize=256)  # the daemon reads the same networks for each pod
def _has_host_bits(block: str) -> bool:
    interface = ipaddress.ip_interface(block)
    return bool(interface.ip != interface.network.network_address)


def _within(digits: str, most: int) -> bool:
    # Bounded before int(), which refuses thousands of digits.
    return len(digits) <= 3 and int(digits) <= most
