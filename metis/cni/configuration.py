"""Readers for what stands in a network configuration: ranges, routes, our keys.

Pure. Every reader refuses what it cannot use with code 7, naming the place, the
value and what would be right; keys that nobody here reads are tolerated, as the
specification wants it (section 1, "Plugin configuration objects").
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from metis.cni.protocol import INVALID_CONFIGURATION, CNIError, shown
from metis.config import parse_duration
from metis.errors import InvalidRequest
from metis.model import DEFAULT_NETWORK, CIDRBlock, Family, Wanted, checked_name

Configuration = Mapping[str, Any]
"""A decoded JSON object; Any because nothing in it is known to be right."""

ROUTE_NUMBERS = ("mtu", "advmss", "priority", "table", "scope")
"""Numbers that a route may carry since 1.1.0 (section 5, "ADD Success")."""

MAX_SOCKET_PATH_BYTES = 107
"""Linux's sun_path less the terminating zero, unix(7)."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the configuration, to be handed on with the address.

    Attributes:
      destination: where it leads.
      gateway: the next hop as text, or None where the configuration has none.
      numbers: those of ROUTE_NUMBERS that are set, in that order.
    """

    destination: CIDRBlock
    gateway: str | None = None
    numbers: tuple[tuple[str, int], ...] = ()


def ipam_section(config: Configuration) -> Configuration:
    """The `ipam` object; empty when there is none."""
    ipam = config.get("ipam")
    return {} if ipam is None else _object(ipam, "ipam")


def network(ipam: Configuration) -> str:
    """The network whose addresses are used, `ipam.network`.

    Not the configuration's `name`: several configurations may share a network,
    and the original always uses the default one.
    """
    value = _text(ipam, "network", "ipam.network") or DEFAULT_NETWORK
    try:
        return checked_name("network", value)
    except InvalidRequest as error:
        raise _invalid(f"ipam.network: {error}") from None


def wanted(ipam: Configuration) -> tuple[Wanted, ...]:
    """One address a family that is configured, from its first subnet.

    `ranges` is a list of sets, each a list of alternatives, as host-local has
    it; `subnet` beside it is the older form of a set with one member and comes
    first. All are parsed, so that a wrong one never goes unnoticed. Without any,
    an IPv4 address from whatever the network has.
    """
    blocks: dict[Family, CIDRBlock] = {}
    for where, subnet in _subnets(ipam):
        if not isinstance(subnet, str):
            raise _invalid(f"{where} is {shown(subnet)}: write a text ADDRESS/PREFIX")
        block = _block(subnet, where)
        blocks.setdefault(block.family, block)
    if not blocks:
        return (Wanted(Family.IPV4),)
    return tuple(
        Wanted(family, blocks[family]) for family in Family if family in blocks
    )


def routes(ipam: Configuration) -> tuple[Route, ...]:
    """The routes of a configuration, in order."""
    return tuple(
        _route(_object(entry, where), where)
        for where, entry in _members(ipam.get("routes"), "ipam.routes")
    )


def previous_addresses(config: Configuration) -> tuple[str, ...]:
    """The addresses of prevResult in canonical form, whatever version it is in.

    Section 2, "CHECK": the runtime must pass the result of the ADD.
    """
    if config.get("prevResult") is None:
        raise _invalid("CHECK needs prevResult: the result of the ADD")
    result = _object(config["prevResult"], "prevResult")
    found = [
        _prefixed_address(_object(entry, where), "address", where)
        for where, entry in _members(result.get("ips"), "prevResult.ips")
    ]
    for key in ("ip4", "ip6"):  # the shape of 0.1.0 and 0.2.0
        if result.get(key) is not None:
            where = f"prevResult.{key}"
            found.append(_prefixed_address(_object(result[key], where), "ip", where))
    return tuple(found)


def setting(config: Configuration, key: str) -> object:
    """A value of ours, which may stand in `ipam` or beside it; `ipam` wins."""
    ipam = config.get("ipam")
    if isinstance(ipam, dict) and ipam.get(key) is not None:
        value: object = ipam[key]
        return value
    return config.get(key)


def path_setting(config: Configuration, key: str, default: str) -> str:
    """A setting that names a file; absent and empty mean the default."""
    value = setting(config, key)
    if value is None or value == "":
        return default
    if not isinstance(value, str) or "\0" in value or not _is_encodable(value):
        raise _invalid(f"{key} is {shown(value)}: write the path of a file")
    return value


def socket_setting(config: Configuration, key: str, default: str) -> str:
    """A setting that names a Unix socket."""
    path = path_setting(config, key, default)
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        raise _invalid(
            f"{key} {shown(path)} is {len(path.encode())} bytes long: "
            f"a socket path has at most {MAX_SOCKET_PATH_BYTES}"
        )
    return path


def duration_setting(config: Configuration, key: str, default: float) -> float:
    """A setting that is a Go duration; in seconds."""
    value = setting(config, key)
    if value is None or value == "":
        return default
    if not isinstance(value, str):
        raise _invalid(f"{key} is {shown(value)}: write a text like '1m' or '500ms'")
    try:
        seconds = parse_duration(value)
    except InvalidRequest as error:
        raise _invalid(f"{key}: {error}") from None
    if not math.isfinite(seconds):
        raise _invalid(f"{key} is {shown(value)}: it is longer than time itself")
    return seconds


def _subnets(ipam: Configuration) -> Iterator[tuple[str, object]]:
    """Every subnet of a configuration, with the place where it stands."""
    if ipam.get("subnet") is not None:
        yield "ipam.subnet", ipam["subnet"]
    for where, alternatives in _members(ipam.get("ranges"), "ipam.ranges"):
        for place, member in _members(alternatives, where):
            yield f"{place}.subnet", _object(member, place).get("subnet")


def _route(fields: Configuration, where: str) -> Route:
    destination = _text(fields, "dst", f"{where}.dst")
    if not destination:
        raise _invalid(f"{where} has no dst: write ADDRESS/PREFIX, '0.0.0.0/0'")
    gateway = _text(fields, "gw", f"{where}.gw")
    numbers = []
    for key in ROUTE_NUMBERS:
        value = fields.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _invalid(f"{where}.{key} is {shown(value)}: write a number from 0 up")
        numbers.append((key, value))
    return Route(
        _block(destination, f"{where}.dst"),
        _address(gateway, f"{where}.gw") if gateway else None,
        tuple(numbers),
    )


def _block(text: str, where: str) -> CIDRBlock:
    try:
        return CIDRBlock.parse(text)
    except InvalidRequest as error:
        raise _invalid(f"{where}: {error}") from None


def _prefixed_address(fields: Configuration, key: str, where: str) -> str:
    """The address of "ADDRESS/PREFIX"."""
    text = _text(fields, key, f"{where}.{key}") or ""
    return _address(text.partition("/")[0], f"{where}.{key}")


def _address(text: str, where: str) -> str:
    """An address in canonical form; one with a zone is refused."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise _invalid(f"{where}: {shown(text)} is not an IP address") from None
    if "%" in text:
        raise _invalid(f"{where}: {shown(text)} has a zone, which no result can hold")
    return str(address)


def _members(value: object, where: str) -> Iterator[tuple[str, object]]:
    """The members of a list, each with its place; an absent list has none."""
    if value is None:
        return
    if not isinstance(value, list):
        raise _invalid(f"{where} is {json_type(value)}: write a list")
    for i, member in enumerate(value):
        yield f"{where}[{i}]", member


def _object(value: object, where: str) -> Configuration:
    if not isinstance(value, dict):
        raise _invalid(f"{where} is {json_type(value)}: write an object")
    return value


def _text(fields: Configuration, key: str, where: str) -> str | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not _is_encodable(value):
        raise _invalid(f"{where} is {shown(value)}: write a text")
    return value


def _is_encodable(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which no path and no name has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_type(value: object) -> str:
    """How a message calls the type of a decoded JSON value."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _invalid(message: str) -> CNIError:
    return CNIError(INVALID_CONFIGURATION, message)
